"""How extraction is cut into jobs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eyas.config import Config
from eyas.shards import Shard


@dataclass(frozen=True)
class ExtractionJob:
    """What one rule makes: a contiguous range of shards in one job, or any shard by itself (the wildcard)."""

    shards: tuple[Shard, ...]

    @property
    def name(self) -> str:
        return f"extract_{self._rows}" if self.shards else "extract"

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


def extraction_jobs(config: Config, shards: list[Shard]) -> list[ExtractionJob]:
    """The shards in jobs of `shards_per_job`, or one job a replica, as alike in size as can be.

    Jobs of one shard come as the wildcard: thousands of rules would be slow.
    """
    extraction = config.extraction
    count = extraction.shards_per_job
    if count is None and extraction.engine == "transformers":
        count = 1
    if count is None:
        jobs = min(extraction.replicas, len(shards))
        cuts = [len(shards) * i // jobs for i in range(jobs + 1)]
    else:
        cuts = [*range(0, len(shards), count), len(shards)]
    if len(cuts) > len(shards):
        return [ExtractionJob(())]
    return [ExtractionJob(tuple(shards[a:b])) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
