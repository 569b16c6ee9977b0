"""Pieces of Markdown (GitHub's) from text that others wrote, which must not become markup."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any


def _one_line(text: Any) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())


def code(text: Any) -> str:
    """A code span that holds any text: everything in it stays as it is."""
    line = _one_line(text)
    if not line:
        return "(empty)"
    longest = max(map(len, re.findall("`+", line)), default=0)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return "`" * (longest + 1) + pad + line + pad + "`" * (longest + 1)


def prose(text: Any) -> str:
    """Text in a paragraph or cell, its markup escaped."""
    return re.sub(r"([\\`*_\[\]<>~&#])", r"\\\1", _one_line(text))


def block(text: str, language: str = "") -> list[str]:
    """The lines of a fenced code block."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return [f"{fence}{language}", *text.splitlines(), fence, ""]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table. Cells are Markdown already, but for bars: tables are cut at them before all else."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", r"\|") for cell in row] for row in rows)]
    return [*(f"| {' | '.join(cells)} |" for cells in lines), ""]
