"""Write a drafter in the form that a server loads, its keys, shapes and dtypes checked."""

from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.export import export_drafter
    from eyas.target.tokenizer import TargetReference, text_config

    model_type = text_config(TargetReference.from_json(args.target)).model_type
    limit = {} if args.max_shard_bytes is None else {"max_shard_bytes": args.max_shard_bytes}
    export_drafter(args.model.parent, args.server, model_type, args.output.parent, **limit)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model.safetensors of a checkpoint")
    parser.add_argument("--server", choices=("sglang", "vllm"), required=True)
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--max-shard-bytes", type=int, help="cut weights larger than this (5 GB) into several files")
    parser.add_argument("--output", type=Path, required=True, help="export.json; the rest goes beside it")
    run_job(parser, work)
