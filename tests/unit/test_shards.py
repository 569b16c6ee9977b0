"""Shards: names, whole-or-absent files, journals, locks, preallocated tensor files."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import select
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from eyas.errors import EyasError
from eyas.shards import (
    Journal,
    Layout,
    Shard,
    TensorFileWriter,
    atomic_path,
    describe_file,
    ensure_free,
    is_complete,
    is_held_out,
    map_arrays,
    publish,
    read_header,
    read_json,
    shards_of,
    write_arrays,
    write_json,
    write_lock,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

LIGHT = settings(max_examples=60, deadline=None, derandomize=True)
TORCH = {
    "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "BF16": torch.bfloat16,
    "F16": torch.float16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


# ---- names


@LIGHT
@given(rows=st.integers(0, 2000), size=st.integers(1, 300))
def test_shards_cover_every_row_exactly_once(rows: int, size: int):
    shards = shards_of(rows, size)
    assert [row for shard in shards for row in range(shard.start, shard.end)] == list(range(rows))
    assert all(len(shard) == size for shard in shards[:-1]) and sum(map(len, shards)) == rows
    assert [Shard.parse(shard.name) for shard in shards] == shards


def test_shard_name_and_membership():
    shard = Shard(500, 1000)
    assert shard.name == "rows_500-1000"
    assert [row in shard for row in (499, 500, 999, 1000)] == [False, True, True, False]


@pytest.mark.parametrize(
    "name",
    ["rows_5-5", "rows_6-5", "rows_-1-5", "rows_1", "rows_1-2.json", "x", "", "rows_0-5\n", "rows_00-5", "rows_٠-٥"],
)
def test_other_names_are_refused(name: str):
    """Also those that only look like a shard's: their file would not be the one that the rules declare."""
    with pytest.raises(EyasError, match="no shard name"):
        Shard.parse(name)


@LIGHT
@given(rows=st.integers(1, 500), more=st.integers(0, 500), every=st.integers(2, 50))
def test_held_out_rows_stay_held_out_when_the_data_grows(rows: int, more: int, every: int):
    def held(count: int) -> list[int]:
        return [row for row in range(count) if is_held_out(row, every)]

    assert held(rows + more)[: len(held(rows))] == held(rows)
    assert len(held(rows)) == rows // every  # one in each whole group, the first at row every - 1


# ---- files


def test_atomic_path_shows_nothing_before_the_end(tmp_path: Path):
    final = tmp_path / "new" / "file"
    with atomic_path(final) as partial:
        partial.write_text("half")
        assert not final.exists() and partial.parent == final.parent
        partial.write_text("whole")
    assert final.read_text() == "whole" and os.listdir(final.parent) == ["file"]


def test_atomic_path_leaves_nothing_after_an_exception(tmp_path: Path):
    for old in (None, "old"):
        if old:
            (tmp_path / "file").write_text(old)
        with pytest.raises(RuntimeError, match="boom"), atomic_path(tmp_path / "file") as partial:
            partial.write_text("half")
            raise RuntimeError("boom")
        assert os.listdir(tmp_path) == (["file"] if old else [])
    assert (tmp_path / "file").read_text() == "old"


def test_json_round_trip_and_its_refusals(tmp_path: Path):
    write_json(tmp_path / "a.json", {"ü": [1, None]})
    assert read_json(tmp_path / "a.json") == {"ü": [1, None]}
    with pytest.raises(ValueError):  # NaN is no JSON: other readers would choke on it
        write_json(tmp_path / "b.json", float("nan"))
    assert os.listdir(tmp_path) == ["a.json"]
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(EyasError, match=r"a\.json: this sidecar cannot be read"):
        read_json(tmp_path / "a.json", "sidecar")
    with pytest.raises(EyasError, match=r"b\.json: this sidecar is missing"):
        read_json(tmp_path / "b.json", "sidecar")


