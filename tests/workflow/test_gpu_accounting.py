"""GPUs are counted, leased and kept busy: the real workflow with workers that hold GPU tokens instead of GPUs."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import eyas.devices
import pytest
from workflow_runs import CHECKOUT, Workdir, new_workdir

POOL = 8
DRAFTERS = {"large": 8, "middle": 4, "small": 1}  # GPUs of their training
WORKER = Path(__file__).with_name("gpu_worker.py")


@dataclass(frozen=True)
class Job:
    """A job with GPUs: when it could have begun, when its process began, held the devices, and let go."""

    name: str
    gpus: int
    devices: tuple[str, ...]
    runnable: float
    started: float
    held: float
    ended: float
    exited: float


def most_held(jobs: list[Job]) -> int:
    """The most GPUs that were held at once."""
    changes = sorted([(job.ended, -job.gpus) for job in jobs] + [(job.held, job.gpus) for job in jobs])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def held_twice(jobs: list[Job]) -> list[tuple[str, str]]:
    """Pairs of jobs that held a device at the same time."""
    return [
        (a.name, b.name)
        for i, a in enumerate(jobs)
        for b in jobs[i + 1 :]
        if set(a.devices) & set(b.devices) and a.held < b.ended and b.held < a.ended
    ]


def idle_spans(jobs: list[Job], pool: int = POOL) -> list[tuple[float, str]]:
    """For each job, the longest time that it was runnable, and did not begin, while enough GPUs were free."""
    spans = []
    for job in jobs:
        moments = {job.runnable, job.started}
        moments |= {t for other in jobs for t in (other.started, other.exited) if job.runnable < t < job.started}
        times, longest, span = sorted(moments), 0.0, 0.0
        for a, b in zip(times, times[1:], strict=False):
            busy = sum(other.gpus for other in jobs if other.started <= a < other.exited)
            span = span + b - a if pool - busy >= job.gpus else 0.0
            longest = max(longest, span)
        spans.append((longest, job.name))
    return sorted(spans, reverse=True)


def needs(name: str, everything: set[str]) -> set[str]:
    """The jobs whose files a job with GPUs reads, by their labels."""
    if name.startswith("responses/"):
        return {"prompts"}
    if name.startswith("hidden_states/"):
        return {name.replace("hidden_states", "tokens"), "totals"}
    drafter, step = name.split("/")
    if step == "epoch_1":
        return {f"{drafter}/epoch_0", "manifest"}
    assert step == "evaluation", name
    return {f"{drafter}/best", *(job for job in everything if job.startswith("responses/"))}


def read_jobs(folder: Path) -> list[Job]:
    entries = {e["job"]: e for e in map(json.loads, (folder / "jobs.jsonl").read_text().splitlines())}
    return [
        Job(
            name, e["gpus"], tuple(e["devices"]),
            max(entries[other]["exited"] for other in needs(name, set(entries))),
            e["started"], e["held"], e["ended"], e["exited"],
        )
        for name, e in entries.items() if e["gpus"]
    ]  # fmt: skip


def start_of_a_process() -> float:
    """Seconds that it takes to start Python here and now: on a busy machine many times what it takes on an idle one."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import eyas.devices"], check=True)
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


@pytest.fixture
def work(tmp_path: Path, tiny_target: Path) -> Workdir:
    """The project's own Snakefile, rules and package, and workers in the scripts' place."""
    checkout = tmp_path / "checkout"
    (checkout / "workflow" / "scripts").mkdir(parents=True)
    shutil.copy(CHECKOUT / "Snakefile", checkout)
    shutil.copytree(CHECKOUT / "rules", checkout / "rules")
    (checkout / "profiles").symlink_to(CHECKOUT / "profiles")
    for name in ("eyas", "envs", "report"):
        (checkout / "workflow" / name).symlink_to(CHECKOUT / "workflow" / name)
    for script in (CHECKOUT / "workflow" / "scripts").glob("*.py"):
        (checkout / "workflow" / "scripts" / script.name).symlink_to(WORKER)
    work = new_workdir(tmp_path / "work", tiny_target)
    work.checkout = checkout
    work.settings["data"] |= {"shard_rows": 4}  # ten shards
    work.settings["responses"]["gpu"] = 1
    work.settings["extraction"]["gpu"] = 4
    work.settings["evaluation"]["gpu"] = 1
    drafter = work.settings["drafters"].pop("small")
    for name, gpus in DRAFTERS.items():
        training = drafter["training"] | {"gpu": gpus, "epochs": 1}
        work.settings["drafters"][name] = drafter | {"training": training}
    return work


