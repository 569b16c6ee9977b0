"""Fixtures shared by all tests: the tiny target, trained once a session."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for a hub
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a trained tiny target; do not write into it."""
    from tiny import make_target

    return make_target(tmp_path_factory.mktemp("target") / "tiny")