@pytest.mark.parametrize("size", [0, 1, (8 << 20) - 1, (8 << 20) + 1])  # around the reading chunk
def test_checksum_is_xxh3_128_of_the_contents(tmp_path: Path, size: int):
    content = random.Random(size).randbytes(size)
    (tmp_path / "file").write_bytes(content)
    expected = f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"
    assert describe_file(tmp_path / "file") == {"bytes": size, "checksum": expected}


@pytest.mark.parametrize("hard_links", [True, False])
def test_publish_moves_in_order_and_drops_staging(tmp_path: Path, monkeypatch, hard_links: bool):
    if not hard_links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "no links")))
    staging, final = tmp_path / "out" / ".staging" / "job", tmp_path / "out"
    staging.mkdir(parents=True)
    (final / "data").write_text("old")  # an older result is replaced
    for name in ("data", "data.json"):
        (staging / name).write_text(f"new {name}")
    publish({staging / n: final / n for n in ("data", "data.json")}, staging)
    assert sorted(os.listdir(final)) == ["data", "data.json"]  # .staging itself is gone: it was the last
    assert (final / "data").read_text() == "new data"


def test_publish_leaves_another_jobs_staging(tmp_path: Path):
    for job in ("a", "b"):
        (tmp_path / ".staging" / job).mkdir(parents=True)
        (tmp_path / ".staging" / job / job).write_text(job)
    publish({tmp_path / ".staging" / "a" / "a": tmp_path / "a"}, tmp_path / ".staging" / "a")
    assert (tmp_path / "a").read_text() == "a" and os.listdir(tmp_path / ".staging") == ["b"]


def test_is_complete_only_for_this_fingerprint_and_these_sizes(tmp_path: Path):
    sidecar = tmp_path / "a.json"
    assert not is_complete(sidecar, "f")
    (tmp_path / "a.bin").write_bytes(b"1234")
    write_json(sidecar, {"fingerprint": "f", "files": {"a.bin": {"bytes": 4}}})
    assert is_complete(sidecar, "f") and not is_complete(sidecar, "g")
    (tmp_path / "a.bin").write_bytes(b"123")  # cut off
    assert not is_complete(sidecar, "f")
    (tmp_path / "a.bin").unlink()
    assert not is_complete(sidecar, "f")
    for damaged in ("", "{", "[]", "3", '{"fingerprint": "f"}', '{"fingerprint": "f", "files": {"a.bin": 1}}'):
        sidecar.write_text(damaged)
        assert not is_complete(sidecar, "f")


# ---- journal


def test_journal_survives_and_ignores_a_torn_line(tmp_path: Path):
    staging = tmp_path / "job"
    with Journal(staging, "f") as journal:
        assert journal.records == []
        journal.append({"row": 1, "text": "ü\u2028\n"}, {"row": 2})
    (staging / "data").write_text("kept")
    with open(staging / "journal.jsonl", "a") as file:
        file.write('{"row": 3')  # a kill in the middle of a write
    with Journal(staging, "f") as journal:
        assert journal.records == [{"row": 1, "text": "ü\u2028\n"}, {"row": 2}]
        journal.append({"row": 4})  # must not be glued to the torn line
    with Journal(staging, "f") as journal:
        assert [record["row"] for record in journal.records] == [1, 2, 4]
    assert (staging / "data").read_text() == "kept"


def test_journal_of_other_settings_starts_over(tmp_path: Path):
    staging = tmp_path / "job"
    with Journal(staging, "f") as journal:
        journal.append({"row": 1})
    (staging / "data").write_text("of the other settings")
    with Journal(staging, "g") as journal:
        assert journal.records == [] and os.listdir(staging) == ["journal.jsonl"]
    with Journal(staging, "f") as journal:
        assert journal.records == []


def test_journal_is_on_disk_before_append_returns(tmp_path: Path):
    journal = Journal(tmp_path / "job", "f")
    journal.append({"row": 1})
    lines = (tmp_path / "job" / "journal.jsonl").read_text().splitlines()  # while it is still open
    journal.close()
    assert [json.loads(line) for line in lines] == [{"fingerprint": "f"}, {"row": 1}]


