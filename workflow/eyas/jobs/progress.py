"""Progress lines: what is done, how fast, how long still; one every few seconds."""

from __future__ import annotations

import logging
import math
import time

from eyas.jobs.heartbeat import report

log = logging.getLogger(__name__)

_BAR = 20


def duration(seconds: float) -> str:
    """Seconds as `mm:ss` or `h:mm:ss`."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


class Progress:
    """Counts work and logs a line at most every `interval` seconds.

    `total` and `advance(done=…)` are in the unit that takes the time (tokens, rows); work
    found finished from an earlier attempt is given as `already` and kept out of the speed.
    """

    def __init__(self, what: str, total: float, unit: str, already: float = 0, interval: float = 5.0) -> None:
        self.what, self.total, self.unit, self.interval = what, total, unit, interval
        self.done = self.already = already
        self.started = self.logged = time.monotonic()
        report(what, unit, already, total, 0)

    def advance(self, done: float, note: str = "") -> None:
        """Add finished work; `note` ends the line."""
        self.done += done
        report(self.what, self.unit, self.done, self.total, done)
        if time.monotonic() - self.logged >= self.interval:
            self.logged = time.monotonic()
            log.info("%s", self.line(note))

    @property
    def speed(self) -> float:
        """Units a second since the start."""
        return (self.done - self.already) / max(time.monotonic() - self.started, 1e-9)

    def line(self, note: str = "") -> str:
        """A bar and the figures; a line of its own each time, so that jobs side by side stay readable."""
        speed = self.speed
        share = 100 * self.done / self.total if self.total else 100.0
        full = int(min(share, 100.0) / 100 * _BAR)
        bar = "#" * full + "-" * (_BAR - full)
        left = f", {duration((self.total - self.done) / speed)} left" if speed > 0 and self.done < self.total else ""
        return (
            f"{self.what} [{bar}] {self.done:,.0f} of {self.total:,.0f} {self.unit} ({share:.0f}%),"
            f" {speed:,.1f} {self.unit}/s{left}{'; ' + note if note else ''}"
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started


class BatchProgress(Progress):
    """Counts rows as well as tokens, and logs a line for every batch, in the form that people know from extractions.

    `Batch a-b: 4.8s, Total: n samples, t tokens, x samples/s, y tok/s, z GB written of Z GB, ETA hh:mm`.
    Samples a to b, from 1, are those of the batch in the order of their work. Totals include `already` tokens and
    `samples_already` of an earlier attempt; speeds do not. ETA is the time that is left, in hours and minutes,
    from the tokens that are left. GB are 10^9 bytes.
    """

    def __init__(
        self, what: str, tokens: int, nbytes: int, already: int = 0, samples_already: int = 0, interval: float = 0.0
    ) -> None:
        super().__init__(what, tokens, "tokens", already, interval)
        self.nbytes = nbytes
        self.samples = self.samples_already = samples_already
        self._last = self.started

    def batch(self, samples: int, tokens: int, written: int | None = None) -> None:
        """Note a finished batch, and log its line (at most one every `interval` seconds).

        `written`: bytes of states that are on the disk; None takes the tokens' share of `nbytes`.
        """
        first, now = self.samples + 1, time.monotonic()
        seconds, self._last = now - self._last, now
        self.samples += samples
        self.done += tokens
        report(self.what, self.unit, self.done, self.total, tokens)
        if now - self.logged >= self.interval:
            self.logged = now
            log.info("%s", self.batch_line(first, seconds, written))

    def batch_line(self, first: int, seconds: float, written: int | None = None) -> str:
        """The line of the batch from sample `first` to the one counted last, which took `seconds`."""
        if written is None:
            written = round(self.nbytes * self.done / self.total) if self.total else self.nbytes
        elapsed, speed = max(self.seconds, 1e-9), self.speed
        eta = "--:--"
        if self.done >= self.total:
            eta = "00:00"
        elif speed > 0:
            minutes = math.ceil((self.total - self.done) / speed / 60)
            eta = f"{minutes // 60:02d}:{minutes % 60:02d}"
        return (
            f"Batch {first}-{self.samples}: {seconds:.1f}s, Total: {self.samples} samples, {self.done:.0f} tokens,"
            f" {(self.samples - self.samples_already) / elapsed:.2f} samples/s, {speed:.1f} tok/s,"
            f" {_gigabytes(written)} GB written of {_gigabytes(self.nbytes)} GB, ETA {eta}"
        )


def _gigabytes(nbytes: int) -> str:
    """10^9 bytes with as many decimals as a small run needs to be seen at all."""
    return f"{nbytes / 1e9:.1f}" if nbytes >= 1e10 else f"{nbytes / 1e9:.3f}"
