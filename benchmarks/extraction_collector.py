"""The collector alone: dumps that are there already go into shards, beside plain sequential writing of the same bytes.

The server is a stand-in in this process that answers at once, and the head gives no arg max: both are the target's
work. The rest is what a job runs: requests in threads, the checks of each dump, the shard, its journal, its checksum.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eyas.config.sglang import Sglang
from eyas.extraction.engines.base import Captured
from eyas.extraction.engines.sglang.client import Reply
from eyas.extraction.engines.sglang.collector import Collector, Shape
from eyas.extraction.engines.sglang.dumps import DumpFolder
from eyas.extraction.engines.sglang.engine import SglangEngine
from eyas.extraction.manifest import write_manifest
from eyas.extraction.shard import extract_shard
from eyas.extraction.space import bytes_a_token, plan_space
from eyas.shards import Shard, describe_file, shards_of, write_json
from eyas.shards.arrays import write_arrays
from eyas.target.tokenizer import TargetReference
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "workflow" / "capture"))
from eyas_capture.writer import Dump as DumpWriter

LAYERS, DTYPE = [2, 30, 58], "bfloat16"
VOCABULARY = 163_840
ROW_TOKENS = 512  # on average
BLOCK = 8 << 20  # of the plain writing
SOURCE = 256 << 20  # bytes that it writes again and again: more than any processor's cache


class FixedWidthDumps(DumpFolder):
    """Request ids of one length: a dump is made under a place holder, which its header then lets go."""

    def rid(self, number: int) -> str:
        return f"eyas-{self.token}-{number:08x}"


class ReadyServer:
    """Hands over dumps that were made before, one for each row. It never goes away."""

    absences = 0

    def __init__(self, dumps: FixedWidthDumps, hidden_size: int, most_tokens: int) -> None:
        self.dumps, self.hidden_size = dumps, hidden_size
        random = torch.Generator().manual_seed(1)
        self.aux = torch.randn(most_tokens, 3 * hidden_size, generator=random).to(torch.bfloat16)
        self.last = torch.randn(most_tokens, hidden_size, generator=random).to(torch.bfloat16)
        self._ready: dict[bytes, queue.SimpleQueue[str]] = {}

    def interrupt(self) -> None:
        """Nobody waits for it."""

    def prepare(self, sequences: Sequence[np.ndarray]) -> None:
        """A dump for each of the sequences, made by the plugin's own writer."""
        for number, ids in enumerate(sequences):
            rid = self.dumps.rid(0xF0000000 + number)
            dump = DumpWriter(str(self.dumps.path), rid, ids.tolist(), LAYERS, 1.0)
            dump.add(0, self.aux[: len(ids)], self.last[: len(ids)])
            dump.finish()
            self._ready.setdefault(ids.tobytes(), queue.SimpleQueue()).put(rid)

    @property
    def client(self) -> ReadyServer:
        return self

    def capture(self, rid: str, ids: list[int]) -> Reply:
        """Give the row's dump the request's id, in its header and name."""
        made = self._ready[np.array(ids, dtype=np.int32).tobytes()].get_nowait()
        with open(self.dumps.dump(made), "r+b") as file:
            place = file.read(4096).index(made.encode())
            file.seek(place)
            file.write(rid.encode())
        os.rename(self.dumps.dump(made), self.dumps.dump(rid))
        return Reply(f"{rid}.safetensors", 0)

    def start(self) -> None: ...

    def wait(self) -> None: ...

    def close(self) -> None: ...


class NoHead:
    """Every next token is 0."""

    def best(self, states: torch.Tensor) -> np.ndarray:
        return np.zeros(len(states), dtype=np.int32)


class ReplayEngine:
    """The SGLang engine's collector with its default settings, in front of a server that is done already."""

    journal_seconds = SglangEngine.journal_seconds
    dumps = None
    way = {"engine": "replay"}

    def __init__(self, server: ReadyServer) -> None:
        options = Sglang()
        shape = Shape(LAYERS, server.hidden_size, 8 * server.hidden_size + 4)
        self.collector = Collector(
            server, server.dumps, shape, NoHead(), options.concurrency, options.max_tries, int(options.dump_gb * 1e9)
        )  # type: ignore[arg-type]

    def begin(self) -> None: ...

    def capture(
        self, name: str, sequences: Sequence[np.ndarray], finished: frozenset[int]
    ) -> Iterator[list[tuple[int, Captured]]]:
        yield from self.collector.capture(sequences, [i for i in range(len(sequences)) if i not in finished])

    def close(self) -> None: ...


