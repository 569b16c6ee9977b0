"""Let the target answer the prompts of one shard."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    from eyas.config.schema import EndpointOptions
    from eyas.regeneration.responses import respond_shard
    from eyas.target.tokenizer import TargetReference

    settings = json.loads(args.settings)
    if settings["engine"] == "transformers":
        import torch

        torch.set_num_threads(args.threads)
    endpoint = EndpointOptions.from_json(args.endpoint) if args.endpoint != "none" else None
    target = TargetReference.from_json(args.target)
    respond_shard(args.prompts, args.output, target, settings, args.batch_rows, args.gpu, endpoint)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--prompts", type=Path, required=True, help="the shard of prompts")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, dtype")
    parser.add_argument("--settings", required=True, help="JSON: engine, max_new_tokens, temperature, …")
    parser.add_argument("--batch-rows", type=int, default=32, help="rows decoded together")
    parser.add_argument("--endpoint", default="none", help="engine openai, as JSON: urls, api_key_env, concurrency, …")
    parser.add_argument("--output", type=Path, required=True, help="the shard of conversations")
    run_job(parser, work)
