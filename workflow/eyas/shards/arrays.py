"""Numpy arrays in safetensors files: small ones written whole, all of them memory-mapped for reading."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.errors import EyasError
from eyas.shards.tensor_file import Layout, TensorFileWriter, read_header

if TYPE_CHECKING:
    import numpy as np

# numpy is imported where it is used: the Snakefile imports this package and needs none.
_BITS = {"BF16": "<u2", "F8_E4M3": "u1"}  # numpy has no such dtypes
_PLAIN = {"I64": "<i8", "I32": "<i4", "F32": "<f4", "F16": "<f2", "U8": "u1", "BOOL": "?"}
_NUMPY = _PLAIN | _BITS


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file (the caller makes it atomic)."""
    import numpy as np

    names = {np.dtype(code): name for name, code in _PLAIN.items()}
    path.unlink(missing_ok=True)
    layout = Layout.of({name: (names[a.dtype], a.shape) for name, a in arrays.items()}, metadata)
    with TensorFileWriter(path, layout) as writer:
        for name, array in arrays.items():
            if array.size:
                writer.write_rows(name, 0, np.ascontiguousarray(array).data)


def map_arrays(path: Path, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Memory-map tensors of a file (bfloat16 and float8 as their bits); raises EyasError naming what is wrong."""
    import numpy as np

    specs, _ = read_header(path)
    if missing := [name for name in names if name not in specs]:
        raise EyasError(f"{path}: has no tensor {', '.join(missing)}; delete it and run snakemake again to rebuild it")
    arrays: dict[str, np.ndarray] = {}
    # One mapping a file: each holds a file descriptor, and a run has thousands of shards.
    whole = np.memmap(path, np.uint8, "r")
    for name in names:
        spec = specs[name]
        dtype = np.dtype(_NUMPY[spec.dtype])
        if spec.nbytes:
            arrays[name] = whole[spec.begin : spec.begin + spec.nbytes].view(dtype).reshape(spec.shape)
        else:
            arrays[name] = np.empty(spec.shape, dtype)
    return arrays
