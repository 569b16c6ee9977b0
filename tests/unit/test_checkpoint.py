"""Checkpoints: the key contract of servers, exact masters for the trainer, no damaged file taken for a whole one."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_reference import file_bytes, read_json_file, small_shape
from eyas.drafter.checkpoint import (
    Checkpoint,
    load_checkpoint,
    load_drafter,
    read_facts,
    save_checkpoint,
    served_tensors,
)
from eyas.drafter.initialise import random_weights
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.shards import read_json, write_sealed
from safetensors import safe_open
from safetensors.torch import load_file, save_file

# vocabulary 23, draft vocabulary 11, 4 heads and 2 key/value heads of 6, inner width 10
NARROW = small_shape(hidden_size=8, target_hidden_size=12)
FILES = ["config.json", "model.safetensors", "trainer_state.json", "trainer_state.safetensors"]


def a_checkpoint(shape: DrafterShape = NARROW, seed: int = 0) -> Checkpoint:
    weights = random_weights(shape, seed)
    trained = sorted(
        set(weights) - ({"embed_tokens.weight"} if shape.hidden_size == shape.target_hidden_size else set())
    )
    ids = torch.arange(0, 22, 2)
    weights["d2t"] = ids - torch.arange(11)
    weights["t2d"] = torch.zeros(23, dtype=torch.bool)
    weights["t2d"][ids] = True
    generator = torch.Generator().manual_seed(seed + 1)
    moments = {
        f"{kind}.{name}": torch.rand(weights[name].shape, generator=generator) * 1e-9
        for kind in ("exp_avg", "exp_avg_sq")
        for name in trained
    }
    facts = {
        "epoch": 2,
        "step": 17,
        "manifest_digest": "xxh3_128:ab",
        "trained": trained,
        "history": [{"loss": 0.1 + 0.2}],
    }
    return Checkpoint(shape, weights, moments, facts)


@pytest.fixture()
def folder(tmp_path: Path) -> Path:
    save_checkpoint(a_checkpoint(), tmp_path / "epoch_2", "mark")
    return tmp_path / "epoch_2"


def test_what_is_saved_is_loaded_exactly(folder: Path) -> None:
    saved, loaded = a_checkpoint(), load_checkpoint(folder)
    assert sorted(os.listdir(folder)) == FILES
    assert loaded.shape == saved.shape
    assert loaded.weights.keys() == saved.weights.keys()
    for name, tensor in saved.weights.items():
        assert loaded.weights[name].dtype == tensor.dtype, name
        assert torch.equal(loaded.weights[name], tensor), name
    assert any(not torch.equal(t, t.bfloat16().float()) for t in saved.weights.values() if t.dtype == torch.float32)
    assert loaded.moments.keys() == saved.moments.keys()
    assert all(torch.equal(loaded.moments[name], tensor) for name, tensor in saved.moments.items())
    assert saved.facts.items() <= loaded.facts.items()
    assert (loaded.facts["fingerprint"], read_facts(folder)) == ("mark", loaded.facts)
    assert not (folder.parent / ".staging").exists()


def test_a_frozen_embedding_is_kept_once_as_served(tmp_path: Path) -> None:
    saved = a_checkpoint(small_shape())
    save_checkpoint(saved, tmp_path / "epoch_0", "mark")
    assert "master.embed_tokens.weight" not in load_file(tmp_path / "epoch_0" / "trainer_state.safetensors")
    found, expected = load_checkpoint(tmp_path / "epoch_0").weights, saved.weights
    assert torch.equal(found["embed_tokens.weight"], expected["embed_tokens.weight"].bfloat16())
    assert torch.equal(found["lm_head.weight"], expected["lm_head.weight"])


def test_tensors_are_those_that_servers_expect(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        found = {
            name: (tuple(file.get_slice(name).get_shape()), file.get_slice(name).get_dtype()) for name in file.keys()
        }
        assert file.metadata() == {"format": "pt"}
    assert found == {
        "fc.weight": ((8, 36), "BF16"),
        "midlayer.self_attn.q_proj.weight": ((24, 16), "BF16"),
        "midlayer.self_attn.k_proj.weight": ((12, 16), "BF16"),
        "midlayer.self_attn.v_proj.weight": ((12, 16), "BF16"),
        "midlayer.self_attn.o_proj.weight": ((8, 24), "BF16"),
        "midlayer.mlp.gate_proj.weight": ((10, 8), "BF16"),
        "midlayer.mlp.up_proj.weight": ((10, 8), "BF16"),
        "midlayer.mlp.down_proj.weight": ((8, 10), "BF16"),
        "midlayer.hidden_norm.weight": ((8,), "BF16"),
        "midlayer.input_layernorm.weight": ((8,), "BF16"),
        "midlayer.post_attention_layernorm.weight": ((8,), "BF16"),
        "norm.weight": ((8,), "BF16"),
        "lm_head.weight": ((11, 8), "BF16"),
        "d2t": ((11,), "I64"),
        "t2d": ((23,), "BOOL"),
        "embed_tokens.weight": ((23, 8), "BF16"),
    }
    weights = a_checkpoint().weights
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(tensor, weights[name].to(tensor.dtype)), name


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 10,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_act": "silu",
    "rms_norm_eps": 1e-5, "rope_theta": 100.0, "rope_scaling": None, "max_position_embeddings": 64,
    "attention_bias": False, "mlp_bias": False, "vocab_size": 23, "draft_vocab_size": 11, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "use_cache": True, "target_hidden_size": 12,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}  # fmt: skip


def test_config_json_is_what_servers_read(folder: Path) -> None:
    assert read_json_file(folder / "config.json") == CONFIG
    same_width = small_shape(hidden_size=12, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    config = same_width.config_json([1, 2, 3])  # ids in a server's own convention
    expected = CONFIG | {"hidden_size": 12, "bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 0}
    del expected["target_hidden_size"]  # its presence would tell SGLang that the embedding is not the target's
    expected["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3], "use_aux_hidden_state": True}
    assert config == expected
    assert [key for key, value in config.items() if value is None] == ["rope_scaling"]


def test_the_shape_survives_its_config() -> None:
    for shape in (NARROW, small_shape(), small_shape(bos_token_id=0, eos_token_id=[2, 3])):
        assert DrafterShape.from_config_json(json.loads(json.dumps(shape.config_json()))) == shape


@pytest.mark.parametrize("key", ["draft_vocab_size", "head_dim", "rope_theta", "hidden_size", "eagle_config"])
def test_a_config_without_a_key_is_refused(key: str) -> None:
    with pytest.raises(EyasError, match=key):
        DrafterShape.from_config_json({k: v for k, v in CONFIG.items() if k != key})


def test_a_drafter_is_loaded_as_a_server_sees_it(folder: Path) -> None:
    drafter, weights = load_drafter(folder), a_checkpoint().weights
    for name, tensor in drafter.state_dict().items():
        expected = weights[name].bfloat16().float() if weights[name].is_floating_point() else weights[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected), name


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-7])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        content[len(content) * 3 // 4] ^= 0x10
        path.write_bytes(content)


DAMAGES = [(name, how) for name in FILES for how in ("deleted", "truncated", "empty", "bit flipped")]


@pytest.mark.parametrize("name, how", DAMAGES)
def test_a_damaged_checkpoint_is_refused_by_name(folder: Path, name: str, how: str) -> None:
    load_checkpoint(folder)
    damage(folder / name, how)
    with pytest.raises(EyasError, match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize("how", ["deleted", "truncated", "empty"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_damaged_drafter_is_refused_by_name(folder: Path, name: str, how: str) -> None:
    damage(folder / name, how)
    with pytest.raises(EyasError, match=name):
        load_drafter(folder)


def test_another_format_version_is_refused(folder: Path) -> None:
    facts = read_json(folder / "trainer_state.json")
    write_sealed(folder / "trainer_state.json", facts | {"format_version": 99})
    with pytest.raises(EyasError, match="format version 99"):
        load_checkpoint(folder)


BAD = {
    "missing": (lambda w: w.pop("lm_head.weight"), r"missing \['lm_head.weight'\]"),
    "unexpected": (lambda w: w.update({"model.norm.weight": torch.ones(8)}), r"unexpected \['model.norm.weight'\]"),
    "shape": (
        lambda w: w.update({"fc.weight": w["fc.weight"][:, :-1]}),
        r"fc.weight has the shape \(8, 35\), not \(8, 36\)",
    ),
    "NaN": (lambda w: w["norm.weight"][3].fill_(torch.nan), "norm.weight holds NaN"),
    "infinity": (lambda w: w["fc.weight"][0, 0].fill_(-torch.inf), "fc.weight holds NaN or infinity"),
}


@pytest.mark.parametrize("fault", BAD)
def test_tensors_off_the_contract_are_never_saved_nor_loaded(fault: str, folder: Path, tmp_path: Path) -> None:
    spoil, message = BAD[fault]
    checkpoint = a_checkpoint()
    spoil(checkpoint.weights)
    with pytest.raises(EyasError, match=message):
        served_tensors(checkpoint.weights, checkpoint.shape)
    with pytest.raises(EyasError, match=message):
        save_checkpoint(checkpoint, tmp_path / "epoch_3", "mark")
    assert not (tmp_path / "epoch_3").exists()
    tensors = load_file(folder / "model.safetensors")
    spoil(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    with pytest.raises(EyasError, match=message):
        load_drafter(folder)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_save_that_fails_leaves_what_was_there(failing: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    before, calls = file_bytes(folder), []

    def full_disk(tensors: Any, path: Path, **options: Any) -> None:
        calls.append(path)
        save_file(tensors, path, **options)
        if len(calls) == failing:
            path.write_bytes(path.read_bytes()[:100])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    other = a_checkpoint(seed=5)
    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    for place in (folder, folder.parent / "epoch_3"):
        calls.clear()
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(other, place, "mark")
    assert file_bytes(folder) == before
    assert not (folder.parent / "epoch_3").exists()
    monkeypatch.undo()
    save_checkpoint(other, folder, "mark")  # the leftover staging is no obstacle
    assert torch.equal(load_checkpoint(folder).weights["fc.weight"], other.weights["fc.weight"])


def test_the_same_state_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    checkpoint = a_checkpoint()
    checkpoint.weights = dict(reversed(checkpoint.weights.items()))
    checkpoint.moments = dict(reversed(checkpoint.moments.items()))
    save_checkpoint(checkpoint, tmp_path / "again", "mark")
    assert file_bytes(tmp_path / "again") == file_bytes(folder)
