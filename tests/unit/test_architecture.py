"""The house's rules: rooms import only rooms above them, no long modules, no pickles."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "workflow" / "eyas"
# top to bottom, as in docs/decisions.md
ROOMS = [
    "errors", "versions", "config", "shards", "devices", "jobs", "target", "conversations", "plan", "regeneration",
    "tokenization", "extraction", "vocabulary", "drafter", "decoding", "export", "summary", "report", "status", "cli",
]  # fmt: skip


def imports_of(file: Path) -> set[str]:
    """Rooms of eyas that a module imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eyas."):
            found.add(node.module.split(".")[1])
    return found


def test_data_flows_one_way() -> None:
    for file in PACKAGE.rglob("*.py"):
        room = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if room == "__init__":
            continue
        below = {other for other in imports_of(file) if ROOMS.index(other) > ROOMS.index(room)}
        assert not below, f"{file} imports {below}, which lie below {room}"


def test_modules_are_short_and_plain() -> None:
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        assert len(text.splitlines()) <= 400, file
        assert file.name not in ("utils.py", "helpers.py")
        assert not re.search(r"torch\.load\(|pickle|shell=True", text), file
