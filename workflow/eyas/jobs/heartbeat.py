"""Signs of life of a running job, for `eyas status`: a small file that is written anew every few seconds.

`{run}/logs/jobs/{job}.json` is there while the job runs, and stays when it is killed: its age and its
process then tell the story. `{run}/logs/jobs/{job}.failed.json` says why the last attempt failed; the next
one that ends well removes it. Nothing here ever stops a job: a disk that is full or read-only
leaves the file old.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from eyas.jobs.processes import this_process

FOLDER = "logs/jobs"
FAILED = ".failed.json"
INTERVAL = 5.0  # seconds
_WINDOW = 70.0  # seconds of samples that are kept, for rates over the last minute
_LONGEST_NAME = 200


class _Work:
    """What the job counts. Written by the job's own thread, read by the one that beats."""

    def __init__(self) -> None:
        self.what = self.unit = ""
        self.done = self.total = self.counted = 0.0
        self.since = self.changed = time.time()

    def report(self, what: str, unit: str, done: float, total: float, advanced: float) -> None:
        now = time.time()
        if unit != self.unit:  # another kind of work: its speed starts anew
            self.counted, self.since = 0.0, now
        self.what, self.unit, self.done, self.total = what, unit, done, total
        self.counted += advanced
        self.changed = now


_work = _Work()


def report(what: str, unit: str, done: float, total: float, advanced: float) -> None:
    """Note work for the heartbeat: `advanced` more `unit`s, `done` of `total` with those of earlier attempts."""
    _work.report(what, unit, done, total, advanced)


def run_folder_of(log: Path | None) -> Path | None:
    """The run's folder, from a job's log file (`{run}/logs/…`); None for a job outside of runs."""
    parents = list(log.parents) if log else []
    for place, folder in enumerate(parents):
        if folder.name == "logs" and folder != folder.parent:
            # a drafter may be named logs, too
            return parents[place + 2] if folder.parent.name == "logs" else folder.parent
    return None


def stage_of(label: str) -> str:
    """The stage that a job belongs to, from its label (`hidden_states/rows_0-500`, `eagle3/epoch_1`, `manifest`)."""
    first, _, last = label.rpartition("/")
    if re.fullmatch(r"epoch_\d+", last):
        return "epochs"
    return last if not first or not re.fullmatch(r"rows_\d+-\d+", last) else first


class Heartbeat:
    """Beats from a thread of its own between `start` and one of `succeeded`, `failed` and `stopped`."""

    def __init__(self, run_folder: Path, log: Path, label: str, interval: float = INTERVAL) -> None:
        self.folder = run_folder / FOLDER
        inside = log.with_suffix("").parts[len(run_folder.parts) + 1 :]
        name = "+".join(inside)[-_LONGEST_NAME:]  # names of drafters and shards have no plus sign
        self.path, self.failure = self.folder / f"{name}.json", self.folder / f"{name}{FAILED}"
        self.label, self.log, self.interval = label, log, interval
        self.started = time.time()
        self._samples: deque[tuple[float, float]] = deque()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def of_job(cls, log: Path | None, label: str) -> Heartbeat | None:
        """The heartbeat of a job that logs into a run's folder, else None."""
        folder = run_folder_of(log)
        return cls(folder, log, label) if folder is not None and log is not None else None

    def start(self) -> Heartbeat:
        global _current
        _current = self
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._beat()
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._stop.wait(self.interval):
            self._beat()

    def _beat(self) -> None:
        now, work = time.time(), _work
        if self._samples and self._samples[-1][1] > work.counted:
            self._samples.clear()  # other work has begun
        self._samples.append((now, work.counted))
        while self._samples[0][0] < now - _WINDOW:
            self._samples.popleft()
        self._write(
            self.path,
            {
                "label": self.label, "stage": stage_of(self.label), "log": str(self.log), **this_process(),
                "started": self.started, "updated": now, "interval": self.interval,
                "what": work.what, "unit": work.unit, "done": work.done, "total": work.total,
                "counted": work.counted, "counting_since": work.since, "changed": work.changed,
                "samples": [[round(at, 2), counted] for at, counted in self._samples],
            },
        )  # fmt: skip

    def _write(self, path: Path, values: dict[str, Any]) -> None:
        partial = path.with_name(f".{path.name}.partial")
        try:
            self.folder.mkdir(exist_ok=True, parents=True)
            partial.write_text(json.dumps(values), encoding="utf-8")
            os.replace(partial, path)
        except OSError:
            _forget(partial)

    def pause(self) -> None:
        """Stop beating, and leave the file to another process of the same job."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)  # a file system that hangs must not hold the job up
            self._thread = None

    def stopped(self) -> None:
        """The job was asked to stop."""
        self.pause()
        _forget(self.path)

    def succeeded(self) -> None:
        self.stopped()
        _forget(self.failure)

    def failed(self, line: str | None) -> None:
        """Record why; None where another process of this job has said it already."""
        if line is not None or not _newer(self.failure, self.started):
            self._write(
                self.failure,
                {
                    "label": self.label, "stage": stage_of(self.label), "log": str(self.log), **this_process(),
                    "time": time.time(), "line": (line or "a process of this job failed").strip()[-1000:],
                },
            )  # fmt: skip
        self.stopped()


_current: Heartbeat | None = None


def pause_heartbeat() -> None:
    """Have this process beat no more: the first of the processes that it is about to start does."""
    if _current is not None:
        _current.pause()


def _forget(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        pass


def _newer(path: Path, moment: float) -> bool:
    try:
        return float(json.loads(path.read_bytes())["time"]) >= moment
    except (OSError, ValueError, KeyError, TypeError):
        return False
