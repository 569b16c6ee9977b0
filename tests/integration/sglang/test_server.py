"""The SGLang engine against real servers: states, kills of either side, little memory for dumps."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eyas.config.sglang import Sglang
from eyas.extraction.shard import extract_shard
from eyas.shards import checksum
from safetensors.torch import load_file
from servers import CHECKOUT, expected_states, make_engine, rows_of, sglang_settings, write_rows

LENGTHS = [1, 2, 63, 64, 65, 128, 200, 300, 17, 90, 150, 31, 66, 5, 129, 40, 40, 12]
LAYERS = [0, 2, 4]


def processes(dump_folder: Path) -> list[str]:
    """Processes of servers that this test started: they know its folder for dumps."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (entry / "environ").read_bytes()
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if f"EYAS_CAPTURE_DIR={dump_folder}".encode() in environment and state != "Z":
                found.append(f"{entry.name} {line}")
    return found


def no_server_within(seconds: float, dump_folder: Path) -> None:
    deadline = time.monotonic() + seconds
    while (left := processes(dump_folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not left


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [
        ("llama", [0, 2, 4]),
        ("qwen3", [1, 2, 4]),
        # Its own rule adds one to the ids when the first is 1: all three cases of it.
        ("deepseek_v3", [0, 1, 3]),
        ("deepseek_v3", [1, 2, 4]),
    ],
)
def test_states_are_those_of_transformers(
    architecture: str, layers: list[int], python: str, targets: Any, tmp_path: Path, dump_folder: Path
) -> None:
    """Eight at once, prefills in chunks of 64, shared beginnings."""
    target = targets(architecture)
    tokens = write_rows(tmp_path, LENGTHS)
    output = tmp_path / "out" / tokens.name
    engine = make_engine(target, layers, python, tmp_path, dump_folder)
    try:
        extract_shard(tokens, output, target, layers, "float32", engine=engine)
        assert [p for p in dump_folder.rglob("*") if p.suffix in (".safetensors", ".part")] == []
    finally:
        engine.close()
    found, expected = load_file(output), expected_states(target, layers, rows_of(LENGTHS))
    torch.testing.assert_close(found["aux_hidden_states"], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["last_hidden_state"], expected[1], rtol=1e-4, atol=1e-4)
    assert torch.equal(found["target_token"].long(), expected[2])
    assert expected[0].std() > 0.1
    assert list(dump_folder.iterdir()) == []
    assert "api_key': '***'" in (tmp_path / "server.log").read_text()  # SGLang prints its arguments
    no_server_within(0.1, dump_folder)


def test_two_tensor_parallel_processes(python: str, targets: Any, tmp_path: Path, dump_folder: Path) -> None:
    target, lengths = targets("llama"), LENGTHS[:8]
    tokens = write_rows(tmp_path, lengths)
    output = tmp_path / "out" / tokens.name
    settings = sglang_settings(python, dump_folder)
    environment = settings["environment"] | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    engine = make_engine(target, LAYERS, python, tmp_path, dump_folder, tp=2, environment=environment)
    try:
        extract_shard(tokens, output, target, LAYERS, "float32", engine=engine)
    finally:
        engine.close()
    found, expected = load_file(output), expected_states(target, LAYERS, rows_of(lengths))
    torch.testing.assert_close(found["aux_hidden_states"], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["last_hidden_state"], expected[1], rtol=1e-4, atol=1e-4)
    no_server_within(0.1, dump_folder)


# One row at a time: batches then are the same in every run, and with them the last bits.
ALONE = {"concurrency": 1}
MANY = LENGTHS * 5


@pytest.fixture(scope="module")
def undisturbed(python: str, targets: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    tokens = write_rows(folder, MANY)
    engine = make_engine(targets("llama"), LAYERS, python, folder, Path("/dev/shm"), **ALONE)
    try:
        extract_shard(tokens, folder / tokens.name, targets("llama"), LAYERS, "bfloat16", engine=engine)
    finally:
        engine.close()
    return folder / tokens.name


def test_a_killed_server_is_started_again(
    undisturbed: Path, python: str, targets: Any, tmp_path: Path, dump_folder: Path
) -> None:
    target = targets("llama")
    tokens = write_rows(tmp_path, MANY)
    engine = make_engine(target, LAYERS, python, tmp_path, dump_folder, **ALONE)
    journal = tmp_path / "out" / ".staging" / tokens.stem / "journal.jsonl"
    killed: list[int] = []

    def kill() -> None:
        while not (journal.exists() and journal.read_text().count("sequence") >= 4):
            time.sleep(0.02)
        killed.extend(
            int(line.split()[0]) for line in processes(dump_folder) if "launch_server" in line and "guard" not in line
        )
        for process in killed:
            os.kill(process, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        extract_shard(tokens, tmp_path / "out" / tokens.name, target, LAYERS, "bfloat16", engine=engine)
    finally:
        engine.close()
        killer.join()
    assert killed
    assert (tmp_path / "server.log").read_text().count("==== start") == 2
    assert checksum(tmp_path / "out" / tokens.name) == checksum(undisturbed)
    no_server_within(0.1, dump_folder)


def test_a_killed_job_leaves_no_server_and_goes_on(
    undisturbed: Path, python: str, targets: Any, tmp_path: Path, dump_folder: Path
) -> None:
    run = tmp_path / "run"
    tokens = write_rows(run, MANY)
    target = targets("llama")
    settings = Sglang(**sglang_settings(python, dump_folder, **ALONE))
    engine = make_engine(target, LAYERS, python, run, dump_folder, **ALONE)
    command = [
        sys.executable, str(CHECKOUT / "workflow" / "scripts" / "extract.py"), "--run", str(run), "--rows", tokens.stem,
        "--total-rows", str(len(MANY)), "--shard-rows", str(len(MANY)), "--target",
        json.dumps({"path": target.path}), "--settings", json.dumps({"layers": LAYERS, "dtype": "bfloat16"}),
        "--sglang", json.dumps(settings.options()), "--server", shlex.join(engine._command),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(CHECKOUT / "workflow")}
    journal = run / "hidden_states" / ".staging" / tokens.stem / "journal.jsonl"
    job = subprocess.Popen(command, env=environment)
    while not (journal.exists() and journal.read_text().count("sequence") >= 4):
        assert job.poll() is None
        time.sleep(0.02)
    assert processes(dump_folder)
    job.kill()
    job.wait()
    no_server_within(20, dump_folder)
    before = journal.read_text().count("sequence")
    assert before < len(MANY)
    left = [p.name for p in dump_folder.iterdir()]
    assert len(left) == 1  # the killed job's folder, which the next one removes
    subprocess.run(command, env=environment, check=True)
    assert checksum(run / "hidden_states" / tokens.name) == checksum(undisturbed)
    assert list(dump_folder.iterdir()) == []
    no_server_within(0.1, dump_folder)


@pytest.fixture
def small_memory(tmp_path: Path) -> Any:
    """A tmpfs of 8 MB."""
    folder = tmp_path / "small"
    folder.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m,mode=0700", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_little_memory_is_slow_and_not_dead(python: str, targets: Any, tmp_path: Path, small_memory: Path) -> None:
    """800 tokens of 1,028 bytes are 0.8 MB: eight such rows do not fit with what the probe and the lock take."""
    target = targets("llama")
    lengths = [1000, 900, 1000, 10, 1000, 1000, 950, 980, 1000, 1000]
    tokens = write_rows(tmp_path, lengths)
    engine = make_engine(
        target, LAYERS, python, tmp_path, small_memory, concurrency=10, chunked_prefill=512, dump_gb=0.003
    )
    try:
        extract_shard(tokens, tmp_path / "out" / tokens.name, target, LAYERS, "float32", engine=engine)
    finally:
        engine.close()
    found = load_file(tmp_path / "out" / tokens.name)
    assert np.isfinite(found["last_hidden_state"].numpy()).all() and found["last_hidden_state"].abs().sum(1).min() > 0
    assert len(found["target_token"]) == sum(lengths)
