"""Sections of the report: the figures, tables and plots of one stage each, with the definitions of their numbers.

A further section is one more function here and one more line in `write_report`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eyas.report import plots
from eyas.report.statistics import percent


@dataclass(frozen=True)
class Figure:
    """One number, as text, and what it means."""

    name: str
    value: str
    meaning: str = ""


@dataclass(frozen=True)
class Table:
    """Cells as text. `meanings` [(column, definition)] stand below it; columns of `prose` are set as text."""

    title: str
    head: list[str]
    rows: list[list[str]]
    meanings: list[tuple[str, str]] = field(default_factory=list)
    prose: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plot:
    """A Vega-Lite specification, a sentence that says what it shows, and the same numbers as a table."""

    title: str
    spec: dict[str, Any]
    meaning: str
    numbers: Table


@dataclass(frozen=True)
class Section:
    """What the page shows below one heading, in this order."""

    anchor: str
    title: str
    figures: list[Figure] = field(default_factory=list)
    plots: list[Plot] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def size_of(nbytes: int) -> str:
    """Bytes for people, in powers of 1000."""
    value, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"


def _number(value: float | None, digits: int = 0) -> str:
    return "none" if value is None else f"{value:,.{digits}f}"


def _data_figures(facts: dict[str, Any]) -> list[Figure]:
    lengths, cut, states = facts["lengths"], facts["truncated"], facts["hidden_states"]
    return [
        Figure("rows", f"{facts['rows']:,}", f"used; they give {facts['sequences']:,} sequences of tokens"),
        Figure("skipped rows", f"{facts['skipped_rows']:,}", "could not be used; the reasons are below"),
        Figure("tokens", f"{facts['tokens']:,}", "of all sequences, without padding"),
        Figure(
            "supervised", percent(facts["supervised_share"]),
            f"of the tokens: {facts['supervised_tokens']:,} that the drafter learns to predict",
        ),
        Figure(
            "cut rows", f"{cut['max_length']['rows']:,}",
            f"{percent(cut['max_length']['share'])} of the used rows were longer than tokenization.max_length",
        ),
        Figure(
            "unfinished answers", f"{cut['answer_limit']['rows']:,}",
            f"{percent(cut['answer_limit']['share'])} of the used rows: the last answer met its limit of tokens",
        ),
        Figure(
            "tokens a sequence", _number(lengths["median"]),
            f"median; mean {_number(lengths['mean'], 1)}, from {_number(lengths['min'])} to {_number(lengths['max'])};"
            f" 95% have at most {_number(lengths['p95'])}",
        ),
        Figure(
            "hidden states", size_of(states["bytes"]),
            f"exactly {states['bytes']:,} bytes in {states['shards']:,} shards ({states['dtype']}),"
            f" {_number(states['bytes_per_token'])} bytes a token",
        ),
    ]  # fmt: skip


def data_section(facts: dict[str, Any]) -> Section:
    """Of `tokens/statistics.json`."""
    sources = Table(
        "Rows by source",
        ["source", "rows", "sequences", "tokens", "supervised tokens", "supervised", "skipped rows"],
        [
            [
                name, f"{s['rows']:,}", f"{s['sequences']:,}", f"{s['tokens']:,}", f"{s['supervised_tokens']:,}",
                percent(s["supervised_tokens"] / s["tokens"] if s["tokens"] else None), f"{s['skipped']:,}",
            ]
            for name, s in facts["sources"].items()
        ],
        [
            ("source", "the data set that a row came from"),
            ("rows", "used ones; a row may come to several sequences"),
            ("supervised", "share of the source's tokens that the drafter learns to predict"),
        ],
    )  # fmt: skip
    skipped = Table(
        "Skipped rows",
        ["reason", "rows", "for example"],
        [
            [kind, f"{s['rows']:,}", "; ".join(f"row {e['row']} ({e['source']}): {e['reason']}" for e in s["examples"])]
            for kind, s in facts["skipped"].items()
        ],
        prose=("for example",),
    )
    histogram = facts["lengths"]["histogram"]
    ranges = [
        [f"{start:,} or more" if below is None else f"{start:,} to {below - 1:,}", f"{count:,}"]
        for start, below, count in histogram
        if count
    ]
    shown = [
        Plot(
            "Lengths of the sequences", plots.length_histogram(histogram),
            "Sequences by their number of tokens; the bins double in width every second one.",
            Table("", ["tokens", "sequences"], ranges),
        ),
        Plot(
            "Tokens by source", plots.tokens_by_source(facts["sources"]),
            "Tokens of the data sets with the most of them, supervised and not.",
            Table("", ["source", "tokens", "supervised tokens"], [[r[0], r[3], r[4]] for r in sources.rows]),
        ),
    ]  # fmt: skip
    tables = [sources, *([skipped] if skipped.rows else [])]
    return Section("data", "Data", _data_figures(facts), shown if facts["sequences"] else [], tables)


def vocabulary_section(maps: list[dict[str, Any]]) -> Section:
    """Of the sidecars of the vocabulary maps, `vocab_map/{size}.json`."""
    figures, shown, tables = [], [], []
    for facts in maps:
        size = facts["draft_vocab_size"]
        figures.append(
            Figure(
                f"draft vocabulary of {size:,}", percent(facts["coverage"]),
                f"coverage of the training tokens, {percent(facts['coverage_held_out'])} of the held-out ones;"
                f" {facts['distinct_tokens']:,} distinct tokens are supervised, the target knows"
                f" {facts['vocab_size']:,}",
            )
        )  # fmt: skip
        curve = facts["coverage_curve"]
        shown.append(
            Plot(
                f"Coverage by size, {size:,} chosen", plots.coverage_curve(curve, size),
                "Coverage: the share of the supervised tokens that a draft vocabulary of this size holds."
                " The dashed line marks the chosen size; sizes stand on a logarithmic scale.",
                Table("", ["size", "training", "held out"], [[f"{n:,}", percent(a), percent(b)] for n, a, b in curve]),
            )
        )  # fmt: skip
        tables.append(
            Table(
                f"Coverage by source, draft vocabulary of {size:,}",
                ["source", "training", "held out", "supervised tokens"],
                [
                    [name, percent(s["training"]), percent(s["held_out"]), f"{s['supervised_tokens']:,}"]
                    for name, s in facts["coverage_by_source"].items()
                ],
                [
                    ("training, held out", "coverage of the source's supervised tokens in training and held-out rows"),
                    ("supervised tokens", "of both; none: the source has no such tokens"),
                ],
            )
        )
    return Section("vocabulary", "Vocabulary", figures, shown, tables)


def _lossless(acceptance: dict[str, Any]) -> str:
    return "none" if acceptance["decoding"] is None else "yes" if acceptance["lossless"] else "NO"


def drafters_section(facts: dict[str, Any]) -> Section:
    """Of `summary.json`."""
    drafters = facts["drafters"]
    about = Table(
        "Drafters",
        ["drafter", "trained parameters", "draft vocabulary", "epochs", "best epoch", "exported to"],
        [
            [
                name, f"{d['parameters']:,}", f"{d['draft_vocab_size']:,}", f"{d['epochs']:,}", f"{d['best_epoch']:,}",
                d["export"],
            ]
            for name, d in drafters.items()
        ],
        [("best epoch", "by the held-out rows; this one is evaluated and exported")],
        prose=("exported to",),
    )  # fmt: skip
    acceptance = Table(
        "Acceptance",
        ["drafter", "which", "decoding", "lossless", "expected", "prompts", "held-out rows", "draft steps"],
        [
            [
                name, which, _number(a["decoding"], 3), _lossless(a), _number(a["offline"], 3),
                f"{d['prompts']:,}", f"{d['held_out_rows']:,}", f"{d['draft_steps']:,}",
            ]
            for name, d in drafters.items()
            for which, a in d["acceptance"].items()
        ],
        [
            ("decoding", "tokens a forward pass of the target, in greedy decoding of held-out prompts by a chain"),
            ("lossless", "whether that decoding gave the very tokens that the target gives alone"),
            (
                "expected",
                "acceptance length from the hidden states of held-out rows: 1 + the sum over the steps of the products"
                " of the accuracies up to each, an accuracy counting only where all earlier steps were right",
            ),
        ],
    )  # fmt: skip
    losses = Table(
        "Loss by epoch",
        ["drafter", "epoch", "loss"],
        [
            [name, f"{n:,}", f"{loss:.4f}"]
            for name, d in drafters.items()
            for n, loss in enumerate(d["loss_by_epoch"], 1)
        ],
        [
            (
                "loss",
                "mean over the epoch's updates; one is the sum over the draft steps i of loss_decay^i times the mean"
                " cross-entropy of the counted positions",
            )
        ],
    )
    return Section("drafters", "Drafters", tables=[about, acceptance, losses])
