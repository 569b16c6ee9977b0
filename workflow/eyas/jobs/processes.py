"""Which process wrote a file, in a form by which another one can tell whether it still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any


def _start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is gone, a zombie, or this is not Linux."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def this_process() -> dict[str, Any]:
    """`pid`, `host` and `pid_started`, which tells the process from a later one with the same number."""
    return {"pid": os.getpid(), "host": socket.gethostname(), "pid_started": _start_ticks(os.getpid())}


def is_alive(writer: Mapping[str, Any]) -> bool | None:
    """Whether the process of `this_process()` lives; None when it ran on another host or cannot be told."""
    pid = writer.get("pid")
    if writer.get("host") != socket.gethostname() or type(pid) is not int:
        return None
    if writer.get("pid_started") is not None:
        return _start_ticks(pid) == writer["pid_started"]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return None
    return True
