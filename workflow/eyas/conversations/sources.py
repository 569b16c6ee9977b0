"""Prompt files and what is in them, record by record: JSON lines, JSON lists, Parquet, gzip, zstd.

Nothing here holds more than a few records at a time.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from eyas.config.schema import PromptFiles
from eyas.conversations.formats import FORMAT_KEYS, RECORD_KEYS
from eyas.conversations.json_list import Damaged, NoList, json_records
from eyas.errors import EyasError

_SUFFIX = re.compile(r"\.(?:(jsonl|ndjson|json)(?:\.(?:gz|zst))?|(parquet))$", re.IGNORECASE)
_READ = ".jsonl, .ndjson and .json (also as .gz or .zst) and .parquet"
_MAGIC = {
    "gzip": (b"\x1f\x8b",),
    # the second kind is a frame to be skipped, as parallel compressors write it
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([first]) + b"\x2a\x4d\x18" for first in range(0x50, 0x60))),
}
_NAMED = {"gzip": ".gz", "zstd": ".zst"}
_BOM = b"\xef\xbb\xbf"
_BUFFER = 1 << 18  # bytes
_INPUT = 1 << 12  # compressed bytes at a time: of the most repetitive text they make no more than 128 MB
_LONGEST = 1 << 24  # bytes of a line: as Python objects they may take twenty times as much
_GZIP = 31  # how zlib calls the headers and checksums of gzip
_PARQUET_ROWS = 128

Entry = TypeVar("Entry", bound=tuple[Any, ...])


class Record(NamedTuple):
    """One entry of a prompt file: its line (or number), from 1, and its value or the reason why there is none."""

    line: int
    value: Any = None
    unreadable: str | None = None


def kind_of(path: str) -> str:
    """`jsonl`, `json` or `parquet`, by the file's name; raises EyasError for any other."""
    match = _SUFFIX.search(path)
    if not match:
        raise EyasError(f"data.prompts: {path}: files of this kind are not read; name {_READ} files")
    return str(match[1] or match[2]).lower().replace("ndjson", "jsonl")


def container_of(path: str) -> tuple[str, str | None]:
    """`jsonl`, `json` or `parquet`, and `gzip`, `zstd` or None, as the file's first bytes say."""
    kind = kind_of(path)
    if kind == "parquet":
        return kind, None
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as exc:
        raise _unreadable(path, exc) from None
    for compression, magics in _MAGIC.items():
        if start.startswith(magics):
            return kind, compression
        if path.lower().endswith(_NAMED[compression]) and magics[0].startswith(start):
            raise EyasError(f"data.prompts: {path} is cut off at its very start; put the whole file there")
    return kind, None


def _unreadable(path: str, exc: OSError) -> EyasError:
    if isinstance(exc, FileNotFoundError):
        return EyasError(f"data.prompts: {path} does not exist; name files of prompts ({_READ})")
    return EyasError(f"data.prompts: {path} cannot be read ({exc.strerror or exc})")


def expand(patterns: Sequence[PromptFiles], exists_later: Callable[[str], bool]) -> list[PromptFiles]:
    """The files that paths and patterns stand for: in their order, those of a pattern sorted.

    A path that is not there yet stays as it is; `exists_later` tells such a path with `*`, `?` or `[` in it
    from a pattern. Raises EyasError for a pattern without files, a folder, a file of another kind, and a file
    that is named twice.
    """
    files: list[PromptFiles] = []
    named: dict[str, str] = {}
    for pattern in patterns:
        literal = not glob.has_magic(pattern.path) or os.path.exists(pattern.path) or exists_later(pattern.path)
        for path in [pattern.path] if literal else _matches(pattern.path):
            if os.path.isdir(path):
                example = os.path.join(path, "*.jsonl")
                raise EyasError(f"data.prompts: {path} is a folder; name the files in it, as in {example}")
            kind_of(path)
            if before := named.get(os.path.realpath(path)):
                raise EyasError(
                    f"data.prompts: {path} is named twice, by {before} and by {pattern.path}; name each file once"
                )
            named[os.path.realpath(path)] = pattern.path
            files.append(pattern.model_copy(update={"path": path}))
    return files


