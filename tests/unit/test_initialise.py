"""Epoch 0 from a layer of the target or random, and the target's weights as they are read for it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_reference import extracted, file_bytes, random_rows, save_llama
from drafter_runs import DRAFT_VOCAB, OPEN, Run, make_run
from eyas.drafter.checkpoint import Checkpoint, load_checkpoint
from eyas.drafter.initialise import random_weights
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.target.head import load_head, load_teacher_head
from eyas.target.tokenizer import TargetReference
from eyas.target.weights import StoredWeights, load_tensors
from eyas.vocabulary.mapping import build_map
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

H = 16
TINY: dict[str, Any] = dict(
    vocab_size=40, hidden_size=H, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
PROJECTIONS = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def start(run: Run, output: Path, init: str = "target_layer", **settings: Any) -> Checkpoint:
    return load_checkpoint(run.start(output, init, **settings))


def model_of(run: Run) -> Any:
    return AutoModelForCausalLM.from_pretrained(run.target.path)


def save_model(folder: Path, config: PretrainedConfig) -> TargetReference:
    """A random model of `config`, all of whose norms and biases are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand(parameter.shape) - 0.5)
    model.save_pretrained(folder)
    return TargetReference(str(folder))


def run_of(folder: Path, target: TargetReference) -> Run:
    rows = random_rows([9, 7])
    counts = np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=40)
    return Run(folder, target, extracted(folder, target, [rows]), build_map(counts, DRAFT_VOCAB, [2]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows([9, 7]))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}  # not the file that is about to be written
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("init_layer, copied", [(None, 4), (4, 4), (0, 0), (2, 2)])
def test_the_layer_is_the_one_asked_for(
    run: Run, init_layer: int | None, copied: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = start(run, tmp_path / "epoch_0", init_layer=init_layer).weights
    model = model_of(run)
    layer = {name: tensor.detach() for name, tensor in model.model.layers[copied].named_parameters()}
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = found[f"midlayer.self_attn.{part}.weight"]
        assert torch.equal(weight[:, H:], layer[f"self_attn.{part}.weight"])  # what reads the state
        assert 0 < weight[:, :H].std() < 0.05  # what reads the embedding
    for part in PROJECTIONS:
        assert torch.equal(found[f"midlayer.{part}.weight"], layer[f"{part}.weight"])
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight.detach()[run.mapping.target_ids])
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight.detach().bfloat16())
    assert warnings_of(caplog) == []  # a Llama has nothing that the drafter has not


@pytest.mark.parametrize("layer", [5, 17])
def test_a_layer_that_the_target_does_not_have(run: Run, layer: int, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=rf"model.init_layer: {layer} is no layer .* 0 to 4"):
        start(run, tmp_path / "epoch_0", init_layer=layer)
    assert not (tmp_path / "epoch_0").exists()


@pytest.mark.parametrize("config, left_out", [
    (Qwen3Config(**TINY), ["self_attn.k_norm.weight", "self_attn.q_norm.weight"]),
    (Qwen2Config(**TINY), ["self_attn.k_proj.bias", "self_attn.q_proj.bias", "self_attn.v_proj.bias"]),
])  # fmt: skip
def test_what_cannot_be_carried_over_is_said_once(
    config: PretrainedConfig, left_out: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, save_model(tmp_path / "target", config))
    found = start(run, tmp_path / "epoch_0", init_layer=3).weights
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Layer 3 of ") and warning.endswith(": " + ", ".join(left_out) + ".")
    model = model_of(run)
    layer = model.model.layers[3]
    assert torch.equal(found["midlayer.self_attn.k_proj.weight"][:, H:], layer.self_attn.k_proj.weight)
    assert torch.equal(found["midlayer.mlp.down_proj.weight"], layer.mlp.down_proj.weight)
    assert torch.equal(found["midlayer.hidden_norm.weight"], layer.input_layernorm.weight)
    assert torch.equal(found["midlayer.post_attention_layernorm.weight"], layer.post_attention_layernorm.weight)
    assert torch.equal(found["norm.weight"], model.model.norm.weight)


