"""Write a drafter in the form that a server loads, its keys, shapes and dtypes checked."""

import sys
from pathlib import Path

from eyas.jobs import job_parser, run_job
from eyas.plan.export import MAX_SHARD_BYTES, SERVERS


def work(args):
    from eyas.export import export_drafter
    from eyas.target.tokenizer import TargetReference, text_config

    model_type = text_config(TargetReference.from_json(args.target)).model_type
    limit = sys.maxsize if args.one_file else args.max_shard_bytes
    export_drafter(args.model.parent, args.server, model_type, args.output.parent, limit)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="model.safetensors of a checkpoint")
    parser.add_argument("--server", choices=SERVERS, required=True)
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help="most bytes of a file of weights")
    parser.add_argument("--one-file", type=int, default=0, help="1: model.safetensors whatever its size")
    parser.add_argument("--output", type=Path, required=True, help="export.json; the rest goes beside it")
    run_job(parser, work)
