"""One word for what a run is doing, and the signals that it rests on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from eyas.status.jobs import STALE_SECONDS, Failure, Job, last_line

Word = Literal["not started", "running", "stalled", "failed", "complete"]

# A job that has begun to count counts something in this time; loading a large target may take an hour.
QUIET_SECONDS, LOADING_SECONDS = 600.0, 3600.0


@dataclass(frozen=True)
class Verdict:
    """`since`: for a stall, the time of the last signal. `job`, `line`, `log`: for a failure."""

    word: Word
    reason: str
    since: float | None = None
    job: str | None = None
    line: str | None = None
    log: str | None = None

    @property
    def text(self) -> str:
        """The verdict in one line."""
        when = f" since {clock(self.since)}" if self.word == "stalled" and self.since else ""
        return f"{self.word}{when}: {self.reason}"


@dataclass(frozen=True)
class Snakemake:
    """The process that runs the workflow, from the run's record."""

    pid: int
    host: str
    started: float
    ended: float | None
    outcome: str | None
    alive: bool | None
    """None where it cannot be told: on another host."""

    @property
    def running(self) -> bool:
        return self.outcome is None and self.alive is True


def clock(moment: float) -> str:
    """A time for people, of this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def open_failures(failures: Sequence[Failure], jobs: Sequence[Job], snakemake: Snakemake | None) -> list[Failure]:
    """Failures of this attempt at the run whose job has not been started again."""
    again = {job.key: job.started for job in jobs if job.alive}
    begun = snakemake.started if snakemake else 0.0
    return [f for f in failures if f.time >= begun and again.get(f.key, 0.0) <= f.time]


def _log_time(job: Job) -> float:
    try:
        return os.stat(job.log).st_mtime
    except OSError:
        return 0.0


def _last_sign(job: Job, newest: dict[str, float]) -> float:
    """When a job that beats last did something: counted work, wrote its log, wrote what its stage writes."""
    return max(job.changed, _log_time(job), newest.get(job.stage, 0.0))


def _failed(failure: Failure, alive: Sequence[Job]) -> Verdict:
    still = f"; {len(alive)} other job(s) still run" if alive else ""
    return Verdict(
        "failed", f"{failure.label}: {failure.line} (log: {failure.log}){still}", failure.time, failure.label,
        failure.line, failure.log,
    )  # fmt: skip


def judge(
    now: float, begun: bool, whole: bool, jobs: Sequence[Job], failures: Sequence[Failure],
    snakemake: Snakemake | None, newest: dict[str, float],
) -> Verdict:  # fmt: skip
    """The verdict.

    `begun`: there is anything of the run; `whole`: everything that it is to make is there; `failures`: open
    ones; `newest`: by stage (and `any`), when its files were last written.
    """
    alive = [job for job in jobs if job.alive]
    if failures:
        return _failed(failures[-1], alive)
    if alive:
        return _judge_alive(now, alive, newest)
    killed = [job for job in jobs if job.killed]
    silent = [job for job in jobs if not job.killed]
    working = snakemake is not None and snakemake.running
    if whole and not working:
        return Verdict("complete", "everything that the run is to make is there")
    if silent:
        since = max(job.updated for job in silent)
        names = ", ".join(f"heartbeat of {job.label} (process {job.pid} on {job.host})" for job in silent)
        return Verdict("stalled", f"stopped: {names}", since)
    if killed and snakemake is not None and snakemake.outcome == "failed":
        return _killed(killed[-1])
    if working:
        return Verdict("running", "Snakemake is between jobs, or waits for them to start")
    if not begun:
        return Verdict("not started", "nothing of it has been made")
    since = max([newest.get("any", 0.0), *(job.updated for job in jobs)])
    if snakemake is not None and snakemake.outcome == "failed":
        since = max(since, snakemake.ended or 0.0)
        return Verdict("stalled", "Snakemake has ended before everything was made; no job runs", since or None)
    parts = [f"heartbeat of {job.label} (process {job.pid} is gone)" for job in killed]
    if snakemake is not None and snakemake.alive is False and snakemake.outcome is None:
        parts.append(f"Snakemake (process {snakemake.pid} is gone)")
    elif snakemake is not None and snakemake.alive is None and snakemake.outcome is None:
        if now - since <= QUIET_SECONDS:
            return Verdict("running", f"Snakemake was started on {snakemake.host}; no job beats at the moment")
        parts.append(f"all signs of the run that was started on {snakemake.host}")
    reason = f"stopped: {', '.join(parts)}" if parts else "no job runs, and not everything is there"
    return Verdict("stalled", f"{reason}; run snakemake to go on", since or None)


def _judge_alive(now: float, alive: Sequence[Job], newest: dict[str, float]) -> Verdict:
    signs = {job: _last_sign(job, newest) for job in alive}
    quiet = [job for job, sign in signs.items() if now - sign > (QUIET_SECONDS if job.worked else LOADING_SECONDS)]
    if len(quiet) == len(alive):
        names = ", ".join(job.label for job in quiet)
        return Verdict(
            "stalled", f"stopped: work counted, files and log of {names}; its process still beats", max(signs.values())
        )
    names = ", ".join(job.label for job in alive[:3]) + (f" and {len(alive) - 3} more" if len(alive) > 3 else "")
    return Verdict("running", names)


def _killed(job: Job) -> Verdict:
    line = last_line(job.log)
    return Verdict(
        "failed", f"{job.label}: its process was killed (out of memory?); its last line: {line} (log: {job.log})",
        job.updated, job.label, line, job.log,
    )  # fmt: skip


__all__ = [
    "LOADING_SECONDS",
    "QUIET_SECONDS",
    "STALE_SECONDS",
    "Snakemake",
    "Verdict",
    "clock",
    "judge",
    "open_failures",
]
