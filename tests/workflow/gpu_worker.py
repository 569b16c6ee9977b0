"""Stands in for every script of the workflow: makes the files that its rule declares, and holds GPUs for a while.

A job that has GPUs leases them as every job does (`eyas.devices`), takes a token for each device in the folder
EYAS_TEST_TOKENS, and writes down when it was started, when it held them and when it let go.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

SECONDS = {"respond": 1.5, "extract": 0.5, "train_epoch": 1.0, "evaluate_drafter": 0.3}
EPOCH = ("model.safetensors", "config.json", "trainer_state.safetensors", "trainer_state.json")


def outputs(script: str, told: dict[str, str]) -> list[Path]:
    """What the job's rule declares."""
    output = Path(told.get("output", "."))
    if "run" in told:
        stage, suffix = {
            "respond": ("conversations", ".jsonl"), "tokenize_conversations": ("tokens", ".safetensors"),
            "extract": ("hidden_states", ".safetensors"),
        }[script]  # fmt: skip
        return [Path(told["run"], stage, told["rows"] + end) for end in (suffix, ".json")]
    names: tuple[str, ...] = (output.name,)
    if script == "number_prompts":
        rows, size = int(told["rows"]), int(told["shard-rows"])
        names = ("index.json", "skipped.jsonl", *(f"rows_{a}-{a + size}.jsonl" for a in range(0, rows, size)))
    elif script == "map_vocabulary":
        names = (output.name, f"{output.stem}.json")
    elif script == "initialise_drafter":
        names = EPOCH
    elif script == "train_epoch":
        names = (*EPOCH, "metrics.jsonl")
    elif script == "select_best":
        names = ("model.safetensors", "config.json", "selection.json")
    return [output.parent / name for name in names]


class Tokens:
    """A file for each device that is held: a second one of the same name is a device held twice."""

    def __init__(self, folder: Path, job: str, devices: list[str]) -> None:
        self.files = [folder / device for device in devices]
        self.job = job

    def __enter__(self) -> None:
        for file in self.files:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY))

    def __exit__(self, *_: object) -> None:
        for file in self.files:
            file.unlink()


def main() -> None:
    started = time.monotonic()  # the same clock for all processes of a machine
    words = sys.argv[1:]
    told = {key[2:]: value for key, value in zip(words, words[1:], strict=False) if key.startswith("--")}
    script, folder = Path(sys.argv[0]).stem, Path(os.environ["EYAS_TEST_TOKENS"])
    gpus = int(told.get("gpu-wanted", "0"))
    devices: list[str] = []
    with ExitStack() as stack:
        if gpus:
            from eyas.devices import lease_gpus

            devices = stack.enter_context(lease_gpus(gpus, int(told["gpu"]), poll_seconds=0.1))
            assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(devices)
            stack.enter_context(Tokens(folder / "held", told["label"], devices))
        held = time.monotonic()
        time.sleep(SECONDS[script] if gpus else 0)
        for file in outputs(script, told):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        ended = time.monotonic()
    entry = {
        "job": told["label"], "gpus": gpus, "devices": devices, "started": started, "held": held, "ended": ended,
        "exited": time.monotonic(),
    }  # fmt: skip
    with open(folder / "jobs.jsonl", "a") as file:
        file.write(json.dumps(entry) + "\n")


if __name__ == "__main__":
    main()
