"""`eyas verify` finds every damaged or missing file of a real run, and says how to rebuild it."""

from __future__ import annotations

import pytest
from eyas.cli.verify import verify_run
from eyas.shards import read_json, write_sealed
from workflow_runs import Workdir

FILES = [
    "prompts/rows_0-20.jsonl",
    "conversations/rows_20-40.jsonl",
    "tokens/rows_0-20.safetensors",
    "hidden_states/rows_20-40.safetensors",
    "vocab_map/100.safetensors",
    "drafters/small/epoch_0/model.safetensors",
    "drafters/small/epoch_1/trainer_state.safetensors",
    "drafters/small/epoch_2/config.json",
    "drafters/small/export/sglang/model.safetensors",
    "drafters/small/export/vllm/config.json",
]


def test_a_finished_run_is_well(reference: Workdir) -> None:
    result = verify_run("tiny", reference.path / "results")
    assert result["problems"] == []
    assert result["files"] > 25 and result["bytes"] > 1_000_000


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_a_cut_and_a_missing_file_are_found(finished: Workdir, name: str) -> None:
    file = finished.run_folder / name
    whole = bytearray(file.read_bytes())
    damaged = bytearray(whole)
    damaged[len(damaged) * 2 // 3] ^= 1
    for content in (damaged, whole[:-7], None):
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        problems = verify_run("tiny", finished.path / "results")["problems"]
        assert any(str(file) in problem and "snakemake" in problem for problem in problems), problems
        file.write_bytes(whole)
    assert verify_run("tiny", finished.path / "results")["problems"] == []


@pytest.mark.parametrize("name", ["prompts/skipped.jsonl", "tokens/statistics.json", "report.html"])
def test_a_missing_file_that_no_sidecar_describes_is_found(finished: Workdir, name: str) -> None:
    file = finished.run_folder / name
    file.unlink()
    (problem,) = verify_run("tiny", finished.path / "results")["problems"]
    assert problem.startswith(f"{file}: ") and "missing" in problem and "snakemake" in problem


def test_shards_of_two_runs_swapped_are_found(finished: Workdir) -> None:
    """Both files are whole, but not where they belong."""
    folder = finished.run_folder / "tokens"
    first, second = folder / "rows_0-20.safetensors", folder / "rows_20-40.safetensors"
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b), second.write_bytes(a)
    assert verify_run("tiny", finished.path / "results")["problems"]


def test_a_manifest_that_contradicts_its_shards(finished: Workdir) -> None:
    path = finished.run_folder / "hidden_states" / "data_config.json"
    values = read_json(path)
    values["totals"]["tokens"] += 1
    write_sealed(path, values)
    problems = verify_run(str(finished.run_folder), finished.path / "elsewhere")["problems"]
    assert len(problems) == 1 and "total tokens" in problems[0]


def test_an_unfinished_run_is_not_well(finished: Workdir) -> None:
    (finished.run_folder / "hidden_states" / "data_config.json").unlink()
    assert any("data_config.json" in p for p in verify_run("tiny", finished.path / "results")["problems"])