def _matches(pattern: str) -> list[str]:
    found = sorted({path for path in glob.glob(pattern, recursive=True) if not os.path.isdir(path)})
    if not found:
        raise EyasError(f"data.prompts: {pattern} matches no file; correct the pattern, or put the files there")
    return found


def read_records(path: str) -> Iterator[Record]:
    """The records of a prompt file, in order; blank lines are none.

    Raises EyasError when the file as a whole is missing, damaged or cut off.
    """
    kind, compression = container_of(path)
    if kind == "parquet":
        return _guarded(path, _parquet_records(path))
    if kind == "json":
        entries = json_records(lambda: _open(path, compression))
        return _guarded(path, map(_list_record, enumerate(entries, 1)))
    return _guarded(path, map(_line_record, _lines(path, compression)))


def count_file(path: str) -> int:
    """How many records `read_records` gives for a file; raises EyasError as it does."""
    kind, compression = container_of(path)
    if kind == "parquet":
        return sum(count for (count,) in _guarded(path, _parquet_count(path)))
    entries: Iterator[tuple[Any, ...]] = _lines(path, compression) if kind == "jsonl" else read_records(path)
    return sum(1 for _ in _guarded(path, entries))


def _guarded(path: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, whose first field is their number; errors in reading them become EyasErrors that say where."""
    number = 0
    try:
        for entry in entries:
            number = entry[0]
            yield entry
    except NoList as exc:
        raise EyasError(f"data.prompts: {path} holds no JSON list of records: {exc}") from None
    except json.JSONDecodeError as exc:
        raise EyasError(
            f"data.prompts: {path} is not valid JSON ({exc.msg}) after record {number}; put the whole file there"
            " (one record a line goes in a .jsonl file)"
        ) from None
    except Damaged as exc:
        raise EyasError(
            f"data.prompts: {path} is damaged or cut off after record {number} ({exc}); put the whole file there"
        ) from None
    except OSError as exc:
        raise _unreadable(path, exc) from None


# ---- JSON lines


def _lines(path: str, compression: str | None) -> Iterator[tuple[int, bytes | None]]:
    """Lines that are not blank, with their numbers; None for one that is too long. Only "\\n" ends a line."""
    with _open(path, compression) as stream:
        number = 0
        while line := stream.readline(_LONGEST):
            number += 1
            if len(line) == _LONGEST and not line.endswith(b"\n"):
                while (rest := stream.readline(_BUFFER)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
                continue
            if number == 1:
                line = line.removeprefix(_BOM)
            start = line.lstrip()[:1]
            # White space of other alphabets is white space too; only a few lines need the closer look.
            if b" " < start < b"\x80" or (start and line.decode("utf-8", "replace").strip()):
                yield number, line


def _line_record(entry: tuple[int, bytes | None]) -> Record:
    number, line = entry
    if line is None:
        return Record(number, None, f"longer than {_LONGEST:,} bytes")
    try:
        return Record(number, json.loads(line.decode("utf-8", "replace")))
    except ValueError as exc:
        return Record(number, None, f"not JSON ({exc})")
    except RecursionError:
        return Record(number, None, "not JSON (nested too deeply)")


def _list_record(entry: tuple[int, tuple[Any, str | None]]) -> Record:
    number, (value, problem) = entry
    return Record(number, value, problem and f"not JSON ({problem})")


# ---- compression


def _open(path: str, compression: str | None) -> io.BufferedIOBase:
    """The file's contents, decompressed as they are read."""
    return io.BufferedReader(io.FileIO(path) if compression is None else _Decompressed(path, compression), _BUFFER)


class _Decompressed(io.RawIOBase):
    """The members of a gzip file or frames of a zstd file, one after the other.

    zstandard's own reader takes a frame that is cut off for a whole one; gzip's drops what it has when it
    comes to the end of a file that is cut off.
    """

    def __init__(self, path: str, compression: str) -> None:
        self._start: Callable[[], Any] = lambda: zlib.decompressobj(_GZIP)
        self._error: type[Exception] = zlib.error
        if compression == "zstd":
            from zstandard import ZstdDecompressor, ZstdError

            self._start, self._error = ZstdDecompressor(max_window_size=1 << 31).decompressobj, ZstdError
        self._file = open(path, "rb")  # noqa: SIM115 - closed with this reader
        self._frame: Any = None
        self._input, self._output = b"", memoryview(b"")
        self._problem = ""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if self._problem:  # for a reader that asks again
                raise Damaged(self._problem)
            self._input = self._input or self._file.read(_INPUT)
            if not self._input:
                if self._frame is None:
                    return 0
                self._problem = "the compressed data has no end"
                continue
            if self._frame is None:
                self._input = self._input.lstrip(b"\0")  # what some writers fill up the last block with
                if not self._input:
                    continue
                self._frame = self._start()
            try:
                self._output = memoryview(self._frame.decompress(self._input))
            except self._error as exc:
                self._problem = str(exc)
                continue
            self._input = b""
            if self._frame.eof:
                self._input, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._output))
        buffer[:count], self._output = self._output[:count], self._output[count:]
        return count


