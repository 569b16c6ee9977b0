"""One writer for a file: flock on a lock file beside it.

A SIGKILL of Snakemake leaves its jobs running; the job that a second Snakemake starts
for the same output waits here until the orphan is done, then finds its result.
The kernel drops a lock with its process, so no lock is ever to be removed by hand.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.errors import EyasError

log = logging.getLogger(__name__)

_REMIND_SECONDS = 60.0


def _open_locked(lock: Path) -> int | None:
    """A descriptor that holds the lock and is still the file at `lock`, or None when it is taken."""
    fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have removed the file that we opened: only the one at the path counts.
        if os.path.exists(lock) and os.path.samestat(os.stat(lock), os.fstat(fd)):
            return fd
    except OSError as exc:
        if exc.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.ENOENT):
            os.close(fd)
            raise EyasError(f"{lock}: this file system cannot lock files ({exc.strerror})") from None
    os.close(fd)
    return None


@contextmanager
def write_lock(target: Path, poll_seconds: float = 0.5) -> Iterator[None]:
    """Hold the right to write `target` (a file or folder); wait, and say so, while another has it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    lock = target.with_name(f".{target.name}.lock")
    reminded = float("-inf")
    while (fd := _open_locked(lock)) is None:
        if time.monotonic() - reminded > _REMIND_SECONDS:
            reminded = time.monotonic()
            try:
                holder = lock.read_text(encoding="utf-8").strip() or "another process"
            except OSError:
                holder = "another process"
            log.warning("%s is being written by %s; waiting until it is done.", target, holder)
        time.sleep(poll_seconds)
    try:
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(fd)
