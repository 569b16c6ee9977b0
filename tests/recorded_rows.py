"""Shards of conversations as a stage leaves them: with the record that holds their checksum."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from eyas.conversations import Row, write_rows
from eyas.shards import describe_file, write_sealed


def write_recorded_rows(path: Path, rows: Iterable[Row], index: Path | None = None) -> Path:
    """Write rows and their sidecar; for prompts the `index` of all shards in the folder instead."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(path, list(rows))
    described = [path] if index is None else sorted(path.parent.glob(f"*{path.suffix}"))
    write_sealed(index or path.with_suffix(".json"), {"files": {file.name: describe_file(file) for file in described}})
    return path
