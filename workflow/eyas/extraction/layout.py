"""Places of a shard's tensors in its file, known from its counts alone. Imports no torch."""

from __future__ import annotations

from eyas.shards import Layout
from eyas.versions import VERSIONS

FORMAT_VERSION = VERSIONS["hidden_states"]
FP8 = "fp8_e4m3"
_STORED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32", FP8: "F8_E4M3"}


def shard_layout(tokens: int, sequences: int, hidden_size: int, dtype: str) -> Layout:
    """Places of all tensors of a shard; its size is known before any state is."""
    stored = _STORED[dtype]
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "aux_hidden_states": (stored, (tokens, 3 * hidden_size)),
        "last_hidden_state": (stored, (tokens, hidden_size)),
        "input_ids": ("I32", (tokens,)),
        "target_token": ("I32", (tokens,)),
        "offsets": ("I64", (sequences + 1,)),
        "row_ids": ("I64", (sequences,)),
    }
    if dtype == FP8:  # a scale for each token and state
        tensors |= {"aux_scales": ("F32", (tokens, 3)), "last_scale": ("F32", (tokens,))}
    return Layout.of(tensors, {"format": "eyas.hidden_states", "version": str(FORMAT_VERSION)})


def shard_bytes(tokens: int, sequences: int, hidden_size: int, dtype: str) -> int:
    """Exact size of a shard's tensor file."""
    return shard_layout(tokens, sequences, hidden_size, dtype).nbytes
