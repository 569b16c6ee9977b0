"""The draft vocabulary against a slow reference, and what is counted for it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from eyas.errors import EyasError
from eyas.shards import describe_file, write_arrays
from eyas.tokenization import TokenShard
from eyas.vocabulary import build_map, read_map, write_map
from eyas.vocabulary.mapping import count_tokens, coverage
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

VOCABULARY = 12


def tokens(rows: dict[int, list[tuple[int, int]]]) -> TokenShard:
    """A shard from row id -> [(token id, mask)]."""
    flat = [pair for row in rows.values() for pair in row]
    return TokenShard(
        np.array([i for i, _ in flat], np.int32),
        np.array([m for _, m in flat], np.uint8),
        np.cumsum([0, *map(len, rows.values())]).astype(np.int64),
        np.array(list(rows), np.int64),
    )


def token_file(path: Path, rows: dict[int, list[tuple[int, int]]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, vars(tokens(rows)), {})
    return path


def slow_ids(counts: list[int], size: int, forced: set[int]) -> list[int]:
    """One id at a time: the forced ones, then the most frequent of the others, the lower id first."""
    chosen = set(forced)
    while len(chosen) < size:
        best = max((i for i in range(len(counts)) if i not in chosen), key=lambda i: (counts[i], -i))
        chosen.add(best)
    return sorted(chosen)


# ---- the map


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], int, set[int]]:
    counts = draw(st.lists(st.integers(0, 4), min_size=2, max_size=24))  # few values, so many ties
    forced = draw(st.sets(st.integers(0, len(counts) - 1), max_size=5))
    return counts, draw(st.integers(max(1, len(forced)), len(counts))), forced


@settings(max_examples=150, deadline=None, derandomize=True)
@given(case=cases())
@example(case=([0] * 5, 5, set()))  # the whole vocabulary
@example(case=([2**40, 1, 2**40], 1, {1}))  # forced against all counts
def test_map_is_the_slow_one(case: tuple[list[int], int, set[int]]):
    counts, size, forced = case
    mapping = build_map(np.array(counts, np.int64), size, sorted(forced))
    ids = slow_ids(counts, size, forced)
    assert (mapping.d2t.dtype, mapping.t2d.dtype) == (np.int64, np.bool_)
    assert mapping.d2t.tolist() == [target - draft for draft, target in enumerate(ids)]
    assert mapping.t2d.tolist() == [i in ids for i in range(len(counts))]
    assert mapping.target_ids.tolist() == ids
    assert mapping.draft_ids().tolist() == [ids.index(i) if i in ids else -1 for i in range(len(counts))]


def test_ties_go_to_the_lower_id():
    mapping = build_map(np.array([0, 3, 1, 3, 1, 1]), 3, [])
    assert mapping.target_ids.tolist() == [1, 2, 3]


def test_forced_ids_push_the_rarest_out():
    mapping = build_map(np.array([9, 8, 7, 0, 0]), 3, [4, 4, 3])
    assert mapping.target_ids.tolist() == [0, 3, 4] and mapping.d2t.tolist() == [0, 2, 2]


def test_whole_vocabulary_is_the_identity():
    mapping = build_map(np.array([0, 5, 1]), 3, [2])
    assert mapping.d2t.tolist() == [0, 0, 0] and mapping.t2d.all()


def test_impossible_sizes():
    with pytest.raises(EyasError, match="draft_vocab_size: 4 is larger than the target's vocabulary of 3"):
        build_map(np.zeros(3, np.int64), 4, [])
    with pytest.raises(EyasError, match="draft_vocab_size: 1 has no room for the 2 special tokens"):
        build_map(np.zeros(3, np.int64), 1, [0, 2])


def test_coverage():
    counts = np.array([6, 3, 1, 0])
    assert coverage(counts, np.array([True, False, True, False])) == 0.7
    assert coverage(np.zeros(4, np.int64), np.ones(4, bool)) is None


# ---- counting


ROWS = {
    0: [(1, 0), (2, 1), (2, 1)],
    4: [(3, 1)],  # held out with held_out_every = 5
    6: [(2, 0), (5, 1)],
    9: [(3, 1), (7, 1), (1, 0)],  # held out
}


def test_only_supervised_tokens_of_training_rows_count():
    training = count_tokens(tokens(ROWS), VOCABULARY, 5)
    assert training.dtype == np.int64 and training.tolist() == [0, 0, 2, 0, 0, 1] + [0] * 6
    assert count_tokens(tokens(ROWS), VOCABULARY, 5, held_out=True).tolist() == [0, 0, 0, 2, 0, 0, 0, 1] + [0] * 4
    assert count_tokens(tokens({}), VOCABULARY, 5).tolist() == [0] * VOCABULARY


@pytest.mark.parametrize("wrong", [VOCABULARY, -1])
def test_ids_outside_the_vocabulary_are_refused(wrong: int):
    with pytest.raises(EyasError, match=f"token id {wrong} lies outside the target's vocabulary of {VOCABULARY}"):
        count_tokens(tokens({0: [(1, 1), (wrong, 1)]}), VOCABULARY, 5)


# ---- files


def written(folder: Path, size: int = 5, special: tuple[int, ...] = (5, 7, 8)) -> Path:
    files = [
        token_file(folder / "tokens" / "rows_0-5.safetensors", {r: ROWS[r] for r in (0, 4)}),
        token_file(folder / "tokens" / "rows_5-10.safetensors", {r: ROWS[r] for r in (6, 9)}),
    ]
    output = folder / "map" / f"{size}.safetensors"
    write_map(files, VOCABULARY, size, 5, [11], special, output)
    return output


def test_written_map_and_its_facts(tmp_path: Path):
    output = written(tmp_path, 4)
    # 2 is the most frequent; 11 ends turns; 5 is special and seen in training; 0 is the lowest of the rest.
    # 7 is special but seen in a held-out row only, 8 nowhere.
    loaded = load_file(output)
    assert loaded["d2t"].dtype == np.int64 and loaded["d2t"].tolist() == [0, 1, 3, 8]
    assert loaded["t2d"].dtype == np.bool_ and np.flatnonzero(loaded["t2d"]).tolist() == [0, 2, 5, 11]
    assert read_map(output).target_ids.tolist() == [0, 2, 5, 11]
    facts = json.loads(output.with_suffix(".json").read_text())
    assert (facts["forced_ids"], facts["supervised_tokens"], facts["distinct_tokens"]) == ([5, 11], 3, 2)
    assert (facts["coverage"], facts["coverage_held_out"]) == (1.0, 0.0)
    assert facts["files"] == {"4.safetensors": describe_file(output)}
    assert sorted(os.listdir(output.parent)) == ["4.json", "4.safetensors"]


def test_the_same_tokens_give_the_same_bytes(tmp_path: Path):
    first, second = written(tmp_path / "a"), written(tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    assert first.with_suffix(".json").read_bytes() == second.with_suffix(".json").read_bytes()


def test_finished_map_is_kept_until_its_inputs_change(tmp_path: Path):
    inode = written(tmp_path).stat().st_ino
    assert written(tmp_path).stat().st_ino == inode  # the same job once more
    changed = written(tmp_path, special=())
    assert changed.stat().st_ino != inode and read_map(changed).target_ids.tolist() == [0, 1, 2, 5, 11]


def test_nothing_to_count(tmp_path: Path):
    file = token_file(tmp_path / "rows_0-5.safetensors", {4: ROWS[4]})  # only a held-out row
    with pytest.raises(EyasError, match="no training row has a supervised token"):
        write_map([file], VOCABULARY, 5, 5, [11], [], tmp_path / "5.safetensors")
    assert os.listdir(tmp_path) == ["rows_0-5.safetensors"]


@pytest.mark.parametrize(
    ("d2t", "t2d"),
    [
        ([0, 1, 1], [1, 0, 1, 0]),  # more draft ids than t2d has
        ([0, 0], [1, 0, 1, 0]),  # another id
        ([0, -1], [1, 0, 0, 0]),  # an id twice
        ([2, 0], [1, 0, 1, 0]),  # not ascending
        ([-1, 1], [0, 0, 1, 0]),  # below the vocabulary
        ([0, 3], [1, 0, 0, 0]),  # beyond it
        ([], [0, 0, 0, 0]),
    ],
)
def test_contradictory_maps_are_refused(tmp_path: Path, d2t: list[int], t2d: list[int]):
    path = tmp_path / "map.safetensors"
    write_arrays(path, {"d2t": np.array([0, 1]), "t2d": np.array([1, 0, 1, 0], bool)}, {})
    assert read_map(path).target_ids.tolist() == [0, 2]  # what a sound one looks like
    write_arrays(path, {"d2t": np.array(d2t, np.int64), "t2d": np.array(t2d, bool)}, {})
    with pytest.raises(EyasError, match=r"map\.safetensors: d2t and t2d contradict each other"):
        read_map(path)


def test_map_without_a_half_is_refused(tmp_path: Path):
    write_arrays(tmp_path / "map.safetensors", {"d2t": np.zeros(2, np.int64)}, {})
    with pytest.raises(EyasError, match="has no tensor t2d"):
        read_map(tmp_path / "map.safetensors")