def run(work: Workdir, *arguments: str) -> list[Job]:
    """Run up to the evaluations with eight devices that nobody else has."""
    folder = work.path / "tokens"
    (folder / "held").mkdir(parents=True)
    devices = [f"test-{uuid.uuid4().hex[:12]}-{i}" for i in range(POOL)]
    environment = os.environ | {"EYAS_TEST_TOKENS": str(folder), "CUDA_VISIBLE_DEVICES": ",".join(devices)}
    targets = [f"results/tiny/drafters/{name}/evaluation.json" for name in DRAFTERS]
    try:
        result = work.snakemake("--cores", "64", *arguments, "--", *targets, env=environment)
    finally:
        for device in devices:
            (eyas.devices.lease_folder() / f"{device}.lease").unlink(missing_ok=True)
    assert result.code == 0, result.text[-5000:]
    assert list((folder / "held").iterdir()) == []
    jobs = read_jobs(folder)
    assert sorted({job.gpus for job in jobs}) == [1, 4, 8]
    assert len(jobs) == 10 + 10 + 2 * len(DRAFTERS)
    return jobs


def test_the_pool_is_never_exceeded_and_never_idle(work: Workdir) -> None:
    before = start_of_a_process()
    jobs = run(work, "--resources", f"gpu={POOL}")
    assert most_held(jobs) <= POOL and held_twice(jobs) == []
    # Counted as Snakemake does, from start to end of the process.
    assert most_held([Job(j.name, j.gpus, (), 0, 0, j.started, j.ended, 0) for j in jobs]) <= POOL
    # A few seconds, and what starting processes takes on a machine as busy as this one.
    patience = 4 + 15 * max(before, start_of_a_process())
    span, name = idle_spans(jobs)[0]
    assert span < patience, f"{name} waited {span:.1f} s beside free GPUs"


def test_no_device_is_held_twice_when_the_pool_was_forgotten(work: Workdir) -> None:
    jobs = run(work)
    assert most_held(jobs) <= POOL and held_twice(jobs) == []
    assert all(len(set(job.devices)) == job.gpus for job in jobs)


def job(name: str, gpus: int, runnable: float, held: float, ended: float, *devices: str) -> Job:
    return Job(name, gpus, devices, runnable, held, held, ended, ended)


def test_faults_would_be_seen() -> None:
    one, two = job("a", 8, 0, 0, 10, "0", "1"), job("b", 1, 0, 9, 11, "1")
    assert most_held([one, two]) == 9 and held_twice([one, two]) == [("a", "b")]
    assert most_held([one, job("b", 1, 0, 10, 11)]) == 8
    # A job of one GPU that begins five seconds after another of one GPU, for no reason.
    lazy = [job("a", 1, 0, 0, 5), job("b", 1, 0, 5, 6)]
    assert idle_spans(lazy)[0] == (5, "b")
    # One of eight has to wait for it.
    assert idle_spans([job("a", 1, 0, 0, 5), job("b", 8, 0, 5, 6)])[0][0] == 0
    # Free GPUs that are too few do not count, and what comes after them starts anew.
    assert idle_spans([job("a", 6, 0, 0, 5), job("b", 4, 0, 7, 8)])[0] == (2, "b")
