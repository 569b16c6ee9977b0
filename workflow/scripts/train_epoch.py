"""Train one epoch, from the checkpoint of the epoch before."""

import json
from pathlib import Path

from eyas.jobs import job_parser, run_job


def work(args):
    import torch
    from eyas.drafter.stages import train_checkpoint
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(args.threads)
    train_checkpoint(
        args.manifest,
        args.manifest.parent.parent / "tokens",
        TargetReference.from_json(args.target),
        args.epoch,
        json.loads(args.settings),
        args.output.parent,
        torch.device("cuda" if args.gpu else "cpu"),
    )


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json, in the run's folder")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--settings", required=True, help="JSON: training settings, seed, held_out_every")
    parser.add_argument("--epoch", type=int, required=True, help="number of this epoch, from 1")
    parser.add_argument("--output", type=Path, required=True, help="trainer_state.json; the rest goes beside it")
    run_job(parser, work)
