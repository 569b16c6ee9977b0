"""Fixtures: real Snakemake runs of a tiny configuration; the finished one is made once and copied."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from workflow_runs import Workdir, new_workdir, tiny_settings


@pytest.fixture
def workdir(tmp_path: Path, tiny_target: Path) -> Workdir:
    """An empty folder with prompts and a configuration."""
    return new_workdir(tmp_path / "work", tiny_target)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Workdir:
    """A run that nothing disturbed; do not change it."""
    work = new_workdir(tmp_path_factory.mktemp("reference") / "work", tiny_target)
    work.run()
    return work


@pytest.fixture
def finished(reference: Workdir, tmp_path: Path) -> Workdir:
    """A copy of the finished run, with Snakemake's records."""
    path = tmp_path / "finished"
    shutil.copytree(reference.path, path, symlinks=True)
    return Workdir(path, tiny_settings(Path(reference.settings["target"]["path"])))
