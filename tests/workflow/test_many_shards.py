"""Jobs that make ranges of shards, with records in the shards' place: what a run of thousands of shards has."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from eyas.shards import describe_file, write_sealed
from workflow_runs import Workdir, new_workdir, tiny_settings

MANIFEST = "results/tiny/hidden_states/data_config.json"
STAGES = {"conversations": ".jsonl", "tokens": ".safetensors", "hidden_states": ".safetensors"}
ALL = ["results/tiny/vocab_map/100.json", MANIFEST]


def ranges(work: Workdir) -> None:
    """Four shards, of which a job makes two."""
    work.settings["data"] |= {"shard_rows": 10, "shards_per_job": 2}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Workdir:
    """Everything that training begins with, made in ranges; do not change it."""
    work = new_workdir(tmp_path_factory.mktemp("ranges") / "work", tiny_target)
    ranges(work)
    work.run(*ALL)
    return work


@pytest.fixture
def run(prepared: Workdir, tmp_path: Path) -> Workdir:
    shutil.copytree(prepared.path, tmp_path / "copy", symlinks=True)
    copy = Workdir(tmp_path / "copy", tiny_settings(Path(prepared.settings["target"]["path"])))
    ranges(copy)
    return copy


def planned(work: Workdir, *targets: str) -> dict[str, int]:
    """Jobs up to the manifest and the vocabulary, by rule."""
    before = ("respond", "tokenize", "extract", "write_manifest", "map_vocabulary", "count_tokens", "number_prompts")
    return {name: count for name, count in work.dry_run(*targets).jobs.items() if name.startswith(before)}


def contents(work: Workdir) -> dict[str, bytes]:
    return {
        f"{stage}/{file.name}": file.read_bytes()
        for stage, suffix in STAGES.items()
        for file in sorted((work.run_folder / stage).glob(f"rows_*{suffix}"))
    }


def test_ranges_make_what_single_jobs_make_and_either_finds_the_others(run: Workdir) -> None:
    made = contents(run)
    assert len(made) == 12
    assert run.dry_run(*ALL).nothing_to_do and planned(run) == {}
    record = json.loads((run.run_folder / "tokens/ranges/rows_0-20.json").read_text())
    sidecar = json.loads((run.run_folder / "tokens/rows_10-20.json").read_text())
    assert list(record["files"]) == ["rows_0-10.safetensors", "rows_10-20.safetensors"]
    assert record["files"]["rows_10-20.safetensors"] == sidecar["files"]["rows_10-20.safetensors"]

    # Other cuts find the shards that are there: nothing is decoded or captured again.
    for count in (4, 1):
        run.settings["data"]["shards_per_job"] = count
        (run.run_folder / MANIFEST.split("/", 2)[2]).unlink()
        run.run(*ALL)
        assert contents(run) == made
        logs = [file.read_text() for stage in ("responses", "hidden_states") for file in
                (run.run_folder / "logs" / stage).glob("rows_0-40.log")]  # fmt: skip
        assert count != 4 or len(logs) == 2
        assert not any("Loaded " in text or "Wrote " in text for text in logs)

    # What single jobs make has the same bytes.
    for stage, suffix in STAGES.items():
        for end in {".json", suffix}:
            (run.run_folder / stage / f"rows_0-10{end}").unlink()
    shutil.rmtree(run.run_folder / "hidden_states" / ".finished")
    run.run("results/tiny/hidden_states/rows_0-10.safetensors")
    assert contents(run) == made


def test_deleted_shards_are_made_again_alone(run: Workdir) -> None:
    made = contents(run)
    states = run.run_folder / "hidden_states"
    (states / "rows_20-30.safetensors").unlink()
    assert planned(run) == {"extract_rows_20-40": 1, "write_manifest": 1}
    shutil.rmtree(states / ".finished")  # the second links, from which they would come back
    run.run("results/tiny/hidden_states/rows_20-30.safetensors")
    assert contents(run) == made
    log = (run.run_folder / "logs/hidden_states/rows_20-40.log").read_text()
    assert "rows_20-30: " in log and "rows_30-40.safetensors is finished already" in log

    # Two stages at once.
    (run.run_folder / "tokens" / "rows_0-10.json").unlink()
    (states / "rows_20-30.json").unlink()
    jobs = planned(run)
    assert jobs == {
        "tokenize_rows_0-20": 1, "count_tokens": 1, "extract_rows_0-20": 1, "extract_rows_20-40": 1,
        "map_vocabulary": 1, "write_manifest": 1,
    }  # fmt: skip
    run.run("results/tiny/tokens/rows_0-10.json")
    run.run("results/tiny/hidden_states/rows_20-30.json")
    log = (run.run_folder / "logs/tokens/rows_0-20.log").read_text()
    assert "rows_10-20.safetensors is finished already" in log and "Wrote" in log
    run.run(*ALL)
    assert contents(run) == made
    assert planned(run) == {}


def test_a_shard_that_was_changed_re_runs_what_reads_it(run: Workdir) -> None:
    file = run.run_folder / "conversations" / "rows_20-30.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0]["messages"][-1]["content"] += " ."
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = file.with_suffix(".json")
    write_sealed(record, json.loads(record.read_text()) | {"files": {file.name: describe_file(file)}})
    jobs = planned(run)
    assert jobs.pop("tokenize_rows_20-40") == 1 and not any(name.startswith(("respond", "tokenize")) for name in jobs)
    before = contents(run)
    run.run(*ALL)
    assert {name for name, content in contents(run).items() if content != before[name]} == {
        "tokens/rows_20-30.safetensors", "hidden_states/rows_20-30.safetensors",
    }  # fmt: skip
    assert planned(run) == {}


def test_settings_re_run_whole_ranges(run: Workdir) -> None:
    run.settings["tokenization"]["max_length"] = 127
    jobs = planned(run)
    assert jobs["tokenize_rows_0-20"] == jobs["tokenize_rows_20-40"] == jobs["extract_rows_0-20"] == 1
    assert jobs["respond_rows_0-20"] == 1  # what fits the prompt


def test_a_killed_range_keeps_its_finished_shards(workdir: Workdir) -> None:
    ranges(workdir)
    folder = workdir.run_folder / "conversations"
    target = "results/tiny/conversations/ranges/rows_0-20.json"
    workdir.kill_during(lambda: (folder / "rows_0-10.json").exists(), target)
    first = folder / "rows_0-10.jsonl"
    before = first.stat().st_mtime_ns
    workdir.run(target)
    assert first.stat().st_mtime_ns == before
    assert workdir.dry_run(target).nothing_to_do
