"""When a shard's states were written, for the report: few numbers, however long it took."""

from __future__ import annotations

import time
from typing import Any

_MOST = 64  # samples kept; when there are so many, every second one goes, and every second one of those to come


class Timeline:
    """Tokens over time, and the longest time in which no token was finished. Starts when it is made."""

    def __init__(self) -> None:
        self.started, self._zero = time.time(), time.monotonic()
        self.tokens, self._last = 0, 0.0
        self._samples: list[list[float]] = []
        self._count, self._stride = 0, 1
        self._pause = (0.0, 0.0)

    def add(self, tokens: int) -> None:
        """Note `tokens` more that were finished since the last note."""
        if not tokens:
            return
        now = time.monotonic() - self._zero
        self._pause = max(self._pause, (now - self._last, self._last))
        self.tokens, self._last = self.tokens + tokens, now
        self._count += 1
        if self._count % self._stride == 0:
            self._samples.append([round(now, 2), self.tokens])
        if len(self._samples) >= _MOST:
            del self._samples[::2]
            self._stride *= 2

    def facts(self) -> dict[str, Any]:
        """As JSON holds it: `started` (seconds since 1970), `samples` [[seconds since then, tokens so far], …],
        `longest_pause` [seconds since then, seconds]: when it began and how long it was."""
        length, begin = self._pause
        last = [[round(self._last, 2), self.tokens]] if self.tokens else []
        return {
            "started": round(self.started, 3),
            "samples": self._samples + [entry for entry in last if entry not in self._samples[-1:]],
            "longest_pause": [round(begin, 2), round(length, 2)],
        }
