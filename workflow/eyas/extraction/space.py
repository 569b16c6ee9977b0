"""What the hidden states of a run take on the disk: exact before the first of them is written. Imports no torch.

Token counts come from the tokens' sidecars, found by name: no folder is listed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.extraction.layout import shard_bytes, shard_layout
from eyas.plan import RunPlan, read_record, target_width
from eyas.shards import Shard, parse_json, shards_of

__all__ = [
    "FileSystem",
    "Need",
    "SpacePlan",
    "bytes_a_token",
    "describe",
    "plan_space",
    "recorded_space",
    "require_space",
    "run_space",
    "shard_bytes",
]

# Bytes of the JSON beside a shard and of a manifest besides what grows: paths and names make the difference.
_SIDECAR, _MANIFEST, _MANIFEST_ENTRY, _FOLDER = 900, 700, 240, 4096
_SKIPPED_ENTRY = 18  # line breaks and indents that an entry of `skipped` has in the sidecar
_BLOCK = 4096
_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")


def amount(nbytes: float) -> str:
    """Bytes for people: three or four digits, units of 1000."""
    value, unit = float(nbytes), 0
    while abs(value) >= 999.95 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:,.0f} bytes" if unit == 0 else f"{value:,.1f} {_UNITS[unit]}"


@dataclass(frozen=True)
class Need:
    """Bytes that are still to be written below a folder, which need not exist yet."""

    purpose: str
    folder: Path
    nbytes: int


@dataclass(frozen=True)
class FileSystem:
    """Bytes that are to be written to a file system, and that are free there."""

    folder: str
    purposes: tuple[str, ...]
    needed_bytes: int
    free_bytes: int

    @property
    def short_bytes(self) -> int:
        """What is lacking; 0 when it fits."""
        return max(self.needed_bytes - self.free_bytes, 0)


@dataclass(frozen=True)
class SpacePlan:
    """Hidden states of a run in bytes. What cannot be known yet is None."""

    run: str
    rows: int
    shards: int
    shards_known: int
    """Shards whose tokens are counted."""
    exact: bool
    """Whether all are; otherwise the figures are scaled by rows."""
    tokens: int | None
    hidden_size: int | None
    dtype: str
    bytes_per_token: int | None
    state_bytes: int | None
    """Of the shards' tensor files."""
    total_bytes: int | None
    """With sidecars, manifest and the folder itself: what `du --apparent-size` says after the run."""
    disk_bytes: int | None
    """The same in whole blocks: what `du` says."""
    bytes_left: int | None
    """Still to be allocated; what a killed job has allocated is counted by the disk already."""
    file_systems: tuple[FileSystem, ...]

    @property
    def fits(self) -> bool:
        return not any(place.short_bytes for place in self.file_systems)

    def as_json(self) -> dict[str, Any]:
        places = [asdict(place) | {"short_bytes": place.short_bytes} for place in self.file_systems]
        return asdict(self) | {"file_systems": places, "fits": self.fits}


def bytes_a_token(hidden_size: int, dtype: str) -> int:
    """Bytes that one more token takes in a shard's file."""
    return sum(
        spec.row_bytes
        for name, spec in shard_layout(1, 1, hidden_size, dtype).tensors.items()
        if name not in ("offsets", "row_ids")
    )


@dataclass(frozen=True)
class _Shard:
    """Sizes of one shard's files: of the tensors, of the sidecar."""

    tokens: int
    states: int
    sidecar: int


def _read_tokens_facts(sidecar: str) -> dict[str, Any] | None:
    """The sidecar of a tokens shard, or None when it is not built yet; raises EyasError when it is damaged."""
    try:
        with open(sidecar, "rb") as file:
            facts = parse_json(file.read(), sidecar, "tokens sidecar")
        facts = {"sequences": facts["rows"], **facts}
        if all(type(facts[key]) is int for key in ("tokens", "sequences")) and isinstance(facts["skipped"], list):
            return facts
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise EyasError(f"{sidecar}: this tokens sidecar cannot be read; delete it and run snakemake again")


