"""Train one epoch, from the checkpoint of the epoch before; in one process, or several under torchrun."""

import json
import os
import sys
from pathlib import Path

from eyas.jobs import Meeting, job_parser, keep_freed_memory, launch, run_job, spread

# Set by torchrun, whether this script started it or a person did.
RANK = int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None
MEETING = Meeting.here()


def work(args):
    here = args.processes // args.nodes  # processes on this machine
    if RANK is None and args.nodes > 1 and MEETING is None:
        spread(sys.argv, args.nodes, args.threads)
        return
    if RANK is None and args.processes > 1:
        launch(sys.argv, here, args.threads, args.nodes, MEETING)
        return
    keep_freed_memory()
    import torch
    from eyas.drafter.epoch import Runtime
    from eyas.drafter.processes import Processes
    from eyas.drafter.stages import train_checkpoint
    from eyas.target.tokenizer import TargetReference

    gpu = args.gpu > 0
    torch.set_num_threads(max(args.threads // here, 1))
    if args.compile:
        from eyas.drafter.shared import compile_elementwise

        compile_elementwise()
    run = args.manifest.parent.parent
    logs = run / "logs" / args.output.parent.parent.name
    processes = Processes.alone(torch.device("cuda" if gpu else "cpu")) if RANK is None else Processes.join(gpu)
    train_checkpoint(
        args.manifest,
        run / "tokens",
        TargetReference.from_json(args.target),
        args.epoch,
        json.loads(args.settings),
        args.output.parent,
        processes,
        Runtime(
            parallel=args.parallel,
            micro_tokens=args.micro_tokens,
            checkpoint_seconds=args.checkpoint_seconds,
            early_stop=args.early_stop or None,
            events=logs / "tensorboard" if args.tensorboard else None,
        ),
        json.loads(args.expected),
        run / "logs" / "verified_shards.json",
    )
    processes.leave()


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("--manifest", type=Path, required=True, help="data_config.json, in the run's folder")
    parser.add_argument("--target", required=True, help="JSON: path, revision, trust_remote_code")
    parser.add_argument("--settings", required=True, help="JSON: training settings, seed, held_out_every")
    parser.add_argument("--expected", default="{}", help="JSON: layers, dtype, rows that the data must have")
    parser.add_argument("--epoch", type=int, required=True, help="number of this epoch, from 1")
    parser.add_argument("--output", type=Path, required=True, help="trainer_state.json; the rest goes beside it")
    parser.add_argument("--processes", type=int, default=1, help="processes of the job, over all its machines")
    parser.add_argument("--nodes", type=int, default=1, help="machines of the job; several need SLURM")
    parser.add_argument("--parallel", choices=["ddp", "fsdp2"], default="ddp", help="how processes share the drafter")
    parser.add_argument("--micro-tokens", type=int, default=8192, help="tokens taken through the drafter at once")
    parser.add_argument("--checkpoint-seconds", type=float, default=600, help="between saves inside the epoch")
    parser.add_argument("--early-stop", type=int, default=0, help="epochs without progress before stopping; 0: never")
    parser.add_argument("--compile", type=int, choices=[0, 1], default=0, help="use torch.compile")
    parser.add_argument("--tensorboard", type=int, choices=[0, 1], default=0, help="write TensorBoard event files")
    run_job(parser, work, RANK, MEETING)
