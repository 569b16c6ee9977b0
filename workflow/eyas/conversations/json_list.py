"""A JSON file that holds a list of records, read record by record.

The text is cut up by the standard library's own scanner, so that every value is exactly what `json.loads`
makes of it: whole numbers of any size, `NaN`, halves of surrogate pairs. (ijson stops at the first two, and
the memory it takes grows with the square of the nesting.) One record that is no JSON spoils only itself.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from io import BufferedIOBase
from typing import Any

_CHUNK = 1 << 18  # bytes
_LONGEST = 1 << 24  # characters of a record: as Python objects they may take twenty times as much
_SPACE = re.compile(r"[ \t\r\n]*")
# All that matters for where a value ends. A string may be cut off by the end of the text, inside an escape too.
_TOKEN = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("|\\?\Z)|[\[\]{},]', re.DOTALL)
_scan = json.JSONDecoder().raw_decode
_TURN_KEYS = ("role", "from")

Value = tuple[Any, str | None]  # the value, and None or why it is no value


class Damaged(Exception):
    """What is wrong with a file as a whole."""


class NoList(Exception):
    """What the file holds instead of a list of records."""


class _Scanner:
    """JSON values one after the other, from a stream; holds one of them and a chunk of text."""

    def __init__(self, stream: BufferedIOBase) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._text, self._at, self._ended = "", 0, False

    def _read(self, size: int) -> bytes:
        """`size` bytes, or fewer where the stream ends or is damaged (the next call then raises)."""
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._stream.read1(size - len(data))
            except (Damaged, OSError):
                if data:
                    break
                raise
            if not piece:
                break
            data += piece
        return bytes(data)

    def _more(self) -> None:
        # Twice as much each time, so that the work on a long record does not grow with its square.
        data = self._read(max(_CHUNK, len(self._text) - self._at))
        self._ended = not data
        self._text = self._text[self._at :] + self._decoder.decode(data, final=self._ended)
        self._at = 0

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._more()

    def take(self, expected: str) -> str:
        """The next character, which must be one of these; raises JSONDecodeError."""
        found = self.peek()
        if not found or found not in expected:
            what = f"{found!r} stands" if found else "the file ends"
            raise json.JSONDecodeError(f"{what} where {' or '.join(expected)} should", "", 0)
        self._at += 1
        return found

    def value(self) -> Value:
        """The value that begins at the next character; raises JSONDecodeError where it has no end."""
        while True:
            value, problem = None, None
            end: int | None
            try:
                value, end = _scan(self._text, self._at)
            except RecursionError:
                problem, end = "nested too deeply", self._end_of_value()
            except ValueError as exc:
                problem, end = getattr(exc, "msg", str(exc)), self._end_of_value()
            # A number at the end of the text may go on behind it, from as little as `1` of `1e+5`.
            if end is not None and (self._ended or end + 2 < len(self._text)):
                self._at = end
                return value, problem
            if self._ended:
                raise json.JSONDecodeError("the file ends inside a record", "", 0)
            if len(self._text) - self._at > _LONGEST:
                raise json.JSONDecodeError(f"a record goes on for over {_LONGEST:,} characters", "", 0)
            self._more()

    def _end_of_value(self) -> int | None:
        """Where a value that is no JSON ends, by its brackets; None when that is not in the text yet."""
        depth = 0
        for token in _TOKEN.finditer(self._text, self._at):
            mark = token[0][0]
            if mark == '"':
                if token[1] != '"':
                    return None
            elif mark in "[{":
                depth += 1
            elif depth == 0:
                return token.start()
            elif mark in "]}":
                depth -= 1
        return None

    def elements(self) -> Iterator[Value]:
        """The values of the list that begins at the next character."""
        self.take("[")
        if self.peek() == "]":
            self.take("]")
            return
        while True:
            if self.peek() in ("]", ","):
                raise json.JSONDecodeError("a comma without a record", "", 0)
            yield self.value()
            if self.take(",]") == "]":
                return

    def members(self) -> Iterator[str]:
        """The keys of the object that begins at the next character; whoever asks takes each value."""
        self.take("{")
        if self.peek() == "}":
            self.take("}")
            return
        while True:
            if self.peek() != '"':
                self.take('"')
            key, _ = self.value()
            self.take(":")
            self.peek()
            yield str(key)
            if self.take(",}") == "}":
                return

    def end(self) -> None:
        """Nothing may follow."""
        if self.peek():
            raise json.JSONDecodeError("more follows after its end", "", 0)


def json_records(open_stream: Callable[[], BufferedIOBase]) -> Iterator[Value]:
    """The records of a JSON list, or of the only list of records in a JSON object.

    Raises NoList when there is none, and JSONDecodeError when the file as a whole is no JSON.
    """
    with open_stream() as stream:
        scanner = _Scanner(stream)
        start = scanner.peek()
        if start == "[":
            yield from scanner.elements()
            scanner.end()
            return
        if start != "{":
            if start:
                scanner.value()
                raise NoList("it holds a single value; put the records in a list")
            raise json.JSONDecodeError("the file is empty", "", 0)
        place = _place_of_list(scanner)
    with open_stream() as stream:
        scanner = _Scanner(stream)
        for number, _ in enumerate(scanner.members()):
            if number == place:
                yield from scanner.elements()
                return
            _skip(scanner)


def _skip(scanner: _Scanner) -> Any:
    """Take a value; of a list, its first object or text is returned."""
    first: Any = None
    if scanner.peek() != "[":
        _, problem = scanner.value()
        if problem:
            raise json.JSONDecodeError(problem, "", 0)
        return None
    for value, _ in scanner.elements():
        if first is None and isinstance(value, dict | str):
            first = value
    return first


def _place_of_list(scanner: _Scanner) -> int:
    """Which member of the object is its list of records: objects, or texts where no list holds objects."""
    lists = []
    for number, key in enumerate(scanner.members()):
        if (first := _skip(scanner)) is not None:
            lists.append((number, key, first))
    scanner.end()
    lists = [entry for entry in lists if isinstance(entry[2], dict)] or lists
    if len(lists) != 1:
        found = f"{len(lists)} ({', '.join(key for _, key, _ in lists)})" if lists else "none"
        raise NoList(f"it is an object, which must hold exactly one list of records, and holds {found}")
    number, key, first = lists[0]
    if key in ("messages", "conversations") and isinstance(first, dict) and any(k in first for k in _TURN_KEYS):
        raise NoList("it is a single record; put it in a list, or on one line of a .jsonl file")
    return number
