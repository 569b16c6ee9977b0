"""Running the workflow under SLURM, and what a test looks for while it runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from cluster import Cluster
from workflow_runs import Workdir

PATIENCE = 900  # seconds for anything to happen on a loaded machine


@dataclass
class SlurmWorkdir(Workdir):
    """A folder in which Snakemake runs with profiles/slurm."""

    cluster: Cluster | None = None
    partition: str = "one"
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, *arguments: str) -> list[str]:
        self.write_config()
        # Only the speed of looking is changed, for a cluster without delays.
        return [
            sys.executable, "-m", "snakemake", "--snakefile", str(self.checkout / "Snakefile"),
            "--workflow-profile", str(self.checkout / "profiles" / "slurm"), "--configfile", "config.yaml",
            "--slurm-init-seconds-before-status-checks", "1", "--max-status-checks-per-second", "2",
            *arguments,
        ]  # fmt: skip

    def start(self, *arguments: str) -> Run:
        assert self.cluster is not None
        environment = os.environ | self.cluster.environment | {"EYAS_SLURM_PARTITION": self.partition}
        environment |= self.environment
        log = self.path / "snakemake.log"
        with open(log, "a", encoding="utf-8") as file:
            process = subprocess.Popen(
                self.command(*arguments), cwd=self.path, stdout=file, stderr=subprocess.STDOUT, env=environment,
                start_new_session=True,
            )  # fmt: skip
        return Run(process, log, self.cluster)


class Run:
    """A Snakemake that is under way."""

    def __init__(self, process: subprocess.Popen, log: Path, cluster: Cluster) -> None:
        self.process, self.log, self.cluster = process, log, cluster

    def wait(self) -> int:
        return self.process.wait(timeout=PATIENCE)

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, f"{what}: Snakemake ended\n{self.text()[-6000:]}"
            assert time.monotonic() < deadline, f"{what}: never\n{self.text()[-6000:]}"
            time.sleep(0.2)

    def job(self, rule: str, state: str = "RUNNING") -> dict[str, str] | None:
        """The first job of a rule in a state."""
        for job in self.cluster.jobs():
            if rule_of(job) == rule and job["JobState"] == state:
                return job
        return None

    def interrupt(self) -> int:
        """As Ctrl-C does."""
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def rule_of(job: dict[str, str]) -> str:
    """The executor notes the rule in the job's comment."""
    return job.get("Comment", "").removeprefix("rule_").partition("_wildcards_")[0]


def gpus_of(job: dict[str, str]) -> int:
    """The GPUs of an allocation, as `scontrol` has them."""
    found = re.fullmatch(r"gpu:(\d+)", job.get("JOB_GRES", ""))
    return int(found[1]) if found else 0


def interval(job: dict[str, str]) -> tuple[datetime, datetime]:
    return datetime.fromisoformat(job["StartTime"]), datetime.fromisoformat(job["EndTime"])


def most_gpus_at_once(jobs: list[dict[str, str]]) -> int:
    """The largest number of GPUs that jobs held at the same time (whole seconds; ends come before starts)."""
    events = []
    for job in jobs:
        if job["StartTime"] != "Unknown" and gpus_of(job):
            start, end = interval(job)
            if start < end:
                events += [(start, 1, gpus_of(job)), (end, 0, -gpus_of(job))]
    held = most = 0
    for _, _, change in sorted(events):
        held += change
        most = max(most, held)
    return most


def job_processes(job: dict[str, str], script: str) -> list[int]:
    """Processes of a SLURM job that run a script of ours, by what their environment says."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = any(word.endswith(f"/{script}".encode()) for word in words[:4])
        if ours and f"SLURM_JOB_ID={job['JobId']}".encode() in environment:
            found.append(int(folder.name))
    return found
