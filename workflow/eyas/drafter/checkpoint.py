"""Drafter checkpoints: `model.safetensors` and `config.json` for servers, the trainer's state for the next epoch."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.model import Drafter
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.errors import EyasError
from eyas.shards import describe_file, ensure_free, read_header, read_json, write_json, write_sealed
from eyas.shards.files import publish
from eyas.versions import VERSIONS

FORMAT_VERSION = VERSIONS["drafter"]
MODEL, CONFIG, STATE, FACTS = "model.safetensors", "config.json", "trainer_state.safetensors", "trainer_state.json"
METRICS = "metrics.jsonl"


@dataclass
class Checkpoint:
    """An epoch's result: fp32 weights, AdamW moments, and where the training stands."""

    shape: DrafterShape
    weights: dict[str, Tensor]
    moments: dict[str, Tensor]
    facts: dict[str, Any]


def served_tensors(weights: dict[str, Tensor], shape: DrafterShape) -> dict[str, Tensor]:
    """The checkpoint's tensors as servers take them: bf16, `d2t` int64, `t2d` bool; keys and shapes checked."""
    expected = tensor_shapes(shape)
    if set(weights) != set(expected):
        missing, extra = sorted(set(expected) - set(weights)), sorted(set(weights) - set(expected))
        raise EyasError(f"drafter tensors do not fit the key contract: missing {missing}, unexpected {extra}")
    for name, tensor in weights.items():
        if tuple(tensor.shape) != expected[name]:
            raise EyasError(f"drafter tensor {name} has the shape {tuple(tensor.shape)}, not {expected[name]}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise EyasError(f"drafter tensor {name} holds NaN or infinity")
    return {
        name: (t.to(torch.bfloat16) if t.is_floating_point() else t).contiguous() for name, t in sorted(weights.items())
    }


def staging_of(folder: Path) -> Path:
    """Where an unfinished epoch keeps what it has; Snakemake does not know it, so it survives a failure."""
    return folder.parent / ".staging" / folder.name


def save_checkpoint(checkpoint: Checkpoint, folder: Path, fingerprint: str, metrics: Path | None = None) -> None:
    """Write a checkpoint, whole or not at all (the caller holds the folder's lock).

    The trainer's state keeps float32 masters of all that is trained; what is frozen (the
    embedding, the maps) is read back from model.safetensors. `metrics` is put beside them.
    """
    from safetensors.torch import save_file

    served = served_tensors(checkpoint.weights, checkpoint.shape)
    staging = staging_of(folder) / "final"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    _ensure_room(checkpoint, staging)
    save_file(served, staging / MODEL, metadata={"format": "pt"})
    write_json(staging / CONFIG, checkpoint.shape.config_json())
    trained = checkpoint.facts["trained"]
    state = {f"master.{name}": checkpoint.weights[name].float().contiguous() for name in trained}
    state |= {name: tensor.contiguous() for name, tensor in checkpoint.moments.items()}
    save_file(dict(sorted(state.items())), staging / STATE, metadata={"format": "pt"})
    _publish(staging, folder, fingerprint, checkpoint.facts, metrics)


def repeat_checkpoint(previous: Path, facts: dict[str, Any], folder: Path, fingerprint: str, metrics: Path) -> None:
    """Write the checkpoint `previous` once more as `folder`, with other facts.

    Copies, no hard links: names of one file would share its time, which Snakemake compares.
    """
    staging = staging_of(folder) / "final"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    for name in (MODEL, CONFIG, STATE):
        shutil.copyfile(previous / name, staging / name)
    _publish(staging, folder, fingerprint, facts, metrics)


def _publish(staging: Path, folder: Path, fingerprint: str, facts: dict[str, Any], metrics: Path | None) -> None:
    names = [MODEL, CONFIG, STATE]
    if metrics is not None:
        names.append(METRICS)
        shutil.copyfile(metrics, staging / METRICS)
    files = {name: describe_file(staging / name) for name in names}
    values = {"format_version": FORMAT_VERSION, "fingerprint": fingerprint, **facts, "files": files}
    write_sealed(staging / FACTS, values)
    # the facts, which name the others' checksums, appear last; the saves inside the epoch go when all is there
    publish({staging / name: folder / name for name in (*names, FACTS)}, staging.parent)


def _ensure_room(checkpoint: Checkpoint, folder: Path) -> None:
    """Raise EyasError before anything is written when the disk has no room for the checkpoint."""
    weights = sum(t.numel() * (2 if t.is_floating_point() else t.element_size()) for t in checkpoint.weights.values())
    masters = sum(4 * checkpoint.weights[name].numel() for name in checkpoint.facts["trained"])
    moments = sum(t.numel() * t.element_size() for t in checkpoint.moments.values())
    ensure_free(folder, weights + masters + moments, f"Checkpoint {folder.name}")


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint with its trainer state; raises EyasError for one that is damaged or incomplete."""
    from safetensors.torch import load_file

    facts = read_json(folder / FACTS, "trainer state", sealed=True)
    if facts.get("format_version") != FORMAT_VERSION:
        raise EyasError(f"{folder / FACTS}: format version {facts.get('format_version')}, not {FORMAT_VERSION}")
    for name, entry in facts["files"].items():
        if not (folder / name).exists() or describe_file(folder / name) != entry:
            raise EyasError(
                f"{folder / name}: missing or not as it was written (checksum); delete {folder} and run snakemake"
                " again to rebuild it"
            )
    shape = DrafterShape.from_config_json(read_json(folder / CONFIG, "drafter configuration"))
    weights = load_file(folder / MODEL)
    moments = load_file(folder / STATE)
    for name in facts["trained"]:
        weights[name] = moments.pop(f"master.{name}")
    return Checkpoint(shape, weights, moments, facts)


def load_drafter(folder: Path) -> Drafter:
    """The drafter of a checkpoint or an export, as a server would see it (bf16 weights), in float32."""
    from safetensors.torch import load_file

    shape = DrafterShape.from_config_json(read_json(folder / CONFIG, "drafter configuration"))
    read_header(folder / MODEL)  # a truncated file is one clear message
    weights = load_file(folder / MODEL)
    return build_drafter(shape, served_tensors(weights, shape))


def build_drafter(shape: DrafterShape, weights: dict[str, Tensor]) -> Drafter:
    """A float32 drafter with the given tensors."""
    drafter = Drafter(shape, weights["d2t"], weights["t2d"])
    frozen = {name for name, parameter in drafter.named_parameters() if not parameter.requires_grad}
    if frozen:  # never trained, so bf16 holds all of it: half the memory of a large embedding
        drafter.embed_tokens.to(torch.bfloat16)
    drafter.load_state_dict({k: v.float() if v.is_floating_point() else v for k, v in weights.items()})
    return drafter


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of a checkpoint without its tensors."""
    facts: dict[str, Any] = read_json(folder / FACTS, "trainer state")
    return facts
