"""Write a drafter in the form that SGLang loads, its keys checked."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.export import export_sglang
    from eyas.target.tokenizer import TargetReference, text_config

    model_type = text_config(TargetReference.from_json(args.target)).model_type
    export_sglang(args.model.parent, model_type, args.output.parent)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model.safetensors of a checkpoint")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--output", type=Path, required=True, help="export.json; the rest goes beside it")
    run_job(parser, work)
