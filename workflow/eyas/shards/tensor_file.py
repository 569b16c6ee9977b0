"""Safetensors files that are allocated at full size first and filled in any order."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import EyasError

ITEM_BYTES = {"I64": 8, "F32": 4, "I32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "U8": 1, "BOOL": 1}

# What file systems without fallocate say: there, the free space is compared, but not taken.
_CANNOT_ALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

# safetensors refuses larger ones too; a damaged length must not make us allocate it.
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class TensorSpec:
    """Dtype (safetensors' name), shape and place of one tensor in its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the first dimension."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """Header bytes and tensor places of a safetensors file, fixed by shapes alone."""

    header: bytes
    tensors: dict[str, TensorSpec]
    nbytes: int

    @classmethod
    def of(cls, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> Layout:
        """Lay `name -> (dtype, shape)` out, widest dtypes first so that every tensor is aligned."""
        order = sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name][0]], name))
        entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
        position, relative = 0, {}
        for name in order:
            dtype, shape = tensors[name]
            size = TensorSpec(dtype, shape).nbytes
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
            relative[name] = position
            position += size
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        specs = {name: TensorSpec(*tensors[name], begin=len(header) + relative[name]) for name in order}
        return cls(header, specs, len(header) + position)


def ensure_free(folder: Path, nbytes: int, what: str) -> None:
    """Raise EyasError unless the file system of `folder` has room for `nbytes` more."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise EyasError(
            f"{what} needs {nbytes:,} bytes in {folder}, where {free:,} are free; free"
            f" {nbytes - free:,} bytes or put `results` on a larger disk"
        )


@dataclass
class TensorFileWriter:
    """Writes rows of tensors at their offsets into a file that already has its full size."""

    path: Path
    layout: Layout
    _fd: int = field(default=-1, repr=False)

    def open(self) -> TensorFileWriter:
        """Allocate the file (or open the one that a killed job left) and write the header."""
        fresh = not self.path.exists() or self.path.stat().st_size != self.layout.nbytes
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if fresh:
            os.ftruncate(self._fd, 0)
            try:
                os.posix_fallocate(self._fd, 0, self.layout.nbytes)
            except OSError as exc:
                if exc.errno in _CANNOT_ALLOCATE:
                    ensure_free(self.path.parent, self.layout.nbytes, str(self.path))
                    os.ftruncate(self._fd, self.layout.nbytes)
                    self._write(self.layout.header, 0)
                    return self
                self.close()
                self.path.unlink(missing_ok=True)
                if exc.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise EyasError(
                        f"{self.path}: no room for {self.layout.nbytes:,} bytes ({exc.strerror}); free disk"
                        " space or put `results` on a larger disk, then run the same command again"
                    ) from None
                raise
        self._write(self.layout.header, 0)  # also into a file whose maker was killed before this line
        return self

    def write_rows(self, name: str, first_row: int, data: memoryview | bytes) -> None:
        """Write contiguous rows (first dimension) of tensor `name`, as raw little-endian bytes."""
        spec = self.layout.tensors[name]
        view = memoryview(data).cast("B")
        begin = first_row * spec.row_bytes
        if begin < 0 or begin + len(view) > spec.nbytes:
            raise ValueError(f"{name}: rows from {first_row} with {len(view)} bytes lie outside the tensor")
        self._write(view, spec.begin + begin)

    def _write(self, data: memoryview | bytes, position: int) -> None:
        view = memoryview(data)
        while view:  # a single write may be short
            written = os.pwrite(self._fd, view, position)
            view, position = view[written:], position + written

    def sync(self) -> None:
        """Make what was written durable."""
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> TensorFileWriter:
        return self if self._fd >= 0 else self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_header(path: Path) -> tuple[dict[str, TensorSpec], dict[str, str]]:
    """Tensor places and metadata of a safetensors file, checked against the file's size.

    Raises EyasError for a file that is truncated, damaged or no safetensors file.
    """
    damaged = f"{path}: truncated or damaged safetensors file; delete it and run snakemake again to rebuild it"
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise EyasError(damaged)
            entries = json.loads(file.read(length))
        metadata = entries.pop("__metadata__", {})
        specs, end = {}, 0
        if not isinstance(metadata, dict):
            raise EyasError(damaged)
        entries = dict(sorted(entries.items(), key=lambda item: item[1]["data_offsets"]))
        for name, entry in entries.items():
            begin, stop = entry["data_offsets"]
            spec = TensorSpec(entry["dtype"], tuple(entry["shape"]), 8 + length + begin)
            if (
                any(type(n) is not int or n < 0 for n in (begin, stop, *spec.shape))
                or begin != end
                or spec.nbytes != stop - begin
            ):
                raise EyasError(damaged)
            specs[name], end = spec, stop
        if 8 + length + end != size:
            raise EyasError(damaged)
    except FileNotFoundError:
        raise EyasError(f"{path}: this file is missing; run snakemake to build it") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise EyasError(damaged) from None
    return specs, metadata
