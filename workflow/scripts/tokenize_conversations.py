"""Render a shard of conversations with the target's chat template: token ids and loss masks."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.target.tokenizer import TargetReference
    from eyas.tokenization import tokenize_shard

    tokenize_shard(args.conversations, args.output, TargetReference.from_json(args.target), json.loads(args.settings))


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--conversations", type=Path, required=True, help="the shard of conversations")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--settings", required=True, help="JSON: max_length, overlong")
    parser.add_argument("--output", type=Path, required=True, help="the shard of tokens")
    run_job(parser, work)
