"""Two processes over gloo train as one does, with DDP and FSDP2; any number continues; a failure ends them all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter_reference import random_rows, read_json_file
from drafter_runs import LENGTHS, Run, history_of, make_run, metrics_of
from eyas.drafter.checkpoint import load_checkpoint
from eyas.drafter.epoch import Runtime
from eyas.errors import EyasError
from eyas.jobs import launch
from eyas.jobs.launch import reason_of
from several_processes import EPOCHS

TESTS = Path(__file__).parents[1]
CONTINUED = ("ddp", "fsdp2")


def start(folder: Path, scenario: str) -> None:
    """Two processes of several_processes.py; this process is the one that launches them."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "GLOO_SOCKET_IFNAME"):
            patch.setenv(name, "lo" if name.startswith("GLOO") else "1")  # launch sets them, and here they are put back
        patch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent / "workflow")]))
        launch([str(TESTS / "several_processes.py"), str(folder), scenario], 2, 2)


@pytest.fixture(autouse=True, scope="module")
def handlers() -> Iterator[None]:
    """The launcher leaves its signal handlers behind."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows(LENGTHS))


@pytest.fixture(scope="module")
def alone(run: Run) -> dict[str, Path]:
    """Epoch 1 of one process with the settings of EPOCHS, by its batch size."""
    before = run.start(run.folder / "drafter" / "epoch_0")
    settings = {json.dumps(changes): changes for _, changes in EPOCHS.values()}
    return {
        key: run.train(before, 1, run.folder / f"alone_{number}" / "epoch_1", **changes)
        for number, (key, changes) in enumerate(settings.items())
    }


@pytest.fixture(scope="module")
def together(run: Run, alone: dict[str, Path]) -> Path:
    """The folder with what two processes did, in one launch."""
    (run.folder / "run.pickle").write_bytes(pickle.dumps(run))
    for name in CONTINUED:  # epochs that one process begins and two continue
        with pytest.MonkeyPatch.context() as patch:
            stop_at_step(patch, 3)
            with pytest.raises(ZeroDivisionError):
                run.train(
                    run.folder / "drafter" / "epoch_0", 1, run.folder / f"{name}-continued" / "epoch_1",
                    runtime=Runtime(checkpoint_seconds=0),
                )  # fmt: skip
    start(run.folder, "train")
    return run.folder


def stop_at_step(patch: pytest.MonkeyPatch, number: int) -> None:
    step, calls = torch.optim.AdamW.step, []

    def stepping(self: torch.optim.AdamW) -> None:
        calls.append(1)
        step(self) if len(calls) != number else 1 // 0

    patch.setattr(torch.optim.AdamW, "step", stepping)


def assert_same_training(found: Path, expected: Path) -> None:
    """The loss curve, the held-out figures and the weights of two epochs, but for the last bits."""
    ours, theirs = metrics_of(found), metrics_of(expected)
    assert len(ours) == len(theirs) > 2
    for line, wanted in zip(ours, theirs, strict=True):
        close = {key: pytest.approx(wanted[key], rel=1e-5) for key in ("loss", "gradient_norm")}
        assert line == wanted | close
    record, wanted = history_of(found)[-1], history_of(expected)[-1]
    held_out = wanted["held_out"]
    held_out |= {"loss": pytest.approx(held_out["loss"], rel=1e-5)}
    assert record == wanted | {"loss": pytest.approx(wanted["loss"], rel=1e-5), "held_out": held_out}
    one, other = load_checkpoint(found), load_checkpoint(expected)
    assert set(one.moments) == set(other.moments) and one.facts["step"] == other.facts["step"]
    for name, tensor in one.weights.items():
        torch.testing.assert_close(tensor, other.weights[name], rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EPOCHS)
def test_two_processes_train_as_one(name: str, alone: dict[str, Path], together: Path) -> None:
    """In one pass and in several, also with batches of fewer rows than there are processes."""
    assert_same_training(together / name / "epoch_1", alone[json.dumps(EPOCHS[name][1])])


def test_the_scenarios_are_what_they_are_called(run: Run) -> None:
    assert any(len(batch) == 1 for batch in run.batches(1, 24))
    assert sum(len(batch) > 2 for batch in run.batches(1)) > 1
    assert min(LENGTHS[row] for batch in run.batches(1) for row in batch) * 2 > 12  # a pass holds a row


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CONTINUED)
def test_another_number_of_processes_continues(name: str, run: Run, alone: dict[str, Path], together: Path) -> None:
    expected = alone[json.dumps({})]
    assert_same_training(together / f"{name}-continued" / "epoch_1", expected)  # one, then two
    for how, batches in (("stopped", [1, 2]), ("asked", [3])):
        folder = together / f"{name}-{how}"
        saves = sorted((folder / ".staging" / "epoch_1").glob("batch_*.json"))
        assert [read_json_file(save)["batches"] for save in saves] == batches
        copy = shutil.copytree(folder, run.folder / f"{name}-{how}-alone")
        place = run.train(run.folder / "drafter" / "epoch_0", 1, copy / "epoch_1")  # two, then one
        assert_same_training(place, expected)
        assert os.listdir(copy) == ["epoch_1"]


@pytest.mark.timeout(300)
def test_how_each_of_them_ended(run: Run, together: Path) -> None:
    first, second = (dict(read_json_file(together / f"seen_{rank}.json")) for rank in (0, 1))
    for name, (_, changes) in EPOCHS.items():
        batches = len(run.batches(1, changes.get("batch_tokens", 48)))
        assert first[name] == second[name] == f"done after {batches} steps"
    for name in CONTINUED:
        assert first[f"{name}-stopped"] == second[f"{name}-stopped"] == "Interrupted: "
        assert first[f"{name}-continued"] == second[f"{name}-continued"] == "done after 2 steps"
        # one of them was asked to stop: all stop after the same batch
        assert first[f"{name}-asked"] == second[f"{name}-asked"] == "KeyboardInterrupt: "
    batch = next(number for number, rows in enumerate(run.batches(1)) if {0, 3} & set(rows))
    rows = sorted({0, 3} & set(run.batches(1)[batch]))
    assert first["ddp-bad"].startswith(f"EyasError: epoch 1, step {batch}: loss nan")
    assert f"in a batch with rows {rows}; their hidden states hold NaN" in first["ddp-bad"]
    assert second["ddp-bad"] == "SystemExit: 1"  # what all meet is said once


@pytest.mark.timeout(300)
def test_a_fault_that_all_would_meet_is_said_once(together: Path) -> None:
    first, second = (dict(read_json_file(together / f"seen_{rank}.json")) for rank in (0, 1))
    assert first["nothing"].startswith("EyasError: no usable training row")
    assert second["nothing"] == "SystemExit: 1"


# ---- failures ----


def errors(capfd: pytest.CaptureFixture[str]) -> list[str]:
    """What the processes said on standard error."""
    return capfd.readouterr().err.strip().splitlines()


@pytest.mark.timeout(120)
def test_a_failure_in_one_process_is_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The other waits in a collective operation: it does not hang, and does not call it a fault of Eyas."""
    with pytest.raises(SystemExit) as caught:
        start(tmp_path, "failed")
    assert caught.value.code == 1
    said = errors(capfd)
    assert [line for line in said if "this shard is not there" in line] == [
        "[process 1] error: rows_3-7.safetensors: this shard is not there"
    ]
    assert not [line for line in said if "Traceback" in line or "fault of Eyas" in line], said


