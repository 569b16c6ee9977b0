"""Keeps a server from outliving its job. Standard library only; run as `python guard.py KEY_FILE -- COMMAND…`.

What the server prints is passed on without the key in KEY_FILE: servers print their arguments.

The job holds the other end of this process's standard input. When that closes, however the job ended, or when a
signal comes, the server and everything it started are ended: SIGTERM, then SIGKILL. When the server ends by itself,
what it left is ended and its exit code passed on. KEY_FILE is deleted at the end.
Should this process be killed, the kernel kills the server.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_GRACE = 10.0  # seconds between SIGTERM and SIGKILL


def _prctl(option: int, value: int) -> None:
    try:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
    except (OSError, AttributeError):
        pass  # not Linux


def _descendants(root: int) -> list[int]:
    """Processes below `root`: orphans come to us, because this process adopts them."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
            except (OSError, IndexError, ValueError):
                continue
    found, waiting = [], [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def _signal_all(number: int) -> bool:
    """Send a signal to everything below; returns whether anything lives."""
    alive = False
    for process in _descendants(os.getpid()):
        try:
            os.kill(process, number)
            alive = True
        except ProcessLookupError:
            continue
    return alive


def end_all(grace: float) -> None:
    """End everything below this process."""
    deadline = time.monotonic() + grace
    if _signal_all(signal.SIGTERM):
        while time.monotonic() < deadline and _descendants(os.getpid()):
            _reap()
            time.sleep(0.05)
    while _descendants(os.getpid()):
        _signal_all(signal.SIGKILL)
        _reap()
        time.sleep(0.02)


def _is_mapped(path: str) -> bool:
    """Whether a living process has the file in its memory."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/maps", encoding="utf-8", errors="replace") as file:
                    if path in file.read():
                        return True
            except OSError:
                continue
    return False


def clean_shared_memory(since: float) -> None:
    """Delete what a killed SGLang leaves in /dev/shm: files made since its start that nobody uses."""
    try:
        entries = list(os.scandir("/dev/shm"))
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith(("sglang_loads_", "sgl_shm_mq_")):
            try:
                facts = entry.stat(follow_symlinks=False)
                if facts.st_uid == os.getuid() and facts.st_ctime >= since and not _is_mapped(entry.path):
                    os.unlink(entry.path)
            except OSError:
                continue


def pass_on(source: IO[bytes], secret: bytes) -> None:
    """Copy lines to standard output, the secret blotted out."""
    for line in source:
        try:
            os.write(1, line.replace(secret, b"***"))
        except OSError:  # the disk with the log is full: the server goes on
            continue


def main(command: list[str], secret: bytes) -> int:
    """Run the command until it ends or the job does; returns the exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    asked, told = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: os.write(told, b"x") and None)
    here, started = os.getpid(), time.time() - 1.0

    def below() -> None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != here:  # killed in between
            os._exit(1)

    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, preexec_fn=below,
        )  # fmt: skip
    except OSError as exc:
        print(f"{command[0]}: cannot be started ({exc.strerror})", file=sys.stderr, flush=True)
        return 127
    assert server.stdout
    copying = threading.Thread(target=pass_on, args=(server.stdout, secret), daemon=True)
    copying.start()
    while server.poll() is None:
        ready, _, _ = select.select([0, asked], [], [], 0.2)
        if asked in ready or (0 in ready and not os.read(0, 4096)):
            end_all(_GRACE)
            clean_shared_memory(started)
            return 0
    code = server.returncode
    end_all(2.0)
    copying.join(2.0)
    clean_shared_memory(started)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        key = json.load(file)["api-key"].encode()
    try:
        code = main(sys.argv[sys.argv.index("--") + 1 :], key)
    finally:
        try:
            os.unlink(sys.argv[1])
        except OSError:  # the job has removed it, or its folder
            pass
    sys.exit(code)
