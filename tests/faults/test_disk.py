"""Disks that are full, read-only, over their quota, slow to take bytes or unable to: one message, nothing half-written."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from drafter_reference import random_rows, save_llama, write_tokens
from eyas.errors import EyasError
from eyas.extraction.shard import extract_shard
from eyas.target.tokenizer import TargetReference
from ledger import Faults
from workflow_runs import Workdir, new_workdir

LENGTHS = [5, 1, 17, 9, 9, 3, 12]
LAYERS = [0, 1, 2]


class Disk:
    """A small file system in memory, mounted for one test."""

    def __init__(self, place: Path, options: str) -> None:
        self.place = place
        place.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.place)], check=True)

    def close(self) -> None:
        subprocess.run(["umount", "--lazy", str(self.place)], check=False)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    mounted: list[Disk] = []

    def mount(options: str) -> Disk:
        mounted.append(Disk(tmp_path / f"disk_{len(mounted)}", options))
        return mounted[-1]

    yield mount
    for one in mounted:
        one.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetReference:
    return save_llama(tmp_path_factory.mktemp("target") / "target")


def extract(folder: Path, target: TargetReference, where: Path | None = None) -> Path:
    """One small shard of hidden states; its file."""
    tokens = write_tokens(folder / "tokens" / "rows_0-7.safetensors", random_rows(LENGTHS))
    output = (where or folder) / "hidden_states" / tokens.name
    extract_shard(tokens, output, target, LAYERS, "bfloat16", 18)
    return output


def whole_or_absent(folder: Path, wanted: bytes) -> None:
    """No file at a final place that is not what it should be."""
    file = folder / "hidden_states" / "rows_0-7.safetensors"
    assert not file.exists() or file.read_bytes() == wanted
    assert file.exists() or not file.with_suffix(".json").exists()


def failing(call: str, number: int, code: int) -> Callable[..., Any]:
    """`os.<call>` that fails with `code` the `number`th time."""
    real, count = getattr(os, call), [0]

    def wrapper(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == number:
            raise OSError(code, os.strerror(code))
        return real(*arguments)

    return wrapper


CALLS = {
    "posix_fallocate": [errno.ENOSPC, errno.EDQUOT, errno.EFBIG],
    "pwrite": [errno.ENOSPC, errno.EDQUOT, errno.EIO],
    "fsync": [errno.EIO, errno.ENOSPC, errno.EDQUOT],
    "fdatasync": [errno.EIO, errno.ENOSPC],
    "replace": [errno.EROFS, errno.EIO],
    "link": [errno.EIO],
    "write": [errno.ENOSPC, errno.EIO],
}


def test_calls_that_fail_during_extraction(
    faults: Faults, target: TargetReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of the kernel at a time, with each reason; then again without: the bytes of an undisturbed run."""
    wanted = extract(tmp_path / "whole", target).read_bytes()
    cases = [(call, code, number) for call, codes in CALLS.items() for code in codes for number in (1, 2, 3, 7)]
    if not faults.all:
        cases = faults.random.sample(cases, 12)
    for call, code, number in cases:
        folder = tmp_path / f"{call}_{code}_{number}"
        with faults.tried(f"{call} fails with {errno.errorcode[code]}", f"call {number}"):
            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing(call, number, code))
                try:
                    extract(folder, target)
                except (EyasError, OSError) as exc:  # scripts say what an OSError of a full disk means
                    assert isinstance(exc, EyasError) or exc.errno == code
            whole_or_absent(folder, wanted)
            assert extract(folder, target).read_bytes() == wanted


