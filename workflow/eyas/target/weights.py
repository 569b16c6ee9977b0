"""Single weights of a model folder, read from its safetensors files without loading the model."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from eyas.errors import EyasError
from eyas.target.tokenizer import TargetReference, unreadable

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_PLAIN = ("F64", "F32", "F16", "BF16")
# What quantisers put beside a module's `weight` or in its place: fp8, compressed-tensors, GPTQ, AWQ, bitsandbytes, HQQ.
_QUANTISED = re.compile(r"weight_|weight\.|qweight|qzeros|scales|SCB|W_q")


@dataclass(frozen=True)
class StoredWeights:
    """The tensors of a model folder: `files` is the file of each. Nothing is read before it is asked for.

    Its methods raise what safetensors, json and the file system raise: the caller knows whose fault it is.
    """

    folder: Path
    files: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> StoredWeights:
        """The tensors of `model.safetensors`, or those of the shards that `model.safetensors.index.json` names."""
        if (folder / INDEX).is_file():
            return cls(folder, dict(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]))
        with safe_open(folder / WEIGHTS, framework="pt") as file:
            return cls(folder, dict.fromkeys(file.keys(), WEIGHTS))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def read(self, name: str, rows: Tensor | None = None) -> Tensor:
        """A tensor in its stored dtype; `rows` int64 [R]: these of its first dimension.

        The file is memory-mapped, so that only the rows taken cost memory.
        """
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor if rows is None else tensor[rows]

    def quantisation(self, name: str) -> str | None:
        """How `name` (…weight) is quantised, or None where it is a plain floating-point tensor or not there at all."""
        stem = name.removesuffix("weight")
        beside = [other.removeprefix(stem) for other in self.files if other.startswith(stem)]
        if marks := sorted(part for part in beside if _QUANTISED.match(part)):
            return f"{', '.join(marks[:3])} beside it"
        if name not in self.files:
            return None
        with safe_open(self.folder / self.files[name], framework="pt") as file:
            dtype = str(file.get_slice(name).get_dtype())
        return None if dtype in _PLAIN else f"dtype {dtype}"


def _open_target(target: TargetReference) -> StoredWeights:
    folder = Path(target.path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            wanted = ["model*.safetensors*"]
            folder = Path(snapshot_download(target.path, revision=target.revision, allow_patterns=wanted))
        except Exception as exc:
            raise unreadable(target, "weights", exc) from None
    try:
        return StoredWeights.open(folder)
    except Exception as exc:
        raise unreadable(target, "safetensors weights", exc) from None


def stored_names(target: TargetReference) -> list[str]:
    """Names of all the target's weights, as stored; raises EyasError when they cannot be read."""
    return list(_open_target(target).files)


def load_tensors(
    target: TargetReference,
    names: list[str],
    dtype: torch.dtype | None = None,
    rows: Tensor | None = None,
    advice: str = "name a copy of the target that is not quantised",
) -> dict[str, Tensor]:
    """Read single weights of the target without loading the model; a name that it lacks is absent from the result.

    In their stored dtype (memory-mapped), or as `dtype`. `rows` int64 [R]: only these of the first
    dimension, taken before they are converted. Raises EyasError for weights that cannot be read, and
    for quantised ones, with `advice` on what to do about them.
    """
    stored = _open_target(target)
    tensors, quantised = {}, []
    try:
        for name in names:
            if how := stored.quantisation(name):
                quantised.append(f"{name} ({how})")
            elif name in stored.files:
                tensor = stored.read(name, rows)
                tensors[name] = tensor if dtype is None else tensor.to(dtype)
    except Exception as exc:
        raise unreadable(target, "safetensors weights", exc) from None
    if quantised:
        more = f" and {len(quantised) - 1} more" if len(quantised) > 1 else ""
        raise EyasError(
            f"target.path: the weights of {target.path} are quantised, and Eyas reads plain floating-point ones"
            f" only: {quantised[0]}{more}; {advice}"
        )
    return tensors
