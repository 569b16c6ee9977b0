"""Device leases: two jobs never hold one GPU, and a job without its GPUs says so."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import eyas.devices
import pytest
from eyas.devices import lease_gpus, visible_devices
from eyas.errors import EyasError

HOLD = """
import os, pathlib, sys
import eyas.devices
from eyas.devices import lease_gpus
wanted = int(sys.argv[1])
eyas.devices.LEASE_ROOT = pathlib.Path(os.environ["LEASES_OF_THIS_TEST"])
print("trying", flush=True)
with lease_gpus(wanted, wanted, poll_seconds=0.05) as held:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(held)
    print(*held, flush=True)
    sys.stdin.readline()
"""
Process = subprocess.Popen


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, and lease files of this test alone: a real job's leases are not touched."""
    monkeypatch.setenv("LEASES_OF_THIS_TEST", str(tmp_path))
    monkeypatch.setattr(eyas.devices, "LEASE_ROOT", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")


@pytest.fixture
def start() -> Iterator[Callable[[int], Process]]:
    """Starts a process that tries to hold so many devices until it is sent a line."""
    started: list[Process] = []

    def start_one(wanted: int) -> Process:
        command = [sys.executable, "-c", HOLD, str(wanted)]
        process = Process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)  # select sees each line
        started.append(process)
        assert process.stdout.readline() == b"trying\n"
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait()


def held(process: Process, seconds: float = 10) -> list[str] | None:
    """The devices that a process holds, or None when it still waits after so many seconds."""
    if not select.select([process.stdout], [], [], seconds)[0]:
        return None
    return process.stdout.readline().decode().split()


def test_two_processes_hold_different_devices_and_a_third_waits(start: Callable[[int], Process]):
    first, second = start(1), start(1)
    assert sorted([*held(first), *held(second)]) == ["0", "1"]
    third = start(1)
    assert held(third, 0.4) is None
    first.communicate(b"\n", timeout=10)  # ends well
    freed = held(third)
    fourth = start(1)
    assert held(fourth, 0.4) is None
    third.kill()  # SIGKILL frees a device as well
    assert held(fourth) == freed and freed in (["0"], ["1"])


def test_waiting_for_two_does_not_keep_the_free_one(start: Callable[[int], Process]):
    first = start(1)
    assert held(first) == ["0"]
    both = start(2)
    assert held(both, 0.4) is None
    other = start(1)
    assert held(other) == ["1"]  # `both` holds nothing while it waits
    other.communicate(b"\n", timeout=10)
    assert held(both, 0.3) is None
    first.communicate(b"\n", timeout=10)
    assert held(both) == ["0", "1"]


def test_leases_end_with_the_block_even_by_an_exception(monkeypatch: pytest.MonkeyPatch):
    for _ in range(2):  # the second would wait for ever if the first had kept its lease
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with pytest.raises(RuntimeError), lease_gpus(1, 1) as devices:
            assert devices == ["7"] and os.environ["CUDA_VISIBLE_DEVICES"] == "7"
            raise RuntimeError


def test_only_the_leased_devices_are_visible():
    with lease_gpus(1, 2) as devices:
        assert devices == ["0"] and os.environ["CUDA_VISIBLE_DEVICES"] == "0"


def test_less_granted_than_wanted():
    """Snakemake clamps a demand above its pool in silence."""
    with pytest.raises(EyasError, match=r"needs gpu=2, but Snakemake's pool gave it 1; .*--resources gpu=2"):
        with lease_gpus(2, 1):
            pytest.fail("got a lease")


@pytest.mark.parametrize("visible", ["", "0,1"])
def test_fewer_devices_than_wanted(monkeypatch: pytest.MonkeyPatch, visible: str):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(EyasError, match=rf"needs 3 GPU\(s\) and sees {len(visible.split(',')) if visible else 0};"):
        with lease_gpus(3, 3):
            pytest.fail("got a lease")


def test_no_gpu_wanted(tmp_path: Path):
    with lease_gpus(0, 0) as devices:
        assert devices == [] and os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert os.listdir(tmp_path) == []  # no lease files on machines without GPUs


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("0, 2,", ["0", "2"]),
        ("GPU-8932f937,MIG-1/2", ["GPU-8932f937", "MIG-1/2"]),
        ("", []),
        ("-1", []),  # the usual way to hide all GPUs: CUDA ignores -1 and what follows it
        ("0,-1,1", ["0"]),
        ("0,0", ["0"]),  # one device: asking for two of it would wait for itself for ever
    ],
)
def test_visible_devices_follow_the_variable(monkeypatch: pytest.MonkeyPatch, given: str, ids: list[str]):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices() == ids


@pytest.mark.parametrize(
    ("answer", "ids"),
    [
        ("echo 'GPU 0: H200 (UUID: GPU-a)'; echo 'GPU 1: H200 (UUID: GPU-b)'", ["0", "1"]),
        ("echo 'GPU 0: H200'; echo '  MIG 1g Device 0: (UUID: MIG-c)'; echo 'GPU 1: H200'", ["0", "1"]),
        ("exit 9", []),  # a driver that does not answer
        (None, []),
    ],
    ids=["two", "MIG", "failing", "none"],
)
def test_visible_devices_without_the_variable(tmp_path: Path, monkeypatch, answer: str | None, ids: list[str]):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", str(tmp_path))
    if answer:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
    assert visible_devices() == ids


def test_slurm_jobs_that_count_their_devices_from_0_do_not_meet(
    start: Callable[[int], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    first = start(2)
    assert held(first) == ["0", "1"]
    monkeypatch.setenv("SLURM_JOB_ID", "8")
    assert held(start(2)) == ["0", "1"]
    # several processes of one job share what it was given
    assert held(start(1), seconds=1) is None