def test_short_writes(faults: Faults, target: TargetReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may take fewer bytes than it was given."""
    wanted = extract(tmp_path / "whole", target).read_bytes()
    real = os.pwrite
    for most in (1, 7, 100):
        with faults.tried("writes that take only some of the bytes", most), monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", lambda fd, data, place, most=most: real(fd, memoryview(data)[:most], place))
            assert extract(tmp_path / str(most), target).read_bytes() == wanted


def test_no_fallocate(faults: Faults, target: TargetReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """File systems that cannot allocate (NFS 3, some FUSE): the shard is written all the same."""
    wanted = extract(tmp_path / "whole", target).read_bytes()
    for code in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):

        def cannot(*_: Any, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with faults.tried("a file system without fallocate", errno.errorcode[code]), monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", cannot)
            assert extract(tmp_path / str(code), target).read_bytes() == wanted


def test_no_hard_links(
    faults: Faults, target: TargetReference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = extract(tmp_path / "whole", target).read_bytes()

    def cannot(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with faults.tried("a file system without hard links"), monkeypatch.context() as patch:
        patch.setattr(os, "link", cannot)
        assert extract(tmp_path / "moved", target).read_bytes() == wanted


def test_a_real_disk_that_is_too_small(
    faults: Faults, disk: Callable[[str], Disk], target: TargetReference, tmp_path: Path
) -> None:
    """Full at allocation: said before any work, in bytes; with room, the same command goes on."""
    wanted = extract(tmp_path / "whole", target).read_bytes()
    small = disk("size=8k")
    with faults.tried("a full disk at allocation"):
        with pytest.raises(EyasError, match="free"):
            extract(tmp_path / "in", target, small.place)
        whole_or_absent(small.place, wanted)
        small.remount("size=4m")
        assert extract(tmp_path / "in", target, small.place).read_bytes() == wanted


@pytest.mark.timeout(3600)
def test_the_workflow_on_a_disk_that_fills_up(
    faults: Faults, disk: Callable[[str], Disk], reference: Workdir, tmp_path: Path
) -> None:
    """Real Snakemake: whatever stage meets the end of the disk says so, and goes on when there is room."""
    faults.skip_unless_all()
    for size in (60, 400, 900, 1500, 2500):  # kB, of about 5 MB
        small = disk("size=64m")
        work = new_workdir(small.place / "work", Path(reference.settings["target"]["path"]))
        filler = small.place / "filler"
        used = shutil.disk_usage(small.place).used
        with faults.tried("a disk that fills up in the middle of a run", f"{size} kB"):
            with open(filler, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, (64 << 20) - used - (size << 10))
            result = work.snakemake()
            assert result.code == 1, result.text[-2000:]
            told = [line for line in result.text.splitlines() if "free" in line or "disk is full" in line]
            ours = result.text.replace(
                "Traceback (most recent call last)", "", result.text.count("OSError: [Errno 28]")
            )
            assert told and "fault of Eyas" not in ours, result.text[-4000:]
            filler.unlink()
            work.run()
            assert work.digests() == reference.digests()
            assert work.leftovers() == []
        small.close()


@pytest.mark.timeout(900)
def test_a_read_only_disk(faults: Faults, disk: Callable[[str], Disk], finished: Workdir, reference: Workdir) -> None:
    """The results cannot be written: said once, without a traceback of ours; afterwards nothing is lost."""
    small = disk("size=64m")
    shutil.move(finished.path / "results", small.place / "results")
    (finished.path / "results").symlink_to(small.place / "results")
    goal = "results/tiny/hidden_states/rows_20-40.safetensors"
    (finished.path / goal).unlink()
    (finished.path / goal).with_suffix(".json").unlink()
    small.remount("ro")
    with faults.tried("a read-only disk"):
        result = finished.snakemake("--", goal)
        assert result.code == 1 and "fault of Eyas" not in result.text, result.text[-3000:]
        assert "ead-only" in result.text or "cannot be written" in result.text, result.text[-3000:]
        small.remount("rw")
        finished.run("--", goal)
        assert finished.digests() == reference.digests()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name",
    ["two words", 'quo\'te "and" $HOME;x', "ünïcodé 数据 🦅", "x" * 200],
    ids=["spaces", "quotes", "unicode", "200 characters"],
)
def test_paths(name: str, faults: Faults, reference: Workdir, tmp_path: Path) -> None:
    faults.skip_unless_all()
    work = new_workdir(tmp_path / name, Path(reference.settings["target"]["path"]))
    with faults.tried("a folder with an unusual name", name):
        work.run()
        assert work.digests() == reference.digests()
