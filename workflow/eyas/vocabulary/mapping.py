"""The draft vocabulary: the target's most frequent supervised tokens, and both ways between the ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import EyasError
from eyas.shards import (
    atomic_path,
    checked,
    describe_file,
    fingerprint,
    is_complete,
    map_arrays,
    read_json,
    write_arrays,
    write_lock,
    write_sealed,
)
from eyas.versions import VERSIONS
from eyas.vocabulary.counting import TokenCounts, count_supervised

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["vocabulary"]


@dataclass(frozen=True)
class VocabularyMap:
    """`d2t` int64 [D]: draft id i is target id i + d2t[i]. `t2d` bool [V]: whether a target id can be drafted."""

    d2t: np.ndarray
    t2d: np.ndarray

    @property
    def target_ids(self) -> np.ndarray:
        """Target ids of the draft vocabulary, ascending: int64 [D]."""
        return self.d2t + np.arange(len(self.d2t))

    def draft_ids(self) -> np.ndarray:
        """Draft id of every target id, -1 where there is none: int64 [V]."""
        ids = np.full(len(self.t2d), -1, dtype=np.int64)
        ids[self.target_ids] = np.arange(len(self.d2t))
        return ids


def _by_rank(counts: np.ndarray, forced: Sequence[int]) -> tuple[np.ndarray, int]:
    """All ids in the order in which they come into a draft vocabulary, int64 [V], and how many of them are forced.

    The forced ones, then the most frequent (ties: the lower id).
    """
    is_forced = np.zeros(len(counts), dtype=bool)
    is_forced[np.asarray(list(forced), dtype=np.int64)] = True
    rank = np.argsort(-counts, kind="stable")
    return np.concatenate([np.flatnonzero(is_forced), rank[~is_forced[rank]]]), int(is_forced.sum())


def build_map(counts: np.ndarray, draft_vocab_size: int, forced: Sequence[int]) -> VocabularyMap:
    """The `draft_vocab_size` most frequent ids (ties: the lower id), with `forced` ids in any case.

    Raises EyasError when the draft vocabulary is larger than the target's or too small for `forced`.
    """
    vocab_size = len(counts)
    if draft_vocab_size > vocab_size:
        raise EyasError(f"draft_vocab_size: {draft_vocab_size} is larger than the target's vocabulary of {vocab_size}")
    rank, special = _by_rank(counts, forced)
    if draft_vocab_size < special:
        raise EyasError(f"draft_vocab_size: {draft_vocab_size} has no room for the {special} special tokens")
    ids = np.sort(rank[:draft_vocab_size])
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[ids] = True
    return VocabularyMap((ids - np.arange(draft_vocab_size)).astype(np.int64), t2d)


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float | None:
    """Share of the counted tokens that the draft vocabulary holds; None when nothing was counted."""
    total = int(counts.sum())
    return float(counts[t2d].sum() / total) if total else None


def curve_sizes(vocab_size: int, draft_vocab_size: int, smallest: int) -> list[int]:
    """Draft sizes to show the coverage of: powers of two and round numbers from 256 (or `smallest`) up to
    the whole vocabulary, and the chosen size."""
    powers = [start << shift for start in (256, 384) for shift in range(vocab_size.bit_length())]
    round_numbers = [n * 10**k for k in range(2, len(str(vocab_size))) for n in (1, 2, 3, 4, 5, 6, 8)]
    sizes = {size for size in (*powers, *round_numbers) if max(256, smallest) <= size < vocab_size}
    return sorted(sizes | {draft_vocab_size, vocab_size})


def coverage_curve(
    counts: np.ndarray, held_out: np.ndarray, forced: Sequence[int], draft_vocab_size: int
) -> list[list[float | None]]:
    """Coverage of the training and the held-out tokens, had the map another size: [[size, training, held out], …].

    By `counts` int64 [V] of the training rows, with the same `forced` ids; the chosen size is among them.
    """
    rank, special = _by_rank(counts, forced)
    curve: list[list[float | None]] = []
    sums = [np.cumsum(side[rank]) for side in (counts, held_out)]
    for size in curve_sizes(len(counts), draft_vocab_size, special):
        curve.append([size, *(float(s[size - 1] / s[-1]) if s[-1] else None for s in sums)])
    return curve


def _coverage_by_source(found: TokenCounts, t2d: np.ndarray) -> dict[str, dict[str, Any]]:
    return {
        name: {
            "training": coverage(training, t2d),
            "held_out": coverage(held_out, t2d),
            "supervised_tokens": int(training.sum() + held_out.sum()),
        }
        for name, (training, held_out) in zip(found.sources, found.counts, strict=True)
    }


def _warn_of_unseen(counts: np.ndarray, mapping: VocabularyMap, forced: Sequence[int]) -> None:
    """Say so when there were too few distinct tokens to fill the draft vocabulary with."""
    unseen = mapping.t2d & (counts == 0)
    unseen[np.asarray(list(forced), dtype=np.int64)] = False
    if unseen.any():
        log.warning(
            "draft_vocab_size %d is larger than the %d distinct tokens to choose from; the lowest %d of the other ids"
            " fill it up, which no training row supervises. A smaller one costs nothing.",
            len(mapping.d2t), len(mapping.d2t) - int(unseen.sum()), int(unseen.sum()),
        )  # fmt: skip


def _identity(tokens_file: Path) -> list[Any]:
    """All that a map takes from a tokens shard; raises EyasError when it is not there, or not as it was written."""
    return [checked(tokens_file, "tokens shard"), read_json(tokens_file.with_suffix(".json"), "tokens sidecar")]


def write_map(
    token_files: Iterable[Path],
    vocab_size: int,
    draft_vocab_size: int,
    held_out_every: int,
    end_ids: Sequence[int],
    special_ids: Sequence[int],
    output: Path,
) -> None:
    """Count the supervised tokens of all training rows and write `output` with its `.json` sidecar.

    End-of-turn tokens, and special tokens that assistant turns contain, are always in. The sidecars
    of the tokens name the data set of every sequence. Raises EyasError.
    """
    files = list(token_files)
    sidecar = output.with_suffix(".json")
    mark = fingerprint(
        version=FORMAT_VERSION, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size,
        held_out_every=held_out_every, special=[list(end_ids), list(special_ids)],
        tokens=[_identity(f) for f in files],
    )  # fmt: skip
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        found = count_supervised(files, vocab_size, held_out_every)
        counts, held_out = found.training, found.held_out
        if not counts.any():
            raise EyasError("no training row has a supervised token; the tokens' .json files say why rows were skipped")
        forced = sorted({*end_ids, *(i for i in special_ids if counts[i])} & set(range(vocab_size)))
        mapping = build_map(counts, draft_vocab_size, forced)
        _warn_of_unseen(counts, mapping, forced)
        with atomic_path(output) as partial:
            write_arrays(
                partial,
                {"d2t": mapping.d2t, "t2d": mapping.t2d},
                {"format": "eyas.vocabulary", "version": str(FORMAT_VERSION)},
            )
        facts = {
            "format_version": FORMAT_VERSION,
            "fingerprint": mark,
            "vocab_size": vocab_size,
            "draft_vocab_size": draft_vocab_size,
            "supervised_tokens": int(counts.sum()),
            "distinct_tokens": int(np.count_nonzero(counts)),
            "coverage": coverage(counts, mapping.t2d),
            "coverage_held_out": coverage(held_out, mapping.t2d),
            "forced_ids": forced,
            "coverage_by_source": _coverage_by_source(found, mapping.t2d),
            "coverage_curve": coverage_curve(counts, held_out, forced, draft_vocab_size),
            "files": {output.name: describe_file(output)},
        }
        write_sealed(sidecar, facts)
        log.info(
            "Wrote %s: %d of %d ids, %d distinct among %d supervised tokens; coverage %.4f of the training tokens.",
            output, draft_vocab_size, vocab_size, facts["distinct_tokens"], facts["supervised_tokens"],
            facts["coverage"],
        )  # fmt: skip


def read_map(path: Path) -> VocabularyMap:
    """Read a map; raises EyasError when its two halves contradict each other."""
    mapping = VocabularyMap(**map_arrays(path, ("d2t", "t2d")))
    ids = mapping.target_ids
    if (
        len(ids) < 1
        or ids.min() < 0
        or ids.max() >= len(mapping.t2d)
        or not np.all(np.diff(ids) > 0)
        or not np.array_equal(np.flatnonzero(mapping.t2d), ids)
    ):
        raise EyasError(f"{path}: d2t and t2d contradict each other; delete it and run snakemake again to rebuild it")
    return mapping
