"""The draft vocabulary: the target's most frequent supervised tokens, and both ways between the ids."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eyas.errors import EyasError
from eyas.shards import (
    atomic_path,
    checksum,
    describe_file,
    fingerprint,
    is_complete,
    is_held_out,
    map_arrays,
    write_arrays,
    write_json,
    write_lock,
)
from eyas.tokenization import TokenShard, read_tokens
from eyas.versions import VERSIONS

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


def count_tokens(shard: TokenShard, vocab_size: int, held_out_every: int, held_out: bool = False) -> np.ndarray:
    """Supervised tokens of a shard's training (or held-out) rows, by id: int64 [V].

    Raises EyasError for ids outside the vocabulary.
    """
    chosen = np.fromiter((is_held_out(int(r), held_out_every) == held_out for r in shard.row_ids), bool, len(shard))
    supervised = np.asarray(shard.loss_mask, dtype=bool) & np.repeat(chosen, shard.lengths)
    ids = shard.input_ids[supervised]
    if ids.size and (ids.max() >= vocab_size or ids.min() < 0):
        raise EyasError(
            f"token id {ids.max() if ids.max() >= vocab_size else ids.min()} lies outside the target's vocabulary of"
            f" {vocab_size}; its tokenizer does not fit its config.json"
        )
    return np.bincount(ids, minlength=vocab_size).astype(np.int64)


def build_map(counts: np.ndarray, draft_vocab_size: int, forced: Sequence[int]) -> VocabularyMap:
    """The `draft_vocab_size` most frequent ids (ties: the lower id), with `forced` ids in any case.

    Raises EyasError when the draft vocabulary is larger than the target's or too small for `forced`.
    """
    vocab_size = len(counts)
    forced_ids = np.unique(np.asarray(list(forced), dtype=np.int64))
    if draft_vocab_size > vocab_size:
        raise EyasError(f"draft_vocab_size: {draft_vocab_size} is larger than the target's vocabulary of {vocab_size}")
    if draft_vocab_size < len(forced_ids):
        raise EyasError(f"draft_vocab_size: {draft_vocab_size} has no room for the {len(forced_ids)} special tokens")
    rank = np.argsort(-counts, kind="stable")
    others = rank[~np.isin(rank, forced_ids)][: draft_vocab_size - len(forced_ids)]
    ids = np.sort(np.concatenate([forced_ids, others]))
    t2d = np.zeros(vocab_size, dtype=bool)
    t2d[ids] = True
    return VocabularyMap((ids - np.arange(draft_vocab_size)).astype(np.int64), t2d)


def coverage(counts: np.ndarray, t2d: np.ndarray) -> float | None:
    """Share of the counted tokens that the draft vocabulary holds; None when nothing was counted."""
    total = int(counts.sum())
    return float(counts[t2d].sum() / total) if total else None


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

    End-of-turn tokens, and special tokens that assistant turns contain, are always in.
    """
    files = list(token_files)
    sidecar = output.with_suffix(".json")
    mark = fingerprint(
        version=FORMAT_VERSION, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size,
        held_out_every=held_out_every, special=[list(end_ids), list(special_ids)],
        tokens=[checksum(f) for f in files],
    )  # fmt: skip
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        counts = np.zeros(vocab_size, dtype=np.int64)
        held_out = np.zeros(vocab_size, dtype=np.int64)
        for file in files:
            shard = read_tokens(file)
            counts += count_tokens(shard, vocab_size, held_out_every)
            held_out += count_tokens(shard, vocab_size, held_out_every, held_out=True)
        if not counts.any():
            raise EyasError("no training row has a supervised token; the tokens' .json files say why rows were skipped")
        forced = sorted({*end_ids, *(i for i in special_ids if counts[i])} & set(range(vocab_size)))
        mapping = build_map(counts, draft_vocab_size, forced)
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
            "files": {output.name: describe_file(output)},
        }
        write_json(sidecar, facts)
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
