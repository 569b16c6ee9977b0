"""Makes the written sequences of a shard durable and journals them, beside the writing of further ones."""

from __future__ import annotations

import threading
import time
from typing import Any

from eyas.extraction.timeline import Timeline
from eyas.jobs import BatchProgress
from eyas.shards import Journal, TensorFileWriter

# The disk is set to work when so much is waiting for it, however little time has passed.
_BYTES = 64 << 20


class Recorder:
    """A thread that syncs the shard's file and then journals what was written before.

    Who writes never waits for the disk. After :meth:`close` everything that was added is in `journal.records`.
    """

    def __init__(self, file: TensorFileWriter, journal: Journal, progress: BatchProgress, seconds: float) -> None:
        """`seconds`: how much finished work a kill may cost; 0: what came since the last :meth:`flush`."""
        self.progress, self.timeline = progress, Timeline()
        self._file, self._journal, self._seconds = file, journal, seconds
        self._token_bytes = file.layout.nbytes / max(progress.total, 1)
        self._changed = threading.Condition()
        self._records: list[dict[str, Any]] = []
        self._samples = self._tokens = self._bytes = 0
        self._noted = time.monotonic()
        self._ending = self._due = self._busy = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def add(self, record: dict[str, Any], tokens: int | None) -> None:
        """A sequence that is written (or has failed); `tokens` None: it was written before, and counts no more.

        Raises what went wrong with earlier ones.
        """
        with self._changed:
            if self._error:
                raise self._error
            self._records.append(record)
            if tokens is not None:
                self._samples += 1
                self._tokens += tokens
                self._bytes += round(tokens * self._token_bytes)
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until what was added is durable; raises what went wrong."""
        with self._changed:
            self._due = True
            self._changed.notify_all()
            while (self._due or self._busy) and not self._error:
                self._changed.wait()
            if self._error:
                raise self._error

    def close(self) -> None:
        """Wait until all is durable; raises what went wrong."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        if self._error:
            raise self._error

    def _wait(self) -> float | None:
        """Seconds until there is something to do; None: nobody knows."""
        if self._ending or self._due or self._bytes >= _BYTES:
            return 0.0
        if not self._records or not self._seconds:
            return None
        return max(self._noted + self._seconds - time.monotonic(), 0.0)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    while (seconds := self._wait()) != 0.0:
                        self._changed.wait(seconds)
                    records, samples, tokens = self._records, self._samples, self._tokens
                    self._records, self._samples, self._tokens, self._bytes = [], 0, 0, 0
                    ending, self._due, self._busy = self._ending, False, True
                if records:
                    self._file.sync()  # states first, then the record that they are there
                    self._journal.append(*records)
                    self._journal.records += records
                    self.progress.batch(samples, tokens)
                    self.timeline.add(tokens)
                    self._noted = time.monotonic()
                elif ending:
                    return
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        except BaseException as exc:
            with self._changed:
                self._error = exc
                self._changed.notify_all()
