"""Reading: states bit for bit as stored, counts of what is predicted as loops find them, one batch ahead."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_reference import extracted, random_rows, save_llama, write_tokens
from eyas.drafter.dataset import HiddenStates, ahead
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest
from safetensors.torch import load_file

LENGTHS = [7, 3, 12, 1, 5, 9]  # rows 0 … 2 and 3 … 5, in two shards


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def manifest(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("run")
    shards = [random_rows(LENGTHS[:3]), random_rows(LENGTHS[3:], seed=1, first_row=3)]
    return extracted(folder, save_llama(folder / "target"), shards, request.param)


def tokens_folder(manifest: Manifest) -> Path:
    return manifest.path.parent.parent / "tokens"


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
            assert values.dtype == dtype
            assert torch.equal(values[start:end], stored[name][a:b])
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


# ---- what is predicted, by row and step ----


@pytest.fixture(scope="module")
def spotty(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Three shards of rows with gaps in their masks: also one to three tokens, nothing or all supervised."""
    random = np.random.default_rng(7)
    lengths, shards, first = [[1, 9, 2, 14], [3], [11, 1, 2, 3, 8, 20]], [], 0
    for number, part in enumerate(lengths):
        rows = random_rows(part, seed=number, first_row=first)
        for _, _, mask in rows:
            mask[:] = random.random(len(mask)) < 0.6
        shards.append(rows)
        first += len(part)
    shards[0][3][2][:] = 0
    shards[2][0][2][:] = 1
    shards[2][3][2][:] = 1
    folder = tmp_path_factory.mktemp("spotty")
    return extracted(folder, save_llama(folder / "target"), shards)


def stored_rows(manifest: Manifest) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Mask and the target's own argmax of each row, read without eyas."""
    for shard in manifest.shards:
        states, tokens = load_file(shard), load_file(tokens_folder(manifest) / shard.name)
        for a, b in itertools.pairwise(tokens["offsets"].tolist()):
            yield tokens["loss_mask"][a:b].numpy(), states["target_token"][a:b].numpy()


@pytest.mark.parametrize("steps", [1, 3, 7, 25])  # up to more than the longest row has tokens
def test_counted_equals_loops_over_rows_and_steps(spotty: Manifest, steps: int) -> None:
    data = HiddenStates(spotty, tokens_folder(spotty))
    draft_ids = np.full(40, -1)
    draft_ids[np.arange(40) % 3 > 0] = np.arange(26)
    expected = []
    for mask, own in stored_rows(spotty):
        row = [0] * steps
        for step in range(steps):
            for position in range(len(mask)):
                predicted = position + 2 + step
                if predicted < len(mask) and mask[predicted] and own[predicted - 1] % 3 > 0:
                    row[step] += 1
        expected.append(row)
    found = data.counted(draft_ids, steps)
    assert (found.dtype, found.tolist()) == (np.int64, expected)
    assert found.any(1).sum() > 3 and found.sum() < data.counted(np.arange(40), steps).sum()
    assert not found[[0, 2, 3, 6, 7]].any()  # one token, two tokens, an empty mask


def test_nothing_counts_without_a_draft_vocabulary(spotty: Manifest) -> None:
    assert not HiddenStates(spotty, tokens_folder(spotty)).counted(np.full(40, -1), 3).any()


def test_supervised_tokens_of_each_row(spotty: Manifest) -> None:
    found = HiddenStates(spotty, tokens_folder(spotty)).supervised().tolist()
    assert found == [int(mask.sum()) for mask, _ in stored_rows(spotty)]
    assert (found[3], found[5], found[8]) == (0, 11, 3)


# ---- one ahead ----


class Loader:
    """Loads numbers by doubling them; knows which loads were begun, and waits for one."""

    def __init__(self, failing: int | None = None) -> None:
        self.failing, self.begun, self.changed = failing, [], threading.Condition()

    def __call__(self, item: int) -> int:
        with self.changed:
            self.begun.append(item)
            self.changed.notify_all()
        if item == self.failing:
            raise EyasError(f"cannot read {item}")
        return 2 * item

    def wait_for(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: len(self.begun) >= count, timeout=20)


def test_one_item_is_loaded_ahead_and_no_more() -> None:
    load, seen = Loader(), []
    for loaded in ahead(load, range(6)):
        seen.append(loaded)
        assert load.wait_for(min(len(seen) + 1, 6))  # while this one is used, by another thread
        threading.Event().wait(0.02)
        assert load.begun == list(range(min(len(seen) + 1, 6)))
    assert seen == [0, 2, 4, 6, 8, 10]
    assert list(ahead(load, [])) == []
    assert list(ahead(load, [3])) == [6]


def test_a_failed_load_comes_out_in_its_turn() -> None:
    load, seen = Loader(failing=3), []
    with pytest.raises(EyasError, match="cannot read 3"):
        for loaded in ahead(load, range(9)):
            seen.append(loaded)
    assert seen == [0, 2, 4]
    assert load.begun in ([0, 1, 2, 3], [0, 1, 2, 3, 4])


def test_loading_stops_when_nobody_wants_more() -> None:
    load = Loader()
    items = ahead(load, itertools.count())
    assert [next(items), next(items)] == [0, 2]
    items.close()
    assert load.begun in ([0, 1], [0, 1, 2])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reading")]
    with pytest.raises(ZeroDivisionError):
        for loaded in ahead(load, itertools.count()):
            _ = 1 // (loaded - 4)
    assert len(load.begun) <= 7
