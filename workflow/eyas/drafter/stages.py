"""The drafter's file targets: epoch 0 and epoch n, each under its lock, each whole or absent."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from eyas.drafter.checkpoint import CONFIG, FACTS, MODEL, read_facts
from eyas.drafter.checks import require_fit, verify_shards
from eyas.drafter.epoch import Runtime
from eyas.drafter.imported import init_checksum
from eyas.drafter.initialise import initialise
from eyas.drafter.processes import Processes
from eyas.drafter.selection import best_epoch
from eyas.drafter.shape import DrafterShape
from eyas.drafter.trainer import train_epoch
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, read_manifest
from eyas.shards import (
    checked,
    describe_file,
    fingerprint,
    is_complete,
    publish,
    read_json,
    write_lock,
    write_sealed,
)
from eyas.target.tokenizer import TargetReference
from eyas.versions import VERSIONS
from eyas.vocabulary import read_map

log = logging.getLogger(__name__)

SELECTION = "selection.json"


@contextmanager
def _epoch_folder(folder: Path, mark: str) -> Iterator[bool]:
    """Hold the folder's lock; yields whether there is anything to do."""
    with write_lock(folder):
        done = is_complete(folder / FACTS, mark)
        if done:
            log.info("%s was finished by another process in the meantime.", folder)
        yield not done


def initialise_checkpoint(
    manifest_file: Path, vocabulary_file: Path, target: TargetReference, settings: dict[str, Any], folder: Path
) -> None:
    """Write epoch 0 to `folder`. `settings`: the fields of config.DrafterModel, and `seed`."""
    manifest = read_manifest(manifest_file)
    mark = fingerprint(
        version=VERSIONS["drafter"], manifest=manifest.digest, settings=settings,
        vocabulary=checked(vocabulary_file, "vocabulary map"), start=init_checksum(settings),
    )  # fmt: skip
    with _epoch_folder(folder, mark) as wanted:
        if wanted:
            initialise(target, manifest, read_map(vocabulary_file), settings, settings["seed"], folder, mark)


def train_checkpoint(
    manifest_file: Path,
    tokens_folder: Path,
    target: TargetReference,
    epoch: int,
    settings: dict[str, Any],
    folder: Path,
    processes: Processes,
    runtime: Runtime | None = None,
    expected: dict[str, Any] | None = None,
    verified: Path | None = None,
) -> None:
    """Write epoch `epoch` to `folder`, from the one before beside it.

    `settings`: the fields of config.Training, `seed` and `held_out_every`. `expected`: see
    `require_fit`; `verified`: see `verify_shards`. Several processes call this together.
    """

    def prepare() -> tuple[Manifest, str]:
        manifest = read_manifest(manifest_file)
        before = read_json(previous / FACTS, "checkpoint")
        shape = DrafterShape.from_config_json(read_json(previous / CONFIG, "drafter configuration"))
        if processes.rank == 0:
            require_fit(manifest, target, shape, expected or {})
            verify_shards(manifest, tokens_folder, verified)
        mark = fingerprint(
            version=VERSIONS["training"], manifest=manifest.digest, before=before["files"], epoch=epoch,
            settings=settings,
        )  # fmt: skip
        return manifest, mark

    previous = folder.parent / f"epoch_{epoch - 1}"
    manifest, mark = processes.first_then_all(prepare)
    # the first process holds the lock for all of them
    with _epoch_folder(folder, mark) if processes.rank == 0 else nullcontext(True) as wanted:
        if int(processes.sum(torch.tensor(int(processes.rank == 0 and wanted)))):
            train_epoch(
                manifest, tokens_folder, target, previous, epoch, settings, settings["held_out_every"],
                settings["seed"], folder, mark, processes, runtime,
            )  # fmt: skip


def select_best(last: Path, output: Path) -> None:
    """Put the best epoch up to `last` (a folder) into the folder `output`, with `selection.json`, which says why."""
    history = read_facts(last)["history"]
    chosen = best_epoch(history)
    source = last.parent / f"epoch_{chosen}"
    facts = read_facts(source)
    mark = fingerprint(version=VERSIONS["selection"], files=facts["files"], history=history)
    sidecar = output / SELECTION
    with write_lock(output):
        if is_complete(sidecar, mark):
            return
        staging = output.parent / ".staging" / output.name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        for name in (MODEL, CONFIG):
            if describe_file(source / name) != facts["files"][name]:
                raise EyasError(
                    f"{source / name}: not as it was written (checksum); delete {source} and run snakemake again"
                )
            shutil.copyfile(source / name, staging / name)
        measured = {record["epoch"]: record.get("held_out") for record in history}
        write_sealed(
            staging / SELECTION,
            {
                "format_version": VERSIONS["selection"], "fingerprint": mark, "epoch": chosen,
                "last_epoch": history[-1]["epoch"] if history else 0,
                "definition": "the epoch with the longest expected acceptance length on the held-out rows",
                "held_out": measured,
                "files": {name: facts["files"][name] for name in (MODEL, CONFIG)},
            },
        )  # fmt: skip
        publish({staging / name: output / name for name in (MODEL, CONFIG, SELECTION)}, staging)
        log.info("The best epoch up to %s is %d.", last.name, chosen)
