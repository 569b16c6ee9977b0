"""`evaluation.engine: sglang` in Snakemake: what it depends on, what it shows and starts, what re-runs it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from workflow_runs import CHECKOUT, Workdir

pytestmark = pytest.mark.timeout(1800)  # a whole run, on machines that do other things too
EVALUATION = "results/tiny/drafters/small/evaluation.json"


@pytest.fixture
def served(workdir: Workdir) -> Workdir:
    """A configuration whose server's `python` is the stand-in: it takes SGLang's arguments and passes by most of them."""
    stand_in = workdir.path / "python"
    notes = workdir.path / "notes"
    notes.mkdir()
    fake = CHECKOUT / "tests" / "fake_decoding_server.py"
    stand_in.write_text(
        f"#!/bin/sh\ncase \"$*\" in *--speculative-draft-model-path*) more='--pattern [2,0]';; esac\n"
        f'exec {sys.executable} {fake} --notes {notes} $more --sglang "$@"\n'
    )
    stand_in.chmod(0o755)
    workdir.settings["extraction"]["layers"] = [0, 1, 2]
    workdir.settings["evaluation"] |= {"engine": "sglang", "sglang": {"python": str(stand_in)}}
    return workdir


def test_an_evaluation_on_servers(served: Workdir) -> None:
    shown = served.snakemake("--dry-run", "-p", EVALUATION)
    assert shown.code == 0 and shown.jobs["export_drafter"] == 1
    (command,) = re.findall(r"evaluate_drafter\.py .*", shown.text)
    assert "launch_server --model-path" in command
    assert "--speculative-draft-model-path results/tiny/drafters/small/export/sglang" in command
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in command
    for targets in (("results/tiny/hidden_states/data_config.json",), (EVALUATION,), ()):  # each has its own time-out
        served.run(*targets)
    figures = json.loads((served.path / EVALUATION).read_text())
    held_out = figures["prompt_sets"]["held_out"]
    assert figures["engine"] == "sglang" and held_out["lossless"] is True and held_out["acceptance_length"] > 1
    assert "no drafter" in (served.run_folder / "summary.txt").read_text()
    card = (served.run_folder / "drafters" / "small" / "export" / "sglang" / "README.md").read_text()
    assert "Measured with `sglang`" in card
    starts = [json.loads(path.read_text()) for path in (served.path / "notes").glob("*.start")]
    assert sorted(facts["drafts"] for facts in starts) == [False, True]
    assert not [facts for facts in starts if Path(f"/proc/{facts['pid']}").exists()]
    for name in ("evaluation.server.log", "evaluation.plain_server.log"):
        assert "api_key='***'" in (served.run_folder / "logs" / "small" / name).read_text()
    assert served.dry_run(EVALUATION).nothing_to_do
    served.settings["evaluation"]["sglang"] |= {"mem_fraction": 0.5, "start_minutes": 2.0}
    assert served.dry_run(EVALUATION).nothing_to_do
    served.settings["evaluation"]["sglang"]["concurrency"] = 4
    assert served.dry_run(EVALUATION).jobs == {"evaluate": 1}
