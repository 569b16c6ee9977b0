"""SIGKILL of everything during each stage, then the same command: the same bytes as an undisturbed run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from workflow_runs import CHECKOUT, Workdir

SHARD = "rows_20-40"
# stage: (its outputs, what the log or journal holds when it is in the middle)
STAGES = {
    "prompts": (["prompts"], ("logs/prompts.log", "")),
    "responses": (
        [f"conversations/{SHARD}.jsonl", f"conversations/{SHARD}.json"],
        (f"conversations/.staging/{SHARD}/journal.jsonl", '"row"'),
    ),
    "tokens": ([f"tokens/{SHARD}.safetensors", f"tokens/{SHARD}.json"], (f"logs/tokens/{SHARD}.log", "")),
    "hidden_states": (
        [f"hidden_states/{SHARD}.safetensors", f"hidden_states/{SHARD}.json"],
        (f"hidden_states/.staging/{SHARD}/journal.jsonl", '"sequence"'),
    ),
    "manifest": (["hidden_states/data_config.json"], ("logs/manifest.log", "")),
    "vocabulary": (["vocab_map"], ("logs/vocab_map/100.log", "")),
    "initialisation": (["drafters/small/epoch_0"], ("logs/small/epoch_0.log", "")),
    "training": (["drafters/small/epoch_1"], ("logs/small/epoch_1.log", "Saved after 5 of 16 batches")),
    "evaluation": (["drafters/small/evaluation.json"], ("logs/small/evaluation.log", "Prompt set held_out")),
    "export": (["drafters/small/export"], ("logs/small/export_sglang.log", "")),
    "summary": (["summary.txt", "summary.json"], ("logs/summary.log", "")),
}


def goals(reference: Workdir, outputs: list[str]) -> list[str]:
    """Every file of a stage, as targets for Snakemake."""
    files: list[str] = []
    for output in outputs:
        path = reference.run_folder / output
        found = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        files += [p.relative_to(reference.path).as_posix() for p in found]
    return files


def remove(work: Workdir, outputs: list[str]) -> None:
    for output in outputs:
        path = work.run_folder / output
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def in_the_middle(work: Workdir, file: str, text: str):
    path = work.run_folder / file

    def condition() -> bool:
        try:
            return text in path.read_text() if text else path.exists()
        except OSError:
            return False

    return condition


@pytest.mark.parametrize("stage", STAGES)
def test_kill_everything_and_run_again(stage: str, finished: Workdir, reference: Workdir) -> None:
    outputs, (file, text) = STAGES[stage]
    wanted = goals(reference, outputs)
    remove(finished, outputs)
    shutil.rmtree(finished.run_folder / "logs")
    finished.kill_during(in_the_middle(finished, file, text), "--", *wanted)
    before = (finished.run_folder / file).read_text()
    result = finished.run("--", *wanted)
    assert finished.digests() == reference.digests()
    assert finished.leftovers() == []
    if stage == "training":
        assert "Going on after" in result.text
    if file.endswith("journal.jsonl"):
        # finished rows were kept, not made again
        assert f"Resuming {SHARD}" in result.text and len(before.splitlines()) > 1


def test_the_job_of_a_killed_snakemake_and_its_successor(finished: Workdir, reference: Workdir) -> None:
    """SIGKILL of Snakemake alone leaves its job running: the next one waits for it or takes its result."""
    goal = f"results/tiny/hidden_states/{SHARD}.safetensors"
    remove(finished, [f"hidden_states/{SHARD}.safetensors", f"hidden_states/{SHARD}.json"])
    shutil.rmtree(finished.run_folder / "logs")
    lock = finished.run_folder / "hidden_states" / f".{SHARD}.safetensors.lock"
    finished.kill_during(lock.exists, "--", goal, only_snakemake=True)
    finished.run("--", goal)
    assert finished.digests() == reference.digests()
    assert finished.leftovers() == []


def test_a_second_snakemake_in_the_same_folder_is_refused_while_the_first_runs(finished: Workdir) -> None:
    goal = f"results/tiny/hidden_states/{SHARD}.safetensors"
    remove(finished, [f"hidden_states/{SHARD}.safetensors", f"hidden_states/{SHARD}.json"])
    first = subprocess.Popen(finished.command("--", goal), cwd=finished.path, stderr=subprocess.PIPE, text=True)
    lock = finished.run_folder / "hidden_states" / f".{SHARD}.safetensors.lock"
    while not lock.exists():
        assert first.poll() is None
        time.sleep(0.002)
    second = finished.snakemake("--", goal)
    assert second.code == 1 and "cannot be locked" in second.text
    assert first.wait(timeout=300) == 0, first.stderr.read()[-3000:]


def test_two_jobs_for_one_output_write_it_once(finished: Workdir, reference: Workdir) -> None:
    """Two snakemakes in different folders over the same results come down to this."""
    remove(finished, [f"hidden_states/{SHARD}.safetensors", f"hidden_states/{SHARD}.json"])
    target = {"path": finished.settings["target"]["path"], "revision": None, "dtype": "float32"}
    command = [
        sys.executable, str(CHECKOUT / "workflow" / "scripts" / "extract.py"),
        "--run", "results/tiny", "--rows", SHARD, "--total-rows", "40", "--shard-rows", "20", "--target",
        json.dumps(target), "--settings", '{"layers": null, "dtype": "bfloat16"}', "--batch-tokens", "64",
    ]  # fmt: skip
    environment = {"PYTHONPATH": str(CHECKOUT / "workflow"), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"}
    jobs = [
        subprocess.Popen(command, cwd=finished.path, env=environment, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    texts = [job.communicate(timeout=300)[1] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], texts
    assert sorted("is finished already" in text for text in texts) == [False, True]
    assert finished.digests() == reference.digests()
    assert finished.leftovers() == []


def test_ctrl_c_is_survived(workdir: Workdir, reference: Workdir) -> None:
    """SIGINT to Snakemake and its jobs, as a terminal sends it, in the middle of the responses."""
    import os
    import signal

    goal = "results/tiny/conversations/rows_0-20.jsonl"
    process = subprocess.Popen(
        workdir.command("--", goal), cwd=workdir.path, start_new_session=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    journal = workdir.run_folder / "conversations" / ".staging" / "rows_0-20" / "journal.jsonl"
    while not journal.exists():
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=120)[0]
    assert process.returncode != 0
    assert "Traceback" not in text.split("Stopped by the user")[0] or "Stopped by the user" in text
    workdir.run("--", goal)
    name = Path(goal).name
    assert workdir.digests(name) == reference.digests(name)
