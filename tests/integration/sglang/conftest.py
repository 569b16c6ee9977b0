"""Fixtures of the SGLang tests: the environment with SGLang, a folder in memory, tiny targets."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from servers import environment_python, save_target


@pytest.fixture(scope="session")
def python() -> str:
    found = environment_python()
    if found is None:
        pytest.skip("the SGLang environment is not there: make test-sglang")
    return found


@pytest.fixture
def dump_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eyas-test-") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory):
    """Targets by their architecture."""
    made = {}

    def get(architecture: str):
        if architecture not in made:
            made[architecture] = save_target(tmp_path_factory.mktemp(architecture) / "target", architecture)
        return made[architecture]

    return get
