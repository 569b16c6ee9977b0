"""Started by test_processes, as torchrun starts training jobs: several epochs in two processes, one after the other.

Arguments: the folder of the run (pickled as run.pickle, with drafter/epoch_0) and a scenario.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import time
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.jobs import job_parser, run_job

RANK = int(os.environ.get("RANK", -1))
# name: (runtime, settings)
EPOCHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ddp": ({"parallel": "ddp"}, {}),
    "fsdp2": ({"parallel": "fsdp2"}, {}),
    "ddp_passes": ({"parallel": "ddp", "micro_tokens": 12}, {}),
    "fsdp2_passes": ({"parallel": "fsdp2", "micro_tokens": 12}, {}),
    "ddp_single_rows": ({"parallel": "ddp"}, {"batch_tokens": 24}),  # fewer rows than processes
    "fsdp2_single_rows": ({"parallel": "fsdp2"}, {"batch_tokens": 24}),
}


class Interrupted(BaseException):
    """What no part of the trainer catches."""


def train_all(folder: Path) -> None:
    """All of EPOCHS; epochs that are interrupted, continued, asked to stop; nothing to train on, bad states."""
    import numpy as np
    import torch
    from drafter_runs import Run
    from eyas.drafter.epoch import Runtime
    from eyas.drafter.processes import Processes

    torch.set_num_threads(1)
    run: Run = pickle.loads((folder / "run.pickle").read_bytes())
    processes = Processes.join(gpu=False)
    step, seen = torch.optim.AdamW.step, []

    def train(
        name: str, run: Run = run, stop_at: int = 0, asked_at: int = 0, held_out_every: int = 5, **options: Any
    ) -> str:
        """Epoch 1 into `folder`/`name`: how it ended. Raise in all at a step, or ask one process to stop."""
        calls = []

        def stepping(self: torch.optim.AdamW) -> None:
            calls.append(1)
            if len(calls) == stop_at:
                raise Interrupted
            if len(calls) == asked_at and RANK == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            step(self)

        torch.optim.AdamW.step = stepping  # type: ignore[method-assign]
        runtime, changes = EPOCHS[name.split("-")[0]]
        try:
            run.train(
                folder / "drafter" / "epoch_0", 1, folder / name / "epoch_1", held_out_every, processes=processes,
                runtime=Runtime(**(runtime | {"checkpoint_seconds": 0} | options)), **changes,
            )  # fmt: skip
        except (Interrupted, EyasError, SystemExit, KeyboardInterrupt) as exc:
            return f"{type(exc).__name__}: {exc}"
        return f"done after {len(calls)} steps"

    for name in EPOCHS:
        seen.append([name, train(name)])
        if "_" not in name:
            seen.append([f"{name}-stopped", train(f"{name}-stopped", stop_at=3)])  # continued by one process, later
            seen.append([f"{name}-continued", train(f"{name}-continued")])  # which one process had begun
            seen.append([f"{name}-asked", train(f"{name}-asked", asked_at=2, checkpoint_seconds=1e9)])
    seen.append(["nothing", train("ddp-nothing", held_out_every=1)])
    bad = run.copy(folder / f"bad_states_{RANK}")  # each its own: nobody reads what another is writing
    for row in (0, 3):
        bad.change_states(row, lambda states: states[2].fill(np.nan))
    seen.append(["ddp-bad", train("ddp-bad", bad)])
    (folder / f"seen_{RANK}.json").write_text(json.dumps(seen))
    processes.leave()


def fail(folder: Path, how: str) -> None:
    """The second process fails while the first waits for it inside a collective operation."""
    import torch
    from eyas.drafter.processes import Processes

    processes = Processes.join(gpu=False)
    processes.sum(torch.ones(1))
    if RANK == 1:
        time.sleep(0.5)  # the first waits by now
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise EyasError("rows_3-7.safetensors: this shard is not there")
    processes.sum(torch.ones(1))


def wait(folder: Path) -> None:
    """Wait to be asked to stop, then take a while to save."""

    def stop(number: int, frame: object) -> None:
        time.sleep(0.3)
        (folder / f"stopped_{RANK}").touch()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    (folder / f"ready_{RANK}").touch()
    time.sleep(60)


def work(args: Any) -> None:
    if args.scenario == "train":
        train_all(args.folder)
    elif args.scenario == "asked":
        wait(args.folder)
    else:
        fail(args.folder, args.scenario)


if __name__ == "__main__":
    parser = job_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("scenario")
    logging.captureWarnings(True)
    run_job(parser, work, RANK)
