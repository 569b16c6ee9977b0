"""One epoch of training: from the checkpoint of the epoch before to the next one."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from eyas.drafter.checkpoint import METRICS, Checkpoint, load_checkpoint, repeat_checkpoint, save_checkpoint, staging_of
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.epoch import Epoch, Runtime
from eyas.drafter.processes import Processes
from eyas.drafter.selection import stopped_after
from eyas.drafter.step import read_moments
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, require_target
from eyas.target.model import target_identity
from eyas.target.tokenizer import TargetReference

log = logging.getLogger(__name__)


def train_epoch(
    manifest: Manifest,
    tokens_folder: Path,
    target: TargetReference,
    previous: Path,
    epoch: int,
    settings: dict[str, Any],
    held_out_every: int,
    seed: int,
    output: Path,
    fingerprint: str,
    processes: Processes,
    runtime: Runtime | None = None,
) -> None:
    """Train epoch `epoch` from the checkpoint `previous` (of epoch - 1) and write `output`.

    `settings`: the fields of `config.Training`. A job that was killed inside the epoch goes on
    from its last save. On CPUs, with the same number of processes, the result is the same to the
    last bit. Raises EyasError when the checkpoint belongs to other data, when no row can be
    trained on, and when the loss stops being a number; KeyboardInterrupt after SIGINT or SIGTERM,
    when the state has been saved.
    """
    runtime = runtime or Runtime()
    checkpoint = processes.first_then_all(lambda: load_checkpoint(previous))
    if checkpoint.facts["epoch"] != epoch - 1:
        raise EyasError(f"{previous}: holds epoch {checkpoint.facts['epoch']}, epoch {epoch} needs epoch {epoch - 1}")
    if checkpoint.facts["manifest_digest"] != manifest.digest:
        raise EyasError(
            f"{previous}: was trained on other data (manifest {checkpoint.facts['manifest_digest']}, now"
            f" {manifest.digest}); delete the drafter's folder and run snakemake again"
        )
    require_target(manifest, target_identity(target))
    facts = {k: v for k, v in checkpoint.facts.items() if k not in ("files", "fingerprint", "format_version")}
    stopped = stopped_after(facts["history"], runtime.early_stop)
    if stopped is not None:
        if processes.rank == 0:
            _repeat(previous, facts, epoch, stopped, output, fingerprint)
        return
    data = processes.first_then_all(lambda: HiddenStates(manifest, tokens_folder))
    work = Epoch(data, checkpoint, target, epoch, settings, held_out_every, seed, processes, runtime)
    with _stop_requests() as stop:
        work.run(staging_of(output), fingerprint, stop)
    record = work.record()
    weights, moments = work.weights(), read_moments(work.optimizer, work.parameters)
    if processes.rank:
        return
    facts |= {"epoch": epoch, "step": work.standing.step, "history": [*facts["history"], record]}
    result = Checkpoint(checkpoint.shape, checkpoint.weights | weights, moments, facts)
    save_checkpoint(result, output, fingerprint, work.metrics_file(staging_of(output)))
    held_out = record.get("held_out")
    log.info(
        "Wrote %s: mean loss %.4f, expected acceptance length %.3f on the training rows%s.",
        output, record["loss"], record["acceptance_length"],
        f", {held_out['acceptance_length']:.3f} on {held_out['rows']} held-out rows" if held_out else "",
    )  # fmt: skip


def _repeat(previous: Path, facts: dict[str, Any], epoch: int, stopped: int, output: Path, fingerprint: str) -> None:
    """Write an epoch that early stopping left out: the one before it, once more."""
    record = {"epoch": epoch, "stopped_after": stopped}
    metrics = staging_of(output) / METRICS
    metrics.parent.mkdir(parents=True, exist_ok=True)
    metrics.write_bytes(b"")
    facts |= {"epoch": epoch, "history": [*facts["history"], record]}
    repeat_checkpoint(previous, facts, output, fingerprint, metrics)
    log.info("Training stopped early after epoch %d: %s repeats %s.", stopped, output, previous)


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """A list that gets the number of a SIGINT or SIGTERM; another one some seconds later acts at once.

    (A Ctrl-C reaches the processes of a job from the terminal and, in the same moment, from their launcher.)
    """
    asked: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if asked and time.monotonic() - first > 5:
            raise KeyboardInterrupt
        first = first if asked else time.monotonic()
        asked.append(number)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: nobody sends us signals
        yield asked
        return
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
