"""Extraction jobs of several shards, and the configurations for large targets, under real Snakemake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml
from workflow_runs import CHECKOUT, Workdir

NAMES = ["rows_0-20.safetensors", "rows_20-40.safetensors"]
STATES = [f"results/tiny/hidden_states/{name}" for name in ["data_config.json", *NAMES]]


def test_a_job_of_two_shards_makes_what_two_jobs_make(workdir: Workdir, reference: Workdir) -> None:
    workdir.settings["extraction"]["shards_per_job"] = 2
    workdir.run(*STATES)
    folder = workdir.run_folder / "hidden_states"
    for name in NAMES:
        assert (folder / name).read_bytes() == (reference.run_folder / "hidden_states" / name).read_bytes()
        assert os.path.samefile(folder / name, folder / ".finished" / name)
    log = workdir.run_folder / "logs" / "hidden_states" / "rows_0-40.log"
    assert log.read_text().count("Loaded ") == 1
    assert workdir.dry_run(*STATES).nothing_to_do

    # A deleted shard comes back from its second link: nothing is captured.
    (folder / NAMES[0]).unlink()
    workdir.run(*STATES)
    assert "Loaded " not in log.read_text()  # Snakemake begins a log anew
    assert (folder / NAMES[0]).read_bytes() == (reference.run_folder / "hidden_states" / NAMES[0]).read_bytes()

    # One whose contents went bad is made again, alone.
    with open(folder / NAMES[1], "r+b") as file:
        file.seek(4000)
        file.write(b"\xff\xff\xff\xff")
    (folder / NAMES[1]).unlink()
    workdir.run(*STATES)
    text = log.read_text()
    assert text.count("Loaded ") == 1 and "rows_20-40.safetensors is damaged" in text and "rows_0-20: " not in text
    for name in NAMES:
        assert (folder / name).read_bytes() == (reference.run_folder / "hidden_states" / name).read_bytes()

    # Jobs cut in another way find what is there.
    del workdir.settings["extraction"]["shards_per_job"]
    workdir.run(*STATES)
    for name in NAMES:
        assert "Loaded " not in (log.parent / name).with_suffix(".log").read_text()
        assert (folder / name).read_bytes() == (reference.run_folder / "hidden_states" / name).read_bytes()


def test_a_failed_job_keeps_its_finished_shards(workdir: Workdir) -> None:
    workdir.settings["extraction"]["shards_per_job"] = 2
    workdir.kill_during(
        lambda: (workdir.run_folder / "hidden_states" / ".finished" / "rows_0-20.json").exists(), *STATES
    )
    first = workdir.run_folder / "hidden_states" / ".finished" / "rows_0-20.safetensors"
    before = first.stat().st_ino
    workdir.run(*STATES)
    assert (workdir.run_folder / "hidden_states" / "rows_0-20.safetensors").stat().st_ino == before


@pytest.mark.parametrize("name", ["kimi-k2.5", "qwen3-8b"])
def test_configurations_for_large_targets_need_nothing_for_a_dry_run(name: str, tmp_path: Path) -> None:
    work = Workdir(tmp_path, yaml.safe_load((CHECKOUT / "config" / f"{name}.yaml").read_text()))
    result = work.snakemake("--dry-run", "--printshellcmds", "--resources", "gpu=8")
    assert result.code == 0, result.text[-3000:]
    gpus = {"kimi-k2.5": 8, "qwen3-8b": 1}[name]
    assert f"-m sglang.launch_server --model-path {work.settings['target']['path']}" in result.text
    assert f"--tp {gpus} " in result.text and "--disable-radix-cache" in result.text
    assert "extract_rows_0-999" in result.text and f"gpu={gpus}" in result.text
    assert not (tmp_path / "results").exists()
