"""Answers over an endpoint as part of a run: the rule, its resource, and what a change of it re-runs."""

from __future__ import annotations

import json
from pathlib import Path

from eyas.conversations import read_rows
from fake_endpoint import FakeEndpoint, replay
from workflow_runs import ROWS, Workdir

GOALS = ("results/tiny/conversations/rows_0-20.jsonl", "results/tiny/conversations/rows_20-40.jsonl")
KEY = "sk-do-not-show-0123456789"


def over_endpoint(work: Workdir, url: str, **changes: object) -> None:
    work.settings["responses"] = {
        "engine": "openai", "max_new_tokens": 64,
        "endpoint": {"urls": [url], "model": "it's a {model}", "api_key_env": "EYAS_TEST_KEY", **changes},
    }  # fmt: skip


def test_a_run_asks_the_endpoint_once_for_each_row(workdir: Workdir, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    with FakeEndpoint(tmp_path / "requests.log") as fake:
        over_endpoint(workdir, fake.url)
        result = workdir.run("--", *GOALS)
        rows = [row for goal in GOALS for row in read_rows(workdir.path / goal)]
        assert [row.row for row in rows] == list(range(ROWS)) and not any(row.skipped for row in rows)
        for row in rows:
            row.messages, said = row.messages[:-1], row.messages
            assert said == replay(row, 64)[0]
        assert len(fake.requests()) == ROWS
        assert {entry["body"]["model"] for entry in fake.requests()} == {"it's a {model}"}
        assert {entry["key"] for entry in fake.requests()} == {f"Bearer {KEY}"}
        # How the endpoint is used re-runs nothing; another model does.
        over_endpoint(workdir, "http://127.0.0.1:9/v1", concurrency=3, max_tries=2)
        assert workdir.dry_run("--", *GOALS).nothing_to_do
        over_endpoint(workdir, fake.url, model="another")
        assert workdir.dry_run("--", *GOALS).jobs == {"respond": 2}
    assert workdir.leftovers() == []
    assert KEY not in result.text
    written = [path for path in workdir.path.rglob("*") if path.is_file()]
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []


def test_a_dead_endpoint_is_one_message(workdir: Workdir, monkeypatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    over_endpoint(workdir, "http://127.0.0.1:9/v1", outage_minutes=0)
    result = workdir.snakemake("--", GOALS[0])
    assert result.code == 1 and "responses.endpoint.urls: no answer for" in result.text
    assert "Traceback" not in result.text
    facts = json.loads((workdir.run_folder / "prompts" / "index.json").read_text())
    assert facts["rows"] == ROWS
