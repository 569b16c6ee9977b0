"""Batches: every row exactly once, whole, never over the limit; states bit for bit as they were stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_reference import extracted, random_rows, save_llama, write_tokens
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.packing import best_fit, epoch_batches
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

LENGTHS = [7, 3, 12, 1, 5, 9]  # rows 0 … 2 and 3 … 5, in two shards
rows_strategy = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def manifest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("run")
    shards = [random_rows(LENGTHS[:3]), random_rows(LENGTHS[3:], seed=1, first_row=3)]
    return extracted(folder, save_llama(folder / "target"), shards, request.param)


def tokens_folder(manifest: Manifest) -> Path:
    return manifest.path.parent.parent / "tokens"


@settings(max_examples=60, deadline=None)
@given(rows_strategy, st.integers(1, 1000), st.integers(0, 2**31 - 1), st.integers(1, 50), st.data())
def test_every_row_exactly_once_and_no_batch_too_large(
    lengths: list[int], batch_tokens: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    chosen = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))  # the training rows among all
    batches = epoch_batches(np.array(chosen), np.array(lengths), batch_tokens, seed, epoch)
    assert sorted(i for batch in batches for i in batch) == chosen
    for batch in batches:
        assert batch
        assert len(batch) == 1 or sum(lengths[i] for i in batch) <= batch_tokens


@settings(max_examples=30, deadline=None)
@given(rows_strategy, st.integers(1, 1000))
def test_pack_keeps_the_order_and_wastes_no_batch(lengths: list[int], batch_tokens: int) -> None:
    batches = best_fit(range(len(lengths)), np.array(lengths), batch_tokens)
    assert [i for batch in batches for i in batch] == list(range(len(lengths)))
    for batch, following in zip(batches, batches[1:], strict=False):  # a batch ends where the next row does not fit
        assert sum(lengths[i] for i in batch) + lengths[following[0]] > batch_tokens


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    rows, lengths = np.arange(40), np.ones(200, dtype=np.int64)

    def order(seed: int, epoch: int, batch_tokens: int = 4) -> list[int]:
        return [i for batch in epoch_batches(rows, lengths, batch_tokens, seed, epoch) for i in batch]

    state = np.random.get_state()[1].copy()
    assert order(3, 1) == order(3, 1) == order(3, 1, batch_tokens=7)
    assert order(3, 1) != order(3, 2)
    assert order(3, 1) != order(4, 1)
    assert order(3, 1) != sorted(order(3, 1))
    assert np.array_equal(np.random.get_state()[1], state)  # the global stream is left alone


def test_a_batch_holds_the_stored_states_bit_for_bit(manifest: Manifest) -> None:
    data = HiddenStates(manifest, tokens_folder(manifest))
    assert (len(data), data.lengths.tolist(), data.row_ids.tolist()) == (6, LENGTHS, [0, 1, 2, 3, 4, 5])
    batch = data.batch([4, 0, 2])  # across both shards, out of order
    assert batch.row_ids == [4, 0, 2]
    assert batch.spans == [(0, 5), (5, 12), (12, 24)]
    assert batch.positions.tolist() == [*range(5), *range(7), *range(12)]
    assert len(batch.tokens) == 24  # nothing is padded
    dtype = getattr(torch, manifest.values["dtype"])
    for row, (start, end) in zip(batch.row_ids, batch.spans, strict=True):
        stored, tokens = (
            load_file(manifest.shards[row // 3]),
            load_file(tokens_folder(manifest) / manifest.shards[row // 3].name),
        )
        a, b = stored["offsets"][row % 3 : row % 3 + 2].tolist()
        assert stored["aux_hidden_states"].dtype == dtype
        for name, values in (("aux_hidden_states", batch.aux), ("last_hidden_state", batch.last)):
            assert values.dtype == torch.float32
            assert torch.equal(values[start:end], stored[name][a:b].float())
            assert torch.equal(values[start:end].to(dtype), stored[name][a:b])
            assert values[start:end].abs().max() > 0
        assert torch.equal(batch.tokens[start:end], tokens["input_ids"][a:b].long())
        assert torch.equal(batch.target_token[start:end], stored["target_token"][a:b].long())
        assert batch.mask[start:end].tolist() == (tokens["loss_mask"][a:b] == 1).tolist()


def test_moving_a_batch_keeps_all_of_it(manifest: Manifest) -> None:
    batch = HiddenStates(manifest, tokens_folder(manifest)).batch([1, 5])
    moved = batch.to(torch.device("cpu"))
    assert (moved.spans, moved.row_ids) == (batch.spans, batch.row_ids)
    assert all(
        torch.equal(getattr(moved, n), getattr(batch, n)) for n in ("aux", "last", "tokens", "mask", "positions")
    )


@pytest.mark.parametrize("every", [1, 2, 3, 4, 100])
def test_held_out_rows_are_never_trained_on(manifest: Manifest, every: int) -> None:
    data = HiddenStates(manifest, tokens_folder(manifest))
    training = data.row_ids[data.select(every, held_out=False)].tolist()
    held_out = data.row_ids[data.select(every, held_out=True)].tolist()
    assert held_out == [row for row in range(6) if (row + 1) % every == 0]
    assert training == [row for row in range(6) if row not in held_out]


@pytest.mark.parametrize("what", ["an id", "a row id", "the lengths", "a row less"])
def test_tokens_of_other_rows_are_refused(what: str, tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    rows = random_rows([4, 6])
    manifest = extracted(tmp_path, target, [rows])
    name = manifest.shards[0].name
    HiddenStates(manifest, tmp_path / "tokens")
    if what == "an id":
        rows[1][1][5] += 1
    elif what == "a row id":
        rows[1] = (7, *rows[1][1:])
    elif what == "the lengths":  # the same ids, cut elsewhere
        ids, mask = np.concatenate([rows[0][1], rows[1][1]]), np.concatenate([rows[0][2], rows[1][2]])
        rows = [(0, ids[:5], mask[:5]), (1, ids[5:], mask[5:])]
    else:
        rows = rows[:1]
    write_tokens(tmp_path / "tokens" / name, rows)
    with pytest.raises(EyasError, match=name):
        HiddenStates(manifest, tmp_path / "tokens")


def test_missing_tokens_are_one_clear_error(manifest: Manifest, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="rows_0-3.safetensors: this file is missing"):
        HiddenStates(manifest, tmp_path)