@dataclass
class Measured:
    """Bytes a second of each round, collector and plain writing; what the plan was off by."""

    collector: list[float]
    plain: list[float]
    plan_error: float
    shard_bytes: int


def write_target(folder: Path, hidden_size: int) -> TargetReference:
    """The config of a target, which is all that the writing of a shard needs of it."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size, "num_hidden_layers": 61, "num_attention_heads": hidden_size // 128,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": VOCABULARY,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return TargetReference(str(folder), dtype=DTYPE)


def write_tokens(path: Path, shard: Shard, random: np.random.Generator) -> list[np.ndarray]:
    """A shard of tokens, rows of about ROW_TOKENS; returns them."""
    lengths = random.integers(ROW_TOKENS * 7 // 8, ROW_TOKENS * 9 // 8 + 1, len(shard))
    sequences = [random.integers(0, VOCABULARY, n).astype(np.int32) for n in lengths]
    arrays = {
        "input_ids": np.concatenate(sequences),
        "loss_mask": np.ones(int(lengths.sum()), dtype=np.uint8),
        "offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        "row_ids": np.arange(shard.start, shard.end, dtype=np.int64),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_arrays(path, arrays, {"format": "eyas.tokens"})
    facts = {
        "format_version": 1, "tokenizer_hash": "benchmark", "chat_template_hash": "benchmark", "rows": len(shard),
        "sequences": len(shard), "tokens": int(lengths.sum()), "skipped": [], "files": {path.name: describe_file(path)},
    }  # fmt: skip
    write_json(path.with_suffix(".json"), facts)
    return sequences


def plain_seconds(path: Path, nbytes: int, source: memoryview) -> float:
    """Seconds of writing so many bytes from memory, one block after the other, into an allocated file, and fsync."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
        started = time.perf_counter()
        position = 0
        while position < nbytes:
            begin = position % len(source)
            position += os.pwrite(fd, source[begin : begin + min(BLOCK, nbytes - position)], position)
        os.fsync(fd)
        return time.perf_counter() - started
    finally:
        os.close(fd)
        path.unlink()
        os.sync()


