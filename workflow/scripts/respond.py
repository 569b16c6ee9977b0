"""Let the target answer the prompts of one shard, or of a range of shards."""

import json
from functools import cache
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.config.schema import EndpointOptions
    from eyas.regeneration.responses import respond_shard
    from eyas.shards import Shard, shards_in, write_record
    from eyas.target.tokenizer import TargetReference

    settings = json.loads(args.settings)
    if settings["engine"] == "transformers":
        import torch

        torch.set_num_threads(args.threads)
    endpoint = EndpointOptions.from_json(args.endpoint) if args.endpoint != "none" else None
    target = TargetReference.from_json(args.target)

    @cache  # once, and only if a shard is not finished
    def load():
        from eyas.target.model import load_target

        return load_target(target, args.gpu)

    rows = Shard.parse(args.rows)
    shards = shards_in(rows, args.total_rows, args.shard_rows)
    folder = args.run / "conversations"
    for shard in shards:
        prompts = args.run / "prompts" / f"{shard.name}.jsonl"
        output = folder / f"{shard.name}.jsonl"
        respond_shard(prompts, output, target, settings, args.batch_rows, args.gpu, endpoint, load)
    if args.recorded:
        write_record(folder, shards)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--rows", required=True, help="rows to answer, named as a shard is: rows_0-500")
    parser.add_argument("--total-rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows of a shard")
    parser.add_argument("--recorded", type=int, default=0, help="1: end with a record of the range of shards")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, dtype")
    parser.add_argument("--settings", required=True, help="JSON: engine, max_new_tokens, temperature, …")
    parser.add_argument("--batch-rows", type=int, default=32, help="rows decoded together")
    parser.add_argument("--endpoint", default="none", help="engine openai, as JSON: urls, api_key_env, concurrency, …")
    run_job(parser, work)
