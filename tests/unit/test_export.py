"""The SGLang form: layer ids by server, exact key set, nothing written when anything is off."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from drafter_reference import file_bytes, read_json_file, small_shape
from eyas.drafter.checkpoint import Checkpoint, save_checkpoint
from eyas.drafter.initialise import random_weights
from eyas.errors import EyasError
from eyas.export import export_sglang, sglang_layer_ids, vllm_layer_ids
from eyas.export.sglang import check_export
from safetensors.torch import load_file, save_file


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    shape = small_shape()
    weights = random_weights(shape, 0)
    ids = torch.arange(0, 2 * shape.draft_vocab_size, 2)
    weights["d2t"] = ids - torch.arange(shape.draft_vocab_size)
    weights["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
    weights["t2d"][ids] = True
    save_checkpoint(
        Checkpoint(shape, weights, {}, {"epoch": 1, "trained": ["fc.weight"]}), tmp_path / "epoch_1", "mark"
    )
    return tmp_path / "epoch_1"


@pytest.mark.parametrize(
    ("layers", "model_type", "expected"),
    [
        # FACTS: SGLang 0.5.23 adds 1 for Llama, Qwen2/3, Gemma3 whatever the ids
        ([1, 14, 26], "llama", [1, 14, 26]),
        ([2, 14, 26], "qwen3", [2, 14, 26]),
        # for DeepSeek and Kimi only to a list that begins with 1
        ([1, 29, 57], "deepseek_v3", [1, 29, 57]),
        ([2, 29, 57], "deepseek_v3", [3, 30, 58]),
        ([2, 29, 57], "kimi_k25", [3, 30, 58]),
    ],
)
def test_sglang_layer_ids(layers: list[int], model_type: str, expected: list[int]) -> None:
    assert sglang_layer_ids(layers, model_type) == expected
    added = (
        [i + 1 for i in expected] if not model_type.startswith(("deepseek", "kimi")) or expected[0] == 1 else expected
    )
    # what SGLang then captures is the input of layer i, the output of layer i - 1
    assert [i - 1 for i in added] == layers


def test_what_sglang_cannot_be_told_is_refused() -> None:
    with pytest.raises(EyasError, match="extraction.layers"):
        sglang_layer_ids([0, 29, 57], "deepseek_v3")


def test_vllm_layer_ids() -> None:
    """vLLM's id j is the output of layer j - 1."""
    assert vllm_layer_ids([1, 14, 26]) == [2, 15, 27]


def test_the_export_holds_the_checkpoints_tensors(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "export" / "sglang"
    export_sglang(checkpoint, "llama", output)
    assert sorted(file_bytes(output)) == ["config.json", "export.json", "model.safetensors"]
    ours, theirs = load_file(output / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    config = read_json_file(output / "config.json")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["num_hidden_layers"] == 1
    assert config["eagle_config"]["use_aux_hidden_state"] is True
    before = file_bytes(output)
    export_sglang(checkpoint, "llama", output)
    assert file_bytes(output) == before


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "nan"])
def test_a_wrong_tensor_is_refused_and_nothing_is_written(checkpoint: Path, tmp_path: Path, fault: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    if fault == "missing":
        del tensors["lm_head.weight"]
    elif fault == "unexpected":
        tensors["midlayer.extra.weight"] = torch.ones(2)
    elif fault == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
    else:
        tensors["norm.weight"][0] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors")
    names = {"missing": "lm_head", "unexpected": "midlayer.extra", "shape": "fc.weight", "nan": "norm.weight"}
    with pytest.raises(EyasError, match=names[fault]):
        export_sglang(checkpoint, "llama", tmp_path / "export" / "sglang")
    assert not (tmp_path / "export" / "sglang").exists()


def test_check_export_reads_what_is_on_the_disk(checkpoint: Path) -> None:
    """A dtype that a server would load as something else."""
    check_export(checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["d2t"] = tensors["d2t"].int()
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(EyasError, match="d2t is I32"):
        check_export(checkpoint)
