"""Several processes of one job: torchrun's launcher, one clear message when one of them fails."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Sequence

from eyas.errors import EyasError
from eyas.jobs.heartbeat import pause_heartbeat

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone, even by SIGKILL (Linux)."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux: an orphan ends when it next meets the others
        return
    if os.getppid() == 1:
        sys.exit(1)


def launch(command: Sequence[str], count: int, threads: int) -> None:
    """Run `count` processes of `command` (a Python script and its arguments) on this machine, as torchrun does.

    Returns when all have ended well. Raises EyasError when one was killed, SystemExit(1) when one
    failed (it has said why), KeyboardInterrupt when they were asked to stop.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(max(threads // count, 1))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no need to know its name
    pause_heartbeat()
    try:
        with tempfile.TemporaryDirectory() as logs:  # the launcher's own, which it would leave behind
            config = LaunchConfig(
                min_nodes=1, max_nodes=1, nproc_per_node=count, run_id=uuid.uuid4().hex, rdzv_backend="c10d",
                rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.2, local_addr="localhost",
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )  # fmt: skip
            elastic_launch(config, sys.executable)("-u", *command)
    except SignalException as exc:
        raise KeyboardInterrupt from exc
    except ChildFailedError as exc:
        codes = {rank: failure.exitcode for rank, failure in exc.failures.items()}
        # Times are in seconds. SIGTERM is what the launcher ends the others with, and SIGABRT what torch
        # does in a process that lost them: neither is the reason while there is another.
        after = (-signal.SIGTERM, -signal.SIGABRT)
        rank, first = min(
            exc.failures.items(),
            key=lambda item: (item[1].timestamp, item[1].exitcode in after, item[1].exitcode >= 0),
        )
        if 130 in codes.values():
            raise KeyboardInterrupt from None
        if first.exitcode < 0:
            raise EyasError(
                f"process {rank} of {count} was killed by signal {-first.exitcode}"
                f" ({signal.Signals(-first.exitcode).name}); was it out of memory? Run the same command to go on from"
                " the last save"
            ) from None
        raise SystemExit(1) from None
