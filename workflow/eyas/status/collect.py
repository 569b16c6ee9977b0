"""Everything that `eyas status` shows, read from the run's folder in one go."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.jobs.processes import is_alive
from eyas.plan import read_record
from eyas.plan.record import RECORD
from eyas.shards import Shard, shards_of
from eyas.status.jobs import Failure, Job, read_jobs
from eyas.status.stages import Stage, Training, drafters_of, read_stages, read_training
from eyas.status.states import HiddenStates, read_states
from eyas.status.verdict import Snakemake, Verdict, judge, open_failures

_MOST_DUMPS = 10_000


@dataclass(frozen=True)
class Dumps:
    """Captured states in the dump folder that no row has taken in yet."""

    folder: str
    files: int
    nbytes: int
    newest: float


@dataclass(frozen=True)
class Status:
    """What a run is doing at `time` (seconds since 1970)."""

    run: str
    folder: str
    time: float
    verdict: Verdict
    stages: list[Stage]
    states: HiddenStates
    training: list[Training]
    jobs: list[Job]
    failures: list[Failure]
    dumps: Dumps | None
    snakemake: Snakemake | None

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        verdict, states = values["verdict"], values["states"]
        for jobs in values["jobs"]:
            jobs.pop("key")
        for failure in values["failures"]:
            failure.pop("key")
        return {
            "run": self.run, "folder": self.folder, "time": self.time,
            "verdict": verdict.pop("word"), "text": self.verdict.text, **verdict,
            "stages": values["stages"], "hidden_states": {k: v for k, v in states.items() if k != "newest"},
            "training": values["training"], "jobs": values["jobs"], "failures": values["failures"],
            "dumps": values["dumps"], "snakemake": values["snakemake"],
        }  # fmt: skip


def find_status_run(run: str | None, results: Path) -> Path:
    """The folder of a run by its name or its folder, which need not be there yet; None: the last one started.

    Raises EyasError where no run is named and none was started.
    """
    if run is not None:
        return Path(run) if not (results / run).is_dir() and (os.sep in run and Path(run).is_dir()) else results / run
    started = []
    try:
        folders = [Path(entry.path) for entry in os.scandir(results) if entry.is_dir()]
    except OSError:
        folders = []
    for folder in folders:
        for mark in (RECORD, "prompts"):
            if (folder / mark).exists():
                started.append(((folder / mark).stat().st_mtime, folder))
                break
    if not started:
        raise EyasError(f"no run in {results}; name one, or its --results folder, or start it with snakemake")
    return max(started)[1]


def _cut(run: Path, record: dict[str, Any] | None) -> tuple[list[Shard], bool]:
    """The run's shards, from its record or the index of its prompts, and whether there was either."""
    facts = record
    if facts is None:
        try:
            facts = json.loads((run / "prompts" / "index.json").read_bytes())
        except (OSError, ValueError):
            return [], False
    try:
        return shards_of(int(facts["rows"]), int(facts["shard_rows"])), True
    except (KeyError, TypeError, ValueError):
        return [], False


def _width_and_dtype(run: Path, record: dict[str, Any] | None) -> tuple[int | None, str]:
    if record and record.get("hidden_size"):
        return int(record["hidden_size"]), str(record["dtype"])
    try:
        facts = json.loads((run / "tokens" / "statistics.json").read_bytes())["hidden_states"]
        return int(facts["hidden_size"]), str(facts["dtype"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, str((record or {}).get("dtype", "bfloat16"))


def _dumps(folder: object) -> Dumps | None:
    if not isinstance(folder, str):
        return None
    files, nbytes, newest = 0, 0, 0.0
    try:
        # Jobs that start a server have a folder of their own in it.
        places = [folder, *(e.path for e in os.scandir(folder) if e.name.startswith(f"eyas-capture-{os.getuid()}-"))]
        for entry in (entry for place in places for entry in os.scandir(place)):
            if files == _MOST_DUMPS:
                break
            if entry.name.startswith("eyas-") and entry.name.endswith(".safetensors"):
                status = entry.stat()
                files, nbytes, newest = files + 1, nbytes + status.st_size, max(newest, status.st_mtime)
    except OSError:
        pass  # not there, or a dump that was just taken in
    return Dumps(folder, files, nbytes, newest)


def _snakemake(record: dict[str, Any] | None) -> Snakemake | None:
    try:
        assert record is not None
        return Snakemake(
            int(record["pid"]), str(record["host"]), float(record["started"]), record.get("ended"),
            record.get("outcome"), is_alive(record),
        )  # fmt: skip
    except (AssertionError, KeyError, TypeError, ValueError):
        return None


def collect(run: Path) -> Status:
    """Look at a run. Takes no lock, writes nothing, reads no tensor but those of shards that are being written."""
    now = time.time()
    record = read_record(run)
    shards, cut = _cut(run, record)
    jobs, failures = read_jobs(run, now)
    snakemake = _snakemake(record)
    width, dtype = _width_and_dtype(run, record)
    drafters = drafters_of(run, record)
    states = read_states(run, shards, width, dtype, jobs)
    stages = read_stages(run, shards, states.shards_done, drafters)
    training = read_training(run, drafters)
    dumps = _dumps((record or {}).get("dump_folder"))
    newest = {
        "hidden_states": max(states.newest, dumps.newest if dumps else 0.0),
        "epochs": max([line.newest for line in training], default=0.0),
    }
    newest["any"] = max([*newest.values(), snakemake.started if snakemake else 0.0])
    failures = open_failures(failures, jobs, snakemake)
    # Without a record nobody says how many epochs there are to be: the last files of a run tell.
    whole = cut and all(stage.complete or stage.total is None for stage in stages)
    begun = snakemake is not None or bool(jobs) or any(stage.done for stage in stages)
    verdict = judge(now, begun, whole, jobs, failures, snakemake, newest)
    return Status(
        record["run"] if record and "run" in record else run.name, str(run), now, verdict, stages, states, training,
        jobs, failures, dumps, snakemake,
    )  # fmt: skip
