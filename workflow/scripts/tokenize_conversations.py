"""Render conversations with the target's chat template: token ids and loss masks of a shard, or a range of shards."""

import json
from functools import cache
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.shards import Shard, shards_in, write_record
    from eyas.target.tokenizer import TargetReference, load_tokenizer
    from eyas.tokenization import tokenize_shard

    target = TargetReference.from_json(args.target)
    load = cache(lambda: load_tokenizer(target))  # once, and only if a shard is not finished
    shards = shards_in(Shard.parse(args.rows), args.total_rows, args.shard_rows)
    folder = args.run / "tokens"
    for shard in shards:
        conversations = args.run / "conversations" / f"{shard.name}.jsonl"
        tokenize_shard(conversations, folder / f"{shard.name}.safetensors", target, json.loads(args.settings), load)
    if args.recorded:
        write_record(folder, shards)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--rows", required=True, help="rows to tokenize, named as a shard is: rows_0-500")
    parser.add_argument("--total-rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows of a shard")
    parser.add_argument("--recorded", type=int, default=0, help="1: end with a record of the range of shards")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--settings", required=True, help="JSON: max_length, overlong")
    run_job(parser, work)
