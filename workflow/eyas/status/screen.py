"""The status of a run on one screen."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from eyas.extraction.space import amount
from eyas.jobs.progress import duration
from eyas.status.collect import Status
from eyas.status.states import HiddenStates
from eyas.status.verdict import clock

_COLOURS = {"not started": "dim", "running": "green", "stalled": "yellow", "failed": "red", "complete": "bold green"}
_BAR, _MOST_JOBS, _MOST_FAILURES = 20, 8, 3


def _bar(done: float, total: float | None) -> str:
    full = int(min(done / total, 1.0) * _BAR) if total else 0
    return "#" * full + "-" * (_BAR - full)


def _of(done: float, total: float | None) -> str:
    return f"{done:,.0f} of {'?' if total is None else f'{total:,.0f}'}"


def _states(found: HiddenStates) -> list[tuple[str, str]]:
    about = "" if found.exact else "about "
    rows = f"{_of(found.rows_done, found.rows)} rows"
    if found.rows_in_unfinished_shards:
        rows += f" ({found.rows_in_unfinished_shards:,} of them in shards that are being written)"
    lines = [("hidden states", rows)]
    if found.tokens is None:
        return lines
    share = 100 * found.tokens_done / found.tokens if found.tokens else 100.0
    lines.append(("tokens", f"{found.tokens_done:,} of {about}{found.tokens:,} ({share:.1f}%)"))
    left = "not known" if found.bytes_left is None else f"{about}{amount(found.bytes_left)}"
    lines.append(("bytes", f"{amount(found.bytes_written)} written, {left} left"))
    minute, overall = found.tokens_per_second_last_minute, found.tokens_per_second
    speeds = [f"{minute:,.1f} tok/s over the last minute"] if minute is not None else []
    speeds += [f"{overall:,.1f} tok/s overall"] if overall is not None else []
    if found.seconds_left is not None:
        speeds.append(f"{duration(found.seconds_left)} left")
    return [*lines, ("speed", ", ".join(speeds))] if speeds else lines


def screen(status: Status) -> RenderableType:
    """Everything for a terminal; text from files is shown as it is, never as markup."""
    head = Text.assemble(
        ("Run ", "bold"), (status.run, "bold"), f"  {status.folder}  {clock(status.time)}\n",
        (status.verdict.text, _COLOURS[status.verdict.word]),
    )  # fmt: skip
    if status.verdict.word == "not started":
        return head
    stages = Table(box=None, pad_edge=False, show_header=False)
    for stage in status.stages:
        stages.add_row(stage.name.replace("_", " "), Text(f"[{_bar(stage.done, stage.total)}]"),
                       _of(stage.done, stage.total))  # fmt: skip
    details = Table(box=None, pad_edge=False, show_header=False)
    details.add_column(style="bold")
    details.add_column(overflow="fold")
    for name, text in _states(status.states):
        details.add_row(name, Text(text))
    for line in status.training:
        loss = "" if line.loss is None else f", loss {line.loss:.3f}"
        length = "" if line.acceptance_length is None else f", acceptance length {line.acceptance_length:.3f}"
        details.add_row("training", Text(f"{line.drafter}: epoch {line.epoch}, step {line.step:,}{loss}{length}"))
    if status.dumps is not None:
        details.add_row("dumps", f"{status.dumps.files:,} waiting, {amount(status.dumps.nbytes)}")
    for job in status.jobs[-_MOST_JOBS:]:
        life = "gone" if job.killed else f"heartbeat {duration(job.age)} ago"
        work = f"; {job.what} {_of(job.done, job.total)} {job.unit}" if job.unit else ""
        rate = f", {job.rate:,.1f} {job.unit}/s" if job.rate is not None and job.unit else ""
        details.add_row("job", Text(f"{job.label}: process {job.pid} on {job.host}, {life}{work}{rate}"))
    if len(status.jobs) > _MOST_JOBS:
        details.add_row("", f"and {len(status.jobs) - _MOST_JOBS} more jobs")
    for failure in status.failures[-_MOST_FAILURES:]:
        details.add_row("error", Text(f"{failure.label}, {clock(failure.time)}: {failure.line}", "red"))
        details.add_row("log", Text(failure.log))
    return Group(head, "", stages, "", details)
