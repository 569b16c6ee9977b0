"""Measure a drafter's acceptance: from the states of held-out rows, and in decoding prompt sets beside baselines."""

import json
import shlex
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.decoding.run_data import RunFiles
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    run = RunFiles(args.manifest.parent.parent, args.rows, args.shard_rows)
    target = TargetReference.from_json(args.target)
    checkpoints = args.trained.parent, args.untrained.parent
    settings = json.loads(args.settings)
    if args.sglang == "none":
        from eyas.decoding.evaluate import evaluate

        evaluate(run, target, *checkpoints, settings, args.output, args.gpu)
        return
    from eyas.decoding.on_server import Commands, evaluate_on_server

    commands = None
    if args.server != "none":
        log = args.log or args.output.with_suffix(".log")
        commands = Commands(
            shlex.split(args.plain_server),
            shlex.split(args.server),
            log.with_suffix(".plain_server.log"),
            log.with_suffix(".server.log"),
        )
    evaluate_on_server(run, target, *checkpoints, settings, json.loads(args.sglang), commands, args.output, args.gpu)


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
    parser.add_argument("--sglang", default="none", help="JSON: evaluation.sglang; `none` decodes in this process")
    parser.add_argument(
        "--server", default="none", help="command of the server with the drafter to start; `none`: it runs already"
    )
    parser.add_argument("--plain-server", default="none", help="command of the server without the drafter to start")
    parser.add_argument("--output", type=Path, required=True, help="evaluation.json")
    run_job(parser, work)
