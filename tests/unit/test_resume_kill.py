"""SIGKILL at random steps, during saves and while the result is written: the same bytes as an undisturbed epoch."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from drafter_reference import random_rows
from drafter_runs import LENGTHS, make_run, metrics_of, same_epoch
from killed_epochs import STEPS, kills

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the epoch of each way to be killed, after it was run again."""
    folder = tmp_path_factory.mktemp("killed")
    run = make_run(folder, random_rows(LENGTHS))
    run.train(run.start(folder / "drafter" / "epoch_0"), 1, folder / "drafter" / "epoch_1")
    (folder / "run.pickle").write_bytes(pickle.dumps(run))
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "workflow"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "killed_epochs.py"), str(folder)], capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("name", kills())
def test_killed_and_run_again(name: str, killed: Path) -> None:
    assert [line["step"] for line in metrics_of(killed / "undisturbed" / "epoch_2")] == [5, 6, 7, 8]
    assert same_epoch(killed / name / "epoch_2", killed / "undisturbed" / "epoch_2")
    assert os.listdir(killed / name) == ["epoch_2"]  # no staging folder, no partial file


def test_three_random_steps_were_tried() -> None:
    assert sum(name.startswith("steps_") and name[6:].isdigit() for name in kills()) == 3 < STEPS
