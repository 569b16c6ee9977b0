"""Journalling beside the writing: states are on the disk before their record, and nobody waits for the disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from eyas.extraction.recording import Recorder
from eyas.jobs import BatchProgress
from eyas.shards import Journal, TensorFileWriter
from eyas.shards.tensor_file import Layout

TOKENS = 100


class Disk:
    """A file whose syncs wait for leave, and are noted with what the journal held at the time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.journal = Journal(folder, "mark")
        self.file = TensorFileWriter(folder / "file", Layout.of({"x": ("U8", (TOKENS << 20,))}, {}))
        self.leave, self.syncing = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.journalled_at_sync: list[list[int]] = []
        monkeypatch.setattr(TensorFileWriter, "sync", lambda _: self._sync())

    def recorded(self) -> list[int]:
        return [json.loads(line)["sequence"] for line in self.journal.path.read_text().splitlines()[1:]]

    def _sync(self) -> None:
        self.syncing.set()
        assert self.leave.wait(20)
        self.journalled_at_sync.append(self.recorded())
        if self.error:
            raise self.error


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    made = Disk(tmp_path / "staging", monkeypatch)
    yield made
    made.leave.set()
    made.journal.close()


def recorder(disk: Disk, seconds: float) -> Recorder:
    return Recorder(disk.file, disk.journal, BatchProgress("states", TOKENS, disk.file.layout.nbytes), seconds)


def test_who_writes_does_not_wait_for_the_disk_and_close_does(disk: Disk) -> None:
    made = recorder(disk, 3600)
    made.add({"sequence": 0}, 70)  # MB: enough to set the disk to work
    assert disk.syncing.wait(20)
    made.add({"sequence": 1}, 10)  # while it works
    assert disk.recorded() == []
    disk.leave.set()
    made.close()
    # Each record came after a sync that began when its states were written.
    assert disk.journalled_at_sync == [[], [0]]
    assert disk.recorded() == [0, 1] == [record["sequence"] for record in disk.journal.records]
    assert made.progress.done == 80 and made.progress.samples == 2


def test_time_sets_the_disk_to_work_too(disk: Disk) -> None:
    made = recorder(disk, 0.01)
    made.add({"sequence": 0}, 1)
    assert disk.syncing.wait(20)
    disk.leave.set()
    made.close()
    assert disk.recorded() == [0]


def test_flush_returns_when_all_is_durable_and_not_before_it_is_called(disk: Disk) -> None:
    disk.leave.set()
    made = recorder(disk, 0)
    made.add({"sequence": 0}, 1)
    made.add({"sequence": 1, "failed": "no luck"}, 1)
    assert not disk.syncing.wait(0.2)
    made.flush()
    assert disk.recorded() == [0, 1] and disk.journalled_at_sync == [[]]
    made.flush()  # nothing new: no harm
    made.close()
    assert len(disk.journal.records) == 2


def test_what_was_written_before_is_recorded_and_not_counted(disk: Disk) -> None:
    disk.leave.set()
    made = recorder(disk, 0)
    made.add({"sequence": 0}, None)
    made.close()
    assert disk.recorded() == [0] and made.progress.done == made.progress.samples == 0


@pytest.mark.parametrize("end", ["add", "flush", "close"])
def test_an_error_of_the_disk_reaches_who_writes_and_nothing_is_recorded(disk: Disk, end: str) -> None:
    disk.error = OSError(5, "Input/output error")
    disk.leave.set()
    made = recorder(disk, 3600)
    made.add({"sequence": 0}, 70)
    made._thread.join(20)
    with pytest.raises(OSError, match="Input/output"):
        made.add({"sequence": 1}, 1) if end == "add" else made.flush() if end == "flush" else made.close()
    assert disk.recorded() == [] == disk.journal.records
