"""States in eight bits: how far off they are, what is exact, files that survive a kill, training on them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from drafter_reference import extracted, random_rows, run_killed, save_llama, write_tokens
from drafter_runs import DRAFT_VOCAB, LENGTHS, Run, history_of
from eyas.drafter.dataset import HiddenStates
from eyas.errors import EyasError
from eyas.extraction.fp8 import dequantise, quantise
from eyas.extraction.layout import shard_layout
from eyas.extraction.shard import extract_shard
from eyas.shards import checksum
from eyas.target.tokenizer import TargetReference
from eyas.vocabulary.mapping import build_map
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

LAYERS = [0, 1, 3]
CODES = [code for code in range(256) if code & 0x7F != 0x7F]  # all but the two NaN


def values_of(codes: list[int] | np.ndarray) -> np.ndarray:
    """Numbers that float8_e4m3fn codes stand for, by their definition (float64)."""
    codes = np.asarray(codes)
    exponent, fraction = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, fraction / 8 * 2.0**-6, (1 + fraction / 8) * 2.0 ** (exponent - 7.0))
    return np.where(codes & 128, -size, size)


def restored(bits: torch.Tensor, scales: torch.Tensor) -> np.ndarray:
    """Number times scale in float64, [vectors, H]."""
    return values_of(bits.reshape(scales.numel(), -1).numpy()) * scales.double().reshape(-1, 1).numpy()


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.one_of(
    st.lists(finite, min_size=6, max_size=6),
    st.lists(st.floats(-(2.0**-126), 2.0**-126, width=32), min_size=6, max_size=6),  # denormal
    st.lists(st.floats(-10, 10, width=32), min_size=6, max_size=6),
)
LARGEST = float(torch.finfo(torch.float32).max)


@settings(max_examples=400, deadline=None)
@given(st.lists(vectors, min_size=1, max_size=5), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@example([[LARGEST, -LARGEST, LARGEST / 2, 1.0, 0.0, -0.0]], torch.float32)
@example([[1.4e-45, -1.4e-45, 0.0, 0.0, 0.0, 0.0], [2e-42, 1e-43, 6.3e-43, 0.0, -2e-42, 1e-45]], torch.float32)
@example([[0.0] * 6, [-0.0] * 6], torch.float32)
def test_every_vector_is_close_and_no_value_is_nan(rows: list[list[float]], dtype: torch.dtype) -> None:
    states = torch.tensor(rows, dtype=torch.float32).to(dtype)
    states = torch.where(states.isfinite(), states, torch.ones_like(states))
    bits, scales = quantise(states, 2)
    assert (bits.dtype, bits.shape, scales.dtype, scales.shape) == (
        torch.uint8, states.shape, torch.float32, (len(states), 2)
    )  # fmt: skip
    assert not ((bits & 0x7F) == 0x7F).any() and scales.isfinite().all() and (scales > 0).all()
    wanted = states.double().reshape(-1, 3).numpy()
    # 2^-4 of the value, or half of the smallest number times the scale; largest values as bfloat16 holds them
    allowed = np.maximum(abs(wanted) * 2.0**-4, 2.0**-10 * scales.double().reshape(-1, 1).numpy()) * (1 + 1e-6)
    assert (abs(restored(bits, scales) - wanted) <= allowed).all()
    largest = abs(wanted).max(1, keepdims=True)
    assert (abs(restored(bits, scales) - wanted) <= largest * 2.0**-4 * (1 + 1e-6)).all()
    read = dequantise(bits, scales)
    assert read.dtype == torch.bfloat16 and read.shape == states.shape and read.isfinite().all()
    exact = torch.from_numpy(restored(bits, scales)).view(states.shape)
    assert ((read.double() - exact).abs() <= exact.abs() * 2.0**-8 + 2.0**-134).all()  # rounded to bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-100, -3, 0, 20, 90])
def test_representable_values_come_back_exactly(power: int, dtype: torch.dtype) -> None:
    """All numbers of the format, 448 among them, times a power of two."""
    states = torch.from_numpy(values_of(CODES) * 2.0**power).to(dtype)[None]
    bits, scales = quantise(states, 1)
    assert scales.tolist() == [[2.0**power]]
    assert bits.tolist() == [CODES]
    assert torch.equal(dequantise(bits, scales).double(), states.double())


def test_every_code_is_read_as_the_number_that_it_stands_for() -> None:
    """The scale is no power of two, so that the product is rounded."""
    scales = torch.tensor([0.3, 7e-5, 1.9e-40, 5e35])
    bits = torch.tensor([CODES] * 4, dtype=torch.uint8)
    read = dequantise(bits, scales)
    product = torch.from_numpy(restored(bits, scales)).float().to(torch.bfloat16)
    assert torch.equal(read, product)
    assert torch.equal(dequantise(bits.view(2, -1), scales.view(2, 2)), product.view(2, -1))


def test_many_vectors_are_each_scaled_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken some at a time: the last part is a smaller one."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(11, 3 * 8, generator=generator) * torch.logspace(-3, 3, 33).view(11, 3).repeat_interleave(8, 1)
    bits, scales = quantise(states, 3)
    monkeypatch.setattr("eyas.extraction.fp8._VALUES", 4 * 8)
    again, scales_again = quantise(states, 3)
    assert torch.equal(bits, again) and torch.equal(scales, scales_again)
    torch.testing.assert_close(scales, states.view(11, 3, 8).abs().amax(2) / 448)
    for token in range(11):
        for vector in range(3):
            part, scale = bits[token, 8 * vector : 8 * vector + 8], scales[token, vector]
            expected = torch.from_numpy(values_of(part.numpy())).float().mul(scale)
            assert torch.equal(dequantise(bits, scales)[token, 8 * vector : 8 * vector + 8], expected.bfloat16())
            torch.testing.assert_close(
                expected, states[token, 8 * vector : 8 * vector + 8], rtol=2**-4, atol=scale * 2**-9
            )


# ---- shards ----


def test_a_shard_holds_the_states_of_the_target_in_half_the_bytes(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target", hidden_size=64)
    tokens = write_tokens(tmp_path / "rows_0-12.safetensors", random_rows(LENGTHS))
    for dtype in ("float32", "bfloat16", "fp8_e4m3"):
        extract_shard(tokens, tmp_path / f"{dtype}.safetensors", target, LAYERS, dtype, 40)
    wide, found = (load_file(tmp_path / f"{name}.safetensors") for name in ("float32", "fp8_e4m3"))
    count = sum(LENGTHS)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    assert kinds == {
        "aux_hidden_states": (torch.float8_e4m3fn, (count, 192)), "last_hidden_state": (torch.float8_e4m3fn, (count, 64)),
        "aux_scales": (torch.float32, (count, 3)), "last_scale": (torch.float32, (count,)),
        "input_ids": (torch.int32, (count,)), "target_token": (torch.int32, (count,)),
        "offsets": (torch.int64, (13,)), "row_ids": (torch.int64, (12,)),
    }  # fmt: skip
    for name, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")):
        states = wide[name].view(count, -1, 64)
        scale = found[scales].view(count, -1, 1)
        assert (
            (found[name].float().view(states.shape).mul(scale) - states)
            .abs()
            .le((states.abs() * 2**-4).maximum(scale * 2**-10) * 1.0001)
            .all()
        )
        torch.testing.assert_close(scale, states.abs().amax(2, keepdim=True) / 448)
        assert states.std() > 0.1
    assert torch.equal(found["target_token"], wide["target_token"])
    size, narrow = (tmp_path / f"{name}.safetensors" for name in ("bfloat16", "fp8_e4m3"))
    assert narrow.stat().st_size == shard_layout(count, 12, 64, "fp8_e4m3").nbytes
    assert size.stat().st_size - narrow.stat().st_size == pytest.approx(count * (4 * 64 - 16), abs=200)


def test_a_killed_job_ends_with_the_same_bytes(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    tokens = write_tokens(tmp_path / "tokens" / "rows_0-12.safetensors", random_rows(LENGTHS))
    whole, output = (tmp_path / folder / tokens.name for folder in ("whole", "out"))
    extract_shard(tokens, whole, target, LAYERS, "fp8_e4m3", 18)
    run_killed(f"""