@pytest.mark.parametrize("config", [Gemma2Config(**TINY), Gemma3TextConfig(**TINY)])
def test_the_norms_of_a_sandwich_do_in_the_drafter_what_they_do_in_the_target(
    config: PretrainedConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(tmp_path, save_model(tmp_path / "target", config))
    found = start(run, tmp_path / "epoch_0").weights
    model = model_of(run)
    layer = model.model.layers[4]
    x = torch.randn(3, H)
    plain = x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.rms_norm_eps)
    # before the MLP is what counts, not the name; Gemma multiplies by 1 + weight
    for name, norm in (
        ("midlayer.hidden_norm", layer.input_layernorm),
        ("midlayer.post_attention_layernorm", layer.pre_feedforward_layernorm),
        ("norm", model.model.norm),
    ):
        torch.testing.assert_close(plain * found[f"{name}.weight"], norm(x).detach())
    (warning,) = warnings_of(caplog)
    assert "post_attention_layernorm.weight, post_feedforward_layernorm.weight" in warning
    assert "pre_feedforward" not in warning and "the activation gelu_pytorch_tanh" in warning


@pytest.mark.parametrize("sizes, tensor", [
    (dict(intermediate_size=20), r"mlp.gate_proj.weight of layer 4 has the shape \(24, 16\), not \(20, 16\)"),
    (dict(num_attention_heads=2), r"self_attn.q_proj.weight of layer 4 has the shape \(16, 16\), not \(8, 16\)"),
])  # fmt: skip
def test_a_layer_of_other_sizes_is_refused(run: Run, sizes: dict[str, int], tensor: str, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=f"{tensor}; set model.init: random"):
        start(run, tmp_path / "epoch_0", **sizes)


def test_a_layer_without_a_dense_mlp_is_refused(run: Run, tmp_path: Path) -> None:
    other = replace(run, target=TargetReference(str(shutil.copytree(run.target.path, tmp_path / "target"))))
    change_weights(tmp_path / "target", lambda tensors: tensors.pop("model.layers.4.mlp.up_proj.weight"))
    with pytest.raises(EyasError, match="mlp.up_proj.weight of layer 4 is not there; set model.init: random"):
        start(other, tmp_path / "epoch_0")
    start(other, tmp_path / "epoch_0", init_layer=3)


def fp8(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)

    return change


def beside(name: str, mark: str, keep: bool = True) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name.removesuffix("weight") + mark] = torch.ones(1)
        if not keep:
            del tensors[name]

    return change


GATE = "model.layers.4.mlp.gate_proj.weight"


@pytest.mark.parametrize("change, said", [
    (fp8(GATE), r"gate_proj.weight \(dtype F8_E4M3\)"),
    (beside(GATE, "weight_scale_inv"), r"gate_proj.weight \(weight_scale_inv beside it\)"),
    (beside(GATE, "weight_scale"), "weight_scale beside it"),
    (beside(GATE, "weight_packed", keep=False), "weight_packed beside it"),
    (beside(GATE, "qweight", keep=False), "qweight beside it"),
    (beside(GATE, "weight.absmax"), "weight.absmax beside it"),
])  # fmt: skip
def test_a_quantised_layer_is_refused(run: Run, change: Callable, said: str, tmp_path: Path) -> None:
    other = replace(run, target=TargetReference(str(shutil.copytree(run.target.path, tmp_path / "target"))))
    change_weights(tmp_path / "target", change)
    with pytest.raises(EyasError, match=rf"^target.path: .* quantised.*{said}.*; set model.init: random$"):
        start(other, tmp_path / "epoch_0")
    start(other, tmp_path / "epoch_0", init="random")


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("kept", [True, False])
def test_a_quantised_head_or_embedding_is_refused_whatever_the_start(
    run: Run, name: str, kept: bool, tmp_path: Path
) -> None:
    other = replace(run, target=TargetReference(str(shutil.copytree(run.target.path, tmp_path / "target"))))
    change_weights(tmp_path / "target", fp8(name) if kept else beside(name, "weight_packed", keep=False))
    message = rf"weights of .* are quantised.*{name}.*; name a copy of the target whose embedding and head are not"
    for init in ("random", "target_layer"):
        with pytest.raises(EyasError, match=message):
            start(other, tmp_path / "epoch_0", init=init)


