"""Write the target's hidden states for one shard of tokens, or for a range of shards."""

import json
import shlex
from pathlib import Path

from eyas.jobs import job_parser, run_job


def make_engine(args, target, layers):
    if args.sglang == "none":
        from eyas.extraction.engines.transformers import TransformersEngine

        return TransformersEngine(target, layers, args.batch_tokens, args.gpu)
    from eyas.extraction.engines.sglang.engine import SglangEngine

    command = None if args.server == "none" else shlex.split(args.server)
    logs = args.log.parent if args.log else args.run / "logs" / "hidden_states"
    server_log = logs / f"{args.rows}.server.log"
    return SglangEngine(target, layers, json.loads(args.sglang), command, args.gpu, server_log)


def work(args):
    import torch
    from eyas.extraction.job import extract_rows
    from eyas.extraction.shard import layers_of
    from eyas.shards import Shard
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    settings = json.loads(args.settings)
    target = TargetReference.from_json(args.target)
    layers = layers_of(target, settings["layers"])
    extract_rows(
        args.run,
        Shard.parse(args.rows),
        args.total_rows,
        args.shard_rows,
        target,
        layers,
        settings["dtype"],
        make_engine(args, target, layers),
        args.max_failed_rows,
        bool(args.recorded),
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    parser.add_argument("--rows", required=True, help="rows to extract, named as a shard is: rows_0-500")
    parser.add_argument("--total-rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows of a shard")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, dtype")
    parser.add_argument("--settings", required=True, help="JSON: layers (or null), dtype")
    parser.add_argument(
        "--batch-tokens", type=int, default=4096, help="padded tokens in a prefill batch (transformers)"
    )
    parser.add_argument("--max-failed-rows", type=int, default=0, help="rows of a shard that may have no states")
    parser.add_argument("--sglang", default="none", help="JSON: extraction.sglang; `none` runs transformers")
    parser.add_argument("--server", default="none", help="command of the server to start; `none`: it runs already")
    parser.add_argument("--recorded", type=int, default=0, help="1: end with a record of the range of shards")
    run_job(parser, work)
