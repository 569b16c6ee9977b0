"""A whole run with hidden states in fp8, from prompts to the export."""

from __future__ import annotations

import json

from eyas.cli.verify import verify_run
from safetensors import safe_open
from workflow_runs import Workdir


def test_a_run_with_states_in_fp8(workdir: Workdir) -> None:
    workdir.settings["extraction"]["dtype"] = "fp8_e4m3"
    workdir.run()
    folder = workdir.run_folder
    states = sorted((folder / "hidden_states").glob("rows_*.safetensors"))
    assert len(states) == 2
    with safe_open(states[0], "np") as file:
        assert file.get_slice("aux_hidden_states").get_dtype() == "F8_E4M3"
    size = sum(path.stat().st_size for path in states)
    told = json.loads((folder / "tokens" / "statistics.json").read_text())["hidden_states"]
    assert (told["bytes"], told["dtype"]) == (size, "fp8_e4m3")  # known before any state was
    manifest = json.loads((folder / "hidden_states" / "data_config.json").read_text())
    assert (manifest["dtype"], manifest["totals"]["bytes"]) == ("fp8_e4m3", size)
    history = json.loads((folder / "drafters" / "small" / "epoch_2" / "trainer_state.json").read_text())["history"]
    assert history[1]["loss"] < history[0]["loss"]
    evaluation = json.loads((folder / "drafters" / "small" / "evaluation.json").read_text())
    assert evaluation["offline"]["trained"]["expected_acceptance_length"] > 1.1
    assert evaluation["prompt_sets"]["held_out"]["lossless"]
    assert verify_run("tiny", workdir.path / "results")["problems"] == []
    assert workdir.dry_run().nothing_to_do
    workdir.settings["extraction"]["dtype"] = "bfloat16"
    assert workdir.dry_run().jobs["extract"] == 2