def _sizes(facts: dict[str, Any], hidden_size: int, dtype: str) -> _Shard:
    skipped = facts["skipped"]
    some = skipped[:: -(-len(skipped) // 4) or 1]  # four of them stand for all: their reasons are much alike
    listed = (len(json.dumps(some)) / len(some) + _SKIPPED_ENTRY) * len(skipped) if some else 0
    states = shard_bytes(facts["tokens"], facts["sequences"], hidden_size, dtype)
    return _Shard(facts["tokens"], states, _SIDECAR + round(listed))


def _missing(folder: str, name: str, nbytes: int) -> int:
    """Bytes that the shard's file still needs. A file of another size there is written over: it counts as room."""
    there = 0
    kept = (f"{folder}/{name}", f"{folder}/.staging/{name}/{name}", f"{folder}/.finished/{name}")
    for path in (f"{place}.safetensors" for place in kept):
        try:
            there = max(there, os.stat(path).st_size)
        except OSError:
            continue
        if there == nbytes:
            return 0
    return max(nbytes - there, 0)


def _blocks(nbytes: int) -> int:
    return -(-nbytes // _BLOCK) * _BLOCK


def plan_space(
    run_folder: Path, rows: int, shard_rows: int, hidden_size: int | None, dtype: str, more: Sequence[Need] = ()
) -> SpacePlan:
    """Bytes of the hidden states of rows 0 … rows-1 and what of them is left to write; `more` is written besides.

    `hidden_size` None: the target's width is not known yet. Raises EyasError for a damaged sidecar.
    """
    shards = shards_of(rows, shard_rows)
    states = run_folder / "hidden_states"
    known: list[tuple[Shard, _Shard]] = []
    tokens = sequences = 0
    for shard in shards:
        facts = _read_tokens_facts(f"{run_folder}/tokens/{shard.name}.json")
        if facts is not None:
            tokens, sequences = tokens + facts["tokens"], sequences + facts["sequences"]
            size = _sizes(facts, hidden_size, dtype) if hidden_size else _Shard(facts["tokens"], 0, 0)
            known.append((shard, size))
    # Unknown shards are taken to be as the known ones, row by row.
    known_rows = sum(len(shard) for shard, _ in known)
    scale = rows / known_rows if known else 0.0
    exact = len(known) == len(shards)
    total = disk = left = state_bytes = None
    if known and hidden_size:
        state_bytes = round(scale * sum(size.states for _, size in known))
        manifest = _MANIFEST + _MANIFEST_ENTRY * len(shards)
        total = state_bytes + round(scale * sum(size.sidecar for _, size in known)) + manifest + _FOLDER
        in_blocks = sum(_blocks(size.states) + _blocks(size.sidecar) for _, size in known)
        disk = round(scale * in_blocks) + _blocks(manifest) + _FOLDER
        left = sum(_blocks(_missing(str(states), shard.name, size.states)) for shard, size in known)
        left += _blocks(round(state_bytes / rows * (rows - known_rows)))
    needs = [Need("hidden states", states, left or 0), *more]
    return SpacePlan(
        run=run_folder.name, rows=rows, shards=len(shards), shards_known=len(known), exact=exact,
        tokens=round(scale * tokens) if known else None, hidden_size=hidden_size, dtype=dtype,
        bytes_per_token=bytes_a_token(hidden_size, dtype) if hidden_size else None,
        state_bytes=state_bytes, total_bytes=total, disk_bytes=disk, bytes_left=left,
        file_systems=tuple(_file_systems(needs)),
    )  # fmt: skip


def run_space(plan: RunPlan, run_folder: Path | None = None, more: Sequence[Need] = ()) -> SpacePlan:
    """The space of a planned run (in `run_folder`, if not where its configuration says); raises EyasError."""
    config, width = plan.config, target_width(plan)
    folder = Path(plan.run_folder) if run_folder is None else run_folder
    if config.extraction.engine == "sglang" and width:
        # One row at least must fit, the longest; with less than `dump_gb` extraction is slower, not impossible.
        longest = config.tokenization.max_length * bytes_a_token(width, config.target.dtype)
        more = [*more, Need("one row of dumps", Path(config.extraction.sglang.dump_folder), longest)]
    return plan_space(folder, plan.rows, config.data.shard_rows, width, config.extraction.dtype, more)


def recorded_space(run_folder: Path) -> SpacePlan | None:
    """The space of a run that was started, from its own record; None when it has none."""
    record = read_record(run_folder)
    if record is None:
        return None
    width = record.get("hidden_size")
    try:
        return plan_space(run_folder, record["rows"], record["shard_rows"], width, record["dtype"])
    except (KeyError, TypeError) as exc:
        raise EyasError(f"{run_folder / 'logs/jobs/run.json'}: damaged ({exc!r}); name the --configfile") from None


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not os.path.exists(folder):  # Path.exists raises where a parent may not be entered
        folder = folder.parent
    return folder


def _file_systems(needs: Sequence[Need]) -> list[FileSystem]:
    """Needs by the file system that their folders are on, in the order of the first ones."""
    places: dict[int, list[Need]] = {}
    for need in needs:
        places.setdefault(os.stat(_existing(need.folder)).st_dev, []).append(need)
    found = []
    for group in places.values():
        usage = os.statvfs(_existing(group[0].folder))
        found.append(
            FileSystem(
                str(group[0].folder), tuple(need.purpose for need in group), sum(need.nbytes for need in group),
                usage.f_bavail * usage.f_frsize,
            )
        )  # fmt: skip
    return found


def require_space(plan: SpacePlan) -> None:
    """Raise EyasError unless everything that is left to write fits."""
    for place in plan.file_systems:
        if place.short_bytes:
            halve = "" if plan.dtype.startswith("fp8") else ", or set extraction.dtype: fp8_e4m3 (half the bytes)"
            raise EyasError(
                f"{plan.run}: {' and '.join(place.purposes)} need {place.needed_bytes:,} bytes"
                f" ({amount(place.needed_bytes)}) more in {place.folder}, where {place.free_bytes:,}"
                f" ({amount(place.free_bytes)}) are free: short by {place.short_bytes:,}"
                f" ({amount(place.short_bytes)}). Free that much, or put `results` on a larger disk"
                f"{halve if 'hidden states' in place.purposes else ''}; then run the same command again"
            )


def describe(plan: SpacePlan) -> list[str]:
    """The plan in a few lines for people."""
    about = "" if plan.exact or plan.tokens is None else "about "
    tokens = "tokens not counted yet" if plan.tokens is None else f"{about}{plan.tokens:,} tokens"
    width = (
        "the target's width is not known yet"
        if plan.bytes_per_token is None
        else f"{plan.bytes_per_token:,} bytes a token of hidden states ({plan.dtype}, width {plan.hidden_size:,})"
    )
    lines = [f"{plan.run}: {plan.rows:,} rows in {plan.shards:,} shards, {tokens}, {width}."]
    if not plan.exact:
        lines.append(
            f"Tokens are counted in {plan.shards_known:,} of {plan.shards:,} shards so far"
            f"{'; the figures are scaled by rows' if plan.shards_known else ''}. They are exact before extraction"
            " starts."
        )
    if plan.total_bytes is not None and plan.bytes_left is not None:
        lines.append(
            f"Hidden states: {about}{plan.total_bytes:,} bytes ({amount(plan.total_bytes)}) in all,"
            f" {about}{plan.bytes_left:,} ({amount(plan.bytes_left)}) left to write."
        )
    for place in plan.file_systems:
        needed = "" if plan.bytes_left is None else f", {amount(place.needed_bytes)} needed"
        short = f"; SHORT BY {amount(place.short_bytes)}, extraction will refuse to start" if place.short_bytes else ""
        lines.append(
            f"Free in {place.folder} ({', '.join(place.purposes)}): {amount(place.free_bytes)}{needed}{short}."
        )
    return lines
