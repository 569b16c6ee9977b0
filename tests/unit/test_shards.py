"""Shards: names, whole-or-absent files, journals, locks."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import select
import subprocess
import sys
from pathlib import Path

import pytest
import xxhash
from eyas.errors import EyasError
from eyas.shards import (
    Journal,
    Shard,
    atomic_path,
    describe_file,
    is_complete,
    is_held_out,
    publish,
    read_json,
    shards_of,
    write_json,
    write_lock,
)
from hypothesis import given, settings
from hypothesis import strategies as st

LIGHT = settings(max_examples=60, deadline=None, derandomize=True)


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
