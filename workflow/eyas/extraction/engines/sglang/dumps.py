"""Dumps: files in memory through which the server's capture plugin hands over the states of one request."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import re
import secrets
import shutil
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.shards.tensor_file import read_header

log = logging.getLogger(__name__)

FORMAT, VERSION = "eyas.capture", "1"
HEADER_BYTES = 16384  # more than a dump has besides its tensors
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_FOLDER = "eyas-capture-"
_DUMP = re.compile(r"\.?eyas-([0-9a-f]{16})-[0-9a-f-]+\.(?:safetensors|part)")


class DumpRefused(Exception):
    """Why a dump is not taken."""


@dataclass
class Dump:
    """A checked dump: `aux` [T, 3·H] and `last` [T, H], mapped from memory, until :meth:`close`."""

    aux: torch.Tensor
    last: torch.Tensor
    path: Path
    _map: mmap.mmap

    def close(self) -> None:
        """Delete the file; the tensors must not be used any more."""
        self.aux = self.last = torch.empty(0)
        with contextlib.suppress(BufferError):
            self._map.close()
        self.path.unlink(missing_ok=True)


def open_dump(path: Path, rid: str, ids: np.ndarray, layers: list[int], hidden_size: int) -> Dump:
    """Open the dump of request `rid` for the sequence `ids` (int32 [T]); raises DumpRefused for any difference."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as exc:
        raise DumpRefused(f"its dump cannot be opened ({exc.strerror})") from None
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise DumpRefused("its dump is no file")
        if facts.st_uid != os.getuid():
            raise DumpRefused(f"its dump belongs to user {facts.st_uid}, not to {os.getuid()}")
        if facts.st_mode & 0o022:
            raise DumpRefused("others may write to its dump")
        if not facts.st_size:
            raise DumpRefused("its dump is empty")
        mapped = mmap.mmap(fd, facts.st_size, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    try:
        aux, last = _tensors(path, mapped, rid, ids, layers, hidden_size)
    except BaseException:
        mapped.close()
        raise
    return Dump(aux, last, path, mapped)


def _tensors(
    path: Path, mapped: mmap.mmap, rid: str, ids: np.ndarray, layers: list[int], hidden_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        specs, metadata = read_header(path)
    except EyasError:
        raise DumpRefused("its dump is truncated or damaged") from None
    expected = {
        "format": FORMAT, "version": VERSION, "rid": rid, "layers": json.dumps(layers, separators=(",", ":")),
        "prefix": "0",
    }  # fmt: skip
    for key, value in expected.items():
        found = str(metadata.get(key))
        if (found.replace(" ", "") if key == "layers" else found) != value:
            raise DumpRefused(f"its dump says {key} {found}, expected {value}")
    shapes = {"aux_hidden_states": (len(ids), 3 * hidden_size), "last_hidden_state": (len(ids), hidden_size)}
    shapes["input_ids"] = (len(ids),)  # type: ignore[assignment]
    for name, shape in shapes.items():
        if name not in specs or specs[name].shape != shape:
            found_shape = specs[name].shape if name in specs else None
            raise DumpRefused(f"its dump has {name} of shape {found_shape}, expected {shape}")
    if specs["input_ids"].dtype != "I32":
        raise DumpRefused(f"its dump has input_ids of dtype {specs['input_ids'].dtype}, expected I32")
    begin = specs["input_ids"].begin
    if mapped[begin : begin + 4 * len(ids)] != np.ascontiguousarray(ids, dtype=np.int32).tobytes():
        raise DumpRefused("its dump is of other token ids")
    tensors = []
    for name in ("aux_hidden_states", "last_hidden_state"):
        spec = specs[name]
        if spec.dtype not in _DTYPES:
            raise DumpRefused(f"its dump has {name} in {spec.dtype}, expected one of {', '.join(_DTYPES)}")
        count = len(ids) * spec.shape[1]
        with _no_warning():
            flat = torch.frombuffer(mapped, dtype=_DTYPES[spec.dtype], count=count, offset=spec.begin)
        tensors.append(flat.view(len(ids), spec.shape[1]))
    return tensors[0], tensors[1]


@contextlib.contextmanager
def _no_warning() -> Any:
    """torch warns that the mapped memory cannot be written to; nobody does."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class DumpFolder:
    """Where the dumps of one job lie: a folder of its own (0700), or the one of a running server.

    `token` is in the ids of the job's requests. A lock says that the job lives: what others left is deleted.
    """

    def __init__(self, place: Path, own: bool) -> None:
        """`own`: make a folder inside `place`; else `place` is the folder that the running server writes to."""
        self.own = own
        self.token = secrets.token_hex(8)
        if not place.is_dir():
            raise EyasError(f"extraction.sglang.dump_folder: {place} is no folder; name one in memory (tmpfs)")
        clean(place)
        self.path = place / f"{_FOLDER}{os.getuid()}-{self.token}" if own else place
        self.path.mkdir(mode=0o700, exist_ok=not own)
        if not own and (self.path.stat().st_uid != os.getuid() or self.path.stat().st_mode & 0o077):
            raise EyasError(
                f"extraction.sglang.dump_folder: {place} must be yours alone (mode 0700): dumps are taken from it"
            )
        self._lock = self.path / f".{self.token}.lock"
        self._fd = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def rid(self, number: int) -> str:
        """The id of the job's request `number`."""
        return f"eyas-{self.token}-{number:x}"

    def dump(self, rid: str) -> Path:
        return self.path / f"{rid}.safetensors"

    def free_bytes(self) -> int:
        return shutil.disk_usage(self.path).free

    def total_bytes(self) -> int:
        return shutil.disk_usage(self.path).total

    def close(self) -> None:
        """Delete what is left of the job."""
        if self.own:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            _delete_dumps(self.path, {self.token})
        self._lock.unlink(missing_ok=True)
        os.close(self._fd)


def _is_dead(lock: Path) -> bool:
    """Whether nobody holds a lock."""
    try:
        fd = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        # A folder is made a moment before its lock.
        return time.time() - lock.parent.stat().st_mtime > 60 or not lock.parent.name.startswith(_FOLDER)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _delete_dumps(folder: Path, tokens: set[str] | None = None) -> int:
    """Delete dumps of jobs that are gone (or of `tokens`) in a shared folder; returns how many."""
    deleted = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            match = _DUMP.fullmatch(entry.name)
            if match is None:
                continue
            token = match[1]
            if token in tokens if tokens is not None else _is_dead(folder / f".{token}.lock"):
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
                    deleted += 1
    return deleted


def clean(place: Path) -> None:
    """Delete what dead jobs of this user left in `place`."""
    deleted = _delete_dumps(place)
    with os.scandir(place) as found:
        entries = list(found)
        folders = [Path(e.path) for e in entries if e.name.startswith(f"{_FOLDER}{os.getuid()}-")]
        locks = [Path(e.path) for e in entries if re.fullmatch(r"\.[0-9a-f]{16}\.lock", e.name)]
    for folder in folders:
        token = folder.name.rpartition("-")[2]
        ours = folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid()
        if ours and _is_dead(folder / f".{token}.lock"):
            deleted += 1
            shutil.rmtree(folder, ignore_errors=True)
    for lock in locks:
        if _is_dead(lock):
            lock.unlink(missing_ok=True)
    if deleted:
        log.info("Deleted %d dump(s) or dump folder(s) in %s that killed jobs had left.", deleted, place)
