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


def _flat(values: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Dotted paths and values."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            yield from _flat(value, f"{place}.{name}" if place else str(name))
    else:
        text = ", ".join(map(str, values)) if isinstance(values, list) else str(values)
        yield place, text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


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
    recorded = [
        Table(
            f"Provenance that the export recorded: {name}",
            ["", "value"],
            [[place, text] for place, text in _flat({k: v for k, v in facts.items() if k != "config"})],
            prose=("value",),
        )
        for name, facts in provenance.items()
    ]
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=100)
    return Section(
        "configuration", "Configuration", tables=[data, *recorded, versions],
        listings=[Listing("Configuration of the run, with all defaults", text)],
    )  # fmt: skip
