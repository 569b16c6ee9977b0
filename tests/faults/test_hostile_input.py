"""Input made to break things: no crash but our own error, no blow-up of memory, no path outside the run."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from eyas.config import check_config, read_config
from eyas.config.schema import PromptFiles
from eyas.conversations.prompts import write_prompts
from eyas.errors import EyasError
from eyas.extraction.manifest import read_manifest
from eyas.shards import Shard, map_arrays, read_header, read_json, write_arrays
from eyas.tokenization import read_tokens
from ledger import Faults
from workflow_runs import CHECKOUT, Workdir, tiny_settings

DEEP = 200_000
TOKENS = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\\u0000",
    b"\\ud800",
    b"null",
    b"1e999",
    b"-0",
    b"NaN",
    b"\xff",
    b"\x00",
]
NASTY: list[Any] = [
    None, True, -1, 0, 1 << 62, 1 << 300, -(1 << 63), 1e308, float("nan"), float("inf"), "", "\0", "\ud800", "../../x",
    "x" * 10_000, [], {}, [[]], {"": {}}, [1, "a", None], "${HOME}", "{row}", "rows_0-20", b"bytes",
]  # fmt: skip


def mutate(chance: random.Random, content: bytes) -> bytes:
    """Up to five changes: bits, cuts, splices, JSON's own signs, nesting."""
    data = bytearray(content)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(data) + 1)
        kind = chance.randrange(6)
        if kind == 0 and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        elif kind == 1:
            del data[at : at + chance.randrange(1, 40)]
        elif kind == 2:
            data[at:at] = chance.choice(TOKENS) * chance.randrange(1, 4)
        elif kind == 3:
            begin = chance.randrange(len(data) + 1)
            data[at:at] = data[begin : begin + chance.randrange(1, 200)]
        elif kind == 4:
            data[at:at] = chance.choice([b"[", b'{"a":']) * chance.choice([10, 5000])
        else:
            data[at:at] = chance.randbytes(chance.randrange(1, 9))
    return bytes(data)


def only_our_error(call: Callable[[], object]) -> None:
    """Anything but EyasError is a fault of ours."""
    try:
        call()
    except EyasError as exc:
        assert str(exc).strip()


# ---- prompt files


def prompt_files(folder: Path) -> list[Path]:
    """A file of each kind, with records of each format."""
    records: list[dict[str, Any]] = [
        {"prompt": "what is it ?", "id": "../../x", "source": "../../../etc"},
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "tools": "[]"},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "ü"}]}], "system": "s"},
    ]
    import pyarrow as pa
    from pyarrow import parquet

    lines = "".join(json.dumps(record) + "\n" for record in records).encode()
    files = {"a.jsonl": lines, "b.json": json.dumps(records).encode(), "c.jsonl.gz": gzip.compress(lines)}
    from zstandard import ZstdCompressor

    files["d.jsonl.zst"] = ZstdCompressor().compress(lines)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    parquet.write_table(pa.table({"prompt": ["a", "b"], "source": ["x", "y"]}), folder / "e.parquet")
    return [*(folder / name for name in files), folder / "e.parquet"]


def test_prompt_readers(faults: Faults, tmp_path: Path) -> None:
    for file in prompt_files(tmp_path):
        whole = file.read_bytes()
        for number in range(faults.count(40, 4000)):
            file.write_bytes(mutate(faults.random, whole))
            with faults.tried(f"mutated {''.join(file.suffixes)} prompts", number):
                out = tmp_path / "out"
                only_our_error(lambda file=file, out=out: write_prompts([PromptFiles(path=str(file))], 2, 1, 5, out))
        file.write_bytes(whole)
    written = {path.parent.name for path in tmp_path.rglob("rows_*")}
    assert written <= {"out"}


# ---- bombs, in a process of their own that may take no more than so much


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[1]), int(sys.argv[1])))
from pathlib import Path
from eyas.errors import EyasError
from eyas.conversations.sources import count_file, read_records
from eyas.shards import read_header, read_json
import pyarrow, zstandard
name = sys.argv[3]
calls = {
    "records": lambda path: print(sum(record.unreadable is None for record in read_records(str(path)))),
    "count": lambda path: print(count_file(str(path))),
    "header": read_header,
    "json": read_json,
}
try:
    calls[name](Path(sys.argv[2]))
