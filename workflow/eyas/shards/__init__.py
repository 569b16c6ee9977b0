"""Shard names, whole-or-absent files, locks, journals, preallocated tensor files. No torch here."""

from eyas.shards.arrays import map_arrays, write_arrays
from eyas.shards.files import (
    atomic_path,
    checksum,
    describe_file,
    fingerprint,
    publish,
    write_json,
    write_text,
)
from eyas.shards.journal import Journal
from eyas.shards.locks import write_lock
from eyas.shards.names import Shard, is_held_out, shard_files, shards_of
from eyas.shards.ranges import record_path, shards_in, write_record
from eyas.shards.sealed import check_page, checked, is_complete, parse_json, read_json, write_page, write_sealed
from eyas.shards.tensor_file import Layout, TensorFileWriter, TensorSpec, ensure_free, read_header

__all__ = [
    "Journal",
    "Layout",
    "Shard",
    "TensorFileWriter",
    "TensorSpec",
    "atomic_path",
    "check_page",
    "checked",
    "checksum",
    "describe_file",
    "ensure_free",
    "fingerprint",
    "is_complete",
    "is_held_out",
    "map_arrays",
    "parse_json",
    "publish",
    "read_header",
    "read_json",
    "record_path",
    "shard_files",
    "shards_in",
    "shards_of",
    "write_arrays",
    "write_json",
    "write_lock",
    "write_page",
    "write_record",
    "write_sealed",
    "write_text",
]
