"""Measure a drafter's acceptance: from the states of held-out rows, and in decoding prompt sets beside baselines."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.decoding.evaluate import RunFiles, evaluate
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    evaluate(
        RunFiles(args.manifest.parent.parent, args.rows, args.shard_rows),
        TargetReference.from_json(args.target),
        args.trained.parent,
        args.untrained.parent,
        json.loads(args.settings),
        args.output,
        args.gpu,
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json, in the run's folder")
    parser.add_argument("--rows", type=int, required=True, help="rows of the run")
    parser.add_argument("--shard-rows", type=int, required=True, help="rows in a shard")
    parser.add_argument("--trained", type=Path, required=True, help="model.safetensors of the best epoch")
    parser.add_argument("--untrained", type=Path, required=True, help="model.safetensors of epoch 0")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code, dtype")
    parser.add_argument(
        "--settings",
        required=True,
        help="JSON: draft_steps, topk, draft_tokens, temperature, seed, max_new_tokens,"
        " prompt_sets (path, format, prompts of each), held_out_every, template_options",
    )
    parser.add_argument("--output", type=Path, required=True, help="evaluation.json")
    run_job(parser, work)
