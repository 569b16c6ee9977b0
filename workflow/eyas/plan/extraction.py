"""How extraction is cut into jobs, and the command line of the server that a job starts."""

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


def server_command(config: Config) -> list[str]:
    """The server that a job starts, but for its port and key: those are the job's own, and on loopback."""
    target, options = config.target, config.extraction.sglang
    command = [options.python, "-m", "sglang.launch_server", "--model-path", target.path]
    if target.revision:
        command += ["--revision", target.revision]
    if target.trust_remote_code:
        command += ["--trust-remote-code"]
    command += ["--dtype", target.dtype, "--tp", str(options.tp or max(config.extraction.gpu, 1))]
    for name, value in (
        ("--quantization", options.quantization),
        ("--mem-fraction-static", options.mem_fraction),
        ("--chunked-prefill-size", options.chunked_prefill),
    ):
        if value is not None:
            command += [name, str(value)]
    # Native capture, without its draft model; whole prompts only; the plugin takes the states from there.
    command += ["--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states", "--disable-radix-cache"]
    return [*command, "--skip-server-warmup", *options.extra_args]
