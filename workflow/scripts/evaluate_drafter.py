"""Measure a drafter's acceptance on held-out rows, beside the untrained one."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.decoding.evaluate import evaluate, held_out_rows
    from eyas.extraction.manifest import read_manifest
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    settings = json.loads(args.settings)
    run = args.manifest.parent.parent
    evaluate(
        read_manifest(args.manifest),
        run / "tokens",
        held_out_rows(run / "conversations", args.rows, args.shard_rows, settings["held_out_every"]),
        TargetReference.from_json(args.target),
        {"trained": args.trained.parent, "untrained": args.untrained.parent},
        settings,
        args.output,
        args.gpu,
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json, in the run's folder")
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--trained", type=Path, required=True, help="model.safetensors of the last epoch")
    parser.add_argument("--untrained", type=Path, required=True, help="model.safetensors of epoch 0")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, dtype")
    parser.add_argument("--settings", required=True, help="JSON: draft_steps, prompts, max_new_tokens, held_out_every")
    parser.add_argument("--output", type=Path, required=True, help="evaluation.json")
    run_job(parser, work)
