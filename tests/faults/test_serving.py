"""Dumps that somebody forged, and who may read ours. (The server's loopback and key: tests/unit/test_sglang_server.)"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from eyas.errors import EyasError
from eyas.extraction.engines.sglang.dumps import DumpFolder, DumpRefused, open_dump
from ledger import Faults

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow" / "capture"))
from eyas_capture.writer import Dump as DumpWriter

LAYERS, WIDTH = [1, 3, 4], 16
IDS = np.arange(7, dtype=np.int32)


def write_dump(folder: DumpFolder, rid: str, ids: np.ndarray = IDS, layers: list[int] = LAYERS) -> Path:
    dump = DumpWriter(str(folder.path), rid, ids.tolist(), layers, 1.0)
    generator = torch.Generator().manual_seed(1)
    aux, last = (torch.randn(len(ids), n * WIDTH, generator=generator).to(torch.bfloat16) for n in (3, 1))
    dump.add(0, aux, last)
    dump.finish()
    return folder.dump(rid)


@pytest.fixture
def folder(tmp_path: Path):
    made = DumpFolder(tmp_path, own=True)
    yield made
    made.close()


def refused(path: Path, rid: str, ids: np.ndarray = IDS, layers: list[int] = LAYERS, width: int = WIDTH) -> None:
    with pytest.raises(DumpRefused):
        open_dump(path, rid, ids, layers, width)


def test_whose_dumps_they_are(faults: Faults, folder: DumpFolder, tmp_path: Path) -> None:
    path = write_dump(folder, folder.rid(1))
    with faults.tried("dumps are for their owner alone"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        open_dump(path, folder.rid(1), IDS, LAYERS, WIDTH)
    if os.getuid() == 0:
        with faults.tried("a dump of another user"):
            os.chown(path, 12345, -1)
            refused(path, folder.rid(1))
            os.chown(path, 0, -1)
    for mode in (0o620, 0o602, 0o666):
        with faults.tried("a dump that others may write to", oct(mode)):
            path.chmod(mode)
            refused(path, folder.rid(1))
    path.chmod(0o600)
    makers: dict[str, Callable[[Path], object]] = {
        "a link to a dump": lambda place: place.symlink_to(path),
        "a folder for a dump": lambda place: place.mkdir(),
        "a pipe for a dump": os.mkfifo,
        "an empty dump": lambda place: place.touch(0o600),
    }
    for number, (what, make) in enumerate(makers.items(), 2):
        with faults.tried(what):
            make(folder.dump(folder.rid(number)))
            refused(folder.dump(folder.rid(number)), folder.rid(number))
    shared = tmp_path / "shared"
    shared.mkdir()
    for mode in (0o777, 0o750, 0o701):
        with faults.tried("a dump folder that others can reach", oct(mode)):
            shared.chmod(mode)
            with pytest.raises(EyasError, match="0700"):
                DumpFolder(shared, own=False)


def test_dumps_of_other_requests(faults: Faults, folder: DumpFolder) -> None:
    rid = folder.rid(1)
    cases = {
        "other token ids": (write_dump(folder, rid, IDS[::-1].copy()), rid, IDS, LAYERS, WIDTH),
        "fewer tokens": (write_dump(folder, folder.rid(2), IDS[:5]), folder.rid(2), IDS, LAYERS, WIDTH),
        "more tokens": (write_dump(folder, folder.rid(3)), folder.rid(3), IDS[:5], LAYERS, WIDTH),
        "other layers": (write_dump(folder, folder.rid(4), layers=[1, 2, 4]), folder.rid(4), IDS, LAYERS, WIDTH),
        "another width": (write_dump(folder, folder.rid(5)), folder.rid(5), IDS, LAYERS, WIDTH * 2),
        "another request": (write_dump(folder, folder.rid(6)), folder.rid(7), IDS, LAYERS, WIDTH),
    }
    for what, (path, wanted, ids, layers, width) in cases.items():
        with faults.tried("a dump of another request", what):
            refused(path, wanted, ids, layers, width)


def test_mutated_dumps(faults: Faults, folder: DumpFolder) -> None:
    """What a dump says of itself: refused, or the very states."""
    rid = folder.rid(1)
    path = write_dump(folder, rid)
    whole = path.read_bytes()
    expected = open_dump(path, rid, IDS, LAYERS, WIDTH)
    aux, last = expected.aux.clone(), expected.last.clone()
    header = 8 + int.from_bytes(whole[:8], "little")
    for number in range(faults.count(200, 20_000)):
        content = bytearray(whole)
        for _ in range(faults.random.choice([1, 1, 2, 8])):
            content[faults.random.randrange(header)] ^= 1 << faults.random.randrange(8)
        if faults.random.random() < 0.3:
            content = content[: faults.random.randrange(len(content))]
        path.write_bytes(content)
        with faults.tried("a dump with a damaged header", number):
            try:
                dump = open_dump(path, rid, IDS, LAYERS, WIDTH)
            except DumpRefused:
                continue
            assert torch.equal(dump.aux, aux) and torch.equal(dump.last, last)
