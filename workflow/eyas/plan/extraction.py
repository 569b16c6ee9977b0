"""How extraction is cut into jobs."""

from __future__ import annotations

from eyas.config import Config
from eyas.plan.shard_jobs import ShardJob, cut, shards_per_job
from eyas.shards import Shard


def extraction_jobs(config: Config, shards: list[Shard]) -> list[ShardJob]:
    """The shards in jobs of `shards_per_job`, or one job a replica, as alike in size as can be."""
    extraction = config.extraction
    count = extraction.shards_per_job
    if count is None and extraction.engine == "transformers":
        count = shards_per_job(len(shards), config.data.shards_per_job)
    if count is not None:
        return cut("extract", shards, count)
    jobs = min(extraction.replicas, len(shards))
    cuts = [len(shards) * i // jobs for i in range(jobs + 1)]
    if jobs == len(shards):
        return cut("extract", shards, 1)
    return [ShardJob("extract", tuple(shards[a:b])) for a, b in zip(cuts[:-1], cuts[1:], strict=True)]
