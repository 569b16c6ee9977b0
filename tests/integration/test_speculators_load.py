"""The vLLM form in the hands of speculators: it converts it, loads every tensor, and computes what Eyas computes.

Its environment is made by the project's script: bash benchmarks/peers/setup.sh speculators
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from drafter_reference import reference_states, small_shape
from eyas.drafter.checkpoint import Checkpoint, save_checkpoint
from eyas.drafter.imported import import_drafter
from eyas.drafter.initialise import random_weights
from eyas.export import export_drafter
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

CHECKOUT = Path(__file__).parents[2]
VENV = CHECKOUT / "benchmarks" / ".venvs" / "speculators"
SETUP = CHECKOUT / "benchmarks" / "peers" / "setup.sh"

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def python() -> Path:
    wanted = re.search(r"speculators==[\d.]+", SETUP.read_text())[0]
    stamp = VENV / ".installed"
    if not stamp.is_file() or wanted not in stamp.read_text():
        pytest.skip(f"no environment with {wanted}; make it with: bash benchmarks/peers/setup.sh speculators")
    return VENV / "bin" / "python"


@pytest.mark.parametrize("normed", [False, True])
def test_speculators_loads_and_computes_the_same(python: Path, tmp_path: Path, normed: bool) -> None:
    # speculators' converter takes heads · head_dim for the width
    shape = small_shape(
        hidden_size=16, target_hidden_size=16, num_attention_heads=4, head_dim=4, norm_before_residual=normed
    )
    weights = random_weights(shape, 0)
    ids = torch.arange(1, 1 + 2 * shape.draft_vocab_size, 2)
    weights |= {"d2t": ids - torch.arange(len(ids)), "t2d": torch.zeros(shape.vocab_size, dtype=torch.bool)}
    weights["t2d"][ids] = True
    for name, tensor in weights.items():  # norms of ones would hide which is which
        if tensor.dim() == 1 and tensor.is_floating_point():
            tensor.mul_(1 + torch.rand(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
        elif tensor.is_floating_point():
            tensor.mul_(10)
    save_checkpoint(Checkpoint(shape, weights, {}, {"epoch": 1, "trained": []}), tmp_path / "epoch_1", "mark")
    export_drafter(tmp_path / "epoch_1", "vllm", "llama", tmp_path / "vllm")

    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=16, intermediate_size=10, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    generator = torch.Generator().manual_seed(1)
    aux = torch.randn(9, 3 * 16, generator=generator)
    tokens = torch.randint(shape.vocab_size, (9,), generator=generator)
    save_file({"aux": aux, "tokens": tokens}, tmp_path / "inputs.safetensors")

    places = [tmp_path / name for name in ("vllm", "target", "inputs.safetensors", "converted", "outputs.safetensors")]
    done = subprocess.run(
        [python, Path(__file__).with_name("speculators_worker.py"), *places],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Missing keys" not in done.stderr and "Unexpected keys" not in done.stderr
    found = load_file(places[-1])
    logits = found.pop("logits")

    exported = load_file(tmp_path / "vllm" / "model.safetensors")
    theirs = {re.sub(r"^layers\.0\.", "midlayer.", name): tensor for name, tensor in found.items()}
    assert theirs.keys() == exported.keys()
    for name, tensor in exported.items():
        assert torch.equal(theirs[name].to(tensor.dtype), tensor), name

    plain = {name: tensor.double() for name, tensor in exported.items() if tensor.is_floating_point()}
    states = reference_states(plain, shape, aux.double(), tokens.tolist(), 1)[0]
    for t in range(8):
        g = states[t]
        normed = g / torch.sqrt((g * g).mean() + shape.rms_norm_eps) * plain["norm.weight"]
        torch.testing.assert_close(logits[t].double(), plain["lm_head.weight"] @ normed, rtol=1e-4, atol=1e-4)

    # and back: what speculators has written is a drafter to start from
    again = import_drafter(tmp_path / "converted", shape, 5, "llama")
    for name, tensor in again.weights.items():
        assert torch.equal(tensor, exported[name].float()), name
    assert torch.equal(again.lm_head, exported["lm_head.weight"]) and torch.equal(again.target_ids, ids)
