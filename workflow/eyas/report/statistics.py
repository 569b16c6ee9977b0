"""What the tokens of a run are made of: rows, lengths, data sets, and the bytes of the hidden states to come."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from eyas.errors import EyasError
from eyas.extraction.layout import shard_bytes
from eyas.report.parts import percent
from eyas.shards import checked, read_json, write_lock, write_sealed
from eyas.target.tokenizer import TargetReference, text_config
from eyas.tokenization import TokenShard, read_tokens
from eyas.versions import VERSIONS
from eyas.vocabulary.counting import MAX_SOURCES, OTHER_SOURCES, sources_of_sequences

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["statistics"]
_EXAMPLES = 3
# Powers of two and the middles between them.
LENGTH_EDGES = sorted(start << shift for start in (8, 12) for shift in range(15) if start << shift <= 131_072)
_SOURCE_KEYS = ("rows", "sequences", "tokens", "supervised_tokens", "skipped")


def kind_of(reason: str) -> str:
    """What rows that were skipped for alike reasons have in common: the text before the first colon."""
    return reason.split(":", 1)[0].strip()


def _row_sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum over each sequence: int64 [R]."""
    return np.add.reduceat(values, offsets[:-1], dtype=np.int64) if len(offsets) > 1 else np.zeros(0, np.int64)


