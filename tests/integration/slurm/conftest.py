"""Fixtures of the SLURM tests: a cluster of this machine, and a checkout whose jobs hold GPUs but compute without."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "workflow"))

import cluster as slurm
from cluster import Cluster
from workflow_runs import CHECKOUT, Workdir, new_workdir


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if absent := slurm.missing():
        pytest.skip(f"{', '.join(absent)} not there: make test-slurm installs SLURM")
    with slurm.running(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def cluster(daemons: Cluster) -> Iterator[Cluster]:
    """The cluster, with nothing on it before and after."""
    assert daemons.command("squeue", "-h") == ""
    daemons.forget()
    yield daemons
    daemons.clear()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy whose jobs take their GPUs like any others, and then compute on the CPU: there are no real ones."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("Snakefile", "rules", "profiles", "workflow"):
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, copy / name)
    script = copy / "workflow" / "eyas" / "jobs" / "script.py"
    text, call = script.read_text(encoding="utf-8"), "            work(args)\n"
    assert text.count(call) == 1
    script.write_text(text.replace(call, f"            args.gpu = 0\n{call}"), encoding="utf-8")
    return copy


@pytest.fixture(scope="session")
def local_run(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, checkout: Path) -> Workdir:
    """The same run on this machine alone, without GPUs: training takes as many processes, and so the same sums."""
    plain = new_workdir(tmp_path_factory.mktemp("local") / "work", tiny_target)
    work = Workdir(plain.path, plain.settings, checkout)  # provenance names the checkout's commit: it has none
    work.settings["drafters"]["small"]["training"] |= {"processes": 2, "threads": 2}
    work.run()
    return work
