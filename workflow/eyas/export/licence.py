"""What a target's folder says about its licence. Nothing is guessed and nothing is fetched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eyas.target.tokenizer import TargetReference

# First lines of licence texts; a changed text ("Modified MIT License") must not pass for the original.
_TITLES = {"apache license": "apache-2.0", "mit license": "mit", "the mit license (mit)": "mit"}


@dataclass(frozen=True)
class Licence:
    """`identifier` as model hubs write it (`apache-2.0`, `other`), a `name` where that says nothing, and the source."""

    identifier: str
    name: str | None
    stated_in: str


def target_folder(target: TargetReference) -> Path:
    """Where files of the target lie: its folder, or a hub model's in the hub's cache on this machine, as far as it is
    there. Nothing is fetched; a path without files stands for a model that is not there."""
    if target.is_folder:
        return Path(target.path)
    from huggingface_hub import try_to_load_from_cache

    for name in ("README.md", "config.json", "LICENSE"):
        try:
            found = try_to_load_from_cache(target.path, name, revision=target.revision)
        except ValueError:  # no name that a hub could have
            break
        if isinstance(found, str):
            return Path(found).parent
    return Path(target.path)


def find_licence(folder: Path, gguf: Path | None = None) -> Licence | None:
    """The licence of the target in `folder`, or of the GGUF file that it was built from; None where neither says it.

    Looked for in the model card's front matter, config.json, the GGUF file's metadata, and a LICENSE file.
    """
    for file, values in (
        ("README.md", _front_matter(folder / "README.md")),
        ("config.json", _json(folder / "config.json")),
        (gguf.name if gguf else "", _gguf_metadata(gguf)),
    ):
        if isinstance(stated := values.get("license"), str) and stated.strip():
            name = values.get("license_name")
            return Licence(stated.strip(), name if isinstance(name, str) else None, file)
    return _licence_file(folder)


def _front_matter(card: Path) -> dict[str, Any]:
    try:
        text = card.read_text(encoding="utf-8", errors="replace")
        if not text.startswith("---\n"):
            return {}
        values = yaml.safe_load(text[4:].split("\n---", 1)[0])
    except (OSError, yaml.YAMLError):
        return {}
    return values if isinstance(values, dict) else {}


def _json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _gguf_metadata(gguf: Path | None) -> dict[str, Any]:
    if gguf is None or not gguf.is_file():
        return {}
    try:
        from gguf import GGUFReader

        fields = GGUFReader(gguf).fields
        return {
            "license": fields["general.license"].contents() if "general.license" in fields else None,
            "license_name": fields["general.license.name"].contents() if "general.license.name" in fields else None,
        }
    except Exception:  # a reader that is not installed, or a file that it cannot read: the card says less
        return {}


def _licence_file(folder: Path) -> Licence | None:
    for name in ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE", "LICENCE.txt", "COPYING"):
        try:
            lines = (folder / name).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        title = next((line.strip(" #*") for line in lines if line.strip(" #*")), "")
        return Licence(_TITLES.get(title.lower(), "other"), title[:200] or None, name)
    return None
