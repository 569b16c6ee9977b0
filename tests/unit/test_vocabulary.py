"""The draft vocabulary against a slow reference, and what is counted for it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from eyas.errors import EyasError
from eyas.shards import describe_file, write_arrays, write_json
from eyas.tokenization import TokenShard
from eyas.vocabulary import build_map, count_supervised, read_map, sources_of_sequences, write_map
from eyas.vocabulary import counting as counting_module
from eyas.vocabulary.counting import OTHER_SOURCES, count_groups
from eyas.vocabulary.mapping import coverage, coverage_curve, curve_sizes
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


def token_file(path: Path, rows: dict[int, list[tuple[int, int]]], sources: dict[int, str] | None = None) -> Path:
    """A shard and as much of its sidecar as the map reads; `sources`: row id -> data set, else "chat"."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, vars(tokens(rows)), {})
    of_rows = [(sources or {}).get(row, "chat") for row in rows]
    names = list(dict.fromkeys(of_rows))
    write_json(
        path.with_suffix(".json"),
        {
            "sources": names,
            "source_of_sequence": [names.index(name) for name in of_rows],
            "files": {path.name: describe_file(path)},
        },
    )
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


# ---- the curve


@settings(max_examples=60, deadline=None, derandomize=True)
@given(case=cases(), seed=st.integers(0, 9))
def test_curve_is_the_coverage_of_a_map_of_each_size(case: tuple[list[int], int, set[int]], seed: int):
    counts, size, forced = case
    counts = [*counts, *[0] * 300]  # a vocabulary beyond the smallest size of the curve
    held_out = np.random.default_rng(seed).integers(0, 3, len(counts))
    curve = coverage_curve(np.array(counts), held_out, sorted(forced), size)
    assert [point[0] for point in curve] == sorted({size, 256, 300, len(counts)})
    for draft_size, training, other in curve:
        t2d = build_map(np.array(counts), int(draft_size), sorted(forced)).t2d
        assert training == coverage(np.array(counts), t2d) and other == coverage(held_out, t2d)
    assert curve[-1][1:] == [1.0 if any(counts) else None, 1.0 if held_out.any() else None]


def test_sizes_of_the_curve():
    sizes = curve_sizes(163_840, 31_999, 300)
    assert sizes == sorted(set(sizes)) and 38 <= len(sizes) <= 45
    assert sizes[0] == 300 and sizes[-1] == 163_840  # 256 has no room for 300 forced ids
    assert {384, 1000, 1024, 8192, 10_000, 31_999, 32_768, 100_000, 131_072} <= set(sizes)
    assert curve_sizes(163_840, 200, 3)[:2] == [200, 256]
    assert curve_sizes(12, 4, 2) == [4, 12] and curve_sizes(256, 256, 2) == [256]


# ---- counting


ROWS = {
    0: [(1, 0), (2, 1), (2, 1)],
    4: [(3, 1)],  # held out with held_out_every = 5
    6: [(2, 0), (5, 1)],
    9: [(3, 1), (7, 1), (1, 0)],  # held out
}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data(), lengths=st.lists(st.integers(1, 9), max_size=12), compiled=st.booleans())
def test_groups_are_counted_as_bincount_does(data: st.DataObject, lengths: list[int], compiled: bool):
    ids = data.draw(st.lists(st.integers(-2, VOCABULARY + 1), min_size=sum(lengths), max_size=sum(lengths)))
    mask = np.array(data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids))), np.uint8)
    groups = np.array(data.draw(st.lists(st.integers(-1, 2), min_size=len(lengths), max_size=len(lengths))), np.int64)
    # Ids outside the vocabulary count for nothing where they are not supervised.
    mask[[not 0 <= i < VOCABULARY for i in ids]] = 0
    array = np.array(ids, np.int32)
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    array.flags.writeable = mask.flags.writeable = False  # as memory-mapped files are
    counts = np.ones((3, VOCABULARY), np.int64)
    if compiled:
        count_groups(TokenShard(array, mask, offsets, np.arange(len(lengths))), groups, counts)
    else:  # the same source, as Python runs it
        counting_module._add_counts(array, mask, offsets, groups, np.flatnonzero(groups >= 0), counts)
    for group in range(3):
        chosen = (np.repeat(groups, lengths) == group) & (mask == 1)
        assert (counts[group] - 1).tolist() == np.bincount(array[chosen], minlength=VOCABULARY).tolist()


