"""Saves inside an epoch: the newest whole one counts, and an interrupted epoch ends with the bytes of an undisturbed one."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from drafter_reference import random_rows, read_json_file
from drafter_runs import LENGTHS, Run, make_run, metrics_of, same_epoch
from eyas.drafter import epoch as epoch_module
from eyas.drafter.epoch import Runtime
from eyas.drafter.resume import load_state, save_state
from eyas.errors import EyasError

ALWAYS, NEVER = Runtime(checkpoint_seconds=0), Runtime(checkpoint_seconds=1e9)
STEPS = 4  # of the epoch below


# ---- the files ----


def saved(folder: Path, *batches: int, mark: str = "mark") -> Path:
    for number in batches:
        tensors = {"master.x": torch.arange(6.0).view(2, 3) * number, "random_state": torch.tensor([number])}
        save_state(folder, mark, number, tensors, {"standing": {"step": number}, "metrics": 10 * number})
    return folder


def newest(folder: Path, mark: str = "mark") -> int | None:
    """After how many batches the save is that would be loaded."""
    found = load_state(folder, mark)
    if found is None:
        return None
    tensors, facts = found
    number = facts["batches"]
    assert torch.equal(tensors["master.x"], torch.arange(6.0).view(2, 3) * number)
    assert (tensors["random_state"].tolist(), facts["standing"], facts["metrics"]) == (
        [number], {"step": number}, 10 * number,
    )  # fmt: skip
    return number


def test_the_newest_of_two_is_loaded_and_older_ones_go(tmp_path: Path) -> None:
    folder = tmp_path / "epoch_1"
    assert newest(folder) is None  # not even a folder
    for batches, kept in ((2, [2]), (9, [2, 9]), (10, [9, 10]), (1000, [10, 1000])):
        assert newest(saved(folder, batches)) == batches
        expected = {f"batch_{number:09d}{suffix}" for number in kept for suffix in (".json", ".safetensors")}
        assert set(os.listdir(folder)) == expected


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "bit flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-5]),
    "empty": lambda path: path.write_bytes(b""),
    "deleted": lambda path: path.unlink(),
}


@pytest.mark.parametrize("suffix, how", [(s, h) for s in (".safetensors", ".json") for h in DAMAGES][:-1])
def test_a_damaged_save_gives_way_to_the_one_before(
    suffix: str, how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 3, 7)
    if (suffix, how) == (".json", "bit flipped"):
        (tmp_path / "batch_000000007.json").write_text('{"fingerprint": "mark", "batches": 7}')
    else:
        DAMAGES[how](tmp_path / f"batch_000000007{suffix}")
    with caplog.at_level(logging.WARNING, "eyas"):
        assert newest(tmp_path) == 3
    (warning,) = caplog.messages
    assert "batch_000000007" in warning and "the save before it" in warning


def test_saves_without_their_second_half_are_passed_over(tmp_path: Path) -> None:
    """Tensors first, then the facts: a kill between them leaves the first alone."""
    saved(tmp_path, 3, 7)
    (tmp_path / "batch_000000007.json").unlink()
    assert newest(tmp_path) == 3
    assert newest(saved(tmp_path, 7)) == 7
    for name in ("batch_000000003.safetensors", "batch_000000007.safetensors"):
        flip(tmp_path / name)
    assert newest(tmp_path) is None


def test_a_save_of_other_data_settings_or_weights_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 3)
    saved(tmp_path, 7, mark="other")
    with caplog.at_level(logging.WARNING, "eyas"):
        assert (newest(tmp_path), newest(tmp_path, "other"), newest(tmp_path, "third")) == (3, 7, None)
    assert len(caplog.messages) == 1 + 0 + 2
    assert all("belongs to other data, settings or weights" in message for message in caplog.messages)


# ---- an epoch that is interrupted in this process ----


class Interrupted(BaseException):
    """What no part of the trainer catches."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = make_run(tmp_path_factory.mktemp("run"), random_rows(LENGTHS))
    run.start(run.folder / "drafter" / "epoch_0")
    return run


@pytest.fixture(scope="module")
def undisturbed(run: Run) -> Path:
    folder = run.folder / "drafter"
    run.train(folder / "epoch_0", 1, folder / "epoch_1")
    place = run.train(folder / "epoch_1", 2, folder / "epoch_2")
    assert len(metrics_of(place)) == len(run.batches(2)) == STEPS
    return place


def on_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], None], before: bool = False) -> None:
    """Do something with the optimizer's step `number` (from 1)."""
    step, calls = torch.optim.AdamW.step, []

    def stepping(self: torch.optim.AdamW) -> None:
        calls.append(1)
        if before and len(calls) == number:
            act()
        step(self)
        if not before and len(calls) == number:
            act()

    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)


def interrupt() -> None:
    raise Interrupted


