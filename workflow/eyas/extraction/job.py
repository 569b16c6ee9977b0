"""One extraction job: a range of shards with the target loaded once."""

from __future__ import annotations

import logging
import os
from contextlib import closing, suppress
from pathlib import Path

from eyas.extraction.engines.base import Engine
from eyas.extraction.shard import extract_shard
from eyas.extraction.space import describe, plan_space, require_space
from eyas.shards import Shard, checksum, read_json, shards_in, write_lock, write_record
from eyas.shards.files import link_file, sync_folder
from eyas.target.tokenizer import TargetReference, text_config

log = logging.getLogger(__name__)

FINISHED = ".finished"


def extract_rows(
    run: Path, rows: Shard, total_rows: int, shard_rows: int, target: TargetReference, layers: list[int], dtype: str,
    engine: Engine, max_failed_rows: int, recorded: bool = False,
) -> None:  # fmt: skip
    """Write the hidden states of all shards of a run that lie in `rows`; raises EyasError.

    Several shards are finished one by one in `hidden_states/.finished`, where a failure of the job does not reach
    them (Snakemake deletes the outputs of a failed job, and all outputs of a job before it runs again), and linked
    to their places at the end. The links there stay: they take no room, and when a shard is deleted, the job
    that runs again makes that one alone. `recorded`: a record of the range says that
    it is finished.
    """
    folder = run / "hidden_states"
    kept = folder / FINISHED
    shards = shards_in(rows, total_rows, shard_rows)
    hidden_size = int(text_config(target).hidden_size)
    space = plan_space(run, total_rows, shard_rows, hidden_size, dtype)
    for line in describe(space):
        log.info("%s", line)
    if space.exact:
        require_space(space)
    with closing(engine):
        if not recorded and len(shards) == 1 and not (kept / f"{rows.name}.json").exists():
            extract_shard(
                _tokens(run, shards[0]), folder / f"{rows.name}.safetensors", target, layers, dtype, engine=engine,
                max_failed_rows=max_failed_rows,
            )  # fmt: skip
            return
        with write_lock(folder / f"{rows.name}.job"):
            _drop_damaged(kept, shards)
            if recorded:
                _keep(folder, kept, shards)
            for shard in shards:
                extract_shard(
                    _tokens(run, shard), kept / f"{shard.name}.safetensors", target, layers, dtype, engine=engine,
                    max_failed_rows=max_failed_rows, staging_root=folder,
                )  # fmt: skip
            _link(kept, folder, shards)
            if recorded:
                write_record(folder, shards)


def _tokens(run: Path, shard: Shard) -> Path:
    return run / "tokens" / f"{shard.name}.safetensors"


def _drop_damaged(kept: Path, shards: list[Shard]) -> None:
    """Shards that were linked before: somebody deleted one, perhaps because its contents were damaged."""
    for shard in shards:
        marker, path = kept / f"{shard.name}.linked", kept / f"{shard.name}.safetensors"
        if not marker.exists():
            continue
        if path.with_suffix(".json").exists():
            facts = read_json(path.with_suffix(".json"), "shard sidecar")
            if not path.exists() or checksum(path) != facts.get("checksum"):
                log.warning("%s is damaged; making it again.", path)
                path.with_suffix(".json").unlink()
                path.unlink(missing_ok=True)
        marker.unlink()


def _keep(folder: Path, kept: Path, shards: list[Shard]) -> None:
    """Shards of another cut into jobs, which Snakemake left where they are."""
    kept.mkdir(parents=True, exist_ok=True)
    for shard in shards:
        there = [folder / f"{shard.name}{suffix}" for suffix in (".safetensors", ".json")]
        if not (kept / there[1].name).exists() and all(file.exists() for file in there):
            for file in there:
                (kept / file.name).unlink(missing_ok=True)
                with suppress(OSError):  # without hard links the shard is made anew
                    os.link(file, kept / file.name)


def _link(kept: Path, folder: Path, shards: list[Shard]) -> None:
    for shard in shards:
        for suffix in (".safetensors", ".json"):  # the sidecar last
            link_file(kept / f"{shard.name}{suffix}", folder / f"{shard.name}{suffix}")
    sync_folder(folder)
    for shard in shards:
        (kept / f"{shard.name}.linked").touch()
