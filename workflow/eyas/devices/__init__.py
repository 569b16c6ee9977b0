"""Device leases: which GPUs a job may use.

Snakemake counts GPUs but hands out no ids, clamps a demand above its pool in silence,
and counts nothing when `--resources gpu=N` was forgotten. So a job asks here: it holds
an flock on one file a device for as long as it lives, and sees only these devices.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas.errors import EyasError

log = logging.getLogger(__name__)

LEASE_ROOT = Path("/tmp")


def visible_devices() -> list[str]:
    """Ids of the GPUs this process may use: CUDA_VISIBLE_DEVICES (a scheduler's choice), else all."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        ids = [part.strip() for part in given.split(",") if part.strip()]
        if "-1" in ids:
            ids = ids[: ids.index("-1")]
        return list(dict.fromkeys(ids))
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.split()[1].rstrip(":") for line in listed.stdout.splitlines() if line.startswith("GPU ")]


def lease_folder() -> Path:
    """The folder of lease files of this user on this machine (0700)."""
    # Not $TMPDIR: schedulers give every job one of its own, and leases must meet.
    folder = LEASE_ROOT / f"eyas-gpu-leases-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise EyasError(f"{folder} belongs to another user; remove it, GPU leases are kept there")
    return folder


def _lease_file(folder: Path, device: str) -> Path:
    job, node = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME", "")
    # SLURM gives devices to one job at a time, and where it hides the others it counts them from 0 in each: the
    # leases of two of its jobs must not meet (nor those of two of its nodes, where a test runs them on one machine).
    prefix = f"slurm-{job}-{node}-" if job and "CUDA_VISIBLE_DEVICES" in os.environ else ""
    return folder / f"{prefix}{device}.lease".replace("/", "_")


@contextmanager
def lease_gpus(wanted: int, granted: int, poll_seconds: float = 1.0) -> Iterator[list[str]]:
    """Hold `wanted` GPUs and set CUDA_VISIBLE_DEVICES to them; yields their ids.

    `granted` is what Snakemake's `gpu` resource came to: less than `wanted` means that the
    pool is smaller than the demand, which would otherwise pass in silence.
    Waits while other jobs hold the devices; raises EyasError when there are not enough.
    """
    if granted < wanted:
        raise EyasError(
            f"this job needs gpu={wanted}, but Snakemake's pool gave it {granted}; start snakemake with"
            f" --resources gpu={wanted} or more, or lower the stage's `gpu` in the configuration"
        )
    if wanted == 0:
        yield []
        return
    devices = visible_devices()
    if len(devices) < wanted:
        raise EyasError(
            f"this job needs {wanted} GPU(s) and sees {len(devices)}; lower the stage's `gpu` in the configuration"
            " (0 runs on the CPU) or run it where the GPUs are"
        )
    folder, announced = lease_folder(), False
    while True:
        held: dict[str, int] = {}
        for device in devices:
            fd = os.open(_lease_file(folder, device), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held[device] = fd
            except OSError:
                os.close(fd)
            if len(held) == wanted:
                break
        if len(held) == wanted:
            break
        for fd in held.values():  # never hold some while waiting for others
            os.close(fd)
        if not announced:
            announced = True
            log.info("Waiting for %d of GPUs %s, which other jobs hold.", wanted, ", ".join(devices))
        time.sleep(poll_seconds)
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(held)
        log.info("Holding GPU(s) %s.", ", ".join(held))
        yield list(held)
    finally:
        for fd in held.values():
            os.close(fd)