from eyas.extraction.shard import extract_shard
extract_shard(Path({str(tokens)!r}), Path({str(output)!r}), TargetReference({target.path!r}), {LAYERS}, "fp8_e4m3", 18)
""")
    staged = output.parent / ".staging" / output.stem
    assert len((staged / "journal.jsonl").read_text().splitlines()) > 2 and not output.exists()
    partial = load_file(staged / output.name)["last_scale"]
    assert (partial == 0).any() and (partial > 0).any()
    extract_shard(tokens, output, target, LAYERS, "fp8_e4m3", 18)
    assert checksum(output) == checksum(whole)
    assert (load_file(output)["last_scale"] > 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_states_that_are_no_numbers_name_their_row(value: float, tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[39] = value
    model.save_pretrained(target.path)
    rows = random_rows([4, 6, 5], vocab_size=39, first_row=20)
    rows[1][1][3] = 39
    tokens = write_tokens(tmp_path / "rows_20-23.safetensors", rows)
    output = tmp_path / "out" / tokens.name
    with pytest.raises(EyasError, match=r"row 21: .*hold NaN or infinity in float32; .*target\.dtype"):
        extract_shard(tokens, output, target, LAYERS, "fp8_e4m3", 6)
    assert not output.exists() and not output.with_suffix(".json").exists()
    extract_shard(tokens, output, target, LAYERS, "fp8_e4m3", 6, max_failed_rows=1)
    found = load_file(output)
    assert not found["last_hidden_state"][4:10].float().any() and not found["aux_scales"][4:10].any()
    assert (found["aux_scales"][:4] > 0).all() and (found["aux_scales"][10:] > 0).all()
    read = dequantise(found["aux_hidden_states"].view(torch.uint8), found["aux_scales"])
    assert torch.equal(read[4:10], torch.zeros(6, 48, dtype=torch.bfloat16))


# ---- training ----


def run_with(folder: Path, target: TargetReference, dtype: str) -> Run:
    rows = random_rows(LENGTHS)
    counts = np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=40)
    manifest = extracted(folder, target, [rows[:5], rows[5:]], dtype)
    return Run(folder, target, manifest, build_map(counts, DRAFT_VOCAB, [2]))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The same rows of the same target, in two precisions."""
    folder = tmp_path_factory.mktemp("runs")
    target = save_llama(folder / "target")
    return {dtype: run_with(folder / dtype, target, dtype) for dtype in ("bfloat16", "fp8_e4m3")}


