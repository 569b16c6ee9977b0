"""How often the target's tokens are supervised: in training rows, in held-out rows, and by data set."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np

from eyas.errors import EyasError
from eyas.shards import is_held_out, read_json
from eyas.tokenization import TokenShard, read_tokens

OTHER_SOURCES = "(other sources)"
# A data set takes 16 bytes a vocabulary entry (2.6 MB at 163,840); a name of its own for every record would take all.
MAX_SOURCES = 100


@dataclass(frozen=True)
class TokenCounts:
    """Supervised tokens by data set, side (0 training, 1 held out) and id: `counts` int64 [S, 2, V].

    `sources` holds the S names. The data sets after the first hundred share the name OTHER_SOURCES.
    """

    sources: list[str]
    counts: np.ndarray

    @property
    def training(self) -> np.ndarray:
        """Of the training rows of all data sets: int64 [V]."""
        return cast(np.ndarray, self.counts[:, 0].sum(axis=0))

    @property
    def held_out(self) -> np.ndarray:
        """Of the held-out rows of all data sets: int64 [V]."""
        return cast(np.ndarray, self.counts[:, 1].sum(axis=0))


def _add_counts(
    ids: np.ndarray, mask: np.ndarray, offsets: np.ndarray, groups: np.ndarray, order: np.ndarray, counts: np.ndarray
) -> int:
    """The loop itself, compiled by numba; the place of a supervised id outside the vocabulary, else -1."""
    size = counts.shape[1]
    for sequence in order:
        row = counts[groups[sequence]]
        for place in range(offsets[sequence], offsets[sequence + 1]):
            token = ids[place]
            if 0 <= token < size:
                row[token] += mask[place] != 0
            elif mask[place]:
                return place
    return -1


@cache
def _compiled() -> Callable[..., int]:
    """`_add_counts` as machine code, from numba's cache where there is one."""
    import numba
    from numba import types

    def read_only(dtype: Any) -> Any:  # as memory-mapped files are; takes writable arrays too
        return types.Array(dtype, 1, "C", readonly=True)

    signature = types.int64(
        read_only(types.int32), read_only(types.uint8), read_only(types.int64), read_only(types.int64),
        read_only(types.int64), types.int64[:, ::1],
    )  # fmt: skip
    try:
        return cast(Callable[..., int], numba.njit(signature, cache=True)(_add_counts))
    except (RuntimeError, OSError):  # no folder to write the cache to, or a full disk: compile every time
        return cast(Callable[..., int], numba.njit(signature)(_add_counts))


def count_groups(shard: TokenShard, groups: np.ndarray, counts: np.ndarray) -> None:
    """Add the supervised tokens of every sequence to its group's row of `counts`.

    `groups` [R]: the group of each sequence; sequences with -1 are not counted. `counts` int64 [G, V].
    Raises EyasError for supervised ids outside the vocabulary, with `counts` half done.
    """
    groups = np.ascontiguousarray(groups, dtype=np.int64)
    if len(groups) != len(shard) or (len(groups) and not -1 <= groups.min() <= groups.max() < len(counts)):
        raise ValueError(f"{len(groups)} groups do not fit {len(shard)} sequences and {len(counts)} rows of counts")
    ids, mask, offsets = (
        np.ascontiguousarray(values, dtype=dtype)  # no copy: the file holds them so
        for values, dtype in ((shard.input_ids, np.int32), (shard.loss_mask, np.uint8), (shard.offsets, np.int64))
    )
    # Group by group, so that the counts in use stay in the processor's cache.
    order = np.argsort(groups, kind="stable")
    wrong = _compiled()(ids, mask, offsets, groups, order[np.count_nonzero(groups < 0) :], counts)
    if wrong >= 0:
        row = shard.row_ids[np.searchsorted(offsets, wrong, side="right") - 1]
        raise EyasError(
            f"row {row}: token id {ids[wrong]} lies outside the target's vocabulary of {counts.shape[1]};"
            " its tokenizer does not fit its config.json"
        )


def sources_of_sequences(tokens_file: Path, sequences: int) -> tuple[list[str], np.ndarray]:
    """Data sets that a tokens shard's sidecar names, and the index into them of each sequence: int64 [R].

    Raises EyasError when the sidecar does not fit the shard's `sequences`.
    """
    sidecar = tokens_file.with_suffix(".json")
    facts = read_json(sidecar, "tokens sidecar")
    try:
        names = [str(name) for name in facts["sources"]]
        indices = np.asarray(facts["source_of_sequence"], dtype=np.int64).reshape(-1)
        fits = len(indices) == sequences and (not sequences or 0 <= indices.min() <= indices.max() < len(names))
    except (KeyError, TypeError, ValueError, OverflowError):
        fits = False
    if not fits:
        raise EyasError(
            f"{sidecar}: its sources do not fit the shard's {sequences} sequences; delete it and run snakemake again"
        )
    return names, indices


def count_supervised(token_files: Iterable[Path], vocab_size: int, held_out_every: int) -> TokenCounts:
    """Count the supervised tokens of all shards, in one pass over their memory-mapped files.

    Raises EyasError for ids outside the vocabulary and for sidecars that do not fit their shards.
    """
    files = list(token_files)
    index: dict[str, int] = {}
    places = []  # of every file: the place in `index` of each of its sequences
    for file in files:
        names, of_sequence = sources_of_sequences(file, len(read_tokens(file)))
        for position, name in enumerate(names):
            if name not in index and len(index) >= MAX_SOURCES:
                names[position] = OTHER_SOURCES
            index.setdefault(names[position], len(index))
        places.append(np.asarray([index[name] for name in names], np.int64)[of_sequence])
    counts = np.zeros((len(index), 2, vocab_size), dtype=np.int64)
    groups = counts.reshape(-1, vocab_size)
    for file, place in zip(files, places, strict=True):
        shard = read_tokens(file)
        held_out = np.asarray(is_held_out(cast(int, shard.row_ids), held_out_every))  # the rule, over an array
        count_groups(shard, 2 * place + held_out, groups)
    return TokenCounts(list(index), counts)
