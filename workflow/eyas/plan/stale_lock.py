"""After a SIGKILL Snakemake leaves its folder locked; the next run sees that nobody holds it any more."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)


def is_dry_run(arguments: Sequence[str]) -> bool:
    """Whether Snakemake was called to show its plan only; it does not say so to the Snakefile in time."""
    long = {"--dry-run", "--dryrun"}
    return any(a in long or re.fullmatch(r"-[A-Za-z]*n[A-Za-z]*", a) for a in arguments)


class WorkingFolder:
    """This process's claim to be the Snakemake that works in the folder of `records` (`.snakemake`).

    The claim is an flock, which the kernel drops with its process. Whoever gets it knows that
    no other Snakemake of Eyas runs here, so that lock files which are there all the same were
    left by a killed one: they are removed, and the same command goes on without `--unlock`.
    Jobs that outlived their Snakemake are no danger, they hold the locks of what they write.
    """

    def __init__(self, records: Path) -> None:
        self.records = records
        self.fd: int | None = None

    def hold(self, patience: float = 0.0) -> bool:
        """Claim the folder until the process ends; False when another still has it after `patience` seconds.

        Then Snakemake's own lock, which is not touched, refuses the second run.
        """
        if self.fd is not None:
            return True
        try:
            self.records.mkdir(exist_ok=True)
            fd = os.open(self.records / "eyas.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            return False  # a read-only folder: Snakemake itself will say so
        give_up = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= give_up:
                    os.close(fd)
                    return False
                time.sleep(0.2)
        self.fd = fd
        return True

    def drop_stale_lock(self) -> None:
        """Remove what a killed Snakemake left, if the folder is ours."""
        locks = self.records / "locks"
        if self.fd is not None and locks.is_dir() and any(locks.iterdir()):
            shutil.rmtree(locks, ignore_errors=True)
            locks.mkdir(exist_ok=True)
            log.warning("A Snakemake that was killed had left this folder locked; its lock is removed.")