class _Collector:
    """Adds shards up; holds a few numbers for every sequence, never its tokens."""

    def __init__(self, hidden_size: int, dtype: str) -> None:
        self.hidden_size, self.dtype = hidden_size, dtype
        self.totals = dict.fromkeys(("rows", "sequences", "skipped_rows", "tokens", "supervised_tokens"), 0)
        self.sources: dict[str, dict[str, int]] = {}
        self.skipped: dict[str, dict[str, Any]] = {}
        self.lengths: list[np.ndarray] = []
        self.cut_rows = self.answers_at_limit = 0
        self.shards = self.bytes = 0

    def _source(self, name: str) -> dict[str, int]:
        return self.sources.setdefault(name, dict.fromkeys(_SOURCE_KEYS, 0))

    def add(self, file: Path) -> None:
        """Read one shard and its sidecar; raises EyasError when they do not fit each other."""
        checked(file, "tokens shard")
        shard, sidecar = read_tokens(file), file.with_suffix(".json")
        facts = read_json(sidecar, "tokens sidecar")
        names, of_sequence = sources_of_sequences(file, len(shard))
        rows, first = np.unique(shard.row_ids, return_index=True)  # a row may come to several sequences
        supervised = _row_sums(shard.loss_mask, shard.offsets)
        found = {
            "rows": len(rows), "sequences": len(shard), "tokens": len(shard.input_ids),
            "supervised_tokens": int(supervised.sum()),
        }  # fmt: skip
        wrong = [key for key, value in found.items() if facts.get(key) != value]
        if wrong:
            raise EyasError(
                f"{sidecar}: {wrong[0]} is {facts.get(wrong[0])}, but the shard holds {found[wrong[0]]};"
                " delete both files and run snakemake again"
            )
        by_source = {
            "rows": np.bincount(of_sequence[first], minlength=len(names)),
            "sequences": np.bincount(of_sequence, minlength=len(names)),
            "tokens": np.bincount(of_sequence, weights=shard.lengths, minlength=len(names)),
            "supervised_tokens": np.bincount(of_sequence, weights=supervised, minlength=len(names)),
        }
        for position, name in enumerate(names):
            for key, values in by_source.items():
                self._source(name)[key] += int(values[position])
        self._add_sidecar(sidecar, facts)
        for key, value in found.items():
            self.totals[key] += value
        self.lengths.append(np.asarray(shard.lengths))
        self._add_bytes(shard)

    def _add_sidecar(self, sidecar: Path, facts: dict[str, Any]) -> None:
        try:
            for entry in facts["skipped"]:
                self._source(str(entry["source"]))["skipped"] += 1
                known = self.skipped.setdefault(kind_of(entry["reason"]), {"rows": 0, "examples": []})
                known["rows"] += 1
                if len(known["examples"]) < _EXAMPLES:
                    known["examples"].append({key: entry[key] for key in ("row", "source", "reason")})
            self.totals["skipped_rows"] += len(facts["skipped"])
            self.cut_rows += len({entry["row"] for entry in facts["truncated"]})
            self.answers_at_limit += int(facts["cut_off"])
        except (KeyError, TypeError, AttributeError, ValueError) as exc:
            raise EyasError(
                f"{sidecar}: an entry is missing or wrong ({exc!r}); delete it and run snakemake again"
            ) from None

    def _add_bytes(self, shard: TokenShard) -> None:
        self.bytes += shard_bytes(len(shard.input_ids), len(shard), self.hidden_size, self.dtype)
        self.shards += 1

    def facts(self) -> dict[str, Any]:
        """Everything as JSON holds it; shares of nothing are null."""
        totals = self.totals
        return {
            "format_version": FORMAT_VERSION,
            **totals,
            "supervised_share": _share(totals["supervised_tokens"], totals["tokens"]),
            "truncated": {
                "max_length": {"rows": self.cut_rows, "share": _share(self.cut_rows, totals["rows"])},
                "answer_limit": {
                    "rows": self.answers_at_limit,
                    "share": _share(self.answers_at_limit, totals["rows"]),
                },
            },
            "skipped": dict(sorted(self.skipped.items(), key=lambda item: (-item[1]["rows"], item[0]))),
            "sources": _largest(self.sources),
            "lengths": describe_lengths(self.lengths),
            "hidden_states": {
                "hidden_size": self.hidden_size,
                "dtype": self.dtype,
                "shards": self.shards,
                "bytes": self.bytes,
                "bytes_per_token": round(self.bytes / totals["tokens"], 2) if totals["tokens"] else None,
            },
        }


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _largest(sources: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    """The data sets as they were first seen; of more than a hundred, the largest, and the sum of the others."""
    ranked = sorted(sources, key=lambda name: -sources[name]["tokens"])
    kept = set(ranked[:MAX_SOURCES])
    table = {name: values for name, values in sources.items() if name in kept}
    if others := ranked[MAX_SOURCES:]:
        table[OTHER_SOURCES] = {key: sum(sources[name][key] for name in others) for key in _SOURCE_KEYS}
    return table


def describe_lengths(parts: Sequence[np.ndarray]) -> dict[str, Any]:
    """Histogram [[from, below or null, sequences], …] and figures of the lengths of sequences, in tokens.

    `p95` is the smallest length that at least 95% of the sequences do not exceed.
    """
    lengths = np.concatenate([np.zeros(0, np.int64), *parts])
    edges = [1, *LENGTH_EDGES]
    counts = np.bincount(np.searchsorted(edges, lengths, side="right") - 1, minlength=len(edges))
    histogram = [[a, b, int(n)] for a, b, n in zip(edges, [*edges[1:], None], counts, strict=True)]
    if not len(lengths):
        return {"histogram": histogram, **dict.fromkeys(("min", "mean", "median", "p95", "max"))}
    return {
        "histogram": histogram,
        "min": int(lengths.min()),
        "mean": round(float(lengths.mean()), 2),
        "median": float(np.median(lengths)),
        "p95": int(np.percentile(lengths, 95, method="inverted_cdf")),
        "max": int(lengths.max()),
    }


def collect(token_files: Iterable[Path], hidden_size: int, dtype: str) -> dict[str, Any]:
    """Statistics of a run's tokens shards and their sidecars; raises EyasError.

    `hidden_size`, `dtype`: of the hidden states that the extraction will store.
    """
    collector = _Collector(hidden_size, dtype)
    for file in token_files:
        collector.add(file)
    return collector.facts()


def render(facts: dict[str, Any]) -> str:
    """The statistics as a table for people."""
    table = Table(title="Tokens of the run", show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    lengths, cut, states = facts["lengths"], facts["truncated"], facts["hidden_states"]
    table.add_row(
        "rows", f"{facts['rows']:,} used, {facts['skipped_rows']:,} skipped; {facts['sequences']:,} sequences"
    )
    table.add_row("tokens", f"{facts['tokens']:,}, of which {percent(facts['supervised_share'])} are supervised")
    if facts["sequences"]:
        table.add_row(
            "tokens a sequence",
            f"{lengths['min']:,} to {lengths['max']:,}; mean {lengths['mean']:,.1f}, median {lengths['median']:,.0f},"
            f" 95% have at most {lengths['p95']:,}",
        )
    table.add_row(
        "truncated",
        f"{cut['max_length']['rows']:,} rows cut to max_length;"
        f" {cut['answer_limit']['rows']:,} whose answer met its limit",
    )
    table.add_row(
        "hidden states", f"{states['bytes']:,} bytes to come ({states['dtype']}), in {states['shards']} shards"
    )
    for title, entries in (("source", facts["sources"]), ("skipped", facts["skipped"])):
        table.add_section()
        for name, values in entries.items():
            if title == "source":
                text = f"{values['rows']:,} rows, {values['tokens']:,} tokens, {values['skipped']:,} rows skipped"
            else:
                text = f"{values['rows']:,} rows, such as {', '.join(str(e['row']) for e in values['examples'])}"
            table.add_row(title, f"{name}: {text}")
    console = Console(file=io.StringIO(), width=100, color_system=None, markup=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def write_statistics(token_files: Iterable[Path], target: TargetReference, dtype: str, output: Path) -> None:
    """Write the statistics of a run's tokens to `output` (JSON), and their table to the log; raises EyasError."""
    facts = collect(token_files, int(text_config(target).hidden_size), dtype)
    with write_lock(output):
        write_sealed(output, facts)
    for line in render(facts).splitlines():
        log.info("%s", line)
    log.info("Wrote %s.", output)
