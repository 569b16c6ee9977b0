"""Shards: half-open ranges of rows, named after them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eyas.errors import EyasError

_NAME = re.compile(r"rows_(0|[1-9][0-9]*)-([1-9][0-9]*)")


@dataclass(frozen=True, order=True)
class Shard:
    """Rows `start` <= row < `end` of a run."""

    start: int
    end: int

    @cached_property
    def name(self) -> str:
        return f"rows_{self.start}-{self.end}"

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, row: int) -> bool:
        return self.start <= row < self.end

    @classmethod
    def parse(cls, name: str) -> Shard:
        """`rows_0-500` -> Shard(0, 500); raises EyasError for anything else."""
        match = _NAME.fullmatch(name)
        if not match or int(match[1]) >= int(match[2]):
            raise EyasError(f"{name!r} is no shard name; shards are named rows_START-END with START < END")
        return cls(int(match[1]), int(match[2]))


def shards_of(rows: int, shard_rows: int) -> list[Shard]:
    """Cut rows 0 … rows-1 into shards of `shard_rows`; the last may be shorter."""
    return [Shard(start, min(start + shard_rows, rows)) for start in range(0, rows, shard_rows)]


def shard_files(folder: Path, rows: int, shard_rows: int) -> list[Path]:
    """The tensor files of all shards in a folder, in order."""
    return [folder / f"{shard.name}.safetensors" for shard in shards_of(rows, shard_rows)]


def is_held_out(row: int, held_out_every: int) -> bool:
    """Whether a row is kept for evaluation: the last of every `held_out_every` rows.

    Depends on the row alone, so that more rows never move one between the two sets.
    """
    return row % held_out_every == held_out_every - 1