def again(run: Run, folder: Path, runtime: Runtime = ALWAYS, mark: str = "mark") -> Path:
    before = run.folder / "drafter" / "epoch_1"
    return run.train(before, 2, folder / "epoch_2", runtime=runtime, mark=mark)


@pytest.mark.parametrize("before", [False, True], ids=["after", "before"])
@pytest.mark.parametrize("number", range(1, STEPS + 1))
def test_interrupted_at_any_step(
    number: int, before: bool, run: Run, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        on_step(patch, number, interrupt, before)
        with pytest.raises(Interrupted):
            again(run, tmp_path)
    saves = sorted(path.name for path in (tmp_path / ".staging" / "epoch_2").glob("*.json"))
    assert saves == [f"batch_{n:09d}.json" for n in range(1, number)][-2:]
    assert not (tmp_path / "epoch_2").exists()
    steps: list[int] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(1) or step(self))
    assert same_epoch(again(run, tmp_path), undisturbed)
    assert len(steps) == STEPS - (number - 1)  # what was saved is not done again
    assert os.listdir(tmp_path) == ["epoch_2"]


def test_interrupted_again_and_again(
    run: Run, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(STEPS - 1):  # one step further each time
        with monkeypatch.context() as patch:
            on_step(patch, 2, interrupt, before=True)
            with pytest.raises(Interrupted):
                again(run, tmp_path)
    assert same_epoch(again(run, tmp_path), undisturbed)


def test_the_random_stream_goes_on_where_it_was(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    again(run, tmp_path / "one")
    expected = torch.rand(3)
    torch.manual_seed(0)
    with monkeypatch.context() as patch:
        on_step(patch, 3, interrupt)
        with pytest.raises(Interrupted):
            again(run, tmp_path / "other")
    torch.manual_seed(99)
    again(run, tmp_path / "other")
    assert torch.equal(torch.rand(3), expected)


def test_interrupted_without_a_save_and_while_measuring(
    run: Run, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        on_step(patch, 3, interrupt)
        with pytest.raises(Interrupted):
            again(run, tmp_path / "early", NEVER)
    assert os.listdir(tmp_path / "early" / ".staging" / "epoch_2") == ["metrics.jsonl"]
    assert same_epoch(again(run, tmp_path / "early"), undisturbed)  # its lines are not kept twice
    with monkeypatch.context() as patch:
        patch.setattr(epoch_module, "validate", lambda *_: interrupt())
        with pytest.raises(Interrupted):
            again(run, tmp_path / "late")
    assert same_epoch(again(run, tmp_path / "late"), undisturbed)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_request_to_stop_saves_first(
    number: int, run: Run, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch:
        on_step(patch, 2, lambda: os.kill(os.getpid(), number))
        with pytest.raises(KeyboardInterrupt):
            again(run, tmp_path, NEVER)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)] == handlers
    (save,) = (tmp_path / ".staging" / "epoch_2").glob("*.json")
    assert read_json_file(save)["batches"] == 3  # the step in which it is noted is finished
    assert same_epoch(again(run, tmp_path), undisturbed)


@pytest.mark.parametrize("seconds, saved", [(0, True), (6, False)])
def test_a_second_request_acts_at_once_when_it_is_one_of_its_own(
    seconds: int, saved: bool, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C comes twice in one moment, from the terminal and from the launcher; later it is meant."""

    def twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        now = time.monotonic()
        monkeypatch.setattr("eyas.drafter.trainer.time.monotonic", lambda: now + seconds)
        os.kill(os.getpid(), signal.SIGTERM)

    on_step(monkeypatch, 2, twice)
    with pytest.raises(KeyboardInterrupt):
        again(run, tmp_path, NEVER)
    assert bool(list((tmp_path / ".staging" / "epoch_2").glob("*.json"))) == saved


def test_other_settings_start_anew(
    run: Run, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        on_step(patch, 3, interrupt)
        with pytest.raises(Interrupted):
            again(run, tmp_path, mark="other")
    assert same_epoch(again(run, tmp_path), undisturbed)


def test_damaged_saves_cost_steps_not_bytes(
    run: Run, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = tmp_path / "epoch_2_" / ".staging" / "epoch_2"
    with monkeypatch.context() as patch:
        on_step(patch, STEPS, interrupt)
        with pytest.raises(Interrupted):
            again(run, staging.parents[1])
    for damaged in (1, 2):
        folder = tmp_path / f"damaged_{damaged}"
        shutil.copytree(staging.parents[1], folder)
        for path in sorted((folder / ".staging" / "epoch_2").glob("*.safetensors"))[-damaged:]:
            path.write_bytes(path.read_bytes()[:-1])
        assert same_epoch(again(run, folder), undisturbed)
    metrics = staging / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes()[:10])
    with pytest.raises(EyasError, match=r"metrics\.jsonl: shorter than when the trainer's state was saved; delete"):
        again(run, staging.parents[1])
