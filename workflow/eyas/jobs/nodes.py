"""A job over several machines of a SLURM cluster: srun starts its script again on each, and they find each other.

The script runs three times over: as the job itself, which only starts srun; as one task on each machine, which holds
that machine's GPUs and launches processes; and as those processes (see :mod:`eyas.jobs.launch`).
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.errors import EyasError
from eyas.jobs.heartbeat import pause_heartbeat
from eyas.jobs.launch import STOPPED

log = logging.getLogger(__name__)

_MARK = "EYAS_MEETING"  # set for the tasks that srun starts: the port and the name of their meeting


@dataclass(frozen=True)
class Meeting:
    """Where the machines of a job find each other, as one of them sees it."""

    node: int
    """This machine's place among them."""
    name: str
    host: str
    port: int

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def address(self) -> str:
        """This machine's address on the way to the first one."""
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
            probe.connect((self.host, self.port))
            return str(probe.getsockname()[0])

    @classmethod
    def here(cls) -> Meeting | None:
        """The meeting that this process, a task of srun, is to join; None in the job itself."""
        mark = os.environ.get(_MARK)
        if mark is None:
            return None
        port, name = mark.split("/")
        # the address of the machine that srun was called on, which is the first one
        host = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "localhost")
        return cls(int(os.environ.get("SLURM_NODEID", 0)), name, host, int(port))


def spread(command: Sequence[str], nodes: int, threads: int) -> None:
    """Run a Python script and its arguments once on each of the `nodes` machines of this SLURM job.

    Returns when all have ended well. Raises EyasError outside of SLURM, SystemExit(1) when one failed (it has
    said why), KeyboardInterrupt when they were asked to stop.
    """
    if "SLURM_JOB_ID" not in os.environ or shutil.which("srun") is None:
        raise EyasError(
            f"this job is to take {nodes} machines, which needs SLURM (--workflow-profile profiles/slurm); write"
            " `nodes: 1` in the configuration to run it on this one"
        )
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    srun = [
        "srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", f"--cpus-per-task={threads}",
        "--mpi=none", "--kill-on-bad-exit=1", "--export=ALL",
    ]  # fmt: skip
    log.info("Starting on %d machines.", nodes)
    pause_heartbeat()
    environment = os.environ | {_MARK: f"{port}/{uuid.uuid4().hex}"}
    process = subprocess.Popen([*srun, sys.executable, "-u", *command], env=environment, start_new_session=True)
    asked: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        process.send_signal(signal.SIGTERM)  # srun hands it to its tasks, which save

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code == STOPPED or (asked and code):
        raise KeyboardInterrupt
    if code:
        raise SystemExit(1)
