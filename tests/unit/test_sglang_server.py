"""A job's own server, by a stand-in command: its key, its restarts, and that nothing of it is ever left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafter_reference import random_rows, save_llama, write_tokens
from eyas.config.sglang import Sglang
from eyas.errors import EyasError
from eyas.extraction.engines.sglang.engine import SglangEngine
from eyas.extraction.shard import extract_shard
from eyas.target.tokenizer import TargetReference
from fake_sglang import made_up_states
from safetensors.torch import load_file

FAKE = Path(__file__).parents[1] / "fake_sglang.py"
LENGTHS = [5, 1, 17, 9, 4]
LAYERS = [0, 1, 3]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetReference:
    return save_llama(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    for name in ("dumps", "notes"):
        (tmp_path / name).mkdir()
    write_tokens(tmp_path / "tokens" / "rows_0-5.safetensors", random_rows(LENGTHS))
    yield tmp_path
    for facts in starts(tmp_path):  # a test that failed must not leave them either
        for name in ("server", "below"):
            try:
                os.kill(facts[name], signal.SIGKILL)
            except ProcessLookupError:
                continue


def starts(place: Path) -> list[dict[str, Any]]:
    """What each start of the server noted of itself."""
    return [json.loads(path.read_text()) for path in sorted((place / "notes").glob("*.start"))]


def command(target: TargetReference, place: Path, *more: str) -> list[str]:
    return [sys.executable, str(FAKE), "--target", target.path, "--notes", str(place / "notes"), *more]


def make_engine(target: TargetReference, place: Path, *more: str, **changes: Any) -> SglangEngine:
    options = Sglang(**({"dump_folder": str(place / "dumps"), "concurrency": 1, "start_minutes": 1.0} | changes))
    return SglangEngine(target, LAYERS, options.options(), command(target, place, *more), 0, place / "server.log")


def extract(target: TargetReference, place: Path, engine: SglangEngine) -> Path:
    output = place / "hidden_states" / "rows_0-5.safetensors"
    extract_shard(place / "tokens" / output.name, output, target, LAYERS, "float32", engine=engine)
    return output


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(seconds: float, *processes: int) -> None:
    deadline = time.monotonic() + seconds
    while (left := [process for process in processes if alive(process)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def until(true: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_server_is_started_used_and_ended(target: TargetReference, place: Path) -> None:
    engine = make_engine(target, place, environment={"MORE": "yes"})
    try:
        output = extract(target, place, engine)
        (facts,) = starts(place)
        assert alive(facts["server"]) and alive(facts["below"])
        lines = {}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                lines[path.parent.name] = path.read_bytes()
            except OSError:
                continue
        assert str(FAKE).encode() in lines[str(facts["server"])]
        assert [name for name, line in lines.items() if facts["key"].encode() in line] == []
    finally:
        engine.close()
    gone_within(0.1, facts["server"], facts["below"], facts["guard"])
    assert (facts["mode"], facts["host"], json.loads(facts["layers"])) == ("0o700", "127.0.0.1", LAYERS)
    assert facts["environment"]["MORE"] == "yes"
    assert not [name for name, value in facts["environment"].items() if facts["key"] in value]
    # SGLang makes an argument of it, which must not look like an option.
    assert len(facts["key"]) >= 32 and facts["key"].isalnum()
    log = (place / "server.log").read_text()
    assert "api_key='***', other=1" in log
    assert facts["key"] not in log
    assert list((place / "dumps").iterdir()) == []
    states = made_up_states(load_file(Path(target.path) / "model.safetensors")["lm_head.weight"].numpy())
    expected = np.concatenate([states(ids.tolist())[1] for _, ids, _ in random_rows(LENGTHS)])
    assert np.array_equal(load_file(output)["last_hidden_state"].numpy(), expected)


def test_a_killed_server_is_started_again_as_often_as_allowed(target: TargetReference, place: Path) -> None:
    """A row that kills the server whenever it comes."""
    engine = make_engine(target, place, "--faults", json.dumps({9: ["die"]}), restarts=1)
    try:
        with pytest.raises(
            EyasError, match=r"died 2 times \(exit code 137: .*restarts allows 1. Finished rows are kept"
        ):
            extract(target, place, engine)
    finally:
        engine.close()
    first, second = starts(place)
    assert first["key"] == second["key"]
    gone_within(0.1, *(facts[name] for facts in (first, second) for name in ("server", "below", "guard")))
    assert (place / "server.log").read_text().count("==== start") == 2
    assert list((place / "dumps").iterdir()) == []


def test_a_restart_loses_no_row(target: TargetReference, place: Path) -> None:
    engine = make_engine(target, place, "--first-faults", json.dumps({9: ["die"]}), restarts=1)
    journal = place / "hidden_states" / ".staging" / "rows_0-5" / "journal.jsonl"
    try:
        output = extract(target, place, engine)
    finally:
        engine.close()
    assert not journal.exists()
    assert len(starts(place)) == 2
    states = made_up_states(load_file(Path(target.path) / "model.safetensors")["lm_head.weight"].numpy())
    expected = np.concatenate([states(ids.tolist())[0] for _, ids, _ in random_rows(LENGTHS)])
    assert np.array_equal(load_file(output)["aux_hidden_states"].numpy(), expected)


def test_a_server_that_does_not_start_says_why(target: TargetReference, place: Path) -> None:
    engine = make_engine(target, place, "--dies", "no memory for")
    try:
        with pytest.raises(
            EyasError, match=r"ended while it was starting with exit code 3: Error: no memory for \*\*\*"
        ):
            extract(target, place, engine)
    finally:
        engine.close()
    assert list((place / "dumps").iterdir()) == []


def test_a_python_that_is_not_there(target: TargetReference, place: Path) -> None:
    options = Sglang(dump_folder=str(place / "dumps")).options()
    engine = SglangEngine(target, LAYERS, options, ["/nowhere/python", "-m", "x"], 0, place / "server.log")
    try:
        with pytest.raises(EyasError, match=r"exit code 127: /nowhere/python: cannot be started \(No such file"):
            extract(target, place, engine)
    finally:
        engine.close()


def test_a_stubborn_server_is_killed(target: TargetReference, place: Path) -> None:
    engine = make_engine(target, place, "--stubborn")
    engine.begin()
    (facts,) = starts(place)
    started = time.monotonic()
    engine.close()
    gone_within(0.1, facts["server"], facts["below"])
    assert 5 < time.monotonic() - started < 25


def test_the_kernel_ends_the_server_with_its_guard(target: TargetReference, place: Path) -> None:
    engine = make_engine(target, place)
    engine.begin()
    (facts,) = starts(place)
    try:
        os.kill(facts["guard"], signal.SIGKILL)
        gone_within(5, facts["server"])
    finally:
        engine.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("fault", ["loading", "slow"])
def test_a_job_that_is_ended_leaves_no_process(
    number: signal.Signals, fault: str, target: TargetReference, place: Path
) -> None:
    """While a row is under way that takes a minute, and before that."""
    if fault == "loading" and number is signal.SIGTERM:
        pytest.skip("as with SIGKILL")
    more = ["--faults", json.dumps({4: ["slow"]})] if fault == "slow" else ["--delay", "60"]
    script = Path(__file__).parents[2] / "workflow" / "scripts" / "extract.py"
    options = Sglang(dump_folder=str(place / "dumps"), concurrency=2, start_minutes=1.0).options()
    import shlex

    job = subprocess.Popen(
        [
            sys.executable, str(script), "--run", str(place), "--rows", "rows_0-5", "--total-rows", "5",
            "--shard-rows", "5", "--target", json.dumps({"path": target.path}),
            "--settings", json.dumps({"layers": LAYERS, "dtype": "float32"}), "--sglang", json.dumps(options),
            "--server", shlex.join(command(target, place, *more)),
        ],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        until(lambda: starts(place) or job.poll() is not None)
        (facts,) = starts(place)
        journal = place / "hidden_states" / ".staging" / "rows_0-5" / "journal.jsonl"
        if fault == "slow":
            until(lambda: journal.exists() or job.poll() is not None)
            time.sleep(1.5)
        assert job.poll() is None
        job.send_signal(number)
        output = job.communicate(timeout=30)[0]
    finally:
        job.kill()
        job.wait()
    gone_within(15, facts["server"], facts["below"], facts["guard"])
    if number is signal.SIGINT:
        assert job.returncode == 130
        assert "Stopped by the user" in output and "Traceback" not in output
        assert list((place / "dumps").iterdir()) == []
    else:
        assert job.returncode == -number
