"""Random SIGKILLs while real Snakemake builds a tiny run, the same command again after each: the same bytes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
from ledger import Faults
from workflow_runs import Workdir, new_workdir

VICTIMS = {
    "snakemake": "SIGKILL of snakemake alone",
    "job": "SIGKILL of a job",
    "shell": "SIGKILL of a job's shell",
    "all": "SIGKILL of snakemake and all its jobs",
}
PATIENCE = 900  # seconds, for one call of Snakemake on a busy machine


class Attempt:
    """One call of Snakemake on the whole run, which may be hit."""

    def __init__(self, work: Workdir, chance: random.Random) -> None:
        self.work, self.chance = work, chance
        self.log = work.path / "snakemake.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                work.command(), cwd=work.path, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        self.root = psutil.Process(self.process.pid)

    def below(self) -> list[tuple[psutil.Process, str]]:
        """Snakemake's descendants: each with the script that it runs, or "" for a shell or a script's own child."""
        found = []
        try:
            for process in self.root.children(recursive=True):
                scripts = [word for word in process.cmdline() if word.endswith(".py") and "scripts" in word]
                found.append((process, Path(scripts[0]).stem if scripts and process.name() != "bash" else ""))
        except psutil.NoSuchProcess:
            pass
        return found

    def wait_for_jobs(self, number: int) -> bool:
        """Wait until `number` jobs have begun; False if Snakemake ended before."""
        seen: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            seen |= {process.pid for process, script in self.below() if script}
            if len(seen) >= number:
                return True
            assert time.monotonic() < deadline, "Snakemake neither starts jobs nor ends"
            time.sleep(0.02)
        return False

    def hit(self, victim: str) -> str | None:
        """Kill; returns a script that was running, or None when there was nothing to hit any more."""
        below = self.below()
        jobs = [(process, script) for process, script in below if script]
        shells = [process for process, script in below if not script]
        if self.process.poll() is not None or not jobs:
            return None
        process, script = self.chance.choice(jobs)
        try:
            if victim == "snakemake":
                self.process.kill()
            elif victim == "all":
                os.killpg(self.process.pid, signal.SIGKILL)
            elif victim == "shell" and shells:
                self.chance.choice(shells).kill()
            else:
                process.kill()
        except (psutil.NoSuchProcess, ProcessLookupError):
            return None
        self.process.wait(PATIENCE)
        return script

    def finish(self) -> None:
        assert self.process.wait(PATIENCE) == 0, self.log.read_text()[-6000:]


def wait_for_orphans(work: Workdir) -> None:
    """Jobs of a Snakemake that was killed go on by themselves."""
    deadline = time.monotonic() + PATIENCE
    while True:
        orphans = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(work.path):
                    orphans.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                pass
        if not orphans:
            return
        assert time.monotonic() < deadline, f"still running: {[p.cmdline() for p in orphans]}"
        time.sleep(0.1)


def same_as_undisturbed(work: Workdir, reference: Workdir) -> None:
    wait_for_orphans(work)
    found, wanted = work.digests(), reference.digests()
    assert sorted(found) == sorted(wanted)
    assert [name for name in wanted if found[name] != wanted[name]] == []
    assert work.leftovers() == []


@pytest.mark.timeout(4 * 3600)
def test_kill_storm(faults: Faults, reference: Workdir, tmp_path: Path) -> None:
    left = faults.count(3, 200)
    stages: Counter[str] = Counter()
    runs = 0
    while left:
        runs += 1
        work = new_workdir(tmp_path / f"run_{runs}", Path(reference.settings["target"]["path"]))
        kills: Counter[str] = Counter()
        try:
            while left:
                attempt = Attempt(work, faults.random)
                # few jobs from one hit to the next, so that a run is hit in all its stages
                if not attempt.wait_for_jobs(faults.random.choice([1, 2, 2, 3])):
                    break
                # logarithmic: in the imports, in the work, in its last file
                time.sleep(10 ** faults.random.uniform(-2, 0.7))
                victim = faults.random.choice(list(VICTIMS))
                script = attempt.hit(victim)
                if script:
                    kills[victim] += 1
                    stages[script] += 1
                    left -= 1
                elif attempt.process.poll() is None:
                    attempt.finish()  # between two jobs
            Attempt(work, faults.random).finish()
            same_as_undisturbed(work, reference)
        except (Exception, pytest.fail.Exception) as exc:
            faults.failures.append(f"run {runs} after {dict(kills)}: {type(exc).__name__}: {exc}")
            for victim, number in kills.items():
                faults.record(VICTIMS[victim], number, 0)
        else:
            for victim, number in kills.items():
                faults.record(VICTIMS[victim], number, number)
    print(f"{runs} runs; kills while these ran: {dict(stages.most_common())}")
    if faults.all:
        # every stage has been hit, and none takes nearly all
        assert len(stages) >= 14, stages
