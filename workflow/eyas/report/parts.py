"""What the page is made of. All of it is text, which the template escapes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One number, as text, and what it means."""

    name: str
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as text. `meanings` [(column, definition)] stand below it; columns of `prose` are set as text.

    A `folded` one is opened by a click.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    meanings: list[tuple[str, str]] = field(default_factory=list)
    prose: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite specification, a sentence that says what it shows, and the same numbers as a table."""

    title: str
    spec: dict[str, Any]
    meaning: str
    numbers: Table


@dataclass(frozen=True)
class Listing:
    """Text that is shown as it is, line by line."""

    title: str
    text: str


@dataclass(frozen=True)
class Section:
    """What the page shows below one heading, in this order. `notes` are paragraphs."""

    anchor: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    listings: list[Listing] = field(default_factory=list)


def size_of(nbytes: int) -> str:
    """Bytes for people, in powers of 1000."""
    value, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def number(value: float | None, digits: int = 0) -> str:
    """A number for people; `none` where there is none."""
    return "none" if value is None else f"{value:,.{digits}f}"


def percent(share: float | None) -> str:
    """A share for people."""
    return "none" if share is None else f"{100 * share:.1f}%"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a span of time is told, and its seconds."""
    return ("hours", 3600.0) if seconds >= 3 * 3600 else ("minutes", 60.0) if seconds >= 300 else ("seconds", 1.0)


def span(seconds: float | None) -> str:
    """A span of time for people."""
    if seconds is None:
        return "none"
    unit, length = time_unit(seconds)
    return f"{seconds / length:,.1f} {unit}"
