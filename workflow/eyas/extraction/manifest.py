"""`data_config.json`: written only when every shard is there and agrees; refused when anything differs."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.extraction.shard import FORMAT_VERSION as SHARD_VERSION
from eyas.extraction.shard import LAST_HIDDEN_STATE, LAYER_CONVENTION
from eyas.shards import Shard, fingerprint, read_json, write_lock, write_sealed
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["manifest"]

# What all shards of a run must have in common.
_COMMON = ("target", "tokenizer_hash", "chat_template_hash", "layers", "dtype", "hidden_size")
# Of what kind these and the others are.
_TYPES: dict[str, type] = {
    "target": dict, "tokenizer_hash": str, "chat_template_hash": str, "layers": list, "dtype": str,
    "hidden_size": int, "shards": list, "totals": dict,
}  # fmt: skip
# What adds up over the shards. A row comes to one sequence or to several.
_SUMS = ("rows", "sequences", "tokens", "bytes")


def write_manifest(shards: Sequence[Path], rows: int, output: Path) -> None:
    """Write the manifest over shard files (hidden states) that together hold rows 0 … rows-1.

    Sizes and agreement are checked here; checksums were taken as the shards were written, and
    `eyas verify` takes them again. Depends on the shards' contents alone. Raises EyasError.
    """
    entries, common, skipped = [], None, 0
    with write_lock(output):
        expected_start = 0
        for path in sorted(shards, key=lambda p: Shard.parse(p.stem)):
            shard = Shard.parse(path.stem)
            facts = read_json(path.with_suffix(".json"), "shard sidecar")
            if not isinstance(facts, dict):
                raise EyasError(f"{path}: its sidecar holds no JSON object; delete it and run snakemake again")
            if facts.get("format_version") != SHARD_VERSION:
                raise EyasError(
                    f"{path}: format version {facts.get('format_version')}, not {SHARD_VERSION}; delete it and run"
                    " snakemake again"
                )
            needed = (*_COMMON, *_SUMS, "skipped", "failed", "checksum", "tokens_checksum")
            if lacking := [key for key in needed if key not in facts]:
                raise EyasError(f"{path}: its sidecar lacks {', '.join(lacking)}; delete both and run snakemake again")
            if shard.start != expected_start:
                raise EyasError(
                    f"{path}: starts at row {shard.start}, but the shard before ends at {expected_start}; run"
                    " snakemake again"
                )
            expected_start = shard.end
            shared = {key: facts[key] for key in _COMMON}
            if common is None:
                common = shared
            for key in _COMMON:
                if shared[key] != common[key]:
                    raise EyasError(
                        f"{path}: its {key} is {shared[key]}, other shards have {common[key]}; delete the shard and"
                        " run snakemake again to rebuild it"
                    )
            if facts["rows"] + len(facts["skipped"]) != len(shard):
                raise EyasError(
                    f"{path}: {facts['rows']} rows and {len(facts['skipped'])} skipped are not its {len(shard)}"
                )
            size = path.stat().st_size if path.exists() else None
            if size != facts["bytes"]:
                raise EyasError(
                    f"{path}: {size} bytes on disk, {facts['bytes']} when it was written; delete it and run snakemake"
                    " again"
                )
            skipped += len(facts["skipped"])
            entries.append(
                {
                    "file": path.name,
                    **{key: facts[key] for key in (*_SUMS, "checksum", "tokens_checksum")},
                    "failed": [entry["sequence"] for entry in facts["failed"]],
                }
            )
        if common is None or expected_start != rows:
            raise EyasError(f"{output}: the shards hold rows 0 to {expected_start - 1} of {rows}; run snakemake again")
        totals = {key: sum(entry[key] for entry in entries) for key in _SUMS}
        failed = sum(len(entry["failed"]) for entry in entries)
        if totals["sequences"] == failed:
            raise EyasError(
                f"{output}: every one of the {rows} rows was skipped or failed; the shards' .json files say why"
            )
        write_sealed(
            output,
            {
                "format_version": FORMAT_VERSION,
                **common,
                "layer_convention": LAYER_CONVENTION,
                "last_hidden_state": LAST_HIDDEN_STATE,
                "shards": entries,
                "totals": {**totals, "skipped": skipped, "failed": failed},
            },
        )
        log.info(
            "Wrote %s: %d shards, %d rows (%d more skipped) in %d sequences (%d without states), %d tokens, %d bytes.",
            output, len(entries), totals["rows"], skipped, totals["sequences"], failed, totals["tokens"],
            totals["bytes"],
        )  # fmt: skip


@dataclass(frozen=True)
class Manifest:
    """A completed extraction, as readers see it."""

    path: Path
    values: dict[str, Any]

    @property
    def shards(self) -> list[Path]:
        return [self.path.parent / entry["file"] for entry in self.values["shards"]]

    @property
    def digest(self) -> str:
        """Digest of the data itself: equal manifests have equal states."""
        return fingerprint(**self.values)

    @property
    def hidden_size(self) -> int:
        return int(self.values["hidden_size"])

    @property
    def layers(self) -> list[int]:
        return list(self.values["layers"])


def read_manifest(path: Path) -> Manifest:
    """Read a manifest; raises EyasError when it is missing, of another format, or a shard is not as it says."""
    values = read_json(path, "manifest")
    if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
        found = values.get("format_version") if isinstance(values, dict) else None
        raise EyasError(
            f"{path}: format version {found}, this Eyas reads {FORMAT_VERSION}; delete it and run snakemake again"
        )
    try:
        for key, kind in _TYPES.items():
            if not isinstance(values[key], kind):
                raise TypeError(key)
        if not all(isinstance(layer, int) for layer in values["layers"]):
            raise TypeError("layers")
        for key in ("path", "revision", "config_hash", "dtype"):
            values["target"][key]
        for entry in values["shards"]:
            shard = path.parent / entry["file"]
            size = shard.stat().st_size if shard.exists() else None
            if size != entry["bytes"]:
                raise EyasError(
                    f"{shard}: {'missing' if size is None else f'{size} bytes'}, the manifest says {entry['bytes']};"
                    f" delete it and run `snakemake {shard}` to rebuild it"
                )
        for key in _SUMS:
            added, total = sum(entry[key] for entry in values["shards"]), values["totals"][key]
            if added != total:
                raise EyasError(
                    f"{path}: the shards' {key} do not add up to the total ({added}, not {total}); delete it and run"
                    " snakemake again"
                )
    except (KeyError, TypeError) as exc:
        raise EyasError(f"{path}: damaged ({exc} is missing or wrong); delete it and run snakemake again") from None
    return Manifest(path, values)


def target_differences(manifest: Manifest, identity: dict[str, Any]) -> list[tuple[str, Any, Any, str]]:
    """What a target is compared by: (name, the manifest's, the target's, whose).

    `identity`: `target_identity` of the target at hand. Folders move: the revision says something of the same path.
    """
    recorded, path = manifest.values["target"], identity["path"]
    facts = [("target's config hash", recorded["config_hash"], identity["config_hash"], path)]
    if recorded["path"] == path:
        facts.append(("target's revision", recorded["revision"], identity["revision"], path))
    return facts


def require_target(manifest: Manifest, identity: dict[str, Any]) -> None:
    """Raise EyasError when the manifest's states come from another target than the one at hand (`target_identity`)."""
    for name, found, wanted, path in target_differences(manifest, identity):
        if found != wanted:
            raise EyasError(
                f"{manifest.path}: its {name} is {found}, {path} has {wanted}; correct target.path and"
                " target.revision, or delete the run's hidden_states and run snakemake again"
            )


def require(manifest: Manifest, **expected: Any) -> None:
    """Raise EyasError that names both values where the manifest differs from what a reader expects."""
    for key, value in expected.items():
        found = manifest.values.get(key)
        if found != value:
            raise EyasError(
                f"{manifest.path}: its {key} is {found}, expected {value}; the states belong to another target or"
                " configuration: correct the configuration, or delete the run's hidden_states and run snakemake again"
            )
