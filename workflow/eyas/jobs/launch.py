"""Several processes of one job: torchrun's launcher, one clear message when one of them fails."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from typing import Protocol

from eyas.errors import EyasError
from eyas.jobs.heartbeat import pause_heartbeat

log = logging.getLogger(__name__)

STOPPED = 130
"""Exit code after Ctrl-C."""

_PR_SET_PDEATHSIG = 1
_BEFORE_THE_LAUNCHER_KILLS = 10  # seconds; it waits for 30


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it is gone, even by SIGKILL (Linux)."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    except (OSError, AttributeError):  # not Linux: an orphan ends when it next meets the others
        return
    if os.getppid() == 1:
        sys.exit(1)


class Rendezvous(Protocol):
    """Where the machines of a job find each other."""

    @property
    def name(self) -> str: ...
    @property
    def endpoint(self) -> str: ...
    @property
    def address(self) -> str: ...


def launch(command: Sequence[str], count: int, threads: int, nodes: int = 1, meeting: Rendezvous | None = None) -> None:
    """Run `count` processes of `command` (a Python script and its arguments) on this machine, as torchrun does.

    With a `meeting`, `nodes` machines do so together. Returns when all have ended well. Raises EyasError when one
    was killed, SystemExit(1) when one failed (it has said why), KeyboardInterrupt when they were asked to stop.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(max(threads // count, 1))
    if meeting is None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no need to know its name
    pause_heartbeat()
    try:
        with tempfile.TemporaryDirectory() as logs:  # the launcher's own, which it would leave behind
            config = LaunchConfig(
                min_nodes=nodes, max_nodes=nodes, nproc_per_node=count, rdzv_backend="c10d",
                run_id=meeting.name if meeting else uuid.uuid4().hex,
                rdzv_endpoint=meeting.endpoint if meeting else "localhost:0",
                local_addr=meeting.address if meeting else "localhost", max_restarts=0, monitor_interval=0.2,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )  # fmt: skip
            elastic_launch(config, sys.executable)("-u", *command)
    except SignalException as exc:
        raise KeyboardInterrupt from exc
    except RendezvousError as exc:
        where = meeting.endpoint if meeting else "localhost"
        raise EyasError(
            f"the {nodes} machines of this job did not meet at {where} ({exc}); do they reach each other there?"
        ) from None
    except ChildFailedError as exc:
        rank, code = reason_of({rank: (item.exitcode, item.timestamp) for rank, item in exc.failures.items()})
        if code == STOPPED:
            raise KeyboardInterrupt from None
        if code < 0:
            name = signal.Signals(-code).name
            raise EyasError(
                f"process {rank} of {count * nodes} was killed by signal {-code} ({name}); was it out of memory? Run"
                " the same command to go on from the last save"
            ) from None
        raise SystemExit(1) from None


def reason_of(ends: Mapping[int, tuple[int, float]]) -> tuple[int, int]:
    """Of several processes that failed, the one (rank, exit code) that is the reason, from how and when each ended.

    `ends`: exit code (negative: a signal) and seconds, by rank. An exit code of Ctrl-C goes before all. A signal
    from outside goes before a process that failed, which it may have done because the other was gone; but not
    the SIGKILL with which the launcher ends, half a minute later, who did not mind its SIGTERM. SIGTERM itself,
    and the SIGABRT of libraries that lost the others, are reasons only where there is no other.
    """
    stopped = [rank for rank, (code, _) in ends.items() if code == STOPPED]
    if stopped:
        return stopped[0], STOPPED
    failed = [(when, rank) for rank, (code, when) in ends.items() if code > 0]
    after = (-signal.SIGTERM, -signal.SIGABRT)
    killed = [(when, rank) for rank, (code, when) in ends.items() if code < 0 and code not in after]
    if failed and (not killed or min(killed)[0] - min(failed)[0] > _BEFORE_THE_LAUNCHER_KILLS):
        rank = min(failed)[1]
    else:
        rank = min(killed or [(when, rank) for rank, (_, when) in ends.items()])[1]
    return rank, ends[rank][0]
