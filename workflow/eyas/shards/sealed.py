"""Sealed files: JSON with the digest of its own bytes in its last line, and pages with one in a comment."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from eyas.errors import EyasError
from eyas.shards.files import checksum, write_text

_JSON_END = re.compile(rb',\n "digest": "(xxh3_128:[0-9a-f]{32})"\n}\n')
_PAGE_END = re.compile(rb"<!-- (xxh3_128:[0-9a-f]{32}) -->\n")
_JSON_END_BYTES, _PAGE_END_BYTES = 59, 51


def _digest(content: bytes) -> str:
    return f"xxh3_128:{xxhash.xxh3_128_hexdigest(content)}"


def _rebuild(path: str | Path) -> str:
    return f"delete it and run `snakemake {path}` to rebuild it"


def write_sealed(final: Path, values: Mapping[str, Any]) -> None:
    """Write an object as JSON that a person can read and that depends on `values` alone, atomically.

    Its last entry is `digest`, of all the bytes before it: see :func:`read_json`. `values` may not be empty.
    """
    body = json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("\n}")
    write_text(final, f'{body},\n "digest": "{_digest(body.encode())}"\n}}\n')


def read_json(path: Path, what: str = "file", sealed: bool = False) -> Any:
    """Read JSON, without its `digest` where it is sealed; raises EyasError that names the file.

    What is not as it was written is refused. With `sealed`, so is what has no digest.
    """
    try:
        with open(path, "rb") as file:
            content = file.read()
    except FileNotFoundError:
        raise EyasError(f"{path}: this {what} is missing; run snakemake to build it") from None
    except OSError as exc:
        raise EyasError(f"{path}: this {what} cannot be read ({exc}); {_rebuild(path)}") from None
    return parse_json(content, path, what, sealed)


def parse_json(content: bytes, path: str | Path, what: str = "file", sealed: bool = False) -> Any:
    """What :func:`read_json` makes of a file's bytes."""
    end = _JSON_END.fullmatch(content, max(len(content) - _JSON_END_BYTES, 0))
    if end:
        body = content[: end.start()]
        if (found := _digest(body)) != (wanted := end[1].decode()):
            raise EyasError(
                f"{path}: this {what} is not as it was written (digest {found}, {wanted} was written); {_rebuild(path)}"
            )
        content = body + b"\n}"
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise EyasError(f"{path}: this {what} cannot be read ({exc}); {_rebuild(path)}") from None
    if sealed and not end:
        raise EyasError(f"{path}: this {what} does not end as it was written; {_rebuild(path)}")
    return values


def checked(path: Path, what: str, record: Path | None = None) -> str:
    """The checksum of a file that an earlier stage finished.

    Raises EyasError when it is not the one in its sidecar (or in `record`): a stage makes nothing of damaged input.
    """
    try:
        found = checksum(path)
    except FileNotFoundError:
        raise EyasError(f"{path}: this {what} is missing; run snakemake to build it") from None
    except OSError as exc:
        raise EyasError(f"{path}: this {what} cannot be read ({exc}); {_rebuild(path)}") from None
    record = record or path.with_suffix(".json")
    try:
        wanted = read_json(record, f"{what}'s record")["files"][path.name]["checksum"]
    except (KeyError, TypeError):
        raise EyasError(f"{record}: it does not describe {path.name}; {_rebuild(record)}") from None
    if found != wanted:
        raise EyasError(
            f"{path}: this {what} is not as it was written (checksum {found}, {wanted} was written); {_rebuild(path)}"
        )
    return found


def write_page(final: Path, page: str) -> None:
    """Write an HTML page, atomically, with the digest of its text in a comment at its end."""
    page = page.removesuffix("\n") + "\n"
    write_text(final, f"{page}<!-- {_digest(page.encode())} -->\n")


def check_page(path: Path) -> None:
    """Raise EyasError if a page is not as `write_page` left it."""
    content = path.read_bytes()
    end = _PAGE_END.fullmatch(content, max(len(content) - _PAGE_END_BYTES, 0))
    if not end or _digest(content[: end.start()]) != end[1].decode():
        raise EyasError(f"{path}: this page is not as it was written; {_rebuild(path)}")


def is_complete(sidecar: Path, expected_fingerprint: str) -> bool:
    """Whether the artefact of `sidecar` is finished and was built from the same things.

    The sidecar is written last, so its presence means that the rest is whole.
    """
    try:
        values = read_json(sidecar)
        files = values["files"]
        return values["fingerprint"] == expected_fingerprint and all(
            (sidecar.parent / name).stat().st_size == entry["bytes"] for name, entry in files.items()
        )
    except (EyasError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
