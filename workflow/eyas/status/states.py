"""Hidden states in detail: shards, rows of unfinished shards, tokens, bytes. Files are found by name."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eyas.errors import EyasError
from eyas.extraction.space import bytes_a_token
from eyas.shards import Shard, map_arrays
from eyas.status.jobs import Job

_ROW_BYTES = 16  # of a sequence in a shard's index
_HEADER = 640  # of a shard's file, about; sizes of files that are there are exact


@dataclass
class HiddenStates:
    """Sums over the shards. Rows include those that were skipped before."""

    rows: int = 0
    shards: int = 0
    shards_done: int = 0
    rows_done: int = 0
    """In finished shards and in those that are being written."""
    rows_in_unfinished_shards: int = 0
    tokens: int | None = None
    exact: bool = False
    """Whether the tokens of all shards are counted; else `tokens` is scaled by rows."""
    tokens_done: int = 0
    tokens_per_second_last_minute: float | None = None
    tokens_per_second: float | None = None
    """Since the start, over all jobs that run."""
    seconds_left: float | None = None
    bytes_written: int = 0
    bytes_left: int | None = None
    newest: float = field(default=0.0, repr=False)
    """Time of the last write to a shard or a journal."""


def _load(path: str) -> dict[str, Any] | None:
    try:
        with open(path, "rb") as file:
            values = json.load(file)
        return values if isinstance(values, dict) else None
    except (OSError, ValueError):
        return None


def _mtime_and_size(path: str) -> tuple[float, int] | None:
    try:
        found = os.stat(path)
        return found.st_mtime, found.st_size
    except OSError:
        return None


def _journalled(run: Path, shard: Shard) -> tuple[int, int, float] | None:
    """Rows and tokens that an unfinished shard has, and when the last came; None when it was not begun."""
    journal = run / "hidden_states" / ".staging" / shard.name / "journal.jsonl"
    try:
        lines = journal.read_text(encoding="utf-8", errors="replace").split("\n")[1:-1]
        newest = journal.stat().st_mtime
    except OSError:
        return None
    finished = set()
    for line in lines:
        try:
            record = json.loads(line)
            if "failed" not in record:
                finished.add(int(record["sequence"]))
        except (ValueError, KeyError, TypeError):
            continue
    try:
        arrays = map_arrays(run / "tokens" / f"{shard.name}.safetensors", ("offsets", "row_ids"))
    except EyasError:
        return 0, 0, newest
    lengths, row_ids = np.diff(arrays["offsets"]), arrays["row_ids"]
    done = np.zeros(len(row_ids), bool)
    done[[i for i in finished if 0 <= i < len(done)]] = True
    rows = len(np.unique(row_ids)) - len(np.unique(row_ids[~done]))  # a row is done with its last sequence
    return rows, int(lengths[done].sum()), newest


def read_states(run: Path, shards: Sequence[Shard], width: int | None, dtype: str, jobs: Sequence[Job]) -> HiddenStates:
    """Look at every shard. `width`: the target's hidden size, None when it is not known."""
    found = HiddenStates(rows=shards[-1].end if shards else 0, shards=len(shards))
    states, tokens_folder = f"{run}/hidden_states", f"{run}/tokens"
    staging, several = os.path.isdir(f"{states}/.staging"), os.path.isdir(f"{states}/.finished")
    counted = counted_rows = sequences_left = 0
    seconds = captured = 0.0
    for shard in shards:
        # A job of several shards keeps those that it has finished until it ends.
        for place in (states, f"{states}/.finished") if several else (states,):
            facts = _load(f"{place}/{shard.name}.json")
            file = _mtime_and_size(f"{place}/{shard.name}.safetensors") if facts else None
            if file:
                break
        if facts and file and type(facts.get("tokens")) is int:
            found.shards_done += 1
            found.rows_done += len(shard)
            found.tokens_done += facts["tokens"]
            found.bytes_written += file[1]
            found.newest = max(found.newest, file[0])
            counted, counted_rows = counted + facts["tokens"], counted_rows + len(shard)
            if facts.get("seconds") and facts.get("tokens_per_second"):
                seconds, captured = seconds + facts["seconds"], captured + facts["seconds"] * facts["tokens_per_second"]
            width, dtype = facts.get("hidden_size", width), facts.get("dtype", dtype)
            continue
        facts = _load(f"{tokens_folder}/{shard.name}.json")
        if facts and type(facts.get("tokens")) is int:
            counted, counted_rows = counted + facts["tokens"], counted_rows + len(shard)
            sequences_left += int(facts.get("sequences", facts.get("rows", 0)))
        begun = _journalled(run, shard) if staging else None
        if begun:
            rows, tokens, newest = begun
            found.rows_in_unfinished_shards += rows
            found.rows_done += rows
            found.tokens_done += tokens
            found.newest = max(found.newest, newest)
            found.bytes_written += tokens * bytes_a_token(width, dtype) if width else 0
    found.exact = counted_rows == found.rows
    if counted_rows:
        found.tokens = round(counted * found.rows / counted_rows)
        left = max(found.tokens - found.tokens_done, 0)
        if width:
            index = _ROW_BYTES * sequences_left + _HEADER * (found.shards - found.shards_done)
            found.bytes_left = left * bytes_a_token(width, dtype) + index if left else 0
        _add_speeds(found, [job for job in jobs if job.stage == "hidden_states"], seconds, captured, left)
    return found


def _add_speeds(found: HiddenStates, jobs: Sequence[Job], seconds: float, captured: float, left: int) -> None:
    """Speeds and the time left; `seconds` and `captured` tokens are those of the finished shards."""
    running = [job for job in jobs if job.alive and job.unit == "tokens"]
    rates = [job.rate for job in running if job.rate is not None]
    found.tokens_per_second_last_minute = sum(rates) if rates else None
    seconds += sum(job.counting_seconds for job in running if job.worked)
    captured += sum(job.counted for job in running if job.worked)
    if seconds > 0:
        found.tokens_per_second = captured / seconds * max(len(running), 1)
    speed = found.tokens_per_second_last_minute or found.tokens_per_second
    if running and speed and left:
        found.seconds_left = left / speed
