"""What a training job reports as it goes: `metrics.jsonl`, TensorBoard events on request."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eyas.errors import EyasError


class Metrics:
    """One JSON object a line for each optimizer step, without times: the same run writes the same file.

    `kept` bytes of a file that is there already stay: those up to the save that the job goes on from.
    """

    def __init__(self, path: Path, kept: int, events: Path | None, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = open(path, "ab")  # noqa: SIM115 (closed by close())
        if self._file.tell() < kept:
            raise EyasError(f"{path}: shorter than when the trainer's state was saved; delete {path.parent} and retry")
        self._file.truncate(kept)
        self._events = _open_events(events, step) if events else None

    def write(self, values: dict[str, Any], tokens_per_second: float) -> None:
        """Record a step; the speed goes to TensorBoard only."""
        self._file.write(json.dumps(values, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        if self._events is None:
            return
        step = values["step"]
        for name in ("loss", "acceptance_length", "learning_rate", "gradient_norm"):
            self._events.add_scalar(f"train/{name}", values[name], step)
        for i, accuracy in enumerate(values["accuracy_by_step"]):
            if accuracy is not None:
                self._events.add_scalar(f"train_accuracy/step_{i}", accuracy, step)
        self._events.add_scalar("train/tokens_per_second", tokens_per_second, step)

    def write_held_out(self, values: dict[str, Any], step: int) -> None:
        """Record an epoch's figures on the held-out rows (TensorBoard; the checkpoint has them as well)."""
        if self._events is not None:
            for name in ("loss", "acceptance_length"):
                self._events.add_scalar(f"held_out/{name}", values[name], step)

    def sync(self) -> int:
        """Make what was written durable; returns its size in bytes."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()


def _open_events(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise EyasError(
            "training.tensorboard: the package tensorboard is not installed; `pip install tensorboard`, or set it to"
            " false"
        ) from None
    return SummaryWriter(str(folder), purge_step=step)
