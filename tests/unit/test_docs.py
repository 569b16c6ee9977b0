"""The generated page on the configuration keys fits the schema."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from eyas.config import Config
from pydantic import BaseModel
from pydantic._internal._docs_extraction import extract_docstrings_from_cls

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = CHECKOUT / "docs" / "make_config_page.py"


def models_in(annotation):
    """Sections that a field's type leads to, with whether they lie under free names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [(annotation, False)]
    free = getattr(annotation, "__origin__", None) is dict
    return [(model, free or deeper) for part in get_args(annotation) for model, deeper in models_in(part)]


def keys(model=Config, path=""):
    """Patterns of the dotted paths of all keys that are no sections, with their fields and what is said of them."""
    said = {}
    for base in model.__mro__[-3::-1]:  # from BaseModel on
        said |= extract_docstrings_from_cls(base, use_inspect=True)
    for name, field in model.model_fields.items():
        place = path + re.escape(name)
        sections = models_in(field.annotation)
        for section, free in sections:
            yield from keys(section, place + (r"\.<\w+>\." if free else r"\."))
        if not sections:
            yield place, field, said.get(name)


def check(checkout):
    return subprocess.run(
        [sys.executable, checkout / "docs" / SCRIPT.name, "--check"], capture_output=True, text=True, cwd=checkout
    )


@pytest.fixture(scope="module")
def lines():
    return (CHECKOUT / "docs" / "config.md").read_text(encoding="utf-8").splitlines()


def test_page_is_up_to_date():
    result = check(CHECKOUT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("change", ["edited", "missing"])
def test_stale_page_is_one_message(tmp_path, change):
    (tmp_path / "docs").mkdir()
    (tmp_path / "workflow").symlink_to(CHECKOUT / "workflow")
    shutil.copy(SCRIPT, tmp_path / "docs")
    if change == "edited":
        (tmp_path / "docs" / "config.md").write_text("# Configuration keys\n")
    result = check(tmp_path)
    assert result.returncode == 1
    assert result.stderr == "docs/config.md is out of date: run `make docs` and commit the page\n"


def test_every_key_has_one_line_with_its_path(lines):
    found = list(keys())
    assert len(found) > 40
    for path, field, text in found:
        rows = [line for line in lines if re.match(rf"\| `{path}` \|", line)]
        assert len(rows) == 1, path
        assert text, f"{path} has no docstring"
        runtime = bool((field.json_schema_extra or {}).get("runtime"))
        assert ("re-runs nothing" in rows[0]) == runtime, path
        assert ("| required |" in rows[0]) == field.is_required(), path
    assert sum(line.startswith("| `") for line in lines) == len(found)


def test_descriptions_are_whole(lines):
    text = "\n".join(lines)
    for *_, said in keys():
        assert " ".join(said.split()) in text
