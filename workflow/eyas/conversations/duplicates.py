"""Rows that say exactly what an earlier one says."""

from __future__ import annotations

import json

import xxhash

from eyas.conversations.formats import Content

_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


class Duplicates:
    """The first row of every content that was seen: 16 bytes of digest for each."""

    def __init__(self) -> None:
        self._rows: dict[bytes, int] = {}

    def first(self, content: Content, row: int) -> int | None:
        """The earlier row with the content of `row`, or None when `row` is the first."""
        digest = xxhash.xxh3_128_digest(_canonical(content).encode())
        first = self._rows.setdefault(digest, row)
        return None if first == row else first
