"""A whole run under real SLURM: what is asked for, what runs at once, and what it survives."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

import pytest
from cluster import Cluster
from slurm_runs import SlurmWorkdir, gpus_of, interval, job_processes, most_gpus_at_once, rule_of
from workflow_runs import CHECKOUT, Workdir, new_workdir

GPUS = {"respond": 1, "extract": 8, "train_epoch": 2, "evaluate": 4}


def with_gpus(settings: dict) -> dict:
    """The tiny run with GPUs: one to answer, all of a node for a shard, two to train and four to measure."""
    settings["responses"]["gpu"] = GPUS["respond"]
    settings["extraction"]["gpu"] = GPUS["extract"]
    settings["drafters"]["small"]["training"] |= {"gpu": GPUS["train_epoch"], "threads": 2}
    settings["evaluation"]["gpu"] = GPUS["evaluate"]
    return settings


@pytest.mark.timeout(3600)
def test_a_run_survives_what_happens_on_a_cluster(
    cluster: Cluster, checkout: Path, local_run: Workdir, tiny_target: Path, tmp_path: Path
) -> None:
    plain = new_workdir(tmp_path / "work", tiny_target)
    work = SlurmWorkdir(plain.path, with_gpus(plain.settings), checkout, cluster)
    once = ("--retries", "0")  # Snakemake would try again by itself: here the same command is given again

    # A job that hits its time limit: it stands still until SLURM ends it. The other shard goes on.
    run = work.start(*once)
    try:
        run.until(lambda: bool((job := run.job("extract")) and job_processes(job, "extract.py")), "an extraction runs")
        late = run.job("extract")
        for pid in job_processes(late, "extract.py"):
            os.kill(pid, signal.SIGSTOP)
        cluster.command("scontrol", "update", f"JobId={late['JobId']}", "TimeLimit=1")
        assert run.wait() == 1
    finally:
        run.end()
    states = {job["JobId"]: job["JobState"] for job in cluster.jobs()}
    assert states[late["JobId"]] == "TIMEOUT"
    assert sorted(states.values()).count("TIMEOUT") == 1 and "FAILED" not in states.values()

    # A cancelled job; and an outage of SLURM while another one runs.
    run = work.start(*once)
    try:
        epoch = work.run_folder / "drafters" / "small" / ".staging"
        run.until(lambda: bool(run.job("train_epoch")) and any(epoch.rglob("*.safetensors")), "an epoch has a save")
        for line in (CHECKOUT / "docs" / "monitoring.md").read_text().splitlines():
            if line.startswith("squeue "):
                assert "rule_train_epoch" in cluster.command(*shlex.split(line))
        cancelled = run.job("train_epoch")
        assert cancelled is not None
        cluster.command("scancel", cancelled["JobId"])
        assert run.wait() == 1
    finally:
        run.end()
    assert run.text().count("Exiting because a job execution failed") == 2

    # A node set to drain: the job on it goes on to its end, the next ones wait; Ctrl-C takes them from the queue.
    run = work.start(*once)
    try:
        run.until(lambda: run.job("train_epoch") is not None, "an epoch runs")
        trained = run.job("train_epoch")
        cluster.stop_controller()
        with pytest.raises(RuntimeError):
            cluster.command("squeue")
        cluster.start_controller()
        cluster.command("scontrol", "update", "NodeName=n1", "State=DRAIN", "Reason=test")
        run.until(lambda: any(job["JobState"] == "PENDING" for job in cluster.jobs()), "a job waits")
        assert run.interrupt() != 0
    finally:
        run.end()
    by_id = {job["JobId"]: job for job in cluster.jobs()}
    assert by_id[trained["JobId"]]["JobState"] == "COMPLETED"
    assert cluster.command("squeue", "-h") == ""
    cluster.command("scontrol", "update", "NodeName=n1", "State=RESUME")

    run = work.start(*once)
    try:
        assert run.wait() == 0, run.text()[-6000:]
    finally:
        run.end()

    # The bytes of a run on this machine.
    assert work.digests() == local_run.digests()
    assert work.leftovers() == []

    # What SLURM gave, and when.
    jobs = [job for job in cluster.jobs() if job["NodeList"].startswith("n")]  # not those cancelled in the queue
    for rule, gpus in GPUS.items():
        given = [job for job in jobs if rule_of(job) == rule]
        assert given and {gpus_of(job) for job in given} == {gpus}, rule
        assert {job["NodeList"] for job in given} == {"n1"} and {job["NumNodes"] for job in given} == {"1"}
    assert {gpus_of(job) for job in jobs if rule_of(job) not in GPUS} == {0}
    assert "fetch_packaged_file" not in {rule_of(job) for job in jobs}
    whole_node = sorted(interval(job) for job in jobs if rule_of(job) == "extract")
    assert len(whole_node) >= 3
    for (_, end), (start, _) in zip(whole_node[:-1], whole_node[1:], strict=True):
        assert end <= start
    assert most_gpus_at_once(jobs) == 8
