"""`eyas plan` and `eyas status` beside a real Snakemake: before, after, and when everything was killed."""

from __future__ import annotations

import json

import pytest
from eyas.cli.main import main
from workflow_runs import Workdir

SHARD = "rows_20-40"


def ask(capsys: pytest.CaptureFixture[str], command: str, work: Workdir) -> dict:
    main([command, "tiny", "--results", str(work.path / "results"), "--json"])
    return json.loads(capsys.readouterr().out)


def test_a_finished_run(finished: Workdir, capsys: pytest.CaptureFixture[str]) -> None:
    status = ask(capsys, "status", finished)
    assert (status["verdict"], status["jobs"], status["failures"]) == ("complete", [], [])
    assert all(stage["done"] == stage["total"] for stage in status["stages"])
    states = status["hidden_states"]
    files = list((finished.run_folder / "hidden_states").glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    assert (states["rows_done"], states["bytes_written"], states["bytes_left"]) == (40, size, 0)
    assert states["tokens"] == states["tokens_done"] and states["exact"]
    plan = ask(capsys, "plan", finished)
    assert (plan["state_bytes"], plan["bytes_left"], plan["tokens"]) == (size, 0, states["tokens"])
    whole = sum(file.stat().st_size for file in (finished.run_folder / "hidden_states").iterdir())
    assert plan["total_bytes"] == pytest.approx(whole + 4096, abs=1500)  # sidecars are small, and estimated


def test_a_run_that_was_killed_and_goes_on(finished: Workdir, capsys: pytest.CaptureFixture[str]) -> None:
    states = finished.run_folder / "hidden_states"
    for kind in ("safetensors", "json"):
        (states / f"{SHARD}.{kind}").unlink()
    target = f"results/tiny/hidden_states/{SHARD}.safetensors"
    journal = states / ".staging" / SHARD / "journal.jsonl"
    record = (finished.run_folder / "logs" / "jobs" / "run.json").read_bytes()
    assert "left to write" not in finished.dry_run(target).text
    assert (finished.run_folder / "logs" / "jobs" / "run.json").read_bytes() == record
    needed = ask(capsys, "plan", finished)["bytes_left"]
    assert needed > 0

    finished.kill_during(lambda: journal.is_file() and '"sequence"' in journal.read_text(), target)
    status = ask(capsys, "status", finished)
    assert status["verdict"] == "stalled" and status["since"]
    assert f"heartbeat of hidden_states/{SHARD}" in status["reason"] and "Snakemake" in status["reason"]
    found = status["hidden_states"]
    assert 0 < found["rows_in_unfinished_shards"] == found["rows_done"] - 20 and found["bytes_left"] > 0
    assert ask(capsys, "plan", finished)["bytes_left"] == 0  # the file is allocated

    text = finished.run(target).text
    assert "tiny: 40 rows in 2 shards" in text and "0 (0 bytes) left to write" in text
    status = ask(capsys, "status", finished)
    assert status["jobs"] == [] and status["hidden_states"]["rows_done"] == 40


def test_a_job_that_fails(workdir: Workdir, capsys: pytest.CaptureFixture[str]) -> None:
    (workdir.path / "prompts.jsonl").write_text("not JSON\n" * 40)
    assert workdir.snakemake("results/tiny/prompts/index.json").code == 1
    status = ask(capsys, "status", workdir)
    assert (status["verdict"], status["job"]) == ("failed", "prompts")
    assert "bad record(s)" in status["text"] and status["log"].endswith("logs/prompts.log")