# ---- Parquet


def _open_parquet(path: str) -> Any:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        return ParquetFile(path, pre_buffer=False, buffer_size=_BUFFER)
    except (ArrowException, UnicodeDecodeError) as exc:
        raise Damaged(_first_line(exc)) from None


def _parquet_count(path: str) -> Iterator[tuple[int]]:
    with _open_parquet(path) as file:
        yield (file.metadata.num_rows,)


def _parquet_records(path: str) -> Iterator[Record]:
    from pyarrow import ArrowException

    with _open_parquet(path) as file:
        number = 0
        try:
            names = file.schema_arrow.names
            columns = [name for name in names if name in RECORD_KEYS]
            if not FORMAT_KEYS.intersection(columns):
                raise EyasError(
                    f"data.prompts: {path} has none of the columns {', '.join(sorted(FORMAT_KEYS))}; it has"
                    f" {', '.join(names[:20])}"
                )
            for batch in file.iter_batches(_PARQUET_ROWS, columns=columns, use_threads=False):
                for value, problem in _batch_values(batch):
                    number += 1
                    yield Record(number, _without_nulls(value), problem)
        # of the names of columns, and what Arrow makes of a damaged page
        except (ArrowException, UnicodeDecodeError, OSError) as exc:
            raise Damaged(_first_line(exc)) from None


def _batch_values(batch: Any) -> list[tuple[Any, str | None]]:
    """A batch's rows as Python values, or why there is none. Values that Python has no type for become text."""
    from pyarrow import ArrowException

    errors = (ArrowException, ValueError, OverflowError, LookupError, TypeError)
    try:
        return [(value, None) for value in batch.to_pylist(maps_as_pydicts="lossy")]
    except errors:
        pass
    try:
        batch = batch.cast(_textual(batch.schema))
    except errors:
        pass
    values: list[tuple[Any, str | None]] = []
    for number in range(batch.num_rows):
        try:
            values.append((batch.slice(number, 1).to_pylist(maps_as_pydicts="lossy")[0], None))
        except errors as exc:
            values.append((None, f"unreadable values ({_first_line(exc)})"))
    return values


def _textual(schema: Any) -> Any:
    """The schema with text for points in time (Python's own cannot hold nanoseconds)."""
    import pyarrow as pa

    def change(kind: Any) -> Any:
        if pa.types.is_duration(kind):
            return pa.int64()
        if pa.types.is_temporal(kind):
            return pa.string()
        if pa.types.is_struct(kind):
            return pa.struct([field.with_type(change(field.type)) for field in kind])
        if pa.types.is_list(kind):
            return pa.list_(change(kind.value_type))
        if pa.types.is_large_list(kind):
            return pa.large_list(change(kind.value_type))
        if pa.types.is_map(kind):
            return pa.map_(change(kind.key_type), change(kind.item_type))
        return kind

    return pa.schema([field.with_type(change(field.type)) for field in schema])


def _without_nulls(value: Any) -> Any:
    """Without the null fields that structs have wherever another row has a value."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def _first_line(exc: Exception) -> str:
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]
