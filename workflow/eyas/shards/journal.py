"""Append-only records of finished work, one JSON object a line; a torn last line is ignored."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eyas.shards.files import remove_folder


class Journal:
    """What a job has finished inside its staging folder.

    The first line carries the fingerprint of the job: a journal of other settings or
    other inputs does not count, and its staging folder is emptied.
    """

    def __init__(self, staging: Path, fingerprint: str) -> None:
        self.path = staging / "journal.jsonl"
        self.fingerprint = fingerprint
        found = self._load()
        if found is None:
            remove_folder(staging)
        self.records: list[dict[str, Any]] = found or []
        staging.mkdir(parents=True, exist_ok=True)
        whole = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in [{"fingerprint": fingerprint}, *self.records])
        partial = self.path.with_suffix(".partial")
        partial.write_text(whole, encoding="utf-8")  # drops a torn line before anything is appended to it
        os.replace(partial, self.path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close())

    def _load(self) -> list[dict[str, Any]] | None:
        """Records of this fingerprint; None when there is nothing to go on from."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
        except OSError:
            return None
        records = []
        for line in lines:
            try:
                records.append(json.loads(line))
            except ValueError:
                break
        if not records or records[0] != {"fingerprint": self.fingerprint}:
            return None
        return records[1:]

    def append(self, *records: dict[str, Any]) -> None:
        """Record finished work, durably."""
        self._file.write("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
        self._file.flush()
        os.fdatasync(self._file.fileno())

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
