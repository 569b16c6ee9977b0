"""What must hold before the first step: data, target, configuration and drafter fit, and shards are as written."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, target_differences
from eyas.extraction.shard import layers_of
from eyas.jobs import Progress
from eyas.shards import checksum, read_json, write_json, write_lock
from eyas.target.model import target_identity
from eyas.target.tokenizer import TargetReference, load_tokenizer, text_config, tokenizer_hashes

log = logging.getLogger(__name__)


def require_fit(manifest: Manifest, target: TargetReference, shape: DrafterShape, expected: dict[str, Any]) -> None:
    """Raise one EyasError that names both values wherever the manifest's data are not for this training.

    `expected`: what the configuration says, of `layers` (None: the default ones), `dtype` and `rows`; what it
    leaves open may be missing.
    """
    values = manifest.values
    config = text_config(target)
    hashes = tokenizer_hashes(load_tokenizer(target))
    rows = values["totals"]["rows"] + values["totals"].get("skipped", 0)
    facts = [
        *target_differences(manifest, target_identity(target)),
        ("target's dtype", values["target"]["dtype"], target.dtype, "the configuration"),
        *((key.replace("_", " "), values[key], found, target.path) for key, found in hashes.items()),
        ("hidden size", values["hidden_size"], int(config.hidden_size), target.path),
        ("hidden size", values["hidden_size"], shape.target_hidden_size, "the drafter"),
        ("layers", list(values["layers"]), list(shape.layers), "the drafter"),
        ("vocabulary size", shape.vocab_size, int(config.vocab_size), target.path),
    ]
    if "layers" in expected:
        expected = expected | {"layers": layers_of(target, expected["layers"])}
    configured = {"layers": list(values["layers"]), "dtype": values["dtype"], "rows": rows}
    facts += [
        (key.replace("rows", "number of rows"), found, expected[key], "the configuration")
        for key, found in configured.items()
        if expected.get(key) is not None
    ]
    problems = [
        f"its {name} is {found}, {where} has {wanted}" for name, found, wanted, where in facts if found != wanted
    ]
    if problems:
        raise EyasError(
            f"{manifest.path}: does not fit: {'; '.join(problems)}. Correct the configuration, or delete the run's"
            " hidden_states (and the drafter's folder) and run snakemake again"
        )


def verify_shards(manifest: Manifest, tokens_folder: Path, record: Path | None) -> None:
    """Compare every shard's checksum with the manifest's; raises EyasError that names a shard which differs.

    `record` (JSON) remembers which files were found right, with their size and times as the kernel
    keeps them: a terabyte is read once, not once an epoch, and a file that anybody wrote to since
    is read again.
    """
    known: dict[str, Any] = {}
    if record is not None and record.exists():
        try:
            known = dict(read_json(record))
        except (EyasError, TypeError, ValueError):
            known = {}  # only a record: the files are read again
    wanted = {}
    for entry in manifest.values["shards"]:
        wanted[manifest.path.parent / entry["file"]] = entry["checksum"]
        wanted[tokens_folder / entry["file"]] = entry["tokens_checksum"]
    stamps = {file: _stamp(file, expected) for file, expected in wanted.items()}
    unread = [file for file in wanted if known.get(str(file)) != stamps[file]]
    progress = Progress("Checksums", sum(stamps[file][0] for file in unread), "bytes")
    for file in unread:
        if checksum(file) != wanted[file]:
            raise EyasError(
                f"{file}: its checksum is not the manifest's, so its contents have changed since it was written;"
                f" delete it and run `snakemake {file}` to rebuild it"
            )
        known[str(file)] = stamps[file]
        progress.advance(stamps[file][0])
    if unread and record is not None:
        with write_lock(record):  # jobs of other drafters keep the same record
            write_json(record, known)
        log.info("%s.", progress.line())


def _stamp(file: Path, expected: str) -> list[Any]:
    """Size, inode and times of a file, and the checksum that it is to have. The change time cannot be set back."""
    try:
        found = os.stat(file)
    except OSError as exc:
        raise EyasError(f"{file}: cannot be read ({exc.strerror}); run `snakemake {file}` to rebuild it") from None
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns, expected]