def test_a_batch_holds_the_dequantised_states(runs: dict[str, Run]) -> None:
    run = runs["fp8_e4m3"]
    data = run.data
    assert all(isinstance(shard["aux_hidden_states"].base, np.ndarray) for shard in data._states)  # mapped, not read
    batch = data.batch([7, 0, 4, 11])  # across both shards, out of order
    assert batch.row_ids == [7, 0, 4, 11]
    for row, (start, end) in zip(batch.row_ids, batch.spans, strict=True):
        stored = load_file(run.manifest.shards[row >= 5])
        place = row - 5 * (row >= 5)
        a, b = stored["offsets"][place : place + 2].tolist()
        aux = stored["aux_hidden_states"][a:b].float().view(-1, 3, 16) * stored["aux_scales"][a:b, :, None]
        last = stored["last_hidden_state"][a:b].float() * stored["last_scale"][a:b, None]
        assert torch.equal(batch.aux[start:end], aux.view(-1, 48).bfloat16())
        assert torch.equal(batch.last[start:end], last.bfloat16())
        assert torch.equal(batch.target_token[start:end], stored["target_token"][a:b].long())
    assert batch.unsound_rows() == []


def test_training_on_eight_bits_is_close_to_training_on_sixteen(runs: dict[str, Run], tmp_path: Path) -> None:
    held_out, trained = {}, {}
    for dtype, run in runs.items():
        start = run.start(tmp_path / dtype / "epoch_0")
        run.train(start, 1, tmp_path / dtype / "epoch_1")
        entry = history_of(run.train(tmp_path / dtype / "epoch_1", 2, tmp_path / dtype / "epoch_2"))[1]
        held_out[dtype], trained[dtype] = entry["held_out"]["loss"], entry["loss"]
    assert held_out["fp8_e4m3"] == pytest.approx(held_out["bfloat16"], rel=0.05)
    assert trained["fp8_e4m3"] == pytest.approx(trained["bfloat16"], rel=0.05)
    assert held_out["fp8_e4m3"] != held_out["bfloat16"]


def test_damaged_scales_are_refused_by_row(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["fp8_e4m3"].copy(tmp_path)
    run.change_states(8, lambda scales: scales[3:4].fill(np.nan), "aux_scales")
    assert run.data.batch([2, 8, 9]).unsound_rows() == [8]


def test_a_shard_without_its_scales_is_one_clear_error(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["fp8_e4m3"].copy(tmp_path)
    shutil.copy(runs["bfloat16"].manifest.shards[0], run.manifest.shards[0])
    with pytest.raises(EyasError, match=r"rows_0-5\.safetensors: has no tensor aux_scales, last_scale; delete it"):
        HiddenStates(run.manifest, tmp_path / "tokens")
