"""Prompt files to shards of numbered rows."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from eyas.config.schema import PromptFiles
from eyas.conversations.duplicates import Duplicates
from eyas.conversations.formats import UnusableRecord, detect, identity_of, read_content, writable
from eyas.conversations.rows import Row, write_rows
from eyas.conversations.sources import Record, container_of, count_file, read_records
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.shards import atomic_path, describe_file, shards_of, write_json, write_lock, write_sealed
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["prompts"]

_LOOKED_AT = 100  # records that tell a file's format
_LISTED = 20  # bad records that are shown
_SOURCES = 1000  # data sets that are counted by name


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
            entry = {"stamp": stamp, "records": count_file(path)}
            known[key], changed = entry, True
        total += int(entry["records"])
    if cache and changed:
        try:
            write_json(cache, known)
        except (OSError, ValueError):
            pass  # a read-only working folder, or a name that is no UTF-8: counted again next time
    if total == 0:
        raise EyasError(f"data.prompts: no prompts in {_named(paths)}")
    return total


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(paths[:_LISTED]) + more


class _Numbering:
    """Records to rows 0 … rows-1, and what the index says about them."""

    def __init__(self, rows: int, max_bad_rows: int, data_format: str, duplicates: str) -> None:
        self.rows, self.max_bad_rows, self.data_format = rows, max_bad_rows, data_format
        self.seen = Duplicates() if duplicates == "skip" else None
        self.number = self.duplicates = self.bad = 0
        self.listed: list[str] = []
        self.formats: dict[str, dict[str, str]] = {}
        self.sources: Counter[str] = Counter()

    def rows_of(self, files: Sequence[PromptFiles]) -> Iterator[Row]:
        """The rows; raises EyasError when records run out or too many are bad."""
        for file in files:
            if self.number == self.rows:
                return
            yield from self._file(file)
        if self.number == 0:
            raise EyasError(f"data.prompts: no prompts in {_named([file.path for file in files])}")
        if self.number < self.rows:
            raise EyasError(
                f"data.rows: {self.rows} are asked for, but the prompt files hold {self.number};"
                f" write data.rows: {self.number}"
            )

    def _file(self, file: PromptFiles) -> Iterator[Row]:
        container = "+".join(filter(None, container_of(file.path)))
        reader = read_records(file.path)
        records = itertools.islice(reader, self.rows - self.number)
        wanted = file.format or self.data_format
        forced = wanted != "auto"
        first = [] if forced else _beginning(records)
        expected = wanted if forced else detect(record.value for record in first)
        path, shown = writable(file.path), expected or "unknown"
        self.formats[path] = {"container": container, "format": shown}
        log.info("%s: %s, format %s (%s).", path, container, shown, "forced" if forced else "detected")
        named, name = file.source and writable(file.source), os.path.basename(path)
        for record in itertools.chain(first, records):
            own, identity = identity_of(record.value)
            source, place = named or own or name, f"{path}:{record.line}"
            row = self._filled(Row(self.number, source, place=place, id=identity), record, expected, forced)
            known = source in self.sources or len(self.sources) < _SOURCES
            self.sources[source if known else "(others)"] += 1
            self.number += 1
            yield row
        # When that was the last record: only at its end does a compressed file tell whether it is whole.
        next(reader, None)

    def _filled(self, row: Row, record: Record, expected: str | None, forced: bool) -> Row:
        """The row with what its record holds, or skipped."""
        try:
            if record.unreadable:
                raise UnusableRecord(record.unreadable)
            content = read_content(record.value, expected, forced)
        except UnusableRecord as exc:
            self._count_bad(f"{row.place}: {exc}")
            return row.skip(f"bad record: {exc}")
        if self.seen and (first := self.seen.first(content, row.row)) is not None:
            self.duplicates += 1
            return row.skip(f"duplicate of row {first}")
        row.messages, row.tools, row.text = content
        return row

    def _count_bad(self, problem: str) -> None:
        self.bad += 1
        if self.bad <= _LISTED:
            self.listed.append(problem)
            log.warning("Row %d is skipped: %s.", self.number, problem)
        elif self.bad == _LISTED + 1:
            log.warning("More rows are skipped; skipped.jsonl lists them all.")
        if self.bad > self.max_bad_rows:
            listed = "\n".join(self.listed)
            raise EyasError(
                f"{listed}\n{self.bad} bad record(s) among the first {self.number + 1}, more than"
                f" data.max_bad_rows = {self.max_bad_rows}; correct them, or allow more to skip them"
            ) from None


def _beginning(records: Iterator[Record]) -> list[Record]:
    """The first records, until enough of them can be read to tell a file's format."""
    first: list[Record] = []
    readable = 0
    while readable < _LOOKED_AT and len(first) < 10 * _LOOKED_AT and (record := next(records, None)):
        first.append(record)
        readable += record.unreadable is None
    return first


def write_prompts(
    files: Sequence[PromptFiles],
    rows: int,
    shard_rows: int,
    max_bad_rows: int,
    folder: Path,
    data_format: str = "auto",
    duplicates: str = "skip",
) -> None:
    """Write `folder/rows_a-b.jsonl` for every shard, `folder/skipped.jsonl`, then `folder/index.json`.

    `files` are files, not patterns (see `expand`). One shard is held in memory at a time. Raises EyasError
    for missing, short or bad input; then no index is written, and nothing that is half a shard.
    """
    with write_lock(folder / "index.json"):
        shards = shards_of(rows, shard_rows)
        written: dict[str, Any] = {}
        numbering = _Numbering(rows, max_bad_rows, data_format, duplicates)
        stream = numbering.rows_of(files)
        progress = Progress("Prompts", rows, "rows")
        with atomic_path(folder / "skipped.jsonl") as listed, open(listed, "w", encoding="utf-8") as skipped:
            for shard in shards:
                batch = list(itertools.islice(stream, len(shard)))
                final = folder / f"{shard.name}.jsonl"
                with atomic_path(final) as partial:
                    write_rows(partial, batch)
                written[final.name] = describe_file(final)
                skipped.writelines(_skipped_line(row) for row in batch if row.skipped is not None)
                progress.advance(len(batch))
            next(stream, None)
        written["skipped.jsonl"] = describe_file(folder / "skipped.jsonl")
        unusable = numbering.bad + numbering.duplicates
        write_sealed(
            folder / "index.json",
            {
                "format_version": FORMAT_VERSION,
                "rows": rows,
                "shard_rows": shard_rows,
                "skipped": unusable,
                "duplicates": numbering.duplicates,
                "formats": numbering.formats,
                "sources": dict(numbering.sources),
                "files": written,
            },
        )
        log.info(
            "Wrote %d rows (%d bad, %d duplicates) in %d shards from %s.",
            rows, numbering.bad, numbering.duplicates, len(shards), _named(list(numbering.formats)),
        )  # fmt: skip


def _skipped_line(row: Row) -> str:
    file, _, line = row.place.rpartition(":")
    values = {"row": row.row, "file": file, "line": int(line), "reason": row.skipped}
    return json.dumps(values, ensure_ascii=False) + "\n"
