"""What the run was made with: its configuration, the versions, and digests that tell the data apart."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import yaml

from eyas import __version__
from eyas.config import Config
from eyas.report.parts import Listing, Section, Table
from eyas.versions import VERSIONS

_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "snakemake")
_LONGEST = 300  # characters of a value in a table


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _text(value: Any) -> str:
    if isinstance(value, Mapping):
        text = ", ".join(f"{name} {_text(entry)}" for name, entry in value.items())
    elif isinstance(value, list):
        text = ", ".join(map(_text, value))
    elif value is None or isinstance(value, bool):
        text = {None: "none", True: "yes", False: "no"}[value]
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Names, of what lies in a mapping with the mapping's before it, and values. Formats are told in one line."""
    for name, value in values.items():
        if isinstance(value, Mapping) and name != "artefact_versions":
            yield from ((f"{name}: {inner}", text) for inner, text in _flat(value))
        else:
            yield name, _text(value)


def _recorded(provenance: Mapping[str, Any]) -> Table:
    """What the exports recorded, without their configuration; what several say alike stands once."""
    said: dict[str, dict[str, list[str]]] = {}
    for export, facts in provenance.items():
        for name, text in _flat({k: v for k, v in facts.items() if k != "config"}):
            said.setdefault(name, {}).setdefault(text, []).append(export)
    return Table(
        "Provenance that the exports recorded", ["", "value", "export"],
        [
            [name, text, "all" if len(exports) == len(provenance) else "; ".join(exports)]
            for name, texts in said.items()
            for text, exports in texts.items()
        ],
        [("git", "commit of the checkout that wrote the export's card; dirty: whether its files differed from that")],
        prose=("value", "export"),
    )  # fmt: skip


def provenance_section(
    config: Config, manifest: Mapping[str, Any], states: Mapping[str, Any], provenance: Mapping[str, Any]
) -> Section:
    """`states`: each drafter's last `trainer_state.json`; `provenance`: what its exports recorded, or nothing."""
    target = manifest["target"]
    data = Table(
        "Data",
        ["", "value"],
        [
            ["target", target["path"]],
            ["target's revision", str(target["revision"] or "none")],
            ["target's configuration", target["config_hash"]],
            ["target's dtype", target["dtype"]],
            ["tokenizer", manifest["tokenizer_hash"]],
            ["chat template", manifest["chat_template_hash"]],
            ["layers", f"{', '.join(map(str, manifest['layers']))} ({manifest['layer_convention']})"],
            ["last hidden state", manifest["last_hidden_state"].replace("_", " ")],
            *([f"manifest of {name}", state["manifest_digest"]] for name, state in states.items()),
        ],
        [("manifest of a drafter", "digest of the data_config.json that it was trained on")],
        prose=("value",),
    )
    versions = Table(
        "Versions of this page's job",
        ["", "version"],
        [["eyas", __version__], ["python", platform.python_version()], *([name, _version(name)] for name in _PACKAGES)]
        + [["formats of the artefacts", ", ".join(f"{name} {number}" for name, number in VERSIONS.items())]],
        prose=("version",),
    )
    recorded = [_recorded(provenance)] if provenance else []
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    return Section(
        "configuration", "Configuration", tables=[data, *recorded, versions],
        listings=[Listing("Configuration of the run, with all defaults", text)],
    )  # fmt: skip
