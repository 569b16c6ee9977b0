"""The statistics of a run's tokens against figures worked out by hand, and what they refuse."""

from __future__ import annotations

import json
import statistics as reference
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eyas.errors import EyasError
from eyas.extraction.shard import shard_layout
from eyas.report import statistics
from eyas.report.statistics import LENGTH_EDGES, collect, describe_lengths, kind_of, render
from eyas.shards import describe_file, write_arrays, write_json, write_sealed
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
HIDDEN = 6


def shard(folder: Path, name: str, masks: list[str], row_ids: list[int], **facts: Any) -> Path:
    """A tokens shard with a sequence for each mask ("0110"), and a sidecar that says so unless `facts` differ."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = np.array([int(m) for text in masks for m in text], np.uint8)
    arrays = {
        "input_ids": np.arange(len(mask), dtype=np.int32),
        "loss_mask": mask,
        "offsets": np.cumsum([0, *map(len, masks)]).astype(np.int64),
        "row_ids": np.array(row_ids, np.int64),
    }
    path = folder / f"{name}.safetensors"
    write_arrays(path, arrays, {})
    said = {
        "rows": len(set(row_ids)),
        "sequences": len(masks),
        "tokens": len(mask),
        "supervised_tokens": int(mask.sum()),
        "sources": ["chat"],
        "source_of_sequence": [0] * len(masks),
        "skipped": [],
        "truncated": [],
        "cut_off": 0,
    }
    write_json(path.with_suffix(".json"), said | {"files": {path.name: describe_file(path)}} | facts)
    return path


LONG = "too long: {} tokens, more than tokenization.max_length = 20"
EMPTY = "no supervised token (the mask is all zero)"


def run(folder: Path) -> list[Path]:
    """Two shards: rows 0, 2, 3 (3 in two sequences) and row 7; rows 1, 4 and 5, 6, 8, 9 are skipped."""
    first = shard(
        folder, "rows_0-5", ["0111", "0" * 9 + "1" * 11, "011", "0111111111"], [0, 2, 3, 3],
        sources=["chat", "code", "text"],
        source_of_sequence=[0, 1, 0, 0],
        skipped=[
            {"row": 1, "reason": LONG.format(21), "source": "code"},
            {"row": 4, "reason": EMPTY, "source": "text"},
        ],
        truncated=[{"row": 2, "tokens": 35}],
        cut_off=1,
    )  # fmt: skip
    second = shard(
        folder, "rows_5-10", ["111"], [7],
        sources=["code"],
        skipped=[{"row": row, "reason": LONG.format(row + 20), "source": "new"} for row in (5, 6, 8, 9)],
        cut_off=1,
    )  # fmt: skip
    return [first, second]


def test_statistics_by_hand(tmp_path: Path):
    facts = collect(run(tmp_path), HIDDEN, "bfloat16")
    expected_bytes = sum(shard_layout(t, s, HIDDEN, "bfloat16").nbytes for t, s in ((37, 4), (3, 1)))
    assert {key: facts[key] for key in ("rows", "sequences", "skipped_rows", "tokens", "supervised_tokens")} == {
        "rows": 4, "sequences": 5, "skipped_rows": 6, "tokens": 40, "supervised_tokens": 28,
    }  # fmt: skip
    assert facts["supervised_share"] == 0.7
    assert facts["truncated"] == {
        "max_length": {"rows": 1, "share": 0.25},
        "answer_limit": {"rows": 2, "share": 0.5},
    }
    assert facts["skipped"] == {
        "too long": {
            "rows": 5,
            "examples": [
                {"row": 1, "source": "code", "reason": LONG.format(21)},
                {"row": 5, "source": "new", "reason": LONG.format(25)},
                {"row": 6, "source": "new", "reason": LONG.format(26)},
            ],
        },
        EMPTY: {"rows": 1, "examples": [{"row": 4, "source": "text", "reason": EMPTY}]},
    }
    assert list(facts["skipped"]) == ["too long", EMPTY]  # the most frequent first
    keys = ("rows", "sequences", "tokens", "supervised_tokens", "skipped")
    assert {name: tuple(values[key] for key in keys) for name, values in facts["sources"].items()} == {
        "chat": (2, 3, 17, 14, 0),
        "code": (2, 2, 23, 14, 1),
        "text": (0, 0, 0, 0, 1),
        "new": (0, 0, 0, 0, 4),
    }
    lengths = facts["lengths"]
    assert [lengths[key] for key in ("min", "mean", "median", "p95", "max")] == [3, 8.0, 4.0, 20, 20]
    assert [bin for bin in lengths["histogram"] if bin[2]] == [[1, 8, 3], [8, 12, 1], [16, 24, 1]]
    assert facts["hidden_states"] == {
        "hidden_size": HIDDEN, "dtype": "bfloat16", "shards": 2, "bytes": expected_bytes,
        "bytes_per_token": round(expected_bytes / 40, 2),
    }  # fmt: skip


def test_bytes_are_those_of_the_file_that_the_extraction_allocates(tmp_path: Path):
    tokens, sequences = 40_000, 3
    path = shard(tmp_path, "rows_0-3", ["1" * 20_000, "1" * 19_000, "1" * 1000], [0, 1, 2])
    states = {
        dtype: collect([path], 7168, dtype)["hidden_states"]["bytes"] for dtype in ("bfloat16", "float16", "float32")
    }
    # 4 x 7168 values of 2 bytes and two int32 a token, two int64 a sequence and one more offset, and the header.
    data = tokens * (8 * 7168 + 8) + sequences * 16 + 8
    assert 0 < states["bfloat16"] - data < 1000 and states["float16"] - data < 1000
    assert 0 < states["float32"] - (data + tokens * 8 * 7168) < 1000


def test_nothing_usable(tmp_path: Path):
    skipped = [{"row": 0, "reason": EMPTY, "source": "chat"}]
    facts = collect([shard(tmp_path, "rows_0-1", [], [], sources=[], skipped=skipped)], HIDDEN, "float32")
    assert (facts["rows"], facts["tokens"], facts["skipped_rows"], facts["supervised_share"]) == (0, 0, 1, None)
    assert facts["lengths"]["mean"] is None and facts["lengths"]["p95"] is None
    assert facts["truncated"]["max_length"] == {"rows": 0, "share": None}
    assert facts["hidden_states"]["bytes_per_token"] is None
    assert "0 used, 1 skipped" in render(facts)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 400_000)), min_size=1, max_size=40))
def test_lengths_against_a_slow_count(lengths: list[int]):
    found = describe_lengths([np.array(lengths[:3], np.int64), np.array(lengths[3:], np.int64)])
    assert sum(count for _, _, count in found["histogram"]) == len(lengths)
    for start, below, count in found["histogram"]:
        assert count == sum(start <= n and (below is None or n < below) for n in lengths)
    assert found["median"] == reference.median(lengths) and found["mean"] == round(sum(lengths) / len(lengths), 2)
    assert found["p95"] == next(n for n in sorted(lengths) if sum(m <= n for m in lengths) >= 0.95 * len(lengths))
    assert (found["min"], found["max"]) == (min(lengths), max(lengths))


def test_edges():
    assert LENGTH_EDGES[:5] == [8, 12, 16, 24, 32] and LENGTH_EDGES[-3:] == [65_536, 98_304, 131_072]


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("too long: 9: tokens", "too long"), ("no colon", "no colon"), (" spaced : x", "spaced"), (": x", "")],
)
def test_kinds(reason: str, kind: str):
    assert kind_of(reason) == kind


def test_many_sources_are_summed_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "MAX_SOURCES", 2)
    masks = ["1111", "111111", "111", "11111"]
    path = shard(tmp_path, "rows_0-4", masks, [0, 1, 2, 3], sources=list("abcd"), source_of_sequence=[0, 1, 2, 3])
    facts = collect([path], HIDDEN, "bfloat16")["sources"]
    assert {name: values["tokens"] for name, values in facts.items()} == {"b": 6, "d": 5, "(other sources)": 7}
    assert facts["(other sources)"]["rows"] == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 2}, "rows is 2, but the shard holds 1"),
        ({"sequences": None}, "sequences is None, but the shard holds 2"),
        ({"tokens": 8}, "tokens is 8, but the shard holds 7"),
        ({"supervised_tokens": 6}, "supervised_tokens is 6, but the shard holds 5"),
        ({"source_of_sequence": [0]}, "its sources do not fit the shard's 2 sequences"),
        ({"skipped": [{"row": 1, "reason": "x"}]}, r"an entry is missing or wrong \(KeyError\('source'\)\)"),
        ({"skipped": [{"row": 1, "reason": None, "source": "x"}]}, "an entry is missing or wrong"),
        ({"truncated": [3]}, "an entry is missing or wrong"),
        ({"cut_off": "many"}, "an entry is missing or wrong"),
    ],
)
def test_sidecars_that_contradict_the_shard_are_refused(tmp_path: Path, wrong: dict[str, Any], message: str):
    path = shard(tmp_path, "rows_0-2", ["011", "1101"], [0, 0], **wrong)
    with pytest.raises(EyasError, match=rf"rows_0-2\.json: {message}"):
        collect([path], HIDDEN, "bfloat16")


def test_missing_shards_are_one_clear_error(tmp_path: Path):
    with pytest.raises(EyasError, match=r"rows_0-2\.safetensors: this tokens shard is missing"):
        collect([tmp_path / "rows_0-2.safetensors"], HIDDEN, "bfloat16")


def test_table_keeps_names_as_they_are(tmp_path: Path):
    path = shard(tmp_path, "rows_0-1", ["011"], [0], sources=["[red]chat[/red]"])
    text = render(collect([path], HIDDEN, "bfloat16"))
    assert "[red]chat[/red]: 1 rows, 3 tokens, 0 rows skipped" in text and "66.7% are supervised" in text


def test_script_writes_what_the_shards_say(tmp_path: Path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "vocab_size": 100}))
    files = run(tmp_path)
    arguments = ["--tokens-folder", tmp_path, "--rows", 10, "--shard-rows", 5, "--dtype", "bfloat16"]
    arguments += ["--target", json.dumps({"path": str(target)}), "--output", tmp_path / "statistics.json"]
    command = [sys.executable, SCRIPTS / "describe_tokens.py", *arguments]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    write_sealed(tmp_path / "again.json", collect(files, 64, "bfloat16"))
    assert (tmp_path / "statistics.json").read_bytes() == (tmp_path / "again.json").read_bytes()
    assert "4 used, 6 skipped; 5 sequences" in done.stderr