class Bench:
    """Shards of a run in `folder`, each from dumps that lie ready in `memory`."""

    def __init__(self, folder: Path, dumps: FixedWidthDumps, rows: int, shard_rows: int, hidden_size: int) -> None:
        self.run, self.hidden_size, self.rows, self.shard_rows = folder / "run", hidden_size, rows, shard_rows
        self.target = write_target(folder / "target", hidden_size)
        self.shards = shards_of(rows, shard_rows)
        random = np.random.default_rng(1)
        self.sequences = {s: write_tokens(self._path("tokens", s), s, random) for s in self.shards}
        self.server = ReadyServer(dumps, hidden_size, ROW_TOKENS * 9 // 8)

    def _path(self, kind: str, shard: Shard) -> Path:
        return self.run / kind / f"{shard.name}.safetensors"

    def nbytes(self, shard: Shard) -> int:
        return sum(map(len, self.sequences[shard])) * bytes_a_token(self.hidden_size, DTYPE)

    def seconds(self, shard: Shard) -> float:
        """Write one shard; the making of its dumps does not count."""
        self.server.prepare(self.sequences[shard])
        engine = ReplayEngine(self.server)
        os.sync()
        started = time.perf_counter()
        extract_shard(
            self._path("tokens", shard), self._path("hidden_states", shard), self.target, LAYERS, DTYPE, engine=engine
        )
        taken = time.perf_counter() - started
        forget(self._path("hidden_states", shard))
        return taken

    def plan_error(self) -> float:
        """What the plan, made before, and `du` of the finished run differ by."""
        planned = plan_space(self.run, self.rows, self.shard_rows, self.hidden_size, DTYPE)
        states = self.run / "hidden_states"
        write_manifest([self._path("hidden_states", s) for s in self.shards], self.rows, states / "data_config.json")
        return plan_error(planned.total_bytes, planned.disk_bytes, states)

    def check(self, shard: Shard) -> None:
        """Stop when the shard does not hold the states that were handed over."""
        first, last = self.sequences[shard][0], self.sequences[shard][-1]
        found = load_file(self._path("hidden_states", shard))
        for name, states in (("aux_hidden_states", self.server.aux), ("last_hidden_state", self.server.last)):
            begin, end = found[name][: len(first)], found[name][-len(last) :]
            if not (torch.equal(begin, states[: len(first)]) and torch.equal(end, states[: len(last)])):
                raise SystemExit(f"error: {shard.name}: {name} are not the states of the dumps")


def forget(path: Path) -> None:
    """Drop a file from the page cache: the next one to write, whoever it is, then finds memory that was used before.

    Memory that was never used is slow where a virtual machine gets it page by page: a tenth of the speed.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def measure(folder: Path, memory: Path, total_bytes: int, rounds: int, hidden_size: int = 7168) -> Measured:
    """Write shards of `total_bytes` in all into `folder`, one a round (and one before).

    The dumps of one shard at a time lie in `memory`.
    """
    rows = max(round(total_bytes / rounds / (ROW_TOKENS * bytes_a_token(hidden_size, DTYPE))), 1)
    source = memoryview(np.random.default_rng(2).bytes(SOURCE))
    collector, plain = [], []
    dumps = FixedWidthDumps(memory, own=True)
    try:
        bench = Bench(folder, dumps, rows * (rounds + 1), rows, hidden_size)
        for turn, shard in enumerate(bench.shards):
            nbytes = bench.nbytes(shard)
            for ours in (False, True) if turn % 2 else (True, False):  # who comes first takes turns, too
                if ours:
                    collector.append(nbytes / bench.seconds(shard))
                else:
                    plain.append(nbytes / plain_seconds(folder / "plain", nbytes, source))
            if not turn:  # to warm up: imports, and memory that nobody had used yet
                collector, plain = [], []
                continue
            print(
                f"round {turn} of {rounds}: collector {collector[-1] / 1e6:,.0f} MB/s,"
                f" plain writing {plain[-1] / 1e6:,.0f} MB/s",
                file=sys.stderr,
            )
        bench.check(bench.shards[-1])
        return Measured(collector, plain, bench.plan_error(), nbytes)
    finally:
        dumps.close()


def plan_error(total: int | None, disk: int | None, folder: Path) -> float:
    """What the plan was off by, as a share of `du`: apparent bytes or blocks, the larger one."""
    assert total and disk
    errors = []
    for planned, options in ((total, ["--apparent-size", "-B1"]), (disk, ["-B1"])):
        found = int(subprocess.check_output(["du", "-s", *options, str(folder)]).split()[0])
        errors.append(abs(planned - found) / found)
    return max(errors)


def room(folder: Path, memory: Path, wanted: int, rounds: int) -> int:
    """The bytes that can be written: the shards and a plain file on the disk, one shard's dumps in memory."""
    disk, free = shutil.disk_usage(folder).free, shutil.disk_usage(memory).free
    with open("/proc/meminfo", encoding="utf-8") as file:
        available = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    most = min(disk * 0.8 * rounds / (rounds + 1), min(free * 0.7, available * 0.4) * rounds)
    return int(min(wanted, most))


def result(found: Measured) -> dict[str, Any]:
    """Medians of the rounds, as the JSON line has them: of each round's ratio, of the speeds."""
    ours, plain = float(np.median(found.collector)), float(np.median(found.plain))
    return {
        "collector_ratio": round(float(np.median(np.divide(found.collector, found.plain))), 3),
        "plan_error": round(found.plan_error, 7),
        "collector_mb_per_s": round(ours / 1e6, 1), "plain_write_mb_per_s": round(plain / 1e6, 1),
    }  # fmt: skip
