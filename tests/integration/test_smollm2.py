"""The real thing, small: SmolLM2-135M-Instruct from its package, through the whole workflow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

CHECKOUT = Path(__file__).parents[2]


def settings() -> dict:
    """The default configuration, cut down to minutes."""
    values = yaml.safe_load((CHECKOUT / "config" / "config.yaml").read_text())
    values["data"] |= {"rows": 24, "shard_rows": 12, "held_out_every": 6}
    values["responses"] |= {"max_new_tokens": 24, "batch_rows": 12}
    values["drafters"]["eagle3"]["training"] |= {"epochs": 1, "warmup_steps": 2}
    values["evaluation"] |= {"prompts": 2, "max_new_tokens": 12}
    return values


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("smollm2")
    (path / "config.yaml").write_text(yaml.safe_dump(settings()))
    if (CHECKOUT / "resources" / "SmolLM2-135M-Instruct" / "config.json").is_file():
        (path / "resources").symlink_to(CHECKOUT / "resources")  # `make demo` has built it already
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile"), "--cores", "2"]
    command += ["--workflow-profile", str(CHECKOUT / "profiles" / "default"), "--configfile", "config.yaml"]
    done = subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert "acceptance, mt_bench" in done.stderr  # the table at the end
    return path


@pytest.mark.integration
@pytest.mark.timeout(0)
def test_states_are_those_of_transformers(run: Path) -> None:
    """A row of a shard against a plain forward pass with all hidden states, in bfloat16's precision."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(run / "resources/SmolLM2-135M-Instruct", dtype=torch.float32).eval()
    shard = load_file(run / "results/demo/hidden_states/rows_0-12.safetensors")
    manifest = json.loads((run / "results/demo/hidden_states/data_config.json").read_text())
    assert manifest["layers"] == [1, 14, 26] and manifest["totals"]["rows"] == 24
    a, b = (int(x) for x in shard["offsets"][3:5])
    with torch.inference_mode():
        out = model(input_ids=shard["input_ids"][a:b].long()[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[layer + 1][0] for layer in manifest["layers"]], -1)
    torch.testing.assert_close(shard["aux_hidden_states"][a:b].float(), expected, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(shard["last_hidden_state"][a:b].float(), out.hidden_states[-1][0], rtol=1e-2, atol=1e-2)
    agreement = (shard["target_token"][a:b] == out.logits[0].argmax(-1)).float().mean()
    assert agreement > 0.99


@pytest.mark.integration
@pytest.mark.timeout(0)
def test_decoding_is_lossless_and_the_export_is_complete(run: Path) -> None:
    drafter = run / "results/demo/drafters/eagle3"
    evaluation = json.loads((drafter / "evaluation.json").read_text())
    assert list(evaluation["prompt_sets"]) == ["held_out", "mt_bench"]
    for facts in evaluation["prompt_sets"].values():
        assert facts["prompts"] == 2 and facts["lossless"], facts
        assert all(baseline["lossless"] for baseline in facts["baselines"].values()), facts
    config = json.loads((drafter / "export/sglang/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 14, 26]
    tensors = load_file(drafter / "export/sglang/model.safetensors")
    assert tensors["lm_head.weight"].shape == (4096, 576) and tensors["t2d"].sum() == 4096


@pytest.mark.integration
@pytest.mark.timeout(0)
def test_verify_agrees(run: Path) -> None:
    command = [sys.executable, "-m", "eyas.cli.main", "verify", "demo", "--json"]
    done = subprocess.run(command, cwd=run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout)["problems"] == []
