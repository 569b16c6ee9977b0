"""How the shards of a stage are cut into jobs, and what Snakemake is told of their files.

A run of few shards has a job a shard, and every shard is an output and an input. That costs Snakemake
milliseconds a file and reference, so a run of many shards has a job a range of them, with a *record* that is
written last: it lists the range's shards with their checksums, and is what the following stages take. Shards
are told to Snakemake where it matters: the missing ones of a range that was finished (they are made again,
alone) and those that were changed since (what depends on them is made again).
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eyas.shards import Shard, record_path

MANY_SHARDS = 256
"""With more of them, jobs make ranges of shards."""
RANGES = 128
"""Ranges that many shards are cut into, at most."""


def shards_per_job(shards: int, configured: int | None) -> int:
    """Shards that a job of answering, tokenising or extracting makes."""
    if configured is not None:
        return configured
    return 1 if shards <= MANY_SHARDS else -(-shards // RANGES)


@dataclass(frozen=True)
class ShardJob:
    """What one rule makes: a contiguous range of shards in one job, or any shard by itself (the wildcard)."""

    rule: str
    shards: tuple[Shard, ...]

    @property
    def name(self) -> str:
        return f"{self.rule}_{self._rows}" if self.shards else self.rule

    @property
    def _rows(self) -> str:
        return Shard(self.shards[0].start, self.shards[-1].end).name

    @property
    def log_name(self) -> str:
        return self._rows if self.shards else "{shard}"

    @property
    def shard_names(self) -> list[str]:
        return [shard.name for shard in self.shards] or ["{shard}"]

    def rows(self, wildcards: Any) -> str:
        """Its rows, named as a shard is: for a resource, because how shards are cut into jobs re-runs nothing."""
        return self._rows if self.shards else str(wildcards.shard)


def cut(rule: str, shards: list[Shard], count: int) -> list[ShardJob]:
    """Jobs of `count` shards. Jobs of one shard come as the wildcard: thousands of rules would be slow."""
    if count == 1 or len(shards) == 1:
        return [ShardJob(rule, ())]
    return [ShardJob(rule, tuple(shards[i : i + count])) for i in range(0, len(shards), count)]


@contextmanager
def _opened(folder: str) -> Iterator[int | None]:
    """A descriptor of the folder; None where there is none, and then no file in it is looked for."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


@dataclass(frozen=True)
class StageFiles:
    """The files of a stage that makes shards, as inputs and outputs of rules.

    `suffixes`: the kinds of files of a shard, by name. `recorded`: whether a range's record stands for its shards.
    `record`: the one record of all shards, where a stage has such a file anyway (the index of the prompts).
    """

    folder: str
    suffixes: Mapping[str, str]
    shards: Sequence[Shard]
    jobs: Sequence[ShardJob]
    recorded: bool
    record: str | None = None

    def outputs(self, job: ShardJob) -> dict[str, list[str]]:
        """Outputs of a job, by name."""
        if self.recorded:
            # First: Snakemake tries a rule's outputs in order when it looks for a file.
            return {"record": [self.record_of(job)], "lost": self._lost(job)}
        return self._named(job.shard_names, *self.suffixes)

    def inputs(self, job: ShardJob, *names: str) -> dict[str, list[str] | Callable[[Any], list[str]]]:
        """What a job of another stage reads of its shards, by name."""
        if not self.recorded:
            return {**self._named(job.shard_names, *names)}

        def files(wildcards: Any) -> list[str]:
            return self._records(job.shards or (Shard.parse(wildcards.shard),))

        return {"records": files}

    def all_inputs(self, *names: str) -> dict[str, list[str] | Callable[[Any], list[str]]]:
        """What a job that reads all shards takes, by name."""
        if not self.recorded:
            return {**self._named([shard.name for shard in self.shards], *names)}

        def files(wildcards: Any) -> list[str]:
            return self._records(self.shards)

        return {"records": files}

    def wanted(self, wildcards: Any = None) -> list[str]:
        """What the run as a whole asks for, so that a deleted shard is noticed when its heirs are there."""
        if not self.recorded:
            main, *_ = self.suffixes
            return self._named([shard.name for shard in self.shards], main)[main]
        return [file for job in self.jobs for file in (self.record_of(job), *self._lost(job))]

    def record_of(self, job: ShardJob) -> str:
        return self.record or record_path(self.folder, Shard(job.shards[0].start, job.shards[-1].end))

    def _named(self, shards: Iterable[str], *names: str) -> dict[str, list[str]]:
        shards = list(shards)
        return {name: [f"{self.folder}/{shard}{self.suffixes[name]}" for shard in shards] for name in names}

    def _lost(self, job: ShardJob) -> list[str]:
        return self._state.get(job.name, ([], {}))[0]

    @cached_property
    def _starts(self) -> list[int]:
        return [job.shards[0].start for job in self.jobs]

    @cached_property
    def _state(self) -> dict[str, tuple[list[str], dict[Shard, list[str]]]]:
        """By finished range: its missing files, and those that were changed since. Each file is looked at once."""
        found = {}
        # By name in the open folder, without a path to follow: there may be a hundred thousand of them.
        with _opened(self.folder) as folder:
            for job in self.jobs:
                try:
                    finished = os.stat(self.record_of(job)).st_mtime_ns
                except OSError:
                    continue
                lost: list[str] = []
                changed: dict[Shard, list[str]] = {}
                for shard in job.shards:
                    name = shard.name
                    for suffix in self.suffixes.values():
                        try:
                            if os.stat(name + suffix, dir_fd=folder).st_mtime_ns > finished:
                                changed.setdefault(shard, []).append(f"{self.folder}/{name}{suffix}")
                        except OSError:
                            lost.append(f"{self.folder}/{name}{suffix}")
                found[job.name] = lost, changed
        return found

    def _records(self, shards: Sequence[Shard]) -> list[str]:
        """The records of contiguous shards, and of these what was changed since."""
        first = bisect_right(self._starts, shards[0].start) - 1
        last = bisect_right(self._starts, shards[-1].start)
        jobs = self.jobs[first:last]
        files = list(dict.fromkeys(self.record_of(job) for job in jobs))
        for job in jobs:
            changed = self._state.get(job.name, ([], {}))[1]
            files += [file for shard in shards if shard in changed for file in changed[shard]] if changed else []
        return files