except EyasError as exc:
    print("EyasError:", str(exc)[:300])
"""


def limited(call: str, file: Path, megabytes: int = 1600) -> str:
    """What a call of the package says when it may take no more than so much address space."""
    environment = os.environ | {
        "PYTHONPATH": str(CHECKOUT / "workflow"),
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(megabytes << 20), str(file), call], capture_output=True, text=True,
        timeout=600, env=environment,
    )  # fmt: skip
    assert done.returncode == 0 and "MemoryError" not in done.stderr, done.stderr[-1500:]
    return done.stdout


def test_bombs(faults: Faults, tmp_path: Path) -> None:
    good = json.dumps({"prompt": "what ?"}).encode() + b"\n"
    nested = tmp_path / "nested.jsonl"
    nested.write_bytes(good + b"[" * DEEP + b"\n" + b'{"a":' * DEEP + b"\n" + good)
    with faults.tried("JSON nested 200,000 times"):
        assert limited("records", nested).strip() == "2"
    deep = tmp_path / "deep.json"
    deep.write_bytes(b"[" * DEEP)
    for call in ("records", "json"):
        with faults.tried("JSON nested 200,000 times", call):
            assert limited(call, deep).startswith("EyasError")
    if not faults.all:
        return
    line = tmp_path / "line.jsonl"
    with open(line, "wb") as file:
        file.write(good)
        for _ in range(1024):
            file.write(b"x" * (1 << 20))
        file.write(b"\n" + good)
    with faults.tried("a line of 1 GB"):
        assert limited("records", line).strip() == "2"
    line.unlink()
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes(good + b"[" + b"[]," * (20 << 20) + b"[]]\n" + good)
    with faults.tried("a line of twenty million lists"):
        assert limited("records", wide).strip() == "2"
    many = tmp_path / "wide.json"
    many.write_bytes(b'[{"prompt": [' + b"[]," * (20 << 20) + b"[]]}]")
    with faults.tried("a record of twenty million lists"):
        assert limited("records", many).startswith("EyasError")
    for suffix, packed in (("gz", gzip_bomb()), ("zst", zstd_bomb())):
        bomb = tmp_path / f"bomb.jsonl.{suffix}"
        bomb.write_bytes(packed)
        with faults.tried(f"a {suffix} file that unpacks to 1 GB in one line"):
            assert limited("records", bomb).strip() == "0"


def gzip_bomb() -> bytes:
    import zlib

    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = b"x" * (1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(1024)), packer.flush()])


def zstd_bomb() -> bytes:
    from zstandard import ZstdCompressor

    packer = ZstdCompressor(level=3).compressobj()
    block = b"x" * (1 << 20)
    return b"".join([*(packer.compress(block) for _ in range(1024)), packer.flush()])


def test_headers_that_claim_too_much(faults: Faults, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    claims: dict[str, bytes] = {
        "2^62 bytes of header": (1 << 62).to_bytes(8, "little") + b"{}",
        "2^64 - 1 bytes of header": b"\xff" * 8 + b"{}",
        "a header as long as the file": (1 << 20).to_bytes(8, "little") + b"{" * 100,
    }
    for shape in ([1 << 62], [1 << 31, 1 << 31], [-1, -8], [1 << 62, 0], [1.5], ["a"], [True], None):
        entry = {"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 8]}}
        text = json.dumps(entry).encode()
        claims[f"a tensor of shape {shape}"] = len(text).to_bytes(8, "little") + text + b"\0" * 8
    for offsets in ([0, 1 << 62], [-8, 0], [8, 0], [0, 8, 9], "ab", [0.0, 8.0]):
        text = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
        claims[f"a tensor at {offsets}"] = len(text).to_bytes(8, "little") + text + b"\0" * 8
    for what, content in claims.items():
        file.write_bytes(content)
        with faults.tried("a safetensors header that lies", what), pytest.raises(EyasError):
            read_header(file)
    file.write_bytes(claims["2^62 bytes of header"])
    with faults.tried("a safetensors header that lies", "memory"):
        assert limited("header", file, 1200).startswith("EyasError")


def test_safetensors_headers(faults: Faults, tmp_path: Path) -> None:
    """Mutated shards of tokens: an error of ours, or arrays that lie inside the file."""
    file = tmp_path / "rows_0-3.safetensors"
    arrays = {
        "input_ids": np.arange(9, dtype=np.int32), "loss_mask": np.ones(9, dtype=np.uint8),
        "offsets": np.array([0, 3, 5, 9]), "row_ids": np.arange(3),
    }  # fmt: skip
    write_arrays(file, arrays, {"format": "eyas.tokens"})
    whole = file.read_bytes()
    for number in range(faults.count(150, 20_000)):
        content = mutate(faults.random, whole[:400]) + whole[400:] if number % 2 else mutate(faults.random, whole)
        file.write_bytes(content)
        with faults.tried("a mutated safetensors file", number):
            only_our_error(lambda: read_header(file))
            only_our_error(lambda: read_tokens(file))
            only_our_error(lambda: map_arrays(file, ("input_ids",)))


# ---- configuration and manifest


def changed(chance: random.Random, values: Any) -> Any:
    """A copy with one to three places replaced by something nasty."""
    copy = json.loads(json.dumps(values))
    for _ in range(chance.randrange(1, 4)):
        inner, key = copy, None
        while True:
            keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = chance.choice(keys)
            if isinstance(inner[key], dict | list) and inner[key] and chance.random() < 0.7:
                inner = inner[key]
                continue
            break
        if key is not None:
            if isinstance(inner, dict) and chance.random() < 0.2:
                inner[str(chance.choice(NASTY))] = inner.pop(key)
            else:
                inner[key] = deepcopy(chance.choice(NASTY))
    return copy


def test_configurations(faults: Faults, tmp_path: Path) -> None:
    values = tiny_settings(tmp_path / "target")
    for number in range(faults.count(150, 20_000)):
        nasty = changed(faults.random, values)
        with faults.tried("a configuration with nasty values", number):
            only_our_error(lambda nasty=nasty: check_config(nasty, "config.yaml"))
    file = tmp_path / "config.yaml"
    whole = yaml.safe_dump(values).encode()
    for number in range(faults.count(60, 4000)):
        file.write_bytes(mutate(faults.random, whole))
        with faults.tried("a mutated configuration file", number):
            only_our_error(lambda: read_config(file))


def test_manifests(faults: Faults, finished: Workdir) -> None:
    path = finished.run_folder / "hidden_states" / "data_config.json"
    values = read_json(path)
    whole = path.read_bytes()
    for number in range(faults.count(100, 10_000)):
        if number % 2:
            path.write_bytes(mutate(faults.random, whole))
        else:
            path.write_text(json.dumps(changed(faults.random, values), default=str))
        with faults.tried("a mutated manifest", number):
            only_our_error(lambda: read_manifest(path))


@pytest.mark.parametrize("name", ["../../x", "/tmp/x", "a/b", "..", ".", "", "a\0b", "-rf", "a\nb", "~", "x" * 300])
def test_names_that_are_paths(name: str, faults: Faults, tmp_path: Path) -> None:
    """Of the run, of a drafter, of a prompt set: no file is ever made outside the run's folder."""
    values = tiny_settings(tmp_path / "target")
    places: list[dict[str, Any]] = [
        values | {"name": name},
        values | {"drafters": {name: values["drafters"]["small"]}},
        values | {"evaluation": {"prompt_sets": {name: {"path": "prompts.jsonl"}}}},
    ]
    for place in places:
        with faults.tried("a name that is a path", repr(name)), pytest.raises(EyasError):
            check_config(place, "config.yaml")
    with faults.tried("a name that is a path", repr(name)), pytest.raises(EyasError):
        Shard.parse(f"rows_0-{name}")
