"""A drafter as servers load it. Keys, shapes and dtypes are checked: SGLang skips wrong names in silence."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.checkpoint import CONFIG, MODEL, served_tensors
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.errors import EyasError
from eyas.export.servers import server_config
from eyas.plan.export import MAX_SHARD_BYTES
from eyas.shards import (
    TensorSpec,
    describe_file,
    ensure_free,
    fingerprint,
    is_complete,
    read_header,
    read_json,
    write_json,
    write_lock,
    write_sealed,
)
from eyas.shards.files import publish, remove_folder
from eyas.target.weights import INDEX
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["export"]
FACTS = "export.json"


def read_specs(folder: Path) -> dict[str, TensorSpec]:
    """Shape and dtype of every tensor of `folder`, from the headers of its file or of the index's shards.

    Raises EyasError for a damaged file, and where index and shards do not hold the same tensors.
    """
    if not (folder / INDEX).is_file():
        return read_header(folder / MODEL)[0]
    places: dict[str, str] = read_json(folder / INDEX, "index of the weights")["weight_map"]
    found: dict[str, TensorSpec] = {}
    for file in sorted(set(places.values())):
        specs, _ = read_header(folder / file)
        if set(specs) != {name for name, place in places.items() if place == file}:
            raise EyasError(f"{folder / file}: does not hold the tensors that {INDEX} says; delete {folder}")
        found |= specs
    return found


def check_tensors(folder: Path) -> DrafterShape:
    """The drafter's shape; EyasError unless the folder holds exactly the tensors, shapes and dtypes that servers take.

    Reads the headers only.
    """
    shape = DrafterShape.from_config_json(read_json(folder / CONFIG, "drafter configuration"))
    expected = tensor_shapes(shape)
    found = read_specs(folder)
    if set(found) != set(expected):
        missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise EyasError(
            f"{folder}: its weights lack {', '.join(missing) or 'nothing'} and hold {', '.join(extra) or 'nothing'}"
            " besides what servers expect; they would skip wrong names in silence"
        )
    for name, spec in found.items():
        dtype = {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")
        if spec.shape != expected[name] or spec.dtype != dtype:
            raise EyasError(f"{folder}: {name} is {spec.dtype} {spec.shape}, servers expect {dtype} {expected[name]}")
    return shape


def _check_maps(folder: Path, d2t: Tensor, t2d: Tensor) -> None:
    """Raise EyasError unless `d2t` (int64 [D], offsets) and `t2d` (bool [V]) say the same."""
    ids = d2t + torch.arange(len(d2t))
    inside = int(ids.min()) >= 0 and int(ids.max()) < len(t2d)
    if not inside or not torch.equal(ids.sort().values, t2d.nonzero().flatten()):
        raise EyasError(f"{folder}: d2t and t2d contradict each other; delete the drafter's folder and run snakemake")


def split(tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[dict[str, Tensor]]:
    """The tensors in shards of at most `max_shard_bytes`, in their order; a larger tensor has one of its own."""
    shards: list[dict[str, Tensor]] = []
    size = 0
    for name, tensor in tensors.items():
        if not shards or size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    return shards


def write_weights(tensors: Mapping[str, Tensor], folder: Path, max_shard_bytes: int) -> list[str]:
    """Write model.safetensors, or shards and their index where that is larger; returns the files' names.

    Names and index are those of transformers' save_pretrained. Raises EyasError when the disk has no room.
    """
    from safetensors.torch import save_file

    total = sum(tensor.nbytes for tensor in tensors.values())
    ensure_free(folder, total, f"Export {folder.name}")
    shards = split(tensors, max_shard_bytes)
    if len(shards) == 1:
        save_file(shards[0], folder / MODEL, metadata={"format": "pt"})
        return [MODEL]
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    places: dict[str, str] = {}
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))})
    return [*names, INDEX]


def export_drafter(
    checkpoint: Path, server: str, target_model_type: str, output: Path, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write `output/` (config.json, the weights, export.json) for `server` from a checkpoint folder.

    Keys, shapes, dtypes, finiteness and the maps are checked before anything is written; what has been
    written is checked once more before it appears. Raises EyasError and leaves what was there before.
    """
    from safetensors.torch import load_file

    mark = fingerprint(
        version=FORMAT_VERSION, model=describe_file(checkpoint / MODEL), config=describe_file(checkpoint / CONFIG),
        server=server, target=target_model_type, max_shard_bytes=max_shard_bytes,
    )  # fmt: skip
    with write_lock(output):
        if is_complete(output / FACTS, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        shape = check_tensors(checkpoint)
        tensors = served_tensors(load_file(checkpoint / MODEL), shape)
        _check_maps(checkpoint, tensors["d2t"], tensors["t2d"])
        config = server_config(shape, server, target_model_type)
        staging = output.parent / ".staging" / output.name
        remove_folder(staging)
        staging.mkdir(parents=True)
        try:
            write_json(staging / CONFIG, config)
            names = [*write_weights(tensors, staging, max_shard_bytes), CONFIG]
            for name in names:  # safetensors' files are for their owner alone; servers often run as somebody else
                shutil.copymode(staging / CONFIG, staging / name)
            check_tensors(staging)
            files: dict[str, Any] = {name: describe_file(staging / name) for name in names}
            facts = {"format_version": FORMAT_VERSION, "fingerprint": mark, "server": server, "files": files}
            write_sealed(staging / FACTS, facts)
            _drop_other_weights(output, names)
            publish({staging / name: output / name for name in (*names, FACTS)}, staging)
        except BaseException:
            remove_folder(staging)
            raise
    log.info(
        "Wrote %s: %d tensors, %d bytes; keys, shapes and dtypes are those that servers load.",
        output,
        len(tensors),
        sum(entry["bytes"] for entry in files.values()),
    )


def _drop_other_weights(folder: Path, names: list[str]) -> None:
    """Remove weights that an earlier export cut otherwise: loaders would read them besides the new ones."""
    (folder / FACTS).unlink(missing_ok=True)
    for old in folder.glob("model*.safetensors*"):
        if old.name not in names:
            old.unlink()
