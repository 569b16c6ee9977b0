"""Jobs that run, were killed or failed, by the files that they leave in `logs/jobs`."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.jobs.heartbeat import FAILED, FOLDER
from eyas.jobs.processes import is_alive
from eyas.plan.record import RECORD

# A beat comes every few seconds; a loaded machine or a slow network file system may delay one.
STALE_SECONDS = 60.0
_MINUTE = 60.0


@dataclass(frozen=True)
class Job:
    """A job's last heartbeat."""

    key: str
    label: str
    stage: str
    log: str
    pid: int
    host: str
    started: float
    updated: float
    """Time of the last beat."""
    changed: float
    """Time of the last work that it counted."""
    age: float
    alive: bool
    """Beating, and not known to be gone."""
    killed: bool
    """Known to be gone: its process does not exist."""
    what: str
    unit: str
    done: float
    total: float
    counted: float
    counting_seconds: float
    rate: float | None
    """Units a second over the last minute."""

    @property
    def worked(self) -> bool:
        return self.counted > 0


@dataclass(frozen=True)
class Failure:
    """Why the last attempt of a job failed."""

    key: str
    label: str
    log: str
    line: str
    time: float


def _rate(samples: list[list[float]], updated: float) -> float | None:
    """Units a second over the last minute before the last beat; None when there are no two samples."""
    recent = [sample for sample in samples if sample[0] >= updated - _MINUTE - 2]
    if len(recent) < 2 or recent[-1][0] - recent[0][0] < 1:
        return None
    return (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])


def _job(key: str, values: dict[str, Any], now: float) -> Job:
    updated, age = float(values["updated"]), max(now - float(values["updated"]), 0.0)
    living = is_alive(values)
    return Job(
        key=key, label=str(values["label"]), stage=str(values["stage"]), log=str(values["log"]),
        pid=int(values["pid"]), host=str(values["host"]), started=float(values["started"]), updated=updated,
        changed=float(values["changed"]), age=age, alive=living is not False and age <= STALE_SECONDS,
        killed=living is False, what=str(values["what"]), unit=str(values["unit"]), done=float(values["done"]),
        total=float(values["total"]), counted=float(values["counted"]),
        counting_seconds=max(updated - float(values["counting_since"]), 0.0),
        rate=_rate(values["samples"], updated),
    )  # fmt: skip


def read_jobs(run: Path, now: float) -> tuple[list[Job], list[Failure]]:
    """Heartbeats and failures of a run, the newest last; files that cannot be read are passed over."""
    jobs, failures = [], []
    try:
        names = [entry.name for entry in os.scandir(run / FOLDER)]
    except OSError:
        return [], []
    for name in names:
        if name.startswith(".") or not name.endswith(".json") or name == Path(RECORD).name:
            continue
        try:
            values = json.loads((run / FOLDER / name).read_bytes())
            if name.endswith(FAILED):
                failures.append(
                    Failure(
                        name.removesuffix(FAILED), str(values["label"]), str(values["log"]), str(values["line"]),
                        float(values["time"]),
                    )
                )  # fmt: skip
            else:
                jobs.append(_job(name.removesuffix(".json"), values, now))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            continue  # gone in this moment, or damaged
    return sorted(jobs, key=lambda job: job.started), sorted(failures, key=lambda failure: failure.time)


def last_line(log: str) -> str:
    """The last line of a log file that is not empty; what a job that was killed said last."""
    try:
        with open(log, "rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - 4096, 0))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
