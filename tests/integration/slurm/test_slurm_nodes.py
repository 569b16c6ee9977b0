"""Two nodes under real SLURM: replicas of extraction side by side, and training over both."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from cluster import Cluster
from slurm_runs import SlurmWorkdir, gpus_of, interval, rule_of
from workflow_runs import CHECKOUT, Workdir, new_workdir

STATES = [f"results/tiny/hidden_states/rows_{rows}.safetensors" for rows in ("0-20", "20-40")]
EPOCHS = "results/tiny/drafters/small"

# Called as the Python of an SGLang environment. It begins to serve when the other replica's server is there, too.
SERVER = """#!{python}
import os, sys, time
from pathlib import Path
given = dict(zip(sys.argv[1:], sys.argv[2:]))
notes = Path({notes!r}, os.environ["SLURM_JOB_ID"])
notes.mkdir()
give_up = time.monotonic() + 240
while len(list(notes.parent.iterdir())) < 2:
    if time.monotonic() > give_up:
        sys.exit("the other replica's server never came")
    time.sleep(0.1)
words = [word for name in ("--host", "--port", "--config") for word in (name, given[name])]
os.execv(sys.executable, [sys.executable, {fake!r}, "--target", {target!r}, "--notes", str(notes), *words])
"""


@pytest.mark.timeout(1800)
def test_each_replica_has_an_allocation_of_its_own(
    cluster: Cluster, checkout: Path, tiny_target: Path, tmp_path: Path
) -> None:
    plain = new_workdir(tmp_path / "work", tiny_target)
    work = SlurmWorkdir(plain.path, plain.settings, checkout, cluster, "pair")
    notes, dumps, server = (tmp_path / name for name in ("notes", "dumps", "server"))
    notes.mkdir()
    dumps.mkdir()
    fake = CHECKOUT / "tests" / "fake_sglang.py"
    values = {"python": sys.executable, "notes": str(notes), "fake": str(fake), "target": str(tiny_target)}
    server.write_text(SERVER.format(**values))
    server.chmod(0o755)
    work.settings["responses"] = {"max_new_tokens": 8}
    work.settings["extraction"] = {
        "engine": "sglang", "layers": [0, 1, 2], "dtype": "float32", "replicas": 2, "gpu": 8,
        "sglang": {"python": str(server), "tp": 8, "dump_folder": str(dumps), "concurrency": 2},
    }  # fmt: skip
    run = work.start("--", *STATES)
    try:
        assert run.wait() == 0, run.text()[-6000:]
    finally:
        run.end()
    jobs = {rule_of(job): job for job in cluster.jobs() if gpus_of(job)}
    assert sorted(jobs) == ["extract_rows_0-20", "extract_rows_20-40"]
    assert {gpus_of(job) for job in jobs.values()} == {8}
    assert {job["NodeList"] for job in jobs.values()} == {"n1", "n2"}
    (first_start, first_end), (second_start, second_end) = (interval(job) for job in jobs.values())
    assert max(first_start, second_start) <= min(first_end, second_end)
    assert len(list(notes.glob("*/*.start"))) == 2  # a server a replica


@pytest.mark.timeout(1800)
def test_training_over_two_nodes_is_training_in_one_process(
    cluster: Cluster, checkout: Path, local_run: Workdir, tmp_path: Path
) -> None:
    path = tmp_path / "work"
    shutil.copytree(local_run.path, path, symlinks=True)
    settings = json.loads(json.dumps(local_run.settings))
    work = SlurmWorkdir(path, settings, checkout, cluster, "pair", {"GLOO_SOCKET_IFNAME": "lo"})
    for epoch in (1, 2):
        shutil.rmtree(path / EPOCHS / f"epoch_{epoch}")
    training = settings["drafters"]["small"]["training"]
    training |= {"gpu": 2, "processes": None, "nodes": 2, "threads": 1}
    for epoch, form in ((1, {}), (2, {"EYAS_SLURM_GRES": "gpu"})):
        work.environment |= form
        run = work.start("--", f"{EPOCHS}/epoch_{epoch}/model.safetensors")
        try:
            assert run.wait() == 0, run.text()[-6000:]
        finally:
            run.end()
        job = cluster.jobs()[-1]
        assert (rule_of(job), job["NodeList"], job["NumNodes"]) == ("train_epoch", "n[1-2]", "2")
        assert job["TresPerNode" if form else "TresPerJob"].endswith(f"gpu:{1 if form else 2}")
    log = (work.run_folder / "logs" / "small" / "epoch_1.log").read_text()
    assert "Starting on 2 machines." in log and "with 2 process(es) of 1 thread(s)" in log

    def losses() -> list[float]:
        files = [path / EPOCHS / f"epoch_{epoch}" / "metrics.jsonl" for epoch in (1, 2)]
        return [json.loads(line)["loss"] for file in files for line in file.read_text().splitlines()]

    over_nodes = losses()
    training |= {"gpu": 0, "processes": 1, "nodes": 1}
    for epoch in (1, 2):
        shutil.rmtree(path / EPOCHS / f"epoch_{epoch}")
    Workdir(path, settings).run("--", f"{EPOCHS}/epoch_2/model.safetensors")
    assert len(over_nodes) == 32 and over_nodes == pytest.approx(losses(), rel=1e-4)
