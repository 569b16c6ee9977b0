"""How the hidden states were extracted: speed and bytes over time, stalls, and the shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np

from eyas.report import plots
from eyas.report.parts import Figure, Plot, Section, Table, number, size_of, span, time_unit

_BINS = 120
_SHARDS_SHOWN = 20
_MOST_SHARDS = 2000  # rows of a table that a browser still lays out at once
_STALLS_SHOWN = 20
_STALL_SECONDS, _STALL_FACTOR = 60.0, 5.0
_CUT_SECONDS = 600.0  # longer times without any job are cut out of the axis

_STALL = (
    f"a time of more than {_STALL_SECONDS:.0f} seconds, and more than {_STALL_FACTOR:.0f} times the median of the"
    " shards' longest pauses, in which a shard that was being filled got no finished token"
)


@dataclass(frozen=True)
class _Times:
    """Work as intervals, float64 [N] each: from, to (seconds), and the tokens and bytes that they finished."""

    begin: np.ndarray
    end: np.ndarray
    tokens: np.ndarray
    nbytes: np.ndarray


def _intervals(shards: Sequence[Mapping[str, Any]]) -> _Times:
    """Of the shards that have a timeline."""
    rows = []
    for shard in shards:
        timeline, per_token = shard["timeline"], shard["bytes"] / max(shard["tokens"], 1)
        last_at, last = 0.0, 0
        for at, tokens in timeline["samples"]:
            finished = tokens - last
            rows.append((timeline["started"] + last_at, timeline["started"] + at, finished, finished * per_token))
            last_at, last = at, tokens
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return _Times(columns[0], np.maximum(columns[1], columns[0] + 1e-3), columns[2], columns[3])


def _end_to_end(shards: Sequence[Mapping[str, Any]]) -> _Times:
    """Of shards without times: one after the other, each at its own speed."""
    rows, at = [], 0.0
    for shard in shards:
        if seconds := shard["seconds"]:
            tokens = (shard["tokens_per_second"] or 0) * seconds
            rows.append((at, at + seconds, tokens, tokens * shard["bytes"] / max(shard["tokens"], 1)))
            at += seconds
    return _Times(*np.array(rows, dtype=np.float64).reshape(-1, 4).T)


def _without_gaps(times: _Times) -> tuple[_Times, float, list[tuple[float, float]]]:
    """The work with long times without any job cut out, from second 0; the time without a job; [(at, cut seconds)]."""
    order = np.argsort(times.begin, kind="stable")
    begin, end = times.begin[order], times.end[order]
    busy_until = np.maximum.accumulate(end)
    gaps = np.maximum(begin[1:] - busy_until[:-1], 0.0)
    cut = np.where(gaps > _CUT_SECONDS, gaps, 0.0)
    shift = begin[0] + np.concatenate([[0.0], np.cumsum(cut)])
    cuts = [(float(begin[i + 1] - shift[i + 1]), float(cut[i])) for i in np.flatnonzero(cut)]
    moved = _Times(begin - shift, end - shift, times.tokens[order], times.nbytes[order])
    return moved, float(gaps.sum()), cuts


def _cumulative(times: _Times, amounts: np.ndarray, at: np.ndarray) -> np.ndarray:
    """What was finished up to the times `at`, float64 [N], when every interval works at an even speed."""
    speed = amounts / (times.end - times.begin)
    moments = np.concatenate([times.begin, times.end])
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    slopes = np.cumsum(np.concatenate([speed, -speed])[order])
    sums = np.concatenate([[0.0], np.cumsum(slopes[:-1] * np.diff(moments))])
    return np.interp(at, moments, sums)


def _stalls(shards: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str]]:
    """(when, seconds, shard), the longest first."""
    pauses = [
        (shard["timeline"]["started"] + begin, seconds, shard["name"])
        for shard in shards
        for begin, seconds in [shard["timeline"]["longest_pause"]]
    ]
    if not pauses:
        return []
    least = max(_STALL_SECONDS, _STALL_FACTOR * float(np.median([seconds for _, seconds, _ in pauses])))
    return sorted((pause for pause in pauses if pause[1] > least), key=lambda pause: -pause[1])


def _clock(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _on_axis(at: float, cuts: Sequence[tuple[float, float]]) -> float:
    """A second after the begin as the axis has it, which `cuts` [(at, cut seconds)] are cut out of."""
    for place, seconds in cuts:
        if at < place + seconds:
            break
        at -= seconds
    return at


def _time_plots(
    times: _Times, cuts: list[tuple[float, float]], about: str, stalls: Sequence[tuple[float, float, str]] = ()
) -> list[Plot]:
    """Speed and bytes over time; `stalls`: (second after the begin, seconds, shard)."""
    total = float(times.end.max())
    edges = np.linspace(0.0, total, min(_BINS, max(2 * len(times.begin), 1)) + 1)
    tokens, nbytes = (_cumulative(times, amounts, edges) for amounts in (times.tokens, times.nbytes))
    unit, length = time_unit(total)
    speeds = np.diff(tokens) / np.diff(edges)
    at = [round(float(edge) / length, 4) for edge in edges]
    values = [{"time": t, "speed": round(float(s), 2)} for t, s in zip(at, [*speeds, speeds[-1]], strict=True)]
    grown = [{"time": t, "bytes": round(float(n))} for t, n in zip(at, nbytes, strict=True)]
    marks = [{"time": round(at / length, 4), "label": f"{span(seconds)} without any job"} for at, seconds in cuts]
    told = " Dashed: a longer time without any job, cut out." if cuts else ""
    bands = [
        {
            "time": round(_on_axis(at, cuts) / length, 4), "until": round((_on_axis(at, cuts) + seconds) / length, 4),
            "label": f"{name}: {span(seconds)} without a finished token",
        }
        for at, seconds, name in stalls
    ]  # fmt: skip
    stalled = " Shaded: a shard stalled (defined above)." if stalls else ""
    return [
        Plot(
            "Speed of the extraction", plots.speed_over_time(values, marks, bands, unit),
            f"Tokens a second, over all jobs. {about}{told}{stalled}",
            Table(
                "", [f"{unit} from", "to", "tokens a second"],
                [
                    [number(a, 2), number(b, 2), number(v["speed"], 1)]
                    for a, b, v in zip(at[:-1], at[1:], values[:-1], strict=True)
                ],
            ),
        ),
        Plot(
            "Bytes of hidden states", plots.bytes_over_time(grown, marks, unit),
            f"Bytes of states that were finished up to a time. {about}{told}",
            Table("", [unit, "bytes"], [[number(v["time"], 2), number(v["bytes"])] for v in grown]),
        ),
    ]  # fmt: skip


def _shard_row(shard: Mapping[str, Any]) -> list[str]:
    timeline = shard["timeline"]
    return [
        shard["name"], number(shard["rows"]), number(shard["tokens"]), size_of(shard["bytes"]),
        number(shard["tokens_per_second"], 1), span(shard["seconds"]),
        span(timeline["longest_pause"][1]) if timeline else "none", _clock(timeline["started"]) if timeline else "none",
        number(len(shard["skipped"])), number(len(shard["failed"])),
    ]  # fmt: skip


def _shards_tables(shards: Sequence[Mapping[str, Any]]) -> list[Table]:
    """All shards, and all of them together; where there are many, the slowest ones stand before them."""
    few = len(shards) <= 2 * _SHARDS_SHOWN
    slowest = [] if few else sorted(shards, key=lambda s: s["tokens_per_second"] or np.inf)[:_SHARDS_SHOWN]
    seconds = sum(shard["seconds"] for shard in shards)
    captured = sum(shard["seconds"] * (shard["tokens_per_second"] or 0) for shard in shards)
    total = [
        f"all {len(shards):,}", number(sum(s["rows"] for s in shards)), number(sum(s["tokens"] for s in shards)),
        size_of(sum(s["bytes"] for s in shards)), number(captured / seconds if seconds else None, 1), span(seconds),
        span(max((s["timeline"]["longest_pause"][1] for s in shards if s["timeline"]), default=None)), "",
        number(sum(len(s["skipped"]) for s in shards)), number(sum(len(s["failed"]) for s in shards)),
    ]  # fmt: skip
    head = [
        "shard", "rows", "tokens", "bytes", "tokens a second", "time", "longest pause", "begun", "skipped", "failed",
    ]  # fmt: skip
    meanings = [
        ("tokens a second, time", "of the job's last attempt, without the loading of the target"),
        ("longest pause", "longest time in which no token of the shard was finished; of all shards the longest"),
        ("skipped, failed", "rows that an earlier stage could not use; sequences without states"),
    ]
    first = f" (the first {_MOST_SHARDS:,} of {len(shards):,})" if len(shards) > _MOST_SHARDS else ""
    rows = [*map(_shard_row, shards[:_MOST_SHARDS]), total]
    return [
        *([Table(f"The slowest {len(slowest)} shards", head, list(map(_shard_row, slowest)))] if slowest else []),
        Table(f"Shards{first}", head, rows, meanings, folded=not few),
    ]


def extraction_section(shards: Sequence[Mapping[str, Any]], dtype: str) -> Section:
    """Of the sidecars of the shards, in order; each with its `name`, and `timeline` null where it has none."""
    timed = [shard for shard in shards if shard["timeline"] and shard["timeline"]["samples"]]
    tokens, nbytes = (sum(shard[key] for shard in shards) for key in ("tokens", "bytes"))
    figures = [
        Figure("shards", f"{len(shards):,}", f"{tokens:,} tokens; their states are {nbytes:,} bytes ({dtype})"),
        Figure("bytes", size_of(nbytes), "of the files with the hidden states"),
    ]
    shown: list[Plot] = []
    tables, notes = [], []
    if timed:
        times, idle, cuts = _without_gaps(_intervals(timed))
        elapsed = float(times.end.max()) + sum(seconds for _, seconds in cuts)
        stalls = _stalls(timed)
        figures += [
            Figure(
                "speed", f"{number(times.tokens.sum() / max(elapsed - idle, 1e-3), 1)} tokens/s",
                "over all jobs, while any of them was filling a shard",
            ),
            Figure("time", span(elapsed), "from the first shard's begin to the last one's end"),
            Figure("without a job", span(idle), "of it no shard was being filled: loading the target, or nothing ran"),
            Figure("stalls", number(len(stalls)), _STALL),
        ]  # fmt: skip
        about = f"From {_clock(min(s['timeline']['started'] for s in timed))} on."
        begun = min(float(shard["timeline"]["started"]) for shard in timed)
        shown = _time_plots(
            times, cuts, about, [(at - begun, length, name) for at, length, name in stalls[:_STALLS_SHOWN]]
        )
        if stalls:
            most = f", the longest {_STALLS_SHOWN} of {len(stalls):,}" if len(stalls) > _STALLS_SHOWN else ""
            tables.append(
                Table(
                    f"Stalls{most}", ["shard", "time", "begun"],
                    [[name, span(seconds), _clock(at)] for at, seconds, name in stalls[:_STALLS_SHOWN]],
                    [("stall", f"{_STALL}; the longest one of each shard")],
                )
            )  # fmt: skip
        if len(timed) < len(shards):
            notes.append(f"{len(shards) - len(timed):,} shards have no times recorded and are not in the plots.")
    elif any(shard["seconds"] for shard in shards):
        times = _end_to_end(shards)
        about = (
            "The shards have no times of day recorded; they are drawn one after the other, whether or not they were."
        )
        shown = _time_plots(times, [], about)
    return Section(
        "extraction", "Extraction", figures, notes, plots=shown, tables=[*tables, *_shards_tables(shards)]
    )  # fmt: skip
