"""The profile for Kubernetes, with a stand-in for kubectl: what it is handed, and what Snakemake makes of its answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from workflow_runs import CHECKOUT, Workdir

PROFILE = CHECKOUT / "profiles" / "kubernetes"
PROMPTS, ANSWERS = "results/tiny/prompts/index.json", "results/tiny/conversations/rows_0-20.jsonl"


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where the stand-in keeps what it was handed."""
    tools, kept = tmp_path / "tools", tmp_path / "jobs"
    tools.mkdir()
    kept.mkdir()
    kubectl = tools / "kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{CHECKOUT / "tests" / "fake_kubectl.py"}" "$@"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    for name, value in {
        "FAKE_KUBERNETES": str(kept), "EYAS_K8S_IMAGE": "registry.example/eyas:1", "EYAS_K8S_CLAIM": "shared",
        "EYAS_K8S_MOUNT": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return kept


def handed(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.job.json"))]


def call(script: str, *words: str) -> subprocess.CompletedProcess:
    program = [sys.executable] if script.endswith(".py") else []
    return subprocess.run([*program, str(PROFILE / script), *words], capture_output=True, text=True, timeout=120)


def submit(jobscript: Path, gpu: int = 8) -> subprocess.CompletedProcess:
    return call(
        "submit.py", "--rule", "extract_rows_0-999", "--threads", "8", "--gpu", str(gpu), "--memory-mb", "232000",
        "--minutes", "1440", str(jobscript),
    )  # fmt: skip


def test_jobs_run_through_kubectl(workdir: Workdir, jobs: Path) -> None:
    command = workdir.command(PROMPTS, ANSWERS)
    at = command.index("--workflow-profile") + 1
    command[at] = str(PROFILE)
    (jobs / "outage").touch()  # the first question has no answer
    done = subprocess.run(command, cwd=workdir.path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (workdir.path / ANSWERS).stat().st_size > 0
    first, second = sorted(handed(jobs), key=lambda job: job["metadata"]["labels"]["eyas-rule"])
    assert [job["metadata"]["labels"]["eyas-rule"] for job in (first, second)] == ["number-prompts", "respond"]
    assert first["spec"]["activeDeadlineSeconds"] == 4 * 3600 and second["spec"]["activeDeadlineSeconds"] == 24 * 3600
    for job, memory in ((first, "8000M"), (second, "12000M")):
        (container,) = job["spec"]["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"memory": memory, "nvidia.com/gpu": "0"}


def test_a_job_with_gpus(jobs: Path, tmp_path: Path) -> None:
    script = tmp_path / "work" / "job.sh"
    script.parent.mkdir()
    script.write_text("exit 3\n")
    submitted = submit(script)
    assert submitted.returncode == 0, submitted.stderr
    (job,) = handed(jobs)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "232000M"}, "limits": {"memory": "232000M", "nvidia.com/gpu": "8"},
    }  # fmt: skip
    assert container["image"] == "registry.example/eyas:1" and container["command"] == ["/bin/sh", str(script)]
    assert pod["restartPolicy"] == "Never" and job["spec"]["backoffLimit"] == 0
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "shared"}

    name = submitted.stdout.strip()
    assert name.startswith("eyas-extract-rows-0-999-")
    answers = {"running"}
    while answers == {"running"}:
        answers = {call("status.sh", name).stdout.strip()}
    assert answers == {"failed"}
    assert call("cancel.sh", name).returncode == 0
    assert call("status.sh", name).stdout == "failed\n"  # it is gone


def test_what_is_missing_is_one_message(jobs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = submit(Path("/usr/job.sh"))
    assert outside.returncode == 1
    assert outside.stderr == f"error: /usr is not below {tmp_path} (EYAS_K8S_MOUNT): pods would not find it\n"
    monkeypatch.delenv("EYAS_K8S_IMAGE")
    monkeypatch.delenv("EYAS_K8S_CLAIM")
    unset = submit(tmp_path / "job.sh")
    assert unset.returncode == 1
    assert unset.stderr.startswith("error: EYAS_K8S_IMAGE, EYAS_K8S_CLAIM must be set: ")
    assert handed(jobs) == []
