"""Servers that a job works with: one that runs already, or one that the job starts, watches and never leaves behind."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Generic, Protocol, TypeVar

from eyas.errors import EyasError

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
_AWAY_SECONDS = 60.0  # how long a server that lives may not answer


class Connection(Protocol):
    """What a keeper needs of the client of its server."""

    url: str

    def healthy(self) -> bool:
        """Whether the server answers at all."""
        ...

    def said(self, text: str) -> str:
        """Words of the server in one line, without its key."""
        ...

    def close(self) -> None: ...


C = TypeVar("C", bound=Connection)


@dataclass(frozen=True)
class Terms:
    """How messages name things: the section of the configuration, the key of a running server's address, and what
    becomes of the work when there is no server."""

    section: str
    url: str
    kept: str


class RunningServer(Generic[C]):
    """A server that somebody else keeps. Waits for it to come back."""

    def __init__(self, client: C, outage_minutes: float, probe: Callable[[C], None], terms: Terms) -> None:
        self.client, self._minutes, self._probe, self._terms = client, outage_minutes, probe, terms
        self.absences = 0
        self._lock = threading.Lock()
        self._tried = False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Check that it is there and does what it should; raises EyasError."""
        self.wait()
        if not self._tried:
            self._probe(self.client)
            self._tried = True

    def wait(self) -> None:
        """Return when the server answers; raises EyasError after the outage."""
        with self._lock:  # one asks, the others wait for what it finds
            started = time.monotonic()
            pause = _POLL_SECONDS
            while not self.client.healthy():
                waited = time.monotonic() - started
                if waited >= 60 * self._minutes:
                    raise EyasError(
                        f"{self._terms.url}: {self.client.url} does not answer since {waited / 60:.1f} minutes;"
                        f" {self._terms.kept}: start the server and run snakemake again"
                    )
                if pause == _POLL_SECONDS:
                    self.absences += 1
                log.warning("%s does not answer; waiting.", self.client.url)
                if self._stopped.wait(pause):
                    raise EyasError(f"{self._terms.url}: the job was stopped while {self.client.url} was away")
                pause = min(2 * pause, 15.0)

    def check(self) -> None:
        """Return when the server answers, after a request that failed; raises EyasError after the outage."""
        self.wait()

    def interrupt(self) -> None:
        """Whoever waits for the server stops."""
        self._stopped.set()

    def close(self) -> None:
        self.interrupt()
        self.client.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class OwnServer(Generic[C]):
    """A server of this job, on loopback with a random key. Started when it is first needed; ended by :meth:`close`,
    and by its guard however this process ends."""

    def __init__(
        self, command: list[str], environment: Mapping[str, str], private: Path, log_file: Path, start_minutes: float,
        restarts: int, connect: Callable[[str, str], C], probe: Callable[[C], None], terms: Terms,
    ) -> None:  # fmt: skip
        """`environment`: more than this process's; `private`: a folder of our user alone (0700); `connect`: a client,
        from the address and the key; `probe`: raises EyasError where the server does not do what it should."""
        self._command, self._environment, self._private = command, environment, private
        self._log_file, self._start_minutes, self._restarts = log_file, start_minutes, restarts
        self._connect, self._probe, self._terms = connect, probe, terms
        self._key = secrets.token_hex(24)  # SGLang would take one that begins with "-" for an option
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.RLock()
        self._starts = 0
        self.absences = 0
        self._stopped = threading.Event()
        self._client: C | None = None

    @property
    def client(self) -> C:
        assert self._client
        return self._client

    # ---- start

    def start(self) -> None:
        """Start the server and wait until the probe goes well; raises EyasError."""
        with self._lock:
            if self._process is None:
                self._begin()

    def _begin(self) -> None:
        self._require_wanted()
        self._starts += 1
        port = _free_port()
        # The key goes by a file that only we can read: command lines are there for all to see.
        config = self._private / ".server.yaml"
        fd = os.open(config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as file:
            json.dump({"api-key": self._key}, file)
        command = [*self._command, "--host", "127.0.0.1", "--port", str(port), "--config", str(config)]
        environment = {**os.environ, **self._environment, "PYTHONUNBUFFERED": "1"}
        for name in ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TRANSFORMERS_VERBOSITY"):
            if name not in self._environment:
                environment.pop(name, None)  # this job's own, not the server's
        log.info("Starting the server (log: %s).", self._log_file)
        with self._open_log() as output:
            output.write(f"\n==== start {self._starts}: {time.strftime('%F %T')}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("guard.py")), str(config), "--", *command],
                stdin=subprocess.PIPE, stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip
        self._client = self._connect(f"http://127.0.0.1:{port}", self._key)
        self._wait_until_ready()

    def _open_log(self) -> IO[bytes]:
        self._log_file.parent.mkdir(parents=True, exist_ok=True)
        return open(self._log_file, "ab", buffering=0)

    def _wait_until_ready(self) -> None:
        started = said = time.monotonic()
        while not self.client.healthy():
            self._require_wanted()
            self._require_alive("while it was starting")
            now = time.monotonic()
            if now - started > 60 * self._start_minutes:
                self._end()
                raise EyasError(
                    f"{self._terms.section}.start_minutes: the server was not ready within {self._start_minutes:g}"
                    f" minutes; its log is {self._log_file}"
                )
            if now - said > 60:
                said = now
                log.info("The server is loading the target since %.0f s.", now - started)
            time.sleep(_POLL_SECONDS)
        self._probe(self.client)
        log.info("The server is ready after %.0f s.", time.monotonic() - started)

    def _require_wanted(self) -> None:
        """A server that is ended because the job is must not be started again by a request that misses it."""
        if self._stopped.is_set():
            self._end()
            raise EyasError("the job was stopped while a request waited for its server")

    def _require_alive(self, when: str) -> None:
        assert self._process
        code = self._process.poll()
        if code is not None:
            self._end()
            raise EyasError(
                f"the server ended {when} with exit code {code}: {self._last_words()} (log: {self._log_file})"
            )

    def _last_words(self) -> str:
        """The last line of the log that tells something."""
        try:
            with open(self._log_file, "rb") as file:
                file.seek(max(os.path.getsize(self._log_file) - 8192, 0))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return "no log"
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if "Error" in line or "error:" in line]
        words = (errors or lines or ["no words"])[-1][:300]
        return self._client.said(words) if self._client else words

    # ---- keep

    def check(self) -> None:
        """Return when the server answers, after a request that failed; raises EyasError where it has died."""
        with self._lock:
            deadline = time.monotonic() + _AWAY_SECONDS
            while not self.client.healthy():
                self._require_wanted()
                if self._process is None:
                    raise EyasError(f"the server is gone; its log is {self._log_file}")
                self._require_alive("while it was answering")
                if time.monotonic() > deadline:
                    raise EyasError(f"the server lives and does not answer; its log is {self._log_file}")
                time.sleep(_POLL_SECONDS)

    def wait(self) -> None:
        """Return when the server answers, having started it again where it died; raises EyasError."""
        with self._lock:
            deadline = time.monotonic() + _AWAY_SECONDS
            away = False
            while self._process and self._process.poll() is None:
                self._require_wanted()
                if self.client.healthy():
                    return
                self.absences += not away
                away = True
                if time.monotonic() > deadline:
                    log.warning("The server lives and does not answer; ending it.")
                    break
                time.sleep(_POLL_SECONDS)
            self._require_wanted()
            self.absences += not away
            code = self._process.poll() if self._process else None
            words = self._last_words()
            self._end()
            if self._starts > self._restarts:
                raise EyasError(
                    f"the server died {self._starts} times (exit code {code}: {words}); {self._terms.section}.restarts"
                    f" allows {self._restarts}. {self._terms.kept.capitalize()}; its log is {self._log_file}"
                )
            log.warning("The server died (exit code %s: %s); starting it again.", code, words)
            self._begin()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin
        process.stdin.close()  # the guard ends everything
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()  # the kernel ends the server with it
            process.wait()

    def interrupt(self) -> None:
        """End the server, and with it the requests that are under way; it is not started again."""
        self._stopped.set()
        self._end()

    def close(self) -> None:
        self.interrupt()
        if self._client:  # not before: requests may still be under way
            self._client.close()
