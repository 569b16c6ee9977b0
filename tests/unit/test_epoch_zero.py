"""Epoch 0 of small targets: tensors copied to their places, other widths, what does not fit refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_reference import file_bytes, random_rows, save_llama
from drafter_runs import DRAFT_VOCAB, LENGTHS, Run, make_run
from eyas.drafter.checkpoint import load_checkpoint
from eyas.errors import EyasError
from eyas.vocabulary.mapping import build_map
from transformers import AutoModelForCausalLM


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows(LENGTHS))


@pytest.mark.parametrize("tied", [False, True])
def test_target_layer_copies_the_last_layer(tied: bool, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_rows([9, 7]), tie_word_embeddings=tied)
    found = load_checkpoint(run.start(tmp_path / "epoch_0")).weights
    model = AutoModelForCausalLM.from_pretrained(run.target.path)
    # norms of a fresh model are all one: the names below are told apart by the shapes and by random matrices
    layer = {name: tensor.detach() for name, tensor in model.model.layers[4].named_parameters()}
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = found[f"midlayer.self_attn.{part}.weight"]
        assert torch.equal(weight[:, 16:], layer[f"self_attn.{part}.weight"])  # what reads the state
        assert 0 < weight[:, :16].std() < 0.05  # what reads the embedding
    for name in ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
        assert torch.equal(found[f"midlayer.{name}"], layer[name])
    aux = torch.randn(4, 48)
    assert torch.equal(aux @ found["fc.weight"].T, aux[:, 32:])  # hands on the highest of the three states
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight.detach()[run.mapping.target_ids])
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight.detach().bfloat16())
    assert np.array_equal(found["d2t"].numpy() + np.arange(DRAFT_VOCAB), np.flatnonzero(found["t2d"].numpy()))


def test_norms_are_copied_to_their_places(tmp_path: Path) -> None:
    run = make_run(tmp_path, random_rows([9, 7]))
    model = AutoModelForCausalLM.from_pretrained(run.target.path)
    last = model.model.layers[4]
    norms = {"hidden_norm": last.input_layernorm, "post_attention_layernorm": last.post_attention_layernorm}
    with torch.no_grad():
        for number, norm in enumerate([*norms.values(), model.model.norm]):
            norm.weight.copy_(torch.arange(16) + 100.0 * number)
    model.save_pretrained(run.target.path)
    found = load_checkpoint(run.start(tmp_path / "epoch_0")).weights
    for name, norm in norms.items():
        assert torch.equal(found[f"midlayer.{name}.weight"], norm.weight.detach())
    assert torch.equal(found["norm.weight"], model.model.norm.weight.detach())
    assert torch.equal(found["midlayer.input_layernorm.weight"], torch.ones(16))  # the embedding's, not in the target


def test_random_weights_of_another_width_train_their_embedding(run: Run, tmp_path: Path) -> None:
    start = run.start(tmp_path / "epoch_0", init="random", hidden_size=24, head_dim=6)
    before = load_checkpoint(start)
    assert (before.shape.hidden_size, before.shape.target_hidden_size) == (24, 16)
    assert before.weights["fc.weight"].shape == (24, 48)
    assert "embed_tokens.weight" in before.facts["trained"]
    assert file_bytes(run.start(tmp_path / "again", init="random", hidden_size=24, head_dim=6)) == file_bytes(start)
    after = load_checkpoint(run.train(start, 1, tmp_path / "epoch_1"))
    seen = np.unique(np.concatenate([ids for _, ids, _ in random_rows([17, 9])]))
    assert not torch.equal(
        before.weights["embed_tokens.weight"][seen[0]], after.weights["embed_tokens.weight"][seen[0]]
    )
    assert torch.equal(
        before.weights["embed_tokens.weight"][0], after.weights["embed_tokens.weight"][0]
    )  # id 0 is in no row


def test_target_layer_of_another_width_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="set model.init: random"):
        run.start(tmp_path / "epoch_0", hidden_size=24)


def test_states_of_another_target_and_maps_of_another_vocabulary_are_refused(run: Run, tmp_path: Path) -> None:
    other = replace(run, target=save_llama(tmp_path / "other", rope_theta=77.0))
    with pytest.raises(EyasError, match="config hash"):
        other.start(tmp_path / "epoch_0")
    small = replace(run, mapping=build_map(np.ones(39, dtype=np.int64), 5, []))
    with pytest.raises(EyasError, match="39 target tokens, the target has 40"):
        small.start(tmp_path / "epoch_0")
    assert not (tmp_path / "epoch_0").exists()
