"""Any drafter folder as a drafter that runs: forms of published heads, layer ids of each server, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_runs import Run
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.imported import read_drafter_config
from eyas.drafter.model import Drafter
from eyas.drafter.published import layers_of, load_any_drafter
from eyas.errors import EyasError
from eyas.export import export_drafter, server_config, sglang_layer_ids
from eyas.target.model import TargetModel, load_target
from test_imported import (
    FORMS,
    H,
    Other,
    drafter_tensors,
    other,
    run,
    save_drafter,
    shape_of,
    speculators_config,
    zeros,
)

__all__ = ["other", "run"]  # fixtures


@pytest.fixture(scope="module")
def target(run: Run) -> TargetModel:
    return load_target(run.target)


def check_loaded(drafter: Drafter, other: Other, target: TargetModel) -> None:
    """Every weight is the folder's, the embedding the target's, and the draft vocabulary the folder's own."""
    found = drafter.state_dict()
    for name, tensor in other.tensors.items():
        if name not in ("embed_tokens.weight", "d2t", "t2d"):
            assert found[name].dtype == torch.float32 and torch.equal(found[name], tensor.float()), name
    assert torch.equal(found["embed_tokens.weight"], target.model.get_input_embeddings().weight.bfloat16())
    assert drafter.target_ids.tolist() == other.ids.tolist()
    assert drafter.t2d.nonzero().flatten().tolist() == other.ids.tolist()
    assert drafter.shape.layers == (0, 1, 3)


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_published_heads(target: TargetModel, other: Other, form: str) -> None:
    check_loaded(
        load_any_drafter(save_drafter(other.folder, FORMS[form](other.tensors), other.config), target), other, target
    )


def test_a_head_whose_residual_is_normed_is_run_as_one(target: TargetModel, other: Other) -> None:
    other.save(norm_before_residual=True)
    drafter = load_any_drafter(other.folder, target)
    assert drafter.shape.norm_before_residual
    other.save()
    assert not load_any_drafter(other.folder, target).shape.norm_before_residual


def test_the_form_of_speculators(target: TargetModel, run: Run, other: Other) -> None:
    config = speculators_config(shape_of(run), len(other.ids))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    check_loaded(
        load_any_drafter(save_drafter(other.folder, FORMS["layers.0"](other.tensors), config), target), other, target
    )


def test_eyas_own_checkpoints_and_exports_are_what_they_are(target: TargetModel, run: Run, tmp_path: Path) -> None:
    checkpoint = run.start(tmp_path / "epoch_0")
    for server in ("sglang", "vllm"):
        export_drafter(checkpoint, server, "llama", tmp_path / server)
    expected = load_drafter(checkpoint)
    for folder in (checkpoint, tmp_path / "sglang", tmp_path / "vllm"):
        drafter = load_any_drafter(folder, target)
        assert drafter.shape == expected.shape
        for name, tensor in expected.state_dict().items():
            assert torch.equal(drafter.state_dict()[name], tensor), name


def test_sizes_are_the_heads_own(target: TargetModel, run: Run, tmp_path: Path) -> None:
    shape = shape_of(
        run, hidden_size=12, head_dim=6, intermediate_size=10, num_attention_heads=2, num_key_value_heads=1
    )
    ids = np.arange(3, 25)
    tensors = drafter_tensors(shape, ids)
    config = replace(shape, draft_vocab_size=len(ids), rope_theta=77.0).config_json()
    for key in ("head_dim", "num_key_value_heads", "rms_norm_eps"):
        del config[key]
    drafter = load_any_drafter(save_drafter(tmp_path / "other", tensors, config), target)
    found = drafter.shape
    assert (found.head_dim, found.num_key_value_heads, found.hidden_size, found.rms_norm_eps) == (6, 1, 12, 1e-6)
    assert found.rope_theta == 77.0 and found.draft_vocab_size == 22
    assert torch.equal(drafter.embed_tokens.weight, tensors["embed_tokens.weight"].float())


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "deepseek_v3", "kimi_k2"])
@pytest.mark.parametrize("layers", [[1, 29, 57], [2, 30, 58], [4, 9, 20]])
def test_layer_ids_are_mapped_back_from_each_server(
    run: Run, tmp_path: Path, model_type: str, layers: list[int]
) -> None:
    """The inverse of what the exporter writes; a checkpoint of Eyas has its own ids."""

    def found(values: dict[str, Any]) -> list[int]:
        (tmp_path / "config.json").write_text(json.dumps(values))
        return list(layers_of(tmp_path, read_drafter_config(tmp_path), model_type, 61))

    shape = replace(shape_of(run), layers=tuple(layers))
    for server in ("sglang", "vllm"):
        assert found(server_config(shape, server, model_type)) == layers
    assert found(speculators_config(shape, 9)) == layers
    assert found(shape.config_json(sglang_layer_ids(layers, model_type))) == layers  # a head that names no server
    (tmp_path / "selection.json").write_text("{}")  # a checkpoint of Eyas
    assert found(shape.config_json()) == layers


def test_heads_that_name_no_layers_read_the_servers_default(tmp_path: Path) -> None:
    assert layers_of(tmp_path, {"layers": None, "counted_from_zero": False}, "llama", 32) == (1, 15, 28)


@pytest.mark.parametrize(
    "config, changed, said",
    [
        ({"norm_before_fc": True}, {}, "switches on norm_before_fc"),
        ({"vocab_size": 41}, {}, "vocab_size is 41, the target's is 40"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {}, "rope_scaling is yarn"),
        ({"num_attention_heads": None}, {}, "no num_attention_heads"),
        ({"num_attention_heads": "4"}, {}, "no num_attention_heads"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 99]}}, {}, r"layers \[1, 2, 99\], .* 0 to 4"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, {}, r"layers \[1, 2\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "abc"}}, {}, "config.json is not one of"),
        ({}, {"fc.weight": zeros(H, 51)}, "reads 51 numbers of a target's states, not 48: take a drafter of this target"),
        ({}, {"fc.weight": None}, "lacks fc.weight; take a one-layer"),
        ({}, {"norm.weight": zeros(H, 2)}, "lacks"),
        ({}, {"midlayer.mlp.down_proj.weight": None}, "lacks midlayer.mlp.down_proj.weight; take a one-layer"),
        ({}, {"norm.weight": torch.full((H,), float("nan"))}, "norm.weight holds NaN"),
        ({}, {"d2t": torch.full((23,), 40)}, "d2t makes target ids outside 0 to 39"),
    ],
)  # fmt: skip
def test_refused_with_one_clear_message(
    target: TargetModel,
    other: Other,
    config: dict[str, Any],
    changed: dict[str, Any],
    said: str,
) -> None:
    for name, tensor in changed.items():
        other.tensors.pop(name)
        if tensor is not None:
            other.tensors[name] = tensor
    with pytest.raises(EyasError, match=rf"^{other.folder}: .*{said}") as caught:
        load_any_drafter(other.save(**config), target)
    assert "\n" not in str(caught.value) and "init_from" not in str(caught.value)


def test_folders_without_a_drafter(target: TargetModel, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=rf"^{tmp_path}/none: no such folder"):
        load_any_drafter(tmp_path / "none", target)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(EyasError, match=r"no model.safetensors, only pytorch_model.bin"):
        load_any_drafter(tmp_path, target)
