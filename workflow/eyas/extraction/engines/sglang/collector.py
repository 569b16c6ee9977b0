"""Sends a shard's rows to the server and takes their states from its dumps."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from eyas.errors import EyasError
from eyas.extraction.engines.base import Captured, CapturedRow, FailedRow
from eyas.extraction.engines.sglang.client import Away, Client, Failed, Refused, Reply, Unreachable
from eyas.extraction.engines.sglang.dumps import HEADER_BYTES, Dump, DumpFolder, DumpRefused, open_dump
from eyas.extraction.engines.sglang.head import TargetHead

log = logging.getLogger(__name__)


class Server(Protocol):
    """Where requests go."""

    @property
    def client(self) -> Client: ...

    @property
    def absences(self) -> int:
        """How often it has been found away."""

    def start(self) -> None: ...

    def wait(self) -> None:
        """Return when the server answers; raises EyasError when it does not for too long."""

    def interrupt(self) -> None:
        """The work is stopped: who waits for the server, waits no longer."""

    def close(self) -> None: ...


class Credits:
    """Bytes of dumps that may exist at once, over all requests in flight."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._used = 0
        self._free = threading.Condition()

    def take(self, nbytes: int, stopped: threading.Event) -> bool:
        """Wait for room; more than there is in all goes alone. False, and nothing taken, when the work was stopped."""
        with self._free:
            while not stopped.is_set():
                if not self._used or self._used + nbytes <= self.total:
                    self._used += nbytes
                    return True
                self._free.wait(0.5)
        return False

    def give(self, nbytes: int) -> None:
        with self._free:
            self._used -= nbytes
            self._free.notify_all()


@dataclass
class DumpedRow(CapturedRow):
    """States that lie in a dump until they are written."""

    dump: Dump | None = field(default=None, repr=False)
    credit: tuple[Credits, int] | None = field(default=None, repr=False)

    def release(self) -> None:
        self.aux = self.last = None  # type: ignore[assignment]
        if self.dump:
            self.dump.close()
        if self.credit:
            self.credit[0].give(self.credit[1])


@dataclass(frozen=True)
class Shape:
    """What a sequence's states must look like, and the bytes that a token of them takes in a dump at most."""

    layers: list[int]
    hidden_size: int
    token_bytes: int


class Collector:
    """Captures sequences with many requests in flight; states come in the order in which they are done."""

    def __init__(
        self, server: Server, dumps: DumpFolder, shape: Shape, head: TargetHead, concurrency: int, max_tries: int,
        dump_bytes: int,
    ) -> None:  # fmt: skip
        self.server, self.dumps, self.shape, self.head = server, dumps, shape, head
        self.concurrency, self.max_tries = concurrency, max_tries
        self._credits = Credits(min(dump_bytes, int(0.8 * dumps.free_bytes())))
        self._number = 0
        self._numbering = threading.Lock()

    def rid(self) -> str:
        with self._numbering:
            self._number += 1
            return self.dumps.rid(self._number)

    def capture(
        self, sequences: Sequence[np.ndarray], missing: Sequence[int]
    ) -> Generator[list[tuple[int, Captured]], None, None]:
        """States of the `missing` sequences (by index), as they come."""
        stopped = threading.Event()
        waiting = list(missing)[::-1]
        running: dict[Future[Captured | None], int] = {}
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="rows")
        try:
            while waiting or running:
                while waiting and len(running) < self.concurrency:
                    index = waiting.pop()
                    running[pool.submit(self._row, sequences[index], stopped)] = index
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    index, captured = running.pop(future), future.result()
                    assert captured is not None  # only when stopped
                    if isinstance(captured, CapturedRow):
                        captured.target_token = self.head.best(captured.last)
                    yield [(index, captured)]
        except BaseException:
            stopped.set()
            self.server.interrupt()
            raise
        finally:
            stopped.set()
            for future in running:
                future.cancel()
            pool.shutdown(wait=True, cancel_futures=True)
            for future in running:
                if future.done() and not future.cancelled() and future.exception() is None:
                    left = future.result()
                    if left is not None:
                        left.release()

    # ---- one row, in a thread of its own

    def _row(self, ids: np.ndarray, stopped: threading.Event) -> Captured | None:
        """A row's states, or why there are none. None: the work was stopped."""
        nbytes = len(ids) * self.shape.token_bytes + HEADER_BYTES
        if nbytes > self.dumps.total_bytes():
            return FailedRow(
                f"its states take {nbytes:,} bytes, and extraction.sglang.dump_folder holds"
                f" {self.dumps.total_bytes():,}"
            )
        if not self._credits.take(nbytes, stopped):
            return None
        try:
            captured = self._tries(ids, stopped)
        except BaseException:
            self._credits.give(nbytes)
            raise
        if isinstance(captured, DumpedRow):
            captured.credit = (self._credits, nbytes)
        else:
            self._credits.give(nbytes)
        return captured

    def _tries(self, ids: np.ndarray, stopped: threading.Event) -> Captured | None:
        tries, reason = 0, ""
        while tries < self.max_tries:
            if stopped.is_set():
                return None
            rid, absences = self.rid(), self.server.absences
            try:
                return self.take(self.server.client, rid, ids)[0]
            except Unreachable as exc:
                self._discard(rid)
                if stopped.is_set():
                    return None
                self.server.wait()
                # No row's fault, where the server was away: it costs no try.
                if isinstance(exc, Away) or self.server.absences != absences:
                    continue
                tries, reason = tries + 1, f"the connection broke while the server was there: {exc}"
            except Refused as exc:
                self._discard(rid)
                return FailedRow(str(exc))
            except (Failed, DumpRefused) as exc:
                self._discard(rid)
                tries, reason = tries + 1, str(exc)
                log.info("A row of %d tokens: %s (try %d of %d).", len(ids), reason, tries, self.max_tries)
            if tries < self.max_tries:
                stopped.wait(min(0.3 * 2 ** (tries - 1), 20.0) * random.uniform(0.8, 1.2))
        return FailedRow(f"{reason} (tried {tries} times)")

    def take(self, client: Client, rid: str, ids: np.ndarray) -> tuple[DumpedRow, Reply]:
        """One request and its dump; raises what `Client.capture` does, and DumpRefused."""
        reply = client.capture(rid, ids.tolist())
        if reply.file != f"{rid}.safetensors":
            raise DumpRefused(f"the server names the dump {reply.file} for request {rid}")
        dump = open_dump(self.dumps.dump(rid), rid, ids, self.shape.layers, self.shape.hidden_size)
        return DumpedRow(dump.aux, dump.last, np.empty(0, dtype=np.int32), dump), reply

    def _discard(self, rid: str) -> None:
        self.dumps.dump(rid).unlink(missing_ok=True)

    def probe(self, client: Client, ids: np.ndarray) -> None:
        """Raise EyasError unless the server captures rightly: the head must give its next token from our state."""
        reason = ""
        for _ in range(self.max_tries):
            rid = self.rid()
            try:
                row, reply = self.take(client, rid, ids)
            except (Failed, Refused, Unreachable, DumpRefused) as exc:
                self._discard(rid)
                reason = str(exc)
                time.sleep(0.5)
                continue
            try:
                self.head.require_same(row.last, reply.next_token)
            finally:
                row.release()
            return
        raise EyasError(f"extraction.sglang: the server does not capture a probe of {len(ids)} tokens: {reason}")
