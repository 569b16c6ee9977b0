"""Prompt files to shards of numbered rows."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.conversations.formats import UnusableRecord, to_messages
from eyas.conversations.rows import Row, write_rows
from eyas.errors import EyasError
from eyas.shards import atomic_path, describe_file, shards_of, write_json, write_lock
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["prompts"]


@dataclass(frozen=True)
class Record:
    """One entry of a prompt file: its place, and its value or the reason why there is none."""

    source: str
    value: Any = None
    unreadable: str | None = None


def read_records(path: Path) -> Iterator[Record]:
    """Records of a .jsonl file (blank lines are none) or of a .json list, in order.

    Raises EyasError when the file itself cannot be read.
    """
    try:
        if path.name.endswith(".jsonl"):
            with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    place = f"{path}:{number}"
                    try:
                        yield Record(place, json.loads(line))
                    except (ValueError, RecursionError) as exc:
                        yield Record(place, unreadable=f"not JSON ({exc})")
            return
        entries = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise EyasError(f"data.prompts: {path} does not exist; name a .json or .jsonl file of prompts") from None
    except (ValueError, RecursionError) as exc:
        raise EyasError(
            f"data.prompts: {path} is not valid JSON ({exc}); one record a line goes in a .jsonl file"
        ) from None
    except OSError as exc:
        raise EyasError(f"data.prompts: {path} cannot be read ({exc.strerror})") from None
    if not isinstance(entries, list):
        raise EyasError(f"data.prompts: {path} holds no JSON list of records")
    for number, value in enumerate(entries, 1):
        yield Record(f"{path}:{number}", value)


def count_records(paths: Sequence[str], cache: Path | None = None) -> int:
    """Number of records in local files, for `data.rows: auto`; remembered by path, size and mtime."""
    known: dict[str, Any] = {}
    if cache and cache.is_file():
        try:
            known = json.loads(cache.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            known = {}
    if not isinstance(known, dict):
        known = {}
    total, changed = 0, False
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            raise EyasError(
                f"data.rows: auto counts the records of {path}, which is not there; put the file there or write"
                " the number of rows"
            ) from None
        key, stamp = os.path.abspath(path), [status.st_size, status.st_mtime_ns]
        entry = known.get(key)
        if not (isinstance(entry, dict) and entry.get("stamp") == stamp and isinstance(entry.get("records"), int)):
            entry = {"stamp": stamp, "records": _count(Path(path))}
            known[key], changed = entry, True
        total += int(entry["records"])
    if cache and changed:
        try:
            write_json(cache, known)
        except OSError:
            pass  # a read-only working folder: counted again next time
    if total == 0:
        raise EyasError(f"data.prompts: no prompts in {', '.join(paths)}")
    return total


def _count(path: Path) -> int:
    if path.name.endswith(".jsonl"):
        try:
            with open(path, encoding="utf-8-sig", errors="replace", newline="\n") as file:
                return sum(1 for line in file if line.strip())
        except OSError as exc:
            raise EyasError(f"data.prompts: {path} cannot be read ({exc.strerror})") from None
    return sum(1 for _ in read_records(path))


def _rows(paths: Sequence[Path], rows: int, max_bad_rows: int) -> Iterator[Row]:
    """Rows 0 … rows-1; raises EyasError when records run out or too many are bad."""
    bad: list[str] = []
    number = 0
    for path in paths:
        for record in read_records(path):
            if number == rows:
                return
            try:
                if record.unreadable:
                    raise UnusableRecord(record.unreadable)
                yield Row(number, record.source, to_messages(record.value))
            except UnusableRecord as exc:
                bad.append(f"{record.source}: {exc}")
                if len(bad) > max_bad_rows:
                    listed = "\n".join(bad[:20])
                    raise EyasError(
                        f"{listed}\n{len(bad)} bad record(s) among the first {number + 1}, more than"
                        f" data.max_bad_rows = {max_bad_rows}; correct them, or allow more to skip them"
                    ) from None
                log.warning("Row %d is skipped: %s: %s.", number, record.source, exc)
                yield Row(number, record.source, skipped=f"bad record: {exc}")
            number += 1
    if number == 0:
        raise EyasError(f"data.prompts: no prompts in {', '.join(map(str, paths))}")
    if number < rows:
        raise EyasError(
            f"data.rows: {rows} are asked for, but the prompt files hold {number}; write data.rows: {number}"
        )


def write_prompts(paths: Sequence[Path], rows: int, shard_rows: int, max_bad_rows: int, folder: Path) -> None:
    """Write `folder/rows_a-b.jsonl` for every shard, then `folder/index.json`.

    One shard is held in memory at a time. Raises EyasError for missing, short or bad input;
    then no index is written, and nothing that is half a shard.
    """
    with write_lock(folder / "index.json"):
        shards = shards_of(rows, shard_rows)
        files: dict[str, Any] = {}
        skipped = 0
        stream = _rows(paths, rows, max_bad_rows)
        for shard in shards:
            batch = list(itertools.islice(stream, len(shard)))
            final = folder / f"{shard.name}.jsonl"
            with atomic_path(final) as partial:
                write_rows(partial, batch)
            skipped += sum(row.skipped is not None for row in batch)
            files[final.name] = describe_file(final)
        write_json(
            folder / "index.json",
            {
                "format_version": FORMAT_VERSION,
                "rows": rows,
                "shard_rows": shard_rows,
                "skipped": skipped,
                "files": files,
            },
        )
        log.info(
            "Wrote %d rows (%d skipped) in %d shards from %s.", rows, skipped, len(shards), ", ".join(map(str, paths))
        )
