"""The drafter's file targets: epoch 0 and epoch n, each under its lock, each whole or absent."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from eyas.drafter.checkpoint import FACTS
from eyas.drafter.initialise import initialise
from eyas.drafter.trainer import train_epoch
from eyas.extraction.manifest import read_manifest
from eyas.shards import checksum, fingerprint, is_complete, read_json, write_lock
from eyas.target.tokenizer import TargetReference
from eyas.versions import VERSIONS
from eyas.vocabulary import read_map

log = logging.getLogger(__name__)


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
        version=VERSIONS["drafter"], manifest=manifest.digest, vocabulary=checksum(vocabulary_file), settings=settings
    )
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
    device: torch.device,
) -> None:
    """Write epoch `epoch` to `folder`, from the one before beside it.

    `settings`: the fields of config.Training, `seed` and `held_out_every`.
    """
    manifest = read_manifest(manifest_file)
    previous = folder.parent / f"epoch_{epoch - 1}"
    before = read_json(previous / FACTS, "checkpoint")
    mark = fingerprint(
        version=VERSIONS["training"], manifest=manifest.digest, before=before["files"], epoch=epoch, settings=settings
    )
    with _epoch_folder(folder, mark) as wanted:
        if wanted:
            train_epoch(
                manifest, tokens_folder, target, previous, epoch, settings, settings["held_out_every"],
                settings["seed"], folder, mark, device,
            )  # fmt: skip
