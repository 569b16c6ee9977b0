"""Fixtures shared by all tests: the tiny target, trained once a session, and real Snakemake runs on it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from filelock import FileLock

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing by more threads, and lose a lot where the machine is busy. Jobs set their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for a hub
sys.path.insert(0, str(Path(__file__).parent))
hypothesis.settings.register_profile("eyas", deadline=None)  # how long an example takes says nothing on a busy machine
hypothesis.settings.load_profile("eyas")

if TYPE_CHECKING:
    from workflow_runs import Workdir


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("faults", "tests/faults")
    group.addoption("--faults", choices=["quick", "all"], default="quick", help="how many faults to inject")
    group.addoption("--faults-seed", type=int, default=0, help="seed of the random faults")
    group.addoption("--faults-page", type=Path, help="page whose table is replaced by this run's")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first: of several workers (pytest-xdist), none begins one when the others have ended."""
    items.sort(key=lambda item: ("unit" in item.path.parts, item.path.stem != "test_kill_storm"))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained tiny target; do not write into it."""
    from tiny import make_target

    return made_once(tmp_path_factory, "tiny_target", lambda folder: make_target(folder / "tiny"))


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], Path]) -> Path:
    """What `make` leaves in a folder, made by one worker for all of them (the others wait)."""
    shared = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        shared = shared.parent
    done = shared / f"{name}.path"
    with FileLock(shared / f"{name}.lock"):
        if not done.exists():
            folder = shared / name
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            done.write_text(str(make(folder)))
    return Path(done.read_text())


@pytest.fixture
def workdir(tmp_path: Path, tiny_target: Path) -> Workdir:
    """An empty folder with prompts and a configuration."""
    from workflow_runs import new_workdir

    return new_workdir(tmp_path / "work", tiny_target)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Workdir:
    """A run that nothing disturbed; do not change it."""
    from workflow_runs import Workdir, new_workdir, tiny_settings

    def make(folder: Path) -> Path:
        work = new_workdir(folder / "work", tiny_target)
        work.run()
        return work.path

    return Workdir(made_once(tmp_path_factory, "reference", make), tiny_settings(tiny_target))


@pytest.fixture
def finished(reference: Workdir, tmp_path: Path) -> Workdir:
    """A copy of the finished run, with Snakemake's records."""
    from workflow_runs import Workdir, tiny_settings

    path = tmp_path / "finished"
    shutil.copytree(reference.path, path, symlinks=True)
    return Workdir(path, tiny_settings(Path(reference.settings["target"]["path"])))