# ---- reading the target ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_the_head_is_float32_and_the_embedding_as_it_is_stored(dtype: torch.dtype, tied: bool, tmp_path: Path) -> None:
    target = save_llama(tmp_path, dtype=dtype, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rows = torch.tensor([7, 0, 39])
    for given, expected in ((rows, model.lm_head.weight[rows]), (None, model.lm_head.weight)):
        embedding, head = load_head(target, given)
        assert embedding.dtype == dtype and torch.equal(embedding.float(), model.model.embed_tokens.weight)
        assert head.dtype == torch.float32 and torch.equal(head, expected)
    teacher = load_teacher_head(target, rows)
    assert teacher.dtype == torch.float32 and torch.equal(teacher, model.lm_head.weight[rows])


@pytest.mark.parametrize("tied, read", [(False, "lm_head.weight"), (True, "model.embed_tokens.weight")])
def test_the_teacher_reads_its_rows_alone(
    tied: bool, read: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_llama(tmp_path, tie_word_embeddings=tied)
    reads = []
    original = StoredWeights.read

    def recorded(self: StoredWeights, name: str, rows: torch.Tensor | None = None) -> torch.Tensor:
        reads.append((name, None if rows is None else rows.tolist()))
        return original(self, name, rows)

    monkeypatch.setattr(StoredWeights, "read", recorded)
    load_teacher_head(target, torch.tensor([3, 4]))
    assert reads == [(read, [3, 4])]


def test_tensors_are_as_stored_unless_asked_and_absent_where_the_target_has_none(tmp_path: Path) -> None:
    target = save_llama(tmp_path, dtype=torch.float16)
    name = "model.layers.1.mlp.up_proj.weight"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float16)
    stored = model.model.layers[1].mlp.up_proj.weight
    assert list(found := load_tensors(target, [name, "nothing.weight"])) == [name]
    assert found[name].dtype == torch.float16 and torch.equal(found[name], stored)
    rows = load_tensors(target, [name], torch.float32, torch.tensor([5, 1]))[name]
    assert rows.dtype == torch.float32 and torch.equal(rows, stored[[5, 1]].float())


def test_sharded_targets_are_read_by_their_index(run: Run, tmp_path: Path) -> None:
    model_of(run).save_pretrained(tmp_path / "target", max_shard_size="8KB")
    assert len(list((tmp_path / "target").glob("*.safetensors"))) > 2
    other = replace(run, target=TargetReference(str(tmp_path / "target")))
    start(other, tmp_path / "sharded")
    start(run, tmp_path / "whole")
    assert file_bytes(tmp_path / "sharded") == file_bytes(tmp_path / "whole")
    next((tmp_path / "target").glob("*-00001-*")).unlink()
    with pytest.raises(EyasError, match=r"^target.path: .* has no readable safetensors weights"):
        start(other, tmp_path / "again")


def test_random_weights_are_the_same_with_and_without_the_embedding(run: Run) -> None:
    shape = DrafterShape.for_target(model_of(run).config, OPEN, DRAFT_VOCAB, run.manifest.layers)
    whole, part = random_weights(shape, 5), random_weights(shape, 5, embedding=False)
    assert set(whole) - set(part) == {"embed_tokens.weight"}
    for name, tensor in part.items():
        assert torch.equal(tensor, whole[name])
        assert (tensor == 1).all() if tensor.dim() == 1 else 0.01 < tensor.std() < 0.03