@pytest.mark.timeout(120)
def test_a_killed_process_is_named_with_its_signal(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(EyasError, match=r"process 1 of 2 was killed by signal 9 \(SIGKILL\)"):
        start(tmp_path, "killed")
    assert not [line for line in errors(capfd) if "Traceback" in line or "fault of Eyas" in line]


@pytest.mark.timeout(120)
def test_all_are_asked_to_stop_and_may_save(tmp_path: Path) -> None:
    def ask() -> None:
        while not all((tmp_path / f"ready_{rank}").exists() for rank in (0, 1)):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking: Any = threading.Thread(target=ask, daemon=True)
    asking.start()
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path, "asked")
    assert (tmp_path / "stopped_0").exists() and (tmp_path / "stopped_1").exists()


FAILED, STOPPED, KILLED, ENDED, ABORTED = 1, 130, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGABRT


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ({0: (ABORTED, 5), 1: (FAILED, 5)}, 1),
        ({0: (ABORTED, 4), 1: (FAILED, 5)}, 1),  # the launcher saw the one that it tore down first
        ({0: (ENDED, 6), 1: (FAILED, 5), 2: (ABORTED, 5)}, 1),
        ({0: (FAILED, 5), 1: (KILLED, 5)}, 1),  # it was gone, so the first failed
        ({0: (FAILED, 4), 1: (KILLED, 5)}, 1),
        ({0: (KILLED, 35), 1: (FAILED, 5)}, 1),  # by the launcher, after its patience
        ({0: (FAILED, 6), 1: (FAILED, 5)}, 1),
        ({0: (ENDED, 5), 1: (ABORTED, 4)}, 1),
        ({0: (KILLED, 5), 1: (STOPPED, 9)}, 1),
    ],
)
def test_the_process_that_is_the_reason(ends: dict[int, tuple[int, float]], reason: int) -> None:
    assert reason_of(ends) == (reason, ends[reason][0])