# ---- locks

HOLD = """
import sys, time
from pathlib import Path
from eyas.shards.locks import write_lock
print("trying", flush=True)
with write_lock(Path(sys.argv[1]), poll_seconds=0.02):
    print("held", flush=True)
    sys.stdin.readline()
print("released", flush=True)
"""


def holder(target: Path) -> subprocess.Popen[bytes]:
    """A process that tries to hold the lock, until it is sent a line."""
    command = [sys.executable, "-c", HOLD, str(target)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    assert process.stdout.readline() == b"trying\n"
    return process


def said(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether the process has said something within this time."""
    return bool(select.select([process.stdout], [], [], seconds)[0])


@pytest.mark.parametrize("killed", [False, True], ids=["released", "SIGKILLed"])
def test_second_writer_waits_for_the_first(tmp_path: Path, killed: bool):
    target = tmp_path / "new" / "file"
    first = holder(target)
    second = None
    try:
        assert first.stdout.readline() == b"held\n"
        second = holder(target)
        assert not said(second, 0.4)  # it waits
        if killed:
            first.kill()
        else:
            assert first.communicate(b"\n", timeout=10)[0] == b"released\n"
        first.wait(10)
        assert said(second, 10) and second.stdout.readline() == b"held\n"
        assert f"process {second.pid} on " in (target.parent / ".file.lock").read_text()  # so that a waiter can tell
        assert second.communicate(b"\n", timeout=10)[0] == b"released\n"
        assert os.listdir(target.parent) == []  # no lock file stays behind
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.wait()


def test_lock_is_freed_by_an_exception(tmp_path: Path):
    for _ in range(2):  # the second would wait for ever if the first were still held
        with pytest.raises(RuntimeError), write_lock(tmp_path / "file"):
            raise RuntimeError
    assert os.listdir(tmp_path) == []


def test_a_lock_on_a_file_that_was_removed_meanwhile_does_not_count(tmp_path: Path, monkeypatch):
    """The holder before us removes its lock file between our open and our flock."""
    lock, tries, flock = tmp_path / ".file.lock", [], fcntl.flock

    def slow_flock(fd: int, how: int) -> None:
        if not tries:
            lock.unlink()
            lock.write_text("a third process made a new one")
        tries.append(os.fstat(fd).st_ino)
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    with write_lock(tmp_path / "file", poll_seconds=0.01):
        assert len(tries) == 2 and tries[-1] == lock.stat().st_ino


# ---- tensor files

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=6)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    NAMES.filter(lambda name: name != "__metadata__"), st.tuples(st.sampled_from(sorted(TORCH)), SHAPES), max_size=5
)


@LIGHT
@given(tensors=TENSORS, metadata=st.dictionaries(NAMES, NAMES, max_size=2), seed=st.integers(0, 99))
def test_rows_in_any_order_are_what_safetensors_reads(tensors: dict, metadata: dict, seed: int):
    rng = random.Random(seed)
    layout = Layout.of(tensors, metadata)
    contents, pieces = {}, []
    for name, (dtype, shape) in tensors.items():
        spec = layout.tensors[name]
        raw = rng.randbytes(spec.nbytes)
        contents[name] = bytes(b & 1 for b in raw) if dtype == "BOOL" else raw
        rows, size = (shape[0] if shape else 1), spec.row_bytes
        pieces += [(name, row, contents[name][row * size : (row + 1) * size]) for row in range(rows)]
    rng.shuffle(pieces)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        with TensorFileWriter(path, layout) as writer:
            for name, row, data in pieces:
                writer.write_rows(name, row, data)
            writer.sync()
        assert path.stat().st_size == layout.nbytes
        loaded = load_file(path)
        assert set(loaded) == set(tensors)
        for name, (dtype, shape) in tensors.items():
            assert (loaded[name].dtype, tuple(loaded[name].shape)) == (TORCH[dtype], shape)
            assert bytes(loaded[name].flatten().view(torch.uint8).tolist()) == contents[name]
        with safe_open(path, "pt") as file:
            assert (file.metadata() or {}) == metadata
        specs, found = read_header(path)
        assert specs == layout.tensors and found == metadata


def small_file(path: Path) -> Layout:
    layout = Layout.of({"a": ("I32", (3, 2)), "b": ("U8", (5,)), "e": ("BF16", (0, 4))}, {"format": "test"})
    with TensorFileWriter(path, layout) as writer:
        writer.write_rows("a", 0, np.arange(6, dtype="<i4").data)
        writer.write_rows("b", 0, b"bytes")
    return layout


@pytest.mark.parametrize(("row", "size"), [(-1, 8), (2, 16), (3, 8), (0, 25)])
def test_writing_outside_a_tensor_is_refused(tmp_path: Path, row: int, size: int):
    layout = small_file(tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    with TensorFileWriter(tmp_path / "file", layout) as writer, pytest.raises(ValueError, match="a: rows from"):
        writer.write_rows("a", row, bytes(size))
    assert (tmp_path / "file").read_bytes() == before


def test_reopening_keeps_what_a_killed_job_wrote(tmp_path: Path):
    path = tmp_path / "file"
    layout = small_file(path)
    with TensorFileWriter(path, layout) as writer:
        writer.write_rows("b", 1, b"Y")
    assert map_arrays(path, ("b",))["b"].tobytes() == b"bYtes"
    path.write_bytes(path.read_bytes()[:-1])  # another size: another file, started afresh
    with TensorFileWriter(path, layout):
        pass
    assert map_arrays(path, ("b",))["b"].tobytes() == bytes(5)


def test_killed_between_allocation_and_header(tmp_path: Path):
    """The file has its full size then, and no header: the next job must write it."""
    path = tmp_path / "file"
    layout = small_file(path)
    path.write_bytes(bytes(layout.nbytes))
    with TensorFileWriter(path, layout):
        pass
    assert read_header(path)[0] == layout.tensors


def test_full_disk_is_told_before_any_work(tmp_path: Path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(EyasError, match=r"file: no room for [\d,]+ bytes \(No space left on device\)"):
        small_file(tmp_path / "file")
    assert os.listdir(tmp_path) == []


def test_free_space_is_compared_exactly(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    ensure_free(tmp_path, 1000, "Shard x")
    with pytest.raises(EyasError, match=r"Shard x needs 1,500 bytes in .*, where 1,000 are free; free 500 bytes"):
        ensure_free(tmp_path, 1500, "Shard x")


def test_every_truncation_is_noticed(tmp_path: Path):
    path = tmp_path / "file"
    small_file(path)
    whole = path.read_bytes()
    for changed in [whole[:n] for n in range(len(whole))] + [whole + b"\0"]:
        path.write_bytes(changed)
        with pytest.raises(EyasError, match="file: truncated or damaged"):
            read_header(path)
    with pytest.raises(EyasError, match="none: this file is missing"):
        read_header(tmp_path / "none")


@LIGHT
@example(changes=[(128, ord("e"))])  # "[0,4]" becomes "[0e4]", a shape of one float
@example(changes=[(43, ord("b"))])  # two tensors of one name
@given(changes=st.lists(st.tuples(st.integers(0, 215), st.integers(0, 255)), min_size=1, max_size=3))
def test_damage_is_an_eyas_error_or_harmless(changes: list[tuple[int, int]]):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        assert len(small_file(path).header) == 216
        content = bytearray(path.read_bytes())
        for position, value in changes:
            content[position] = value
        path.write_bytes(content)
        try:
            specs, _ = read_header(path)
            arrays = map_arrays(path, tuple(specs))
        except EyasError:
            return
        assert {name: a.nbytes for name, a in arrays.items()} == {name: s.nbytes for name, s in specs.items()}
        assert set(load_file(path)) == set(specs)  # what we accept, safetensors accepts


@LIGHT
@given(content=st.binary(max_size=60))
def test_garbage_is_an_eyas_error(content: bytes):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for text in (content, len(content).to_bytes(8, "little") + content):
            path.write_bytes(text)
            try:
                assert read_header(path)[0] == {}  # "{}" is a file without tensors
            except EyasError as exc:
                assert "truncated or damaged" in str(exc)


def header(tensor: str = "", **changes: str) -> str:
    """The header of a file with one tensor of four bytes, and what is given besides."""
    entry = {"dtype": '"U8"', "shape": "[4]", "data_offsets": "[0,4]"} | changes
    return '{"a":{' + ",".join(f'"{key}":{value}' for key, value in entry.items()) + "}" + tensor + "}"


IMPOSSIBLE = {
    "list": "[]",
    "number": "3",
    "no entry": '{"a":1}',
    "unknown dtype": header(dtype='"F8"'),
    "list as dtype": header(dtype='["U8"]'),
    "text as size": header(shape='["4"]'),
    "float as size": header(shape="[4.0]"),  # numpy cannot map it
    "negative sizes": header(shape="[-2,-2]"),
    "float as offset": header(data_offsets="[0.0,4.0]"),
    "overflow": header(data_offsets=f"[1.5,{'9' * 400}]"),  # a float minus an int that no float can hold
    "two in one place": header(',"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'),
    "number as metadata": header(',"__metadata__":3'),
    "too deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_headers_are_an_eyas_error(tmp_path: Path, text: str):
    def write(header_text: str) -> None:
        (tmp_path / "file").write_bytes(len(header_text).to_bytes(8, "little") + header_text.encode() + bytes(4))

    write(header())
    assert read_header(tmp_path / "file")[0]["a"].shape == (4,)  # it is the change that is refused
    write(text)
    with pytest.raises(EyasError, match="truncated or damaged"):
        read_header(tmp_path / "file")


# ---- arrays


def test_arrays_round_trip(tmp_path: Path):
    arrays = {
        "ids": np.arange(7, dtype=np.int32), "offsets": np.array([0, 7], np.int64), "mask": np.ones(7, np.uint8),
        "t2d": np.array([True, False]), "f": np.eye(3, dtype=np.float32)[:, ::2],  # not contiguous
        "h": np.array(1.5, np.float16), "none": np.zeros((0, 4), np.int32),
    }  # fmt: skip
    path = tmp_path / "file"
    path.write_bytes(b"leftover" * 999)
    write_arrays(path, arrays, {"format": "test"})
    mapped = map_arrays(path, tuple(arrays))
    for name, array in arrays.items():
        assert mapped[name].dtype == array.dtype and mapped[name].shape == array.shape
        assert np.array_equal(mapped[name], array) and np.array_equal(load_file(path)[name].numpy(), array)
    with pytest.raises(ValueError):
        mapped["ids"][0] = 1  # read-only: a reader cannot damage the file
    with pytest.raises(EyasError, match="has no tensor x, y"):
        map_arrays(path, ("ids", "x", "y"))


def test_bfloat16_is_mapped_as_its_bits(tmp_path: Path):
    values = torch.tensor([[1.0, -2.5], [0.0, 3e38]], dtype=torch.bfloat16)
    layout = Layout.of({"x": ("BF16", (2, 2))}, {})
    with TensorFileWriter(tmp_path / "file", layout) as writer:
        writer.write_rows("x", 0, values.view(torch.int16).numpy().data)
    mapped = map_arrays(tmp_path / "file", ("x",))["x"]
    assert mapped.dtype == np.uint16
    assert torch.equal(torch.from_numpy(mapped.astype(np.int32)).to(torch.int16).view(torch.bfloat16), values)
