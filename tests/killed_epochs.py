"""Started by test_resume_kill: an epoch in processes that get a real SIGKILL, then once more to its end.

Arguments: the folder of the run (pickled as run.pickle), which holds drafter/epoch_1. All is imported
once; each attempt is a fork, so that it costs little more than its steps.
"""

from __future__ import annotations

import os
import pickle
import random
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from drafter_runs import Run
from eyas.drafter import checkpoint as checkpoint_module
from eyas.drafter import resume as resume_module
from eyas.drafter.epoch import Runtime
from eyas.shards import files as files_module

STEPS = 4


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill(module: Any, name: str, call: int, half: bool = False) -> Callable[[], None]:
    """Patch a function so that its call number `call` is the last thing that this process does.

    `half`: what it writes is cut in half first (the path is its second argument).
    """

    def patch() -> None:
        original, calls = getattr(module, name), []

        def deadly(*args: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == call and not half:
                die()
            result = original(*args, **options)
            if len(calls) == call:
                os.truncate(args[1], os.path.getsize(args[1]) // 2)
                die()
            return result

        setattr(module, name, deadly)

    return patch


def kills() -> dict[str, list[Callable[[], None]]]:
    """By name: where each attempt in turn is killed. The last attempt is not."""
    chance = random.Random(20)
    steps = [chance.randint(1, STEPS) for _ in range(3)]
    found = {f"steps_{number}": [kill(torch.optim.AdamW, "step", number)] for number in sorted(set(steps))}
    return found | {
        "steps_again_and_again": [kill(torch.optim.AdamW, "step", 2) for _ in range(STEPS - 1)],
        "tensors_half_written": [kill(safetensors.torch, "save_file", 2, half=True)],
        "tensors_without_facts": [kill(resume_module, "write_sealed", 2)],
        "old_save_half_removed": [kill(resume_module.Path, "unlink", 8)],
        "result_half_written": [kill(safetensors.torch, "save_file", STEPS, half=True)],
        "result_without_facts": [kill(checkpoint_module, "write_sealed", 1)],
        "result_half_published": [kill(files_module.os, "link", 3)] * 2,
        "staging_half_removed": [kill(files_module, "remove_folder", 1)],
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    run: Run = pickle.loads((folder / "run.pickle").read_bytes())

    def epoch(place: Path) -> None:
        run.train(folder / "drafter" / "epoch_1", 2, place / "epoch_2", runtime=Runtime(checkpoint_seconds=0))

    def attempt(place: Path, patch: Callable[[], None]) -> None:
        child = os.fork()
        if child == 0:
            patch()
            epoch(place)
            os._exit(3)  # it should not have got here
        status = os.waitpid(child, 0)[1]
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            sys.exit(f"{place.name}: not killed, status {status}")

    epoch(folder / "undisturbed")  # first: what it imports late, the forks have
    for name, patches in kills().items():
        for patch in patches:
            attempt(folder / name, patch)
        epoch(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
