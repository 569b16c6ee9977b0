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

    `source`: the data set it comes from, `place`: the file and line, `id`: the record's own, if it has one.
    `messages`: `role` (system, user, assistant, tool) and `content` (text); an assistant's may have
    `reasoning_content` (text) and `tool_calls` (`{"id", "type": "function", "function": {"name", "arguments"}}`,
    arguments as an object where they are one), a tool's `tool_call_id` and `name`. `tools`: descriptions of
    the functions on offer. `text` instead of messages: ready text, all of it supervised.
    `skipped` is the reason why the row cannot be used, and stays with it through every stage.
    `finish` is how the last answer ended: `stop`, `length` (cut off), `tool_calls`, or None (not generated).
    """

    row: int
    source: str
    messages: list[dict[str, Any]] = field(default_factory=list)
    skipped: str | None = None
    finish: str | None = None
    reply_tokens: int | None = None
    place: str = ""
    id: str | int | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None

    def to_json(self) -> str:
        values: dict[str, Any] = {"row": self.row, "source": self.source}
        for name in ("place", "id"):
            if getattr(self, name) not in ("", None):
                values[name] = getattr(self, name)
        if self.skipped is not None:
            values["skipped"] = self.skipped
        elif self.text is not None:
            values["text"] = self.text
        else:
            values |= {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        if self.finish is not None:
            values |= {"finish": self.finish, "reply_tokens": self.reply_tokens}
        return json.dumps(values, ensure_ascii=False)

    def skip(self, reason: str, finish: str | None = None, reply_tokens: int | None = None) -> Row:
        """The same row, unusable for this reason."""
        return Row(self.row, self.source, [], reason, finish, reply_tokens, self.place, self.id)


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
