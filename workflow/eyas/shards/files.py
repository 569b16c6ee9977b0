"""Files that are whole or absent: write beside the final place, sync, rename or link."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

_CHUNK = 8 << 20


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as exc:  # some network file systems cannot sync a folder
        if exc.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def sync_file(path: Path) -> None:
    """Make the contents of `path` durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def atomic_path(final: Path) -> Iterator[Path]:
    """A path beside `final` to write to; it becomes `final` when the block ends well.

    The partial file has a fixed name: a killed writer's leftover is overwritten by the
    next one (writers hold the lock of `final`, see :mod:`eyas.shards.locks`).
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.partial")
    try:
        yield partial
        sync_file(partial)
        os.replace(partial, final)
        sync_folder(final.parent)
    finally:
        partial.unlink(missing_ok=True)


def write_text(final: Path, text: str) -> None:
    """Write a text file, atomically."""
    with atomic_path(final) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(final: Path, values: Any) -> None:
    """Write JSON that a person can read and that depends on `values` alone, atomically."""
    write_text(final, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def checksum(path: Path) -> str:
    """`xxh3_128:` and the hex digest of a file's contents."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return f"xxh3_128:{digest.hexdigest()}"


def fingerprint(**parts: Any) -> str:
    """Digest of all that an artefact depends on: settings, format version, checksums of inputs."""
    canonical = json.dumps(parts, sort_keys=True, default=str, separators=(",", ":"))
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(canonical.encode())}"


def link_file(source: Path, final: Path) -> None:
    """Put a finished file at its final place, too; it moves there where the file system has no hard links."""
    final.unlink(missing_ok=True)
    try:
        os.link(source, final)
    except OSError:
        os.replace(source, final)
    os.utime(final)


def publish(staged: Mapping[Path, Path], staging: Path) -> None:
    """Put finished files at their final places, in order, then drop the staging folder.

    They are hard-linked first: a kill in between costs nothing, because the staging
    folder still holds everything when the job is run again.
    """
    for source, final in staged.items():
        final.parent.mkdir(parents=True, exist_ok=True)
        sync_file(source)
        link_file(source, final)
    for folder in {final.parent for final in staged.values()}:
        sync_folder(folder)
    remove_folder(staging)


def remove_folder(folder: Path) -> None:
    """Delete a staging folder, and the folder of staging folders when it was the last."""
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.rmdir()
    except OSError:
        pass


def describe_file(path: Path) -> dict[str, Any]:
    """Size and checksum, as sidecars and the manifest record them."""
    return {"bytes": path.stat().st_size, "checksum": checksum(path)}