@pytest.mark.parametrize("wrong", [VOCABULARY, -1, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused(wrong: int):
    shard = tokens({3: [(1, 1)], 8: [(1, 1), (wrong, 0), (wrong, 1)]})
    expected = f"row 8: token id {wrong} lies outside the target's vocabulary of {VOCABULARY}"
    with pytest.raises(EyasError, match=expected):
        count_groups(shard, np.zeros(2), np.zeros((1, VOCABULARY), np.int64))
    count_groups(shard, np.array([0, -1]), counts := np.zeros((1, VOCABULARY), np.int64))  # a row that does not count
    assert counts[0].tolist() == [0, 1] + [0] * 10


@pytest.mark.parametrize("groups", [[0], [0, 0, 0], [0, 2], [0, -2]])
def test_groups_that_would_write_elsewhere_are_refused(groups: list[int]):
    with pytest.raises(ValueError, match="do not fit"):
        count_groups(tokens({0: [(1, 1)], 1: [(1, 1)]}), np.array(groups), np.zeros((2, VOCABULARY), np.int64))


def test_only_supervised_tokens_count_by_side_and_source(tmp_path: Path):
    sources = {0: "chat", 4: "code", 6: "code", 9: "chat"}
    files = [
        token_file(tmp_path / "rows_0-5.safetensors", {r: ROWS[r] for r in (0, 4)}, sources),
        token_file(tmp_path / "rows_5-10.safetensors", {r: ROWS[r] for r in (6, 9)}, sources),
        token_file(tmp_path / "rows_10-15.safetensors", {}),
    ]
    found = count_supervised(files, VOCABULARY, 5)
    assert found.training.dtype == np.int64 and found.training.tolist() == [0, 0, 2, 0, 0, 1] + [0] * 6
    assert found.held_out.tolist() == [0, 0, 0, 2, 0, 0, 0, 1] + [0] * 4
    assert found.sources == ["chat", "code"]
    counted = {tuple(map(int, place)): int(found.counts[tuple(place)]) for place in np.argwhere(found.counts)}
    assert counted == {(0, 0, 2): 2, (0, 1, 3): 1, (0, 1, 7): 1, (1, 0, 5): 1, (1, 1, 3): 1}
    nothing = count_supervised([], VOCABULARY, 5)
    assert nothing.sources == [] and nothing.training.tolist() == [0] * VOCABULARY


def test_a_row_may_come_to_several_sequences(tmp_path: Path):
    path = tmp_path / "rows_0-5.safetensors"
    arrays = vars(tokens({0: [(1, 1)], 1: [(2, 1)], 4: [(3, 1)], 5: [(4, 1)]}))
    write_arrays(path, arrays | {"row_ids": np.array([0, 0, 4, 4], np.int64)}, {})
    write_json(path.with_suffix(".json"), {"sources": ["a", "b"], "source_of_sequence": [0, 0, 1, 1]})
    found = count_supervised([path], VOCABULARY, 5)
    assert found.training.nonzero()[0].tolist() == [1, 2] and found.held_out.nonzero()[0].tolist() == [3, 4]


def test_many_sources_share_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(counting_module, "MAX_SOURCES", 2)
    rows = {row: [(row, 1)] for row in range(5)}
    sources = dict(enumerate("abcda"))
    files = [
        token_file(tmp_path / "rows_0-3.safetensors", {r: rows[r] for r in (0, 1, 2)}, sources),
        token_file(tmp_path / "rows_3-5.safetensors", {r: rows[r] for r in (3, 4)}, sources),
    ]
    found = count_supervised(files, VOCABULARY, 100)
    assert found.sources == ["a", "b", OTHER_SOURCES]
    assert [side[0].nonzero()[0].tolist() for side in found.counts] == [[0, 4], [1], [2, 3]]


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"sources": ["a"], "source_of_sequence": [0]},
        {"sources": ["a"], "source_of_sequence": [0, 1]},
        {"sources": ["a"], "source_of_sequence": [0, -1]},
        {"sources": ["a"], "source_of_sequence": [0, None]},
        {"sources": ["a"], "source_of_sequence": [0, 2**80]},
        {"sources": None, "source_of_sequence": [0, 0]},
        [],
    ],
)
def test_sidecars_that_do_not_fit_are_refused(tmp_path: Path, facts: object):
    path = tmp_path / "rows_0-5.safetensors"
    write_json(path.with_suffix(".json"), facts)
    with pytest.raises(EyasError, match=r"rows_0-5\.json: its sources do not fit the shard's 2 sequences"):
        sources_of_sequences(path, 2)


_COUNT = """
import sys
import numpy as np
import eyas.vocabulary.counting as counting
heavy = {"numba", "torch", "transformers", "altair"} & set(sys.modules)
assert not heavy, heavy
import numba.core.caching as caching
if sys.argv[1] == "no folder":
    caching.CacheImpl._locator_classes = []
    caching.CodeLibraryCacheImpl._locator_classes = []
elif sys.argv[1] == "full disk":
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")
    caching.IndexDataCacheFile.save = refuse
from eyas.tokenization import TokenShard
shard = TokenShard(np.array([1, 2], np.int32), np.ones(2, np.uint8), np.array([0, 2]), np.array([0]))
counting.count_groups(shard, np.zeros(1), counts := np.zeros((1, 3), np.int64))
print(counts.tolist(), bool(counting._compiled().stats.cache_path))
"""


