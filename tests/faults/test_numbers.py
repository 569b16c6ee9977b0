"""States that no training should see: named by their row, or handled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from drafter_reference import random_rows, save_llama, write_tokens
from eyas.errors import EyasError
from eyas.extraction.shard import extract_shard
from ledger import Faults
from safetensors.torch import load_file

LAYERS = [0, 1, 2]
DTYPES = ["float32", "float16", "bfloat16", "fp8_e4m3"]
# value of one token's embedding: dtypes in which its row must be refused
REFUSED = {
    float("nan"): set(DTYPES),
    float("inf"): set(DTYPES),
    float("-inf"): set(DTYPES),
}
HANDLED = [0.0, 1e-40, 1e-30, -1e4]


def target_with(folder: Path, value: float):
    """A target that embeds token 39 as `value`."""
    target = save_llama(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[39] = value
    model.save_pretrained(target.path)
    return target


def rows_with(row: int, place: int) -> list[tuple]:
    rows = random_rows([4, 6, 5, 8], vocab_size=39, first_row=20)
    rows[row][1][place] = 39
    return rows


@pytest.mark.parametrize("dtype", DTYPES)
def test_extraction(dtype: str, faults: Faults, tmp_path: Path) -> None:
    for value in REFUSED:
        target = target_with(tmp_path / f"target {value}", value)
        for number in range(faults.count(1, 12)):
            row = faults.random.randrange(4)
            rows = rows_with(row, faults.random.randrange(4))
            tokens = write_tokens(tmp_path / f"{value} {number}" / "rows_20-24.safetensors", rows)
            output = tmp_path / f"out {value} {number}" / tokens.name
            with faults.tried(f"a state of {value}: refused by row", dtype):
                with pytest.raises(EyasError, match=f"row {20 + row}: "):
                    extract_shard(tokens, output, target, LAYERS, dtype, 6)
                assert not output.exists()
    for value in HANDLED:
        target = target_with(tmp_path / f"target {value}", value)
        tokens = write_tokens(tmp_path / f"{value}" / "rows_20-24.safetensors", rows_with(1, 2))
        output = tmp_path / f"out {value}" / tokens.name
        with faults.tried("zeros, denormals and large states: stored", f"{value} in {dtype}"):
            extract_shard(tokens, output, target, LAYERS, dtype, 6)
            for name, tensor in load_file(output).items():
                if tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn:
                    assert bool(torch.isfinite(tensor).all()), name


def test_fp8_of_any_states_is_finite_and_close(faults: Faults) -> None:
    """Each token has its own scale: nothing overflows, zeros stay zeros, denormals do not divide by nothing."""
    from eyas.extraction import fp8

    generator = torch.Generator().manual_seed(faults.random.randrange(1 << 30))
    for _ in range(faults.count(20, 500)):
        scale = 10.0 ** faults.random.uniform(-38, 30)
        states = torch.randn(4, 64, generator=generator) * scale
        states[1] = 0
        states[2, faults.random.randrange(64)] *= 1e4
        if not bool(torch.isfinite(states).all()):
            continue
        with faults.tried("overflow and underflow to fp8", f"{scale:.0e}"):
            bits, scales = fp8.quantise(states, 1)
            back = fp8.dequantise(bits, scales).float()
            assert bool(torch.isfinite(back).all()) and bool((back[1] == 0).all())
            largest = states.abs().amax(-1, keepdim=True)
            assert bool(((back - states).abs() <= largest * 2**-4).all()), (back - states).abs().max()
