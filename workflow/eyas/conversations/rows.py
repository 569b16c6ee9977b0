"""A row of a run, and the JSONL files that hold rows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas.errors import EyasError


@dataclass
class Row:
    """One conversation; `row` is its global index for life.

    `skipped` is the reason why it cannot be used, and stays with the row through every stage.
    `finish` is how the last answer ended: `stop`, `length` (cut off), or None (not generated).
    """

    row: int
    source: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None
    finish: str | None = None
    reply_tokens: int | None = None

    def to_json(self) -> str:
        values: dict[str, Any] = {"row": self.row, "source": self.source}
        if self.skipped is not None:
            values["skipped"] = self.skipped
        else:
            values["messages"] = self.messages
        if self.finish is not None:
            values |= {"finish": self.finish, "reply_tokens": self.reply_tokens}
        return json.dumps(values, ensure_ascii=False)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as JSONL, one line each (the caller makes it atomic)."""
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(row.to_json() + "\n")


def read_rows(path: Path) -> list[Row]:
    """Read a shard's rows; raises EyasError for a damaged file."""
    rows = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                rows.append(Row(**json.loads(line)))
    except (OSError, ValueError, TypeError) as exc:
        raise EyasError(f"{path}: damaged at line {len(rows) + 1} ({exc}); delete it and run snakemake again") from None
    return rows
