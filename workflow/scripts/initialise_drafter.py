"""Write the drafter's epoch 0: before any training."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.drafter.stages import initialise_checkpoint
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    initialise_checkpoint(
        args.manifest,
        args.vocabulary,
        TargetReference.from_json(args.target),
        json.loads(args.settings),
        args.output.parent,
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json")
    parser.add_argument("--vocabulary", type=Path, required=True, help="the vocabulary map")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--settings", required=True, help="JSON: the drafter's model settings and the seed")
    parser.add_argument("--output", type=Path, required=True, help="trainer_state.json; the rest goes beside it")
    run_job(parser, work)