@pytest.mark.parametrize(("trouble", "cached"), [("none", True), ("no folder", False), ("full disk", False)])
def test_counting_without_a_place_for_the_cache(tmp_path: Path, trouble: str, cached: bool):
    """And that importing the room loads no compiler."""
    package = Path(counting_module.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(package), "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COUNT, trouble], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.stdout == f"[[0, 1, 1]] {cached}\n", done.stderr


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
    assert facts["coverage_by_source"] == {"chat": {"training": 1.0, "held_out": 0.0, "supervised_tokens": 6}}
    assert facts["coverage_curve"] == [[4, 1.0, 0.0], [12, 1.0, 1.0]]
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


def test_shares_are_those_of_a_slow_count(tmp_path: Path):
    generator = np.random.default_rng(5)
    rows = {
        row: [(int(generator.zipf(1.5)) % 290, int(generator.random() < 0.6)) for _ in range(40)] for row in range(30)
    }
    sources = {row: "ab"[row % 2] if row < 28 else "rare" for row in rows}
    rows[29] = [(1, 0)] * 3  # the only held-out row of its data set has nothing supervised
    files = [
        token_file(tmp_path / f"rows_{a}-{a + 10}.safetensors", {r: rows[r] for r in range(a, a + 10)}, sources)
        for a in (0, 10, 20)
    ]
    write_map(files, 300, 20, 5, [299], [298], tmp_path / "20.safetensors")
    facts = json.loads((tmp_path / "20.json").read_text())
    chosen = set(read_map(tmp_path / "20.safetensors").target_ids.tolist())
    assert {299} <= chosen and 298 not in chosen

    def share(held_out: bool, ids: set[int], names: str | tuple[str, ...] = ("a", "b", "rare")) -> float | None:
        counted = Counter(
            i for r, row in rows.items() if (r % 5 == 4) == held_out and sources[r] in names for i, m in row if m
        )
        total = sum(counted.values())
        return sum(n for i, n in counted.items() if i in ids) / total if total else None

    for name in ("a", "b", "rare"):
        assert facts["coverage_by_source"][name] == {
            "training": share(False, chosen, (name,)),
            "held_out": share(True, chosen, (name,)),
            "supervised_tokens": sum(m for r, row in rows.items() if sources[r] == name for _, m in row),
        }
    assert facts["coverage_by_source"]["rare"]["held_out"] is None
    assert [20, share(False, chosen), share(True, chosen)] in facts["coverage_curve"]
    assert (facts["coverage"], facts["coverage_held_out"]) == (share(False, chosen), share(True, chosen))


def test_too_few_distinct_tokens_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "eyas"):
        written(tmp_path, 3)  # 2, 5 and 11
        assert not caplog.messages
        written(tmp_path, 5)  # and 0 and 1, which nobody said
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(
        "draft_vocab_size 5 is larger than the 3 distinct tokens to choose from; the lowest 2 of the other ids fill it"
    )


def test_other_sources_make_another_map_file(tmp_path: Path):
    """The names stand in the sidecar, so a map of other names is not the finished one."""
    file = token_file(tmp_path / "rows_0-5.safetensors", {0: ROWS[0]})
    for name in ("one", "other"):
        token_file(file, {0: ROWS[0]}, {0: name})
        write_map([file], VOCABULARY, 3, 5, [11], [], tmp_path / "3.safetensors")
        assert list(json.loads((tmp_path / "3.json").read_text())["coverage_by_source"]) == [name]


def test_missing_files_are_one_clear_error(tmp_path: Path):
    file = token_file(tmp_path / "rows_0-5.safetensors", {0: ROWS[0]})
    file.with_suffix(".json").unlink()
    with pytest.raises(EyasError, match=r"rows_0-5\.json: this tokens shard's record is missing"):
        write_map([file], VOCABULARY, 3, 5, [11], [], tmp_path / "3.safetensors")
    file.unlink()
    with pytest.raises(EyasError, match=r"rows_0-5\.safetensors: this tokens shard is missing"):
        write_map([file], VOCABULARY, 3, 5, [11], [], tmp_path / "3.safetensors")


def test_damaged_tokens_are_refused(tmp_path: Path):
    file = token_file(tmp_path / "rows_0-5.safetensors", {0: ROWS[0]})
    content = bytearray(file.read_bytes())
    content[-3] ^= 1
    file.write_bytes(content)
    with pytest.raises(EyasError, match=r"rows_0-5\.safetensors: this tokens shard is not as .*snakemake .*rows_0-5"):
        write_map([file], VOCABULARY, 3, 5, [11], [], tmp_path / "3.safetensors")


def test_nothing_to_count(tmp_path: Path):
    file = token_file(tmp_path / "rows_0-5.safetensors", {4: ROWS[4]})  # only a held-out row
    with pytest.raises(EyasError, match="no training row has a supervised token"):
        write_map([file], VOCABULARY, 5, 5, [11], [], tmp_path / "5.safetensors")
    assert sorted(os.listdir(tmp_path)) == ["rows_0-5.json", "rows_0-5.safetensors"]


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
