"""Saves inside an epoch, in its staging folder, from which a killed job goes on."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas.errors import EyasError
from eyas.shards import atomic_path, describe_file, ensure_free, read_json, write_sealed

log = logging.getLogger(__name__)

# The newest may be damaged (a disk that lied about a sync): the one before it is kept.
_KEEP = 2


def save_state(folder: Path, fingerprint: str, batches: int, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    """Write what the trainer knows after `batches` batches, whole or not at all.

    The tensors come first, the facts with their size and checksum last. Older saves but one go.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"batch_{batches:09d}.safetensors"
    ensure_free(folder, sum(t.numel() * t.element_size() for t in tensors.values()), "The save inside the epoch")
    with atomic_path(file) as partial:
        save_file({name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, partial)
    write_sealed(
        file.with_suffix(".json"),
        {"fingerprint": fingerprint, "batches": batches, **facts, "files": {file.name: describe_file(file)}},
    )
    for old in sorted(folder.glob("batch_*.json"))[:-_KEEP]:
        old.unlink()
        old.with_suffix(".safetensors").unlink(missing_ok=True)


def load_state(folder: Path, fingerprint: str) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The newest whole save of an epoch with this fingerprint, or None; others are reported and passed over."""
    from safetensors.torch import load_file

    for sidecar in sorted(folder.glob("batch_*.json"), reverse=True):
        file = sidecar.with_suffix(".safetensors")
        try:
            facts = read_json(sidecar, "save")
            if facts["fingerprint"] != fingerprint:
                log.warning("%s belongs to other data, settings or weights; it is passed over.", file)
                continue
            if describe_file(file) != facts["files"][file.name]:
                raise EyasError("truncated or damaged")
            return load_file(file), facts
        except (EyasError, OSError, KeyError, TypeError) as exc:
            log.warning("%s is not whole (%s); going on from the save before it.", file, exc)
    return None
