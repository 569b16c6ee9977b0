"""Others at work at the same time, and times that say nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ledger import Faults
from workflow_runs import CHECKOUT, Workdir, new_workdir

GOAL = "results/tiny/hidden_states/data_config.json"
STAGES = ("hidden_states", "drafters", "vocab_map", "tokens")


def start(work: Workdir, *arguments: str) -> tuple[subprocess.Popen, Path]:
    log = work.path / f"snakemake_{time.monotonic_ns()}.log"
    with open(log, "w") as file:
        return subprocess.Popen(work.command(*arguments), cwd=work.path, stdout=file, stderr=file), log


def same(work: Workdir, reference: Workdir, *patterns: str) -> None:
    assert work.digests(*patterns) == reference.digests(*patterns)
    assert work.leftovers() == []


@pytest.mark.timeout(3600)
def test_two_snakemakes_in_one_folder(faults: Faults, finished: Workdir, reference: Workdir) -> None:
    """One of them does the work, the other is told so by Snakemake; the same command is all it takes afterwards."""
    for _ in range(faults.count(1, 5)):
        shutil.rmtree(finished.run_folder / "hidden_states")
        with faults.tried("two snakemakes in one folder"):
            runs = [start(finished, "--", GOAL) for _ in range(2)]
            codes = [process.wait(timeout=900) for process, _ in runs]
            texts = [log.read_text() for _, log in runs]
            assert 0 in codes, texts
            for code, text in zip(codes, texts, strict=True):
                assert code == 0 or "cannot be locked" in text, text[-3000:]
            finished.run("--", GOAL)
            for _, log in runs:
                log.unlink()
            same(finished, reference)


@pytest.mark.timeout(3600)
def test_two_snakemakes_in_two_folders_on_one_run(faults: Faults, reference: Workdir, tmp_path: Path) -> None:
    """They share the results only: each file is written once, by one of them."""
    faults.skip_unless_all()
    target = Path(reference.settings["target"]["path"])
    for number in range(3):
        works = [new_workdir(tmp_path / f"{number}_{name}", target) for name in "ab"]
        shared = tmp_path / f"shared_{number}"
        shared.mkdir()
        for work in works:
            (work.path / "results").symlink_to(shared)
        with faults.tried("two snakemakes in two folders on one run"):
            runs = [start(work, "--", GOAL) for work in works]
            for process, log in runs:
                # one may find what the other is just replacing; then the same command goes on
                if process.wait(timeout=900):
                    assert "Traceback" not in log.read_text().replace("snakemake/", ""), log.read_text()[-3000:]
            for work in works:
                work.run("--", GOAL)
            patterns = ("hidden_states/*", "tokens/rows*", "conversations/*", "prompts/*")
            same(works[0], reference, *patterns)


@pytest.mark.timeout(1800)
def test_status_and_verify_during_a_run(faults: Faults, workdir: Workdir, reference: Workdir) -> None:
    process, log = start(workdir, *([] if faults.all else ["--", GOAL]))
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT / "workflow")}
    verdicts = set()
    asked = 0
    while process.poll() is None or not asked:
        for command in (["status", "--json"], ["verify", "tiny", "--json"]):
            with faults.tried(f"eyas {command[0]} during a run", asked):
                done = subprocess.run(
                    [sys.executable, "-m", "eyas.cli.main", *command], cwd=workdir.path, env=environment,
                    capture_output=True, text=True, timeout=300,
                )  # fmt: skip
                assert "Traceback" not in done.stderr, done.stderr[-3000:]
                if done.stdout.startswith("{"):
                    verdicts.add(str(json.loads(done.stdout).get("verdict", {}))[:40])
                else:  # nothing there yet
                    assert done.returncode and len(done.stderr.strip().splitlines()) == 1, done.stderr
        asked += 1
    assert process.wait() == 0, log.read_text()[-3000:]
    log.unlink()
    with faults.tried("eyas status and verify during a run: the bytes"):
        same(workdir, reference, "hidden_states/*")


def touch(work: Workdir, when) -> None:
    for file in work.run_folder.rglob("*"):
        if file.is_file():
            os.utime(file, (when(file), when(file)))


@pytest.mark.timeout(1800)
def test_times_that_say_nothing(faults: Faults, finished: Workdir, reference: Workdir) -> None:
    """Contents decide: nothing is done again because of a clock; what is deleted comes back as it was."""
    now = time.time()
    cases = {
        "files with equal mtimes": lambda file: now,
        "a clock that was set back: files from the future": lambda file: now + 3600,
        "a clock that was set back in the middle of a run": lambda file: now + 3600 * (file.parts[-2] in STAGES),
        "times in no order": lambda file: now - hash(file.name) % 9999,
    }
    for what, when in cases.items():
        with faults.tried(what):
            touch(finished, when)
            result = finished.dry_run()
            assert result.nothing_to_do, result.text[-3000:]
    with faults.tried("a clock that was set back: a file built after files from the future"):
        touch(finished, lambda file: now + 3600)
        (finished.run_folder / "tokens" / "rows_0-20.safetensors").unlink()
        # Snakemake makes no file that is older than what it is made of: it names both, and builds it when time is right.
        stopped = finished.snakemake()
        assert stopped.code == 1, stopped.text[-3000:]
        assert "older modification time" in stopped.text and "clock skew" in stopped.text, stopped.text[-3000:]
        touch(finished, lambda file: now)
        finished.run()
        same(finished, reference)
        assert finished.dry_run().nothing_to_do


LATE = """
import os, subprocess, sys
from pathlib import Path
code = subprocess.run([sys.executable, {script!r}, *sys.argv[1:]]).returncode
output = Path(sys.argv[sys.argv.index("--output") + 1])
if code == 0:
    hidden = output.with_name("." + output.name + ".late")
    os.rename(output, hidden)
    subprocess.Popen(["sh", "-c", "sleep 3; mv \\"$0\\" \\"$1\\"", hidden, output], start_new_session=True,
                     stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
sys.exit(code)
"""


@pytest.mark.timeout(1800)
def test_files_that_are_seen_late(faults: Faults, finished: Workdir, reference: Workdir, tmp_path: Path) -> None:
    """As on a network file system: the job is done, its output is there three seconds later."""
    checkout = tmp_path / "checkout"
    shutil.copytree(
        CHECKOUT, checkout, symlinks=True,
        ignore=shutil.ignore_patterns(".git", ".venv*", "results", "resources", ".snakemake", "tests", "benchmarks"),
    )  # fmt: skip
    late = Workdir(finished.path, finished.settings, checkout)
    scripts = {"write_manifest.py": GOAL, "map_vocabulary.py": "results/tiny/vocab_map/100.safetensors"}
    for script, goal in scripts.items():
        path = checkout / "workflow" / "scripts" / script
        path.write_text(LATE.format(script=str(CHECKOUT / "workflow" / "scripts" / script)))
        (finished.path / goal).unlink()
        with faults.tried("a network file system: files that are seen late", script):
            late.run("--", goal)
            assert finished.digests() == reference.digests()
