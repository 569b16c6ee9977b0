"""Packing: best fit as plain loops do it, every row exactly once whatever the batch size and the world size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_reference import TRAINING, random_rows
from drafter_runs import HELD_OUT_EVERY, SEED, Run, make_run
from eyas.drafter.checkpoint import load_checkpoint
from eyas.drafter.epoch import Epoch, Runtime
from eyas.drafter.packing import best_fit, epoch_batches, share_rows
from eyas.drafter.processes import Parallel, Processes, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

rows_strategy = st.lists(st.integers(1, 300), min_size=1, max_size=60)


# ---- best fit ----


def test_best_fit_by_hand() -> None:
    lengths = np.array([6, 5, 4, 3, 2, 5, 12, 1])
    # 6 | 5 | 4 fills 6 up | 3 to 5 | 2 fills 5+3 up | 5 alone | 12 is too long, alone | 1 to the last 5
    assert best_fit(range(8), lengths, 10) == [[0, 2], [1, 3, 4], [5, 7], [6]]
    assert best_fit([3, 1, 0], lengths, 10) == [[3, 1], [0]]
    assert best_fit([], lengths, 10) == []


@settings(max_examples=80, deadline=None)
@given(rows_strategy, st.integers(1, 1000), st.randoms(use_true_random=False))
def test_best_fit_puts_each_row_where_plain_loops_would(lengths: list[int], limit: int, random: object) -> None:
    """Every batch is looked at for every row. Which of equally full ones it takes is left open."""
    order = list(range(len(lengths)))
    random.shuffle(order)  # type: ignore[attr-defined]
    batches = best_fit(order, np.array(lengths), limit)
    where = {row: number for number, batch in enumerate(batches) for row in batch}
    rooms: list[int] = []
    for row in order:
        fitting = [room for room in rooms if room >= lengths[row]]
        if not fitting:
            rooms.append(limit)
            assert where[row] == len(rooms) - 1, "no open batch has room: the next one is begun"
        else:
            assert where[row] < len(rooms) and rooms[where[row]] == min(fitting), "not where the least room is left"
        rooms[where[row]] -= lengths[row]
    place = {row: at for at, row in enumerate(order)}
    assert all(sorted(batch, key=place.__getitem__) == batch for batch in batches)  # rows keep their order


@settings(max_examples=80, deadline=None)
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


def test_batches_are_nearly_full() -> None:
    """5,000 rows as chats have them: the workload of the benchmarks."""
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(np.log(600) - 0.32, 0.8, 5000), 16, 2048).astype(np.int64)
    batches = epoch_batches(np.arange(5000), lengths, 8192, SEED, 1)
    assert lengths.sum() / (8192 * len(batches)) > 0.97


# ---- the order of an epoch ----


def test_batches_depend_on_rows_lengths_size_seed_and_epoch_alone() -> None:
    random = np.random.default_rng(1)
    rows, lengths = np.arange(0, 200, 2), random.integers(1, 30, 200)

    def batches(seed: int = 3, epoch: int = 1, size: int = 64, lengths: np.ndarray = lengths) -> list[list[int]]:
        return epoch_batches(rows, lengths, size, seed, epoch)

    state = np.random.get_state()[1].copy()
    first = batches()
    assert np.array_equal(np.random.get_state()[1], state)  # the global stream is left alone
    np.random.seed(5)
    torch.manual_seed(5)
    assert batches() == first
    others = lengths.copy()
    others[1::2] = 999  # rows that are not trained on
    assert batches(lengths=others) == first
    different = [batches(epoch=2), batches(seed=4), batches(seed=1, epoch=3), batches(size=65)]
    for i, found in enumerate(different):
        assert found != first and found not in different[:i]
    assert sorted(first) != first


def test_batches_begun_last_are_not_trained_on_last() -> None:
    """The ones begun last are the emptiest; a shuffle spreads them over the epoch."""
    lengths = np.full(41, 10)  # ten batches of four, one of a single row
    places = [[len(b) for b in epoch_batches(np.arange(41), lengths, 40, SEED, epoch)].index(1) for epoch in range(60)]
    assert set(places) == set(range(11))


# ---- rows over processes and passes ----


@settings(max_examples=100, deadline=None)
@given(rows_strategy, st.integers(1, 400), st.integers(1, 5), st.data())
def test_processes_and_passes_share_a_batch_exactly(
    lengths: list[int], micro_tokens: int, processes: int, data: st.DataObject
) -> None:
    sizes = np.array(lengths)
    work = np.array(data.draw(st.lists(st.integers(0, 5000), min_size=len(lengths), max_size=len(lengths))))
    batch = sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1)))
    shares = share_rows(batch, sizes, work, processes, micro_tokens)
    assert len(shares) == processes
    assert sorted(row for own in shares for part in own for row in part) == batch
    assert len({len(own) for own in shares}) == 1  # collective operations of every pass meet
    assert any(own[-1] for own in shares)  # and there is no pass in which nobody has work
    for own in shares:
        for part in own:
            assert len(part) <= 1 or sizes[part].sum() <= micro_tokens
    loads = [sum(int(work[row]) for part in own for row in part) for own in shares]
    assert max(loads) - min(loads) <= max(work[batch])
    assert share_rows(batch, sizes, work, processes, micro_tokens) == shares


def test_one_process_takes_a_batch_as_it_is() -> None:
    lengths, work = np.array([5, 3, 9, 4]), np.array([1, 100, 10, 1000])
    assert share_rows([2, 0, 3, 1], lengths, work, 1, 100) == [[[2, 0, 3, 1]]]
    assert share_rows([2, 0, 3, 1], lengths, work, 1, 9) == [[[2], [0, 3], [1]]]


def test_more_processes_than_rows_leave_some_without() -> None:
    shares = share_rows([7, 2], np.full(8, 4), np.full(8, 9), 4, 100)
    assert sorted(map(str, shares)) == ["[[2]]", "[[7]]", "[[]]", "[[]]"]


# ---- a whole epoch, as the trainer reads it ----


@dataclass(frozen=True)
class Pretended(Processes):
    """A process of several that does not meet the others: enough to see what it reads."""

    def distribute(self, module: nn.Module, parallel: Parallel) -> nn.Module:
        return module

    def first_then_all(self, work: Callable[[], Result]) -> Result:
        return work()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """83 rows: no batch size and no number of processes divides them."""
    lengths = np.random.default_rng(0).integers(3, 40, 83).tolist()
    return make_run(tmp_path_factory.mktemp("run"), random_rows(lengths))


@pytest.fixture(scope="module")
def start(run: Run) -> Path:
    return run.start(run.folder / "epoch_0")


@pytest.mark.parametrize("batch_tokens", [16, 100, 333, 100_000])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_an_epoch_trains_on_every_row_exactly_once(count: int, batch_tokens: int, run: Run, start: Path) -> None:
    """The tail is not dropped, file index is row index, and rows that are held out stay out."""
    checkpoint, data, read = load_checkpoint(start), run.data, Counter()
    for rank in range(count):
        processes = Pretended(rank, count, torch.device("cpu"))
        for epoch in (1, 2):
            work = Epoch(
                data, checkpoint, run.target, epoch, TRAINING | {"batch_tokens": batch_tokens}, HELD_OUT_EVERY, SEED,
                processes, Runtime(micro_tokens=50),
            )  # fmt: skip
            for number in range(len(work.batches)):
                for batch in work._load(number)[1]:
                    if batch is not None:
                        read.update((epoch, row) for row in batch.row_ids)
                        assert len(batch.row_ids) == 1 or len(batch.tokens) <= 50
    training = [row for row in range(83) if row % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    assert read == {(epoch, row): 1 for epoch in (1, 2) for row in training}
