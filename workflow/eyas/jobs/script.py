"""The frame around a script: common arguments, logging, device leases, errors without tracebacks."""

from __future__ import annotations

import argparse
import errno
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from safetensors import SafetensorError

from eyas.devices import lease_gpus
from eyas.errors import EyasError
from eyas.jobs.heartbeat import Heartbeat
from eyas.jobs.launch import STOPPED, die_with_parent
from eyas.jobs.nodes import Meeting

log = logging.getLogger("eyas")

_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full; free space or put `results` on a larger disk",
    errno.EDQUOT: "the disk quota is used up; free space or put `results` elsewhere",
    errno.EROFS: "the file system is read-only; put `results` where you can write",
    errno.EACCES: "permission denied; put `results` where you can write",
    errno.EPERM: "not permitted; put `results` where you can write",
}


# How gloo and NCCL say that a process which this one waits for is gone.
_PEER_GONE = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited", "remote process has exited")


def job_parser(description: str | None) -> argparse.ArgumentParser:
    """An argument parser with what every job takes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--log", type=Path, help="file to write the log to, besides standard error")
    parser.add_argument("--label", default="", help="words that start each line on standard error")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--gpu", type=int, default=0, help="GPUs that the scheduler granted")
    parser.add_argument("--gpu-wanted", type=int, default=None, help="GPUs that the job needs (default: --gpu)")
    return parser


def _start_logging(file: Path | None, label: str, level: int) -> None:
    root = logging.getLogger("eyas")
    root.setLevel(level)
    root.propagate = False
    console = logging.StreamHandler(sys.stderr)
    console.setFormatter(logging.Formatter(f"[{label}] %(message)s" if label else "%(message)s"))
    root.addHandler(console)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(file, mode="a", encoding="utf-8")
        handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        root.addHandler(handler)


def _allow_many_files() -> None:
    """Raise the soft limit of open files to the hard one: a shard that is read takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):
            pass


def run_job(
    parser: argparse.ArgumentParser,
    work: Callable[[argparse.Namespace], None],
    rank: int | None = None,
    meeting: Meeting | None = None,
) -> None:
    """Parse the command line, hold the GPUs, do the work; exits 0, 1 (clear error) or 130 (Ctrl-C).

    `rank`: this process's place among those of one job that torchrun started. Whoever started them
    holds the GPUs; the first writes the log, the others only say what goes wrong. `meeting`: of the machines of
    one job (`--nodes`), each of which holds its share of the GPUs.
    """
    args = parser.parse_args()
    if rank is None and meeting is not None:
        args.log, args.label = None, f"{args.label} node {meeting.node}".strip()
    if rank is not None:
        die_with_parent()
        if rank:
            args.log, args.label = None, f"{args.label} process {rank}".strip()
    # Before torch and tokenizers are imported (by `work`): they read these once.
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        _start_logging(args.log, args.label, logging.ERROR if rank else logging.INFO)
    except OSError as exc:
        sys.exit(f"error: {args.log}: {_DISK_ERRORS.get(exc.errno or 0, exc.strerror)}")
    _allow_many_files()
    started = time.monotonic()
    heartbeat = Heartbeat.of_job(args.log, args.label)
    if heartbeat:
        heartbeat.start()
    code, reason = _run(args, work, rank, meeting)
    if heartbeat:
        if code == 0:
            heartbeat.succeeded()
        elif code == STOPPED:
            heartbeat.stopped()
        else:
            heartbeat.failed(reason)
    if code:
        if rank is not None:
            _end_at_once(code)
        sys.exit(code)
    log.info("Done in %.1f s.", time.monotonic() - started)


def _end_at_once(code: int | str) -> None:
    """Leave one of several processes without Python's clean-up, in which threads that wait for the others abort it.

    Its exit code then is the one that it was given, and the others hear of it in the same moment.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _run(
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace], None],
    rank: int | None,
    meeting: Meeting | None,
) -> tuple[int | str | None, str | None]:
    """Do the work; returns the exit code, and the last line of what is wrong, if this process said it."""
    try:
        with _leases(args, meeting) if rank is None else nullcontext():
            work(args)
    except SystemExit as exc:  # of several processes one failed, and has said why
        return (0 if exc.code is None else exc.code), None
    except EyasError as exc:
        lines = str(exc).splitlines() or [""]
        for line in lines:
            log.error("error: %s", line)
        return 1, lines[-1]
    except OSError as exc:
        if exc.errno not in _DISK_ERRORS:
            log.exception("This is a fault of Eyas or of the machine:")
            return 1, _named(exc)
        line = f"{exc.filename or 'writing'}: {_DISK_ERRORS[exc.errno]}"
        log.error("error: %s", line)
        return 1, line
    except SafetensorError as exc:
        line = f"a safetensors file could not be read or written ({exc}); is the disk full?"
        log.error("error: %s", line)
        return 1, line
    except KeyboardInterrupt:
        log.error("Stopped by the user; finished work is kept, run the same command to go on.")
        return STOPPED, None
    except Exception as exc:
        if rank is not None and any(words in str(exc) for words in _PEER_GONE):
            log.error("Ends, because another process of this job did.")
            return 1, None
        log.exception("This is a fault of Eyas; please report it with the lines above and below:")
        return 1, _named(exc)
    return 0, None


def _leases(args: argparse.Namespace, meeting: Meeting | None) -> AbstractContextManager[object]:
    """The GPUs of this process: all of the job's, or on one of its machines a share of them."""
    wanted = args.gpu if args.gpu_wanted is None else args.gpu_wanted
    nodes = getattr(args, "nodes", 1)
    if nodes == 1 or args.gpu < wanted:
        return lease_gpus(wanted, args.gpu)
    return nullcontext() if meeting is None else lease_gpus(wanted // nodes, args.gpu // nodes)


def _named(exc: Exception) -> str:
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"
