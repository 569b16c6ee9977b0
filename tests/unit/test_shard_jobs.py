"""How shards are cut into jobs, and which of their files Snakemake is told of."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from eyas.errors import EyasError
from eyas.plan.shard_jobs import MANY_SHARDS, RANGES, ShardJob, StageFiles, cut, shards_per_job
from eyas.shards import Shard, record_path, shards_in, shards_of, write_json, write_record

SUFFIXES = {"tokens": ".safetensors", "facts": ".json"}


@pytest.mark.parametrize("shards", [1, 2, MANY_SHARDS, MANY_SHARDS + 1, 1000, 5000, 20_000, 19_999])
def test_jobs_are_few_and_cover_every_shard_once(shards: int) -> None:
    every = shards_of(shards * 10 - 3, 10)
    jobs = cut("tokenize", every, shards_per_job(shards, None))
    if shards <= MANY_SHARDS:
        assert jobs == [ShardJob("tokenize", ())]
    else:
        assert len(jobs) <= RANGES and [shard for job in jobs for shard in job.shards] == every
    assert shards_per_job(shards, 7) == 7


def stage(folder: Path, count: int, recorded: bool = True) -> StageFiles:
    shards = shards_of(100, 10)
    return StageFiles(str(folder), SUFFIXES, shards, cut("tokenize", shards, count), recorded)


def finish(files: StageFiles) -> None:
    """All shards, then the records, each older than the next."""
    folder = Path(files.folder)
    folder.mkdir(parents=True)
    for shard in files.shards:
        for suffix in SUFFIXES.values():
            (folder / f"{shard.name}{suffix}").touch()
            os.utime(folder / f"{shard.name}{suffix}", (1000, 1000))
    for job in files.jobs:
        record = Path(files.record_of(job))
        record.parent.mkdir(exist_ok=True)
        record.touch()
        os.utime(record, (2000, 2000))


def read_by(files: StageFiles, *shards: Shard) -> list[str]:
    function = files.inputs(ShardJob("extract", shards), "tokens")["records"]
    assert callable(function)
    return function(SimpleNamespace(shard="rows_0-10"))


def test_records_stand_for_shards(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    new = stage(folder, 4)
    records = [record_path(str(folder), Shard(*ends)) for ends in ((0, 40), (40, 80), (80, 100))]
    assert new.wanted() == records
    assert [new.outputs(job) for job in new.jobs] == [{"record": [r], "lost": []} for r in records]
    finish(new)
    done = stage(folder, 4)
    assert done.wanted() == records
    # Readers that are cut in another way take all records that they touch.
    assert read_by(done, *shards_of(100, 10)[3:5]) == records[:2]
    assert read_by(done, *shards_of(100, 10)[4:8]) == records[1:2]
    assert read_by(done) == records[:1]  # the shard of the wildcard
    assert done.all_inputs("tokens")["records"](None) == records


def test_lost_and_changed_shards_are_told(tmp_path: Path) -> None:
    folder = tmp_path / "tokens"
    finish(stage(folder, 4))
    (folder / "rows_50-60.json").unlink()
    (folder / "rows_90-100.safetensors").unlink()
    os.utime(folder / "rows_30-40.safetensors", (3000, 3000))
    found = stage(folder, 4)
    lost = [f"{folder}/rows_50-60.json", f"{folder}/rows_90-100.safetensors"]
    assert [found.outputs(job)["lost"] for job in found.jobs] == [[], lost[:1], lost[1:]]
    assert set(lost) < set(found.wanted())
    changed = f"{folder}/rows_30-40.safetensors"
    shards = shards_of(100, 10)
    assert changed in read_by(found, *shards[2:5]) and changed not in read_by(found, *shards[:3])
    assert read_by(found, shards[3]) == [record_path(str(folder), Shard(0, 40)), changed]
    # A range that was never finished has lost nothing.
    Path(found.record_of(found.jobs[1])).unlink()
    assert stage(folder, 4).outputs(found.jobs[1])["lost"] == []


def test_few_shards_are_all_declared(tmp_path: Path) -> None:
    files = stage(tmp_path / "tokens", 1, recorded=False)
    (job,) = files.jobs
    assert files.outputs(job) == {name: [f"{files.folder}/{{shard}}{end}"] for name, end in SUFFIXES.items()}
    assert files.inputs(job, "tokens") == {"tokens": [f"{files.folder}/{{shard}}.safetensors"]}
    assert files.wanted() == [f"{files.folder}/{shard.name}.safetensors" for shard in files.shards]
    assert len(files.all_inputs("tokens", "facts")["facts"]) == 10


def test_shards_in_a_range() -> None:
    assert shards_in(Shard(20, 45), 45, 10) == [Shard(20, 30), Shard(30, 40), Shard(40, 45)]
    for rows in (Shard(5, 20), Shard(20, 25), Shard(40, 50)):
        with pytest.raises(EyasError, match="not a range of shards of 10 of 45 rows"):
            shards_in(rows, 45, 10)


def test_a_record_holds_its_shards_checksums(tmp_path: Path) -> None:
    shards = shards_of(20, 10)
    for shard in shards:
        file = {"bytes": shard.start, "checksum": f"xxh3_128:{shard.end}"}
        write_json(tmp_path / f"{shard.name}.json", {"files": {f"{shard.name}.jsonl": file}})
    write_record(tmp_path, shards)
    record = tmp_path / "ranges" / "rows_0-20.json"
    values = json.loads(record.read_text())
    assert values["rows"] == "rows_0-20" and values["files"]["rows_10-20.jsonl"]["checksum"] == "xxh3_128:20"
    before = record.read_bytes()
    write_record(tmp_path, shards)
    assert record.read_bytes() == before
    (tmp_path / "rows_0-10.json").unlink()
    with pytest.raises(EyasError, match=r"rows_0-10\.json"):
        write_record(tmp_path, shards)
