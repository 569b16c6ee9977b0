"""Records of finished ranges of shards: written last, they stand for the shards where there are thousands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from eyas.errors import EyasError
from eyas.shards.names import Shard, shards_of
from eyas.shards.sealed import read_json, write_sealed

FORMAT_VERSION = 1


def record_path(folder: str, rows: Shard) -> str:
    """Where the record of a range of shards lies, below the folder of the shards."""
    return f"{folder}/ranges/{rows.name}.json"


def shards_in(rows: Shard, total_rows: int, shard_rows: int) -> list[Shard]:
    """The shards of a run that `rows` consists of; raises EyasError when they are none."""
    if rows.start % shard_rows == 0 and rows.end <= total_rows:
        start = rows.start
        shards = [Shard(start + s.start, start + s.end) for s in shards_of(len(rows), shard_rows)]
        if rows.end == total_rows or rows.end % shard_rows == 0:
            return shards
    raise EyasError(f"--rows {rows.name}: not a range of shards of {shard_rows} of {total_rows} rows")


def write_record(folder: Path, shards: list[Shard]) -> None:
    """Write the record of a range of finished shards in `folder`, from their sidecars; raises EyasError.

    Its content depends on that of the shards alone, so that shards which were made again with the same bytes
    re-run nothing.
    """
    rows = Shard(shards[0].start, shards[-1].end)
    files = {name: facts for shard in shards for name, facts in _files(folder / f"{shard.name}.json")}
    record = Path(record_path(str(folder), rows))
    write_sealed(record, {"format_version": FORMAT_VERSION, "rows": rows.name, "files": files})


def _files(sidecar: Path) -> Iterator[tuple[str, object]]:
    yield from read_json(sidecar, "shard sidecar")["files"].items()
