"""Sections on what goes in: the tokens of the rows, and the draft vocabularies that were counted from them."""

from __future__ import annotations

from typing import Any

from eyas.report import plots
from eyas.report.parts import Figure, Plot, Section, Table, number, percent, size_of


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
            "tokens a sequence", number(lengths["median"]),
            f"median; mean {number(lengths['mean'], 1)}, from {number(lengths['min'])} to {number(lengths['max'])};"
            f" 95% have at most {number(lengths['p95'])}",
        ),
        Figure(
            "hidden states", size_of(states["bytes"]),
            f"exactly {states['bytes']:,} bytes in {states['shards']:,} shards ({states['dtype']}),"
            f" {number(states['bytes_per_token'])} bytes a token",
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
    return Section("data", "Data", _data_figures(facts), plots=shown if facts["sequences"] else [], tables=tables)


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
    return Section("vocabulary", "Vocabulary", figures, plots=shown, tables=tables)
