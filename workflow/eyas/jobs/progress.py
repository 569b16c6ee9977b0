"""Progress lines: what is done, how fast, how long still; one every few seconds."""

from __future__ import annotations

import logging
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
