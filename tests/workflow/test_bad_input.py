"""Whatever a user gets wrong is one clear message with the place, and loses nothing."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
from workflow_runs import Result, Workdir


def refused(result: Result, *words: str) -> None:
    assert result.code == 1, result.text
    assert "Traceback" not in result.text, result.text
    for word in words:
        assert word in result.text, result.text


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("drafters.small.training.epocs", 3, ["drafters.small.training.epocs", "unknown key", "'epochs'"]),
        ("data.shard_rows", 0, ["data.shard_rows", "greater than or equal to 1"]),
        ("data.shard_rows", "many", ["data.shard_rows", "whole number", '"many"']),
        ("extraction.layers", [1, 2, 9], ["extraction.layers", "[1, 2, 9]", "0 to 3"]),
        ("extraction.layers", [2, 1, 3], ["extraction.layers", "ascending"]),
        ("drafters.small.draft_vocab_size", 100000, ["drafters.small.draft_vocab_size", "100000", "larger"]),
        ("name", "../up", ["name"]),
        ("target.path", "./nowhere", ["target.path", "./nowhere"]),
        ("data.prompts", ["none.jsonl"], ["data.prompts", "none.jsonl", "does not exist"]),
        ("results", "prompts.jsonl", ["results", "is a file"]),
    ],
)
def test_configuration(workdir: Workdir, path: str, value: object, words: list[str]) -> None:
    *sections, key = path.split(".")
    place = workdir.settings
    for section in sections:
        place = place[section]
    place[key] = value
    refused(workdir.dry_run(), *words)
    assert not (workdir.path / "results").exists()


def test_results_that_cannot_be_written(workdir: Workdir) -> None:
    workdir.settings["results"] = "/proc/eyas"
    refused(workdir.dry_run(), "results: cannot write in /proc")


def test_a_prompt_file_that_is_shorter_or_empty(workdir: Workdir) -> None:
    workdir.settings["data"]["rows"] = 50
    refused(workdir.snakemake(), "data.rows", "write data.rows: 40")
    workdir.settings["data"]["rows"] = "auto"
    assert workdir.dry_run().jobs["respond"] == 2
    (workdir.path / "prompts.jsonl").write_text("\n")
    refused(workdir.dry_run(), "data.prompts", "no prompts")


def test_bad_records_name_file_line_and_reason(workdir: Workdir) -> None:
    prompts = workdir.path / "prompts.jsonl"
    lines = prompts.read_text().splitlines()
    lines[3], lines[7] = "{not json", json.dumps({"messages": []})
    prompts.write_text("\n".join(lines))
    refused(workdir.snakemake("results/tiny/prompts/index.json"), "prompts.jsonl:4", "not JSON", "data.max_bad_rows")
    workdir.settings["data"]["max_bad_rows"] = 2
    workdir.run("results/tiny/prompts/index.json")
    rows = [json.loads(line) for line in (workdir.run_folder / "prompts" / "rows_0-20.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(20))
    assert {row["row"]: row["skipped"] for row in rows if "skipped" in row}.keys() == {3, 7}
    assert "empty conversation" in rows[7]["skipped"]


def test_a_target_without_tokenizer_or_chat_template(workdir: Workdir, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(workdir.settings["target"]["path"], folder)
    workdir.settings["target"]["path"] = str(folder)
    for name in ("chat_template.jinja",):
        (folder / name).unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    goal = "results/tiny/conversations/rows_0-20.jsonl"
    refused(workdir.snakemake(goal), "target.path", "no chat template")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    refused(workdir.dry_run(), "target.path", str(folder), "no tokenizer")


def test_not_enough_disk_is_an_error_before_any_work_and_loses_nothing(finished: Workdir, reference: Workdir) -> None:
    """A limit on the file size stands for the full disk: the allocation fails as it would there."""
    shutil.rmtree(finished.run_folder / "hidden_states")
    goal = "results/tiny/hidden_states/data_config.json"
    limit = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))}
    result = finished.snakemake(goal, **limit)
    refused(result, "no room for", "free disk space")
    assert "Loaded" not in result.text  # before the target was loaded
    finished.run(goal)
    assert finished.digests() == reference.digests()


def test_rows_over_the_limit_are_recorded_not_dropped(finished: Workdir) -> None:
    finished.settings["tokenization"]["max_length"] = 25
    finished.run("results/tiny/tokens/rows_0-20.json")
    facts = json.loads((finished.run_folder / "tokens" / "rows_0-20.json").read_text())
    assert facts["rows"] + len(facts["skipped"]) == 20
    assert facts["skipped"] and all("too long" in skip["reason"] for skip in facts["skipped"])
