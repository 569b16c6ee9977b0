"""What all jobs of a run share when they use one endpoint: requests in flight, rates, and what has been spent.

Kept in small files beside the shards, under locks that the kernel lets go of when a job dies.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.config.schema import EndpointOptions
from eyas.errors import EyasError
from eyas.shards import read_json

_BURST = 0.1  # of a minute's allowance can be used at once


@dataclass(frozen=True)
class Usage:
    """Tokens of requests: of their prompts and of their answers."""

    prompt: int = 0
    answer: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.prompt + other.prompt, self.answer + other.answer)

    def cost(self, options: EndpointOptions) -> float:
        return (self.prompt * options.input_price + self.answer * options.output_price) / 1e6


class SharedLimits:
    """Limits of one endpoint over all shards in `folder`. `shard`: the one that this job writes."""

    def __init__(self, folder: Path, shard: str, options: EndpointOptions, spent: Usage) -> None:
        self.options = options
        self.shard = shard
        self.folder = folder / ".staging" / "endpoint"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._slots: dict[int, int] = {}
        self._others = self._finished(folder) if options.max_spend is not None else {}
        with self._state() as state:
            state["shards"][shard] = {"spent": spent.cost(options), "reserved": 0.0}

    def _finished(self, folder: Path) -> dict[str, float]:
        """What each finished shard cost."""
        found = {}
        for sidecar in folder.glob("*.json"):
            try:
                facts = read_json(sidecar)
                usage = Usage(int(facts["paid_tokens"]["prompt"]), int(facts["paid_tokens"]["answer"]))
            except (EyasError, ValueError, KeyError, TypeError):
                continue
            found[sidecar.stem] = usage.cost(self.options)
        return found

    @contextmanager
    def _state(self) -> Iterator[dict[str, Any]]:
        """The shared state, for this process alone; written back at the end."""
        fd = os.open(self.folder / "state.json", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            try:
                # A line: what a kill between writing and cutting leaves behind it does not matter.
                state = json.loads(os.pread(fd, 1 << 24, 0).partition(b"\n")[0])
            except ValueError:
                state = {"shards": {}, "rates": {}}
            yield state
            raw = json.dumps(state).encode() + b"\n"
            os.pwrite(fd, raw, 0)
            os.ftruncate(fd, len(raw))
        finally:
            os.close(fd)

    # ---- requests in flight

    def take_slot(self) -> int | None:
        """A place among the requests in flight, when one is free."""
        for number in range(self.options.concurrency):
            if number in self._slots:
                continue
            fd = os.open(self.folder / f"slot_{number}", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                continue
            self._slots[number] = fd
            return number
        return None

    def give_slot(self, number: int) -> None:
        os.close(self._slots.pop(number))

    # ---- rates

    def wait_for_rate(self, tokens: int) -> float:
        """Take one request of about so many tokens; 0, or the seconds after which to ask again."""
        wanted = {
            "requests": (self.options.requests_per_minute, 1.0),
            "tokens": (self.options.tokens_per_minute, tokens),
        }
        limits = {name: (limit, need) for name, (limit, need) in wanted.items() if limit}
        if not limits:
            return 0.0
        with self._state() as state:
            now, wait = time.time(), 0.0
            levels = {}
            for name, (limit, need) in limits.items():
                most = max(1.0, limit * _BURST)
                level, then = state["rates"].get(name, (most, now))
                levels[name] = min(most, level + max(now - then, 0.0) * limit / 60)
                lacking = min(need, most) - levels[name]
                wait = max(wait, lacking * 60 / limit)
            for name, (_, need) in limits.items():
                state["rates"][name] = (levels[name] - (need if wait <= 0 else 0), now)
        return max(wait, 0.0)

    def correct_rate(self, tokens: int) -> None:
        """So many tokens more (or fewer) than were taken."""
        if self.options.tokens_per_minute and tokens:
            with self._state() as state:
                if "tokens" in state["rates"]:
                    level, then = state["rates"]["tokens"]
                    state["rates"]["tokens"] = (level - tokens, then)

    # ---- money

    def reserve(self, most: Usage) -> None:
        """Set aside what a request can cost at most; raises EyasError when that would go over `max_spend`."""
        cap, cost = self.options.max_spend, most.cost(self.options)
        if cap is None:
            return
        with self._state() as state:
            shards = state["shards"]
            others = sum(cost for shard, cost in self._others.items() if shard not in shards)
            spent = others + sum(entry["spent"] for entry in shards.values())
            total = spent + sum(entry["reserved"] for entry in shards.values()) + cost
            if total > cap:
                raise EyasError(
                    f"responses.endpoint.max_spend: {spent:,.2f} of {cap:,.2f} are spent, and the next request could go"
                    " over it; finished answers are kept: write a larger max_spend to go on"
                )
            shards[self.shard]["reserved"] += cost

    def settle(self, most: Usage, used: Usage) -> None:
        """A request that was set aside for has cost this."""
        if self.options.max_spend is not None:
            with self._state() as state:
                entry = state["shards"][self.shard]
                entry["reserved"] = max(entry["reserved"] - most.cost(self.options), 0.0)
                entry["spent"] += used.cost(self.options)

    def close(self) -> None:
        for number in list(self._slots):
            self.give_slot(number)
        with self._state() as state:
            state["shards"][self.shard]["reserved"] = 0.0

    def finish(self, shards: set[str]) -> None:
        """The shard is about to be published; delete the shared files when it is the last of the run's `shards`.

        Not before: a job that comes after this one must find what the minute's allowance has left.
        """
        with self._state() as state:
            state["shards"][self.shard]["finished"] = True
            noted = {shard for shard, entry in state["shards"].items() if entry.get("finished")}
            published = {sidecar.stem for sidecar in self.folder.parent.parent.glob("*.json")}
            last = shards <= noted | published
        if last:
            shutil.rmtree(self.folder, ignore_errors=True)
