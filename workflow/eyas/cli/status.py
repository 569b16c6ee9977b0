"""`eyas status`: print once, or again and again."""

from __future__ import annotations

import json
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from eyas.status import Status, collect
from eyas.status.screen import screen


def _code(status: Status) -> int:
    return int(status.verdict.word in ("stalled", "failed"))


def show(status: Status, as_json: bool) -> int:
    """Print a status; returns the exit code."""
    if as_json:
        print(json.dumps(status.as_json(), indent=1))
    else:
        Console(highlight=False).print(screen(status))
    return _code(status)


def watch(run: Path, seconds: float, as_json: bool) -> int:
    """Print a line of JSON, or redraw the screen, every so many seconds until the run is complete or has failed."""
    status = collect(run)
    if as_json:
        while True:
            print(json.dumps(status.as_json()), flush=True)
            if status.verdict.word in ("complete", "failed"):
                return _code(status)
            time.sleep(seconds)
            status = collect(run)
    with Live(screen(status), console=Console(highlight=False), auto_refresh=False) as live:
        while status.verdict.word not in ("complete", "failed"):
            time.sleep(seconds)
            status = collect(run)
            live.update(screen(status), refresh=True)
    return _code(status)
