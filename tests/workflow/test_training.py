"""Training through real Snakemake: several processes, early stopping, the best epoch, event files, a damaged shard."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from workflow_runs import Workdir

DRAFTER = "results/tiny/drafters/small"


def remove_epochs(work: Workdir, *epochs: int) -> None:
    for epoch in epochs:
        shutil.rmtree(work.path / DRAFTER / f"epoch_{epoch}")


def losses(work: Workdir, epoch: int) -> list[float]:
    lines = (work.path / DRAFTER / f"epoch_{epoch}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def history(work: Workdir, epoch: int) -> list[dict]:
    return json.loads((work.path / DRAFTER / f"epoch_{epoch}" / "trainer_state.json").read_text())["history"]


def test_two_processes_train_like_one_and_write_event_files(finished: Workdir, reference: Workdir) -> None:
    remove_epochs(finished, 1)
    finished.settings["drafters"]["small"]["training"] |= {
        "threads": 2, "processes": 2, "parallel": "fsdp2", "tensorboard": True,
    }  # fmt: skip
    result = finished.run("--", f"{DRAFTER}/epoch_1/model.safetensors")
    assert "with 2 process(es) of 1 thread(s)" in result.text
    expected = losses(reference, 1)
    assert len(expected) == 16 and losses(finished, 1) == pytest.approx(expected, rel=1e-5)
    events = list((finished.run_folder / "logs" / "small" / "tensorboard").glob("events.out.tfevents.*"))
    assert len(events) == 1 and events[0].stat().st_size > 1000
    assert finished.leftovers() == []


# Stands for srun: starts the script twice, as on two machines. Real SLURM: tests/integration/slurm.
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do echo "srun was given $1" >&2; shift; done
export SLURM_LAUNCH_NODE_IPADDR=127.0.0.1 GLOO_SOCKET_IFNAME=lo
SLURM_NODEID=1 "$@" & other=$!
SLURM_NODEID=0 "$@"; first=$?
wait $other && exit $first
"""


def test_two_machines_train_like_one(finished: Workdir, reference: Workdir, monkeypatch: pytest.MonkeyPatch) -> None:
    remove_epochs(finished, 1)
    settings = finished.settings["drafters"]["small"]["training"]
    settings |= {"processes": 2, "nodes": 2, "threads": 1}
    alone = finished.snakemake("--", f"{DRAFTER}/epoch_1/model.safetensors")
    assert alone.code == 1
    assert "this job is to take 2 machines, which needs SLURM (--workflow-profile profiles/slurm)" in alone.text
    assert "Traceback" not in alone.text

    tools = finished.path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN)
    (tools / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    result = finished.run("--", f"{DRAFTER}/epoch_1/model.safetensors")
    for option in ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--kill-on-bad-exit=1"):
        assert f"srun was given {option}\n" in result.text
    assert "with 2 process(es) of 1 thread(s)" in result.text
    expected = losses(reference, 1)
    assert losses(finished, 1) == pytest.approx(expected, rel=1e-5)
    log = (finished.run_folder / "logs" / "small" / "epoch_1.log").read_text()
    assert log.count("Starting on 2 machines.") == 1 and log.count("Epoch 1: ") == 1
    assert finished.leftovers() == []


def test_early_stopping_repeats_the_last_epoch_and_the_best_is_exported(finished: Workdir) -> None:
    """A rate so high that epoch 2 is worse than epoch 1: with patience 1, epoch 3 is epoch 2 once more."""
    remove_epochs(finished, 1, 2)
    finished.settings["drafters"]["small"]["training"] |= {
        "early_stop": 1, "epochs": 3, "learning_rate": 0.01, "schedule": "constant", "loss_decay": 0.8, "grad_clip": 1.0,
    }  # fmt: skip
    finished.run("--", f"{DRAFTER}/epoch_1/model.safetensors")
    first = history(finished, 1)[0]["held_out"]["acceptance_length"]
    finished.settings["drafters"]["small"]["training"]["learning_rate"] = 5.0
    # only epoch 2 is trained with the high rate: --touch takes epoch 1 as it is
    finished.run("--touch", "--", f"{DRAFTER}/epoch_1/model.safetensors")
    finished.run("--", f"{DRAFTER}/export/sglang/model.safetensors")
    trained, last = history(finished, 2), history(finished, 3)
    assert trained[1]["held_out"]["acceptance_length"] < first
    assert last[2] == {"epoch": 3, "stopped_after": 2}
    folder = finished.path / DRAFTER
    for name in ("model.safetensors", "trainer_state.safetensors"):
        assert (folder / "epoch_3" / name).read_bytes() == (folder / "epoch_2" / name).read_bytes()
    assert json.loads((folder / "best" / "selection.json").read_text())["epoch"] == 1
    assert (folder / "best" / "model.safetensors").read_bytes() == (
        folder / "epoch_1" / "model.safetensors"
    ).read_bytes()
    assert finished.dry_run("--", f"{DRAFTER}/export/sglang/model.safetensors").nothing_to_do


def test_a_damaged_shard_is_refused_before_training(finished: Workdir) -> None:
    remove_epochs(finished, 1)
    shard = finished.run_folder / "hidden_states" / "rows_20-40.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    shard.write_bytes(damaged)
    # a file that changed would be made again with the manifest: take it as it is
    result = finished.snakemake("--rerun-triggers", "params", "--", f"{DRAFTER}/epoch_1/model.safetensors")
    path = Path("results/tiny/hidden_states/rows_20-40.safetensors")
    assert result.code == 1
    assert f"{path}: its checksum is not the manifest's" in result.text
    assert f"delete it and run `snakemake {path}`" in result.text
    assert "Traceback" not in result.text
