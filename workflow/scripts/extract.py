"""Write the target's hidden states for one shard of tokens."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.extraction.shard import extract_shard
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    settings = json.loads(args.settings)
    extract_shard(
        args.tokens,
        args.output,
        TargetReference.from_json(args.target),
        settings["layers"],
        settings["dtype"],
        args.batch_tokens,
        args.gpu,
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--tokens", type=Path, required=True, help="the shard of tokens")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, dtype")
    parser.add_argument("--settings", required=True, help="JSON: layers (or null), dtype")
    parser.add_argument("--batch-tokens", type=int, default=4096, help="padded tokens in a prefill batch")
    parser.add_argument("--output", type=Path, required=True, help="the shard of hidden states")
    run_job(parser, work)
