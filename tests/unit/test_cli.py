"""`eyas doctor` and `eyas verify` (a run of rows that come to several sequences; whole runs are in tests/workflow)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from drafter_reference import random_rows, read_json_file, save_llama, write_tokens
from eyas.cli.main import main
from eyas.cli.verify import verify_run
from eyas.conversations import Row, write_rows
from eyas.extraction.manifest import write_manifest
from eyas.extraction.shard import extract_shard
from eyas.shards import describe_file, write_page, write_sealed


def test_doctor_reports_what_is_there(capsys, tmp_path) -> None:
    assert main(["doctor", "--json", "--results", str(tmp_path / "results")]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ready"] and facts["problems"] == []
    assert facts["versions"]["torch"] and facts["cpus"] >= 1
    assert facts["file_system"] == {"write": True, "lock": True, "hard_links": True, "preallocate": True}
    assert not (tmp_path / "results").exists()


def test_doctor_says_what_is_missing(capsys, tmp_path, monkeypatch) -> None:
    from eyas.cli import doctor

    monkeypatch.setitem(doctor.NEEDS, "engine transformers", ["torch", "no-such-package"])
    assert main(["doctor", "--results", str(tmp_path)]) == 1
    assert "no-such-package" in capsys.readouterr().out


def test_verify_of_no_run(capsys, tmp_path) -> None:
    assert main(["verify", "nothing", "--results", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "no run 'nothing'" in error and "Traceback" not in error


ROW_IDS = [0, 0, 0, 1, 3, 3]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rows, two of which come to several sequences and one of which was skipped; no drafter yet."""
    folder = tmp_path_factory.mktemp("verify")
    run = folder / "results" / "several"
    for stage in ("prompts", "conversations"):
        (run / stage).mkdir(parents=True)
        file = run / stage / "rows_0-4.jsonl"
        write_rows(file, [Row(number, "set") for number in range(4)])
        described = [file]
        if stage == "prompts":
            described.append(file.with_name("skipped.jsonl"))
            described[1].write_text("")
        facts = {"rows": 4, "shard_rows": 4, "files": {path.name: describe_file(path) for path in described}}
        write_sealed(run / stage / ("index.json" if stage == "prompts" else "rows_0-4.json"), facts)
    rows = [(row, *rest) for row, (_, *rest) in zip(ROW_IDS, random_rows([5, 7, 4, 9, 3, 6]), strict=True)]
    tokens = write_tokens(run / "tokens" / "rows_0-4.safetensors", rows, skipped=(2,))
    supervised = int(sum(mask.sum() for _, _, mask in rows))
    counts = {"rows": 3, "sequences": 6, "tokens": 34, "supervised_tokens": supervised}
    write_sealed(tokens.with_suffix(".json"), read_json_file(tokens.with_suffix(".json")) | counts)
    states = run / "hidden_states" / tokens.name
    extract_shard(tokens, states, save_llama(folder / "target"), [0, 1, 3], "float32")
    write_manifest([states], 4, states.parent / "data_config.json")
    for name in ("statistics", "totals"):
        write_sealed(run / "tokens" / f"{name}.json", {"rows": 3})
    write_sealed(run / "summary.json", {"files": {}})
    write_page(run / "report.html", "<p>")
    return folder / "results"


UNFINISHED = ["vocab_map: no vocabulary map", "drafters: no drafter"]


def problems_of(results: Path) -> list[str]:
    """Problems beside those of a run that has no drafter yet."""
    found: list[str] = verify_run("several", results)["problems"]
    assert all(any(words in problem for problem in found) for words in UNFINISHED)
    return [problem for problem in found if not any(words in problem for words in UNFINISHED)]


def test_rows_of_several_sequences_are_well(results: Path) -> None:
    assert problems_of(results) == []


@pytest.mark.parametrize(
    "name, key, value, words",
    [
        ("tokens/rows_0-4.json", "rows", 6, "rows 3, expected 6"),
        ("tokens/rows_0-4.json", "sequences", 5, "sequences 6, expected 5"),
        ("tokens/rows_0-4.json", "skipped", [], "rows and skipped rows [0, 1, 3], expected [0, 1, 2, 3]"),
        ("hidden_states/rows_0-4.json", "sequences", 3, "sequences in its sidecar 3, expected 6"),
        ("hidden_states/data_config.json", "totals", {"sequences": 3}, "total sequences 3, expected 6"),
    ],
)
def test_wrong_counts_are_found(results: Path, name: str, key: str, value: object, words: str) -> None:
    path = results / "several" / name
    whole = path.read_bytes()
    facts = read_json_file(path)
    try:
        write_sealed(path, facts | {key: facts[key] | value if isinstance(value, dict) else value})
        found = problems_of(results)
        assert len(found) == 1 and found[0].startswith(str(path.with_suffix("")).removesuffix(".json"))
        assert words in found[0]
    finally:
        path.write_bytes(whole)


def test_states_of_other_sequences_are_found(results: Path) -> None:
    """The same tokens, cut at another place: sums and shapes agree."""
    path = results / "several" / "hidden_states" / "rows_0-4.safetensors"
    whole = path.read_bytes()
    offsets = np.array([0, 5, 12, 16, 25, 28, 34]).tobytes()
    assert whole.count(offsets) == 1
    try:
        path.write_bytes(whole.replace(offsets, np.array([0, 6, 12, 16, 25, 28, 34]).tobytes()))
        assert any("offsets agree with the tokens shard: False" in problem for problem in problems_of(results))
    finally:
        path.write_bytes(whole)


@pytest.mark.parametrize("name", ["prompts/skipped.jsonl", "tokens/statistics.json", "report.html"])
def test_files_that_no_sidecar_describes(results: Path, name: str) -> None:
    path = results / "several" / name
    whole = path.read_bytes()
    try:
        path.unlink()
        (problem,) = problems_of(results)
        assert problem.startswith(f"{path}: ") and "missing" in problem and "snakemake" in problem
        if path.suffix == ".json":
            path.write_text("{")
            (problem,) = problems_of(results)
            assert f"{path}: this statistics file cannot be read" in problem and "snakemake" in problem
    finally:
        path.write_bytes(whole)
