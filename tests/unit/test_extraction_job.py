"""Extraction jobs of several shards, how shards are cut into jobs, and the command of the server they start."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from drafter_reference import random_rows, save_llama, write_tokens
from eyas.config import check_config
from eyas.errors import EyasError
from eyas.extraction.engines.base import Captured, FailedRow
from eyas.extraction.engines.transformers import TransformersEngine
from eyas.extraction.job import extract_rows
from eyas.plan.extraction import extraction_jobs
from eyas.plan.servers import capture_command
from eyas.shards import Shard, checksum, shards_of
from eyas.target.tokenizer import TargetReference

LAYERS = [0, 1, 3]
LENGTHS = [5, 1, 17, 9, 9, 3, 12, 4]
ROWS, PER_SHARD = len(LENGTHS), 3
NAMES = ["rows_0-3", "rows_3-6", "rows_6-8"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetReference:
    return save_llama(tmp_path_factory.mktemp("target") / "target")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for shard in shards_of(ROWS, PER_SHARD):
        rows = random_rows(LENGTHS[shard.start : shard.end], first_row=shard.start, seed=shard.start)
        write_tokens(tmp_path / "run" / "tokens" / f"{shard.name}.safetensors", rows)
    return tmp_path / "run"


class Engine:
    """transformers, which notes what it is asked for, and fails where it is told to."""

    journal_seconds = 0.0
    dumps: Any = None
    way: dict[str, Any] = {}

    def __init__(self, target: TargetReference, fails: tuple[str, ...] = ()) -> None:
        self._engine = TransformersEngine(target, LAYERS, 1, 0)
        self.fails = fails
        self.begun = self.closed = 0
        self.asked: list[tuple[str, list[int]]] = []

    def begin(self) -> None:
        self.begun += 1
        self._engine.begin()

    def capture(self, name: str, sequences: Any, finished: frozenset[int]) -> Generator[list[tuple[int, Captured]]]:
        self.asked.append((name, [i for i in range(len(sequences)) if i not in finished]))
        for batch in self._engine.capture(name, sequences, finished):
            yield [(i, FailedRow("as told") if name in self.fails and i == 1 else row) for i, row in batch]

    def close(self) -> None:
        self.closed += 1
        self._engine.close()

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.asked]


def extract(run: Path, target: TargetReference, engine: Engine, rows: str = "rows_0-8") -> None:
    try:
        extract_rows(run, Shard.parse(rows), ROWS, PER_SHARD, target, LAYERS, "float32", engine, 0)
    finally:
        assert engine.closed == 1


def files(run: Path) -> dict[str, Path]:
    return {name: run / "hidden_states" / f"{name}.safetensors" for name in NAMES}


def kept(path: Path) -> Path:
    return path.parent / ".finished" / path.name


def alone(run: Path, target: TargetReference, folder: Path) -> dict[str, str]:
    """Checksums of the shards, each made by itself."""
    from eyas.extraction.shard import extract_shard

    found = {}
    for name in NAMES:
        path = folder / f"{name}.safetensors"
        extract_shard(run / "tokens" / path.name, path, target, LAYERS, "float32", batch_tokens=1)
        found[name] = checksum(path)
    return found


def test_shards_are_linked_to_their_places_at_the_end(run: Path, target: TargetReference, tmp_path: Path) -> None:
    engine = Engine(target)
    extract(run, target, engine)
    assert engine.names == NAMES
    for name, path in files(run).items():
        for file in (path, path.with_suffix(".json")):
            assert file.stat().st_ino == kept(file).stat().st_ino  # takes no room twice
        assert checksum(path) == alone(run, target, tmp_path / "alone")[name]
    again = Engine(target)
    extract(run, target, again)
    assert again.asked == [] and again.begun == 0


def test_one_shard_goes_to_its_place_at_once(run: Path, target: TargetReference) -> None:
    engine = Engine(target)
    extract(run, target, engine, "rows_3-6")
    assert engine.names == ["rows_3-6"]
    assert sorted(path.name for path in (run / "hidden_states").glob("rows_*")) == [
        "rows_3-6.json",
        "rows_3-6.safetensors",
    ]
    assert not (run / "hidden_states" / ".finished").exists()


def test_a_part_of_the_shards(run: Path, target: TargetReference) -> None:
    engine = Engine(target)
    extract(run, target, engine, "rows_3-8")
    assert engine.names == NAMES[1:]
    assert [path.exists() for path in files(run).values()] == [False, True, True]


def test_a_failed_shard_costs_nothing_of_the_others(run: Path, target: TargetReference, tmp_path: Path) -> None:
    engine = Engine(target, fails=("rows_3-6",))
    with pytest.raises(EyasError, match=r"rows_3-6: 1 row\(s\) have no hidden states.*row 4: as told"):
        extract(run, target, engine)
    assert engine.names == NAMES[:2]
    assert not any(path.exists() for path in files(run).values())
    assert kept(files(run)["rows_0-3"]).exists()
    again = Engine(target)
    extract(run, target, again)
    assert again.asked == [("rows_3-6", [1]), ("rows_6-8", [0, 1])]
    expected = alone(run, target, tmp_path / "alone")
    assert {name: checksum(path) for name, path in files(run).items()} == expected


def test_a_deleted_shard_is_linked_again(run: Path, target: TargetReference) -> None:
    extract(run, target, Engine(target))
    before = {name: checksum(path) for name, path in files(run).items()}
    for path in files(run).values():  # Snakemake deletes all outputs of a job before it runs again
        path.unlink()
        path.with_suffix(".json").unlink()
    engine = Engine(target)
    extract(run, target, engine)
    assert engine.asked == [] and engine.begun == 0
    assert {name: checksum(path) for name, path in files(run).items()} == before


def test_a_damaged_shard_is_made_again_alone(
    run: Path, target: TargetReference, caplog: pytest.LogCaptureFixture
) -> None:
    extract(run, target, Engine(target))
    before = {name: checksum(path) for name, path in files(run).items()}
    damaged = files(run)["rows_3-6"]
    with open(damaged, "r+b") as file:  # the kept one is the same file
        file.seek(-200, os.SEEK_END)
        file.write(bytes(100))
    assert checksum(damaged) != before["rows_3-6"]
    damaged.unlink()  # what a user does to have it made again
    engine = Engine(target)
    extract(run, target, engine)
    assert engine.names == ["rows_3-6"]
    assert "rows_3-6.safetensors is damaged; making it again" in caplog.text
    assert {name: checksum(path) for name, path in files(run).items()} == before


def test_a_kept_shard_that_is_gone_is_made_again_alone(run: Path, target: TargetReference) -> None:
    extract(run, target, Engine(target))
    kept(files(run)["rows_6-8"]).unlink()
    engine = Engine(target)
    extract(run, target, engine)
    assert engine.names == ["rows_6-8"]


def test_a_file_system_without_links(run: Path, target: TargetReference, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    extract(run, target, Engine(target))
    assert all(path.exists() and path.with_suffix(".json").exists() for path in files(run).values())


@pytest.mark.parametrize("rows", ["rows_0-4", "rows_1-6", "rows_0-9", "rows_8-11", "rows_3-3", "rows_6-9"])
def test_rows_that_are_no_range_of_shards_are_refused(rows: str, run: Path, target: TargetReference) -> None:
    engine = Engine(target)
    with pytest.raises(EyasError, match="rows_"):
        extract_rows(run, Shard.parse(rows), ROWS, PER_SHARD, target, LAYERS, "float32", engine, 0)
    assert engine.asked == [] and engine.begun == 0
    assert not (run / "hidden_states").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_engine_begins(
    run: Path, target: TargetReference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda *_: SimpleNamespace(f_bavail=2, f_frsize=4096))
    engine = Engine(target)
    with pytest.raises(EyasError, match=r"run: hidden states need [\d,]+ bytes .* where 8,192 .* are free: short by"):
        extract_rows(run, Shard(0, ROWS), ROWS, PER_SHARD, target, LAYERS, "float32", engine, 0)
    assert engine.asked == [] and engine.begun == 0
    assert not list(run.glob("hidden_states/**/*.safetensors"))


# ---- the plan


def configured(sglang: dict[str, Any] | None = None, target: dict[str, Any] | None = None, **extraction: Any) -> Any:
    return check_config(
        {
            "name": "test", "target": {"path": "/models/big"} | (target or {}), "data": {"prompts": ["x.jsonl"]},
            "drafters": {"d": {}}, "extraction": extraction | ({"sglang": sglang} if sglang is not None else {}),
        },
        "test",
    )  # fmt: skip


def cut(config: Any, rows: int = 40, per_shard: int = 4) -> list[list[str]]:
    return [job.shard_names for job in extraction_jobs(config, shards_of(rows, per_shard))]


def test_transformers_makes_each_shard_by_itself() -> None:
    (job,) = extraction_jobs(configured(), shards_of(40, 4))
    assert (job.name, job.shard_names, job.log_name) == ("extract", ["{shard}"], "{shard}")
    assert job.rows(SimpleNamespace(shard="rows_4-8")) == "rows_4-8"


@pytest.mark.parametrize("engine", ["transformers", "sglang"])
def test_shards_per_job(engine: str) -> None:
    jobs = extraction_jobs(configured(engine=engine, shards_per_job=4), shards_of(38, 4))
    assert [job.name for job in jobs] == ["extract_rows_0-16", "extract_rows_16-32", "extract_rows_32-38"]
    assert [len(job.shards) for job in jobs] == [4, 4, 2]
    assert [job.log_name for job in jobs] == [job.rows(None) for job in jobs] == [
        "rows_0-16", "rows_16-32", "rows_32-38"
    ]  # fmt: skip
    assert cut(configured(engine=engine, shards_per_job=1)) == [["{shard}"]]
    assert len(cut(configured(engine=engine, shards_per_job=100))) == 1


def test_replicas_share_the_shards() -> None:
    (job,) = extraction_jobs(configured(engine="sglang"), shards_of(40, 4))
    assert job.rows(None) == "rows_0-40"
    jobs = extraction_jobs(configured(engine="sglang", replicas=3), shards_of(40, 4))
    assert [len(job.shards) for job in jobs] == [3, 3, 4]
    assert [shard for job in jobs for shard in job.shards] == shards_of(40, 4)  # each once, in order
    assert cut(configured(engine="sglang", replicas=10)) == [["{shard}"]]
    assert cut(configured(engine="sglang", replicas=99)) == [["{shard}"]]


def test_a_run_of_one_shard() -> None:
    for changes in ({}, {"engine": "sglang"}, {"engine": "sglang", "replicas": 4}, {"shards_per_job": 7}):
        assert cut(configured(**changes), 3, 4) == [["{shard}"]]


def test_the_servers_command() -> None:
    config = configured(
        {
            "python": "/env/bin/python", "tp": 4, "quantization": "w4afp8", "mem_fraction": 0.85,
            "chunked_prefill": 8192, "extra_args": ["--ep-size", "4"], "environment": {"A": "b"},
        },
        {"revision": "abc", "trust_remote_code": True, "dtype": "bfloat16"}, engine="sglang", gpu=8,
    )  # fmt: skip
    assert capture_command(config) == [
        "/env/bin/python", "-m", "sglang.launch_server", "--model-path", "/models/big", "--revision", "abc",
        "--trust-remote-code", "--dtype", "bfloat16", "--tp", "4", "--quantization", "w4afp8",
        "--mem-fraction-static", "0.85", "--chunked-prefill-size", "8192", "--speculative-algorithm", "EAGLE3",
        "--enable-return-aux-hidden-states", "--disable-radix-cache", "--skip-server-warmup", "--ep-size", "4",
    ]  # fmt: skip
    assert capture_command(configured(engine="sglang"))[1:] == [
        "-m", "sglang.launch_server", "--model-path", "/models/big", "--dtype", configured().target.dtype, "--tp", "1",
        "--speculative-algorithm", "EAGLE3", "--enable-return-aux-hidden-states", "--disable-radix-cache",
        "--skip-server-warmup",
    ]  # fmt: skip
    command = capture_command(configured(engine="sglang", gpu=8))
    assert command[command.index("--tp") + 1] == "8"


@pytest.mark.parametrize(
    ("sglang", "extraction", "message"),
    [
        ({"extra_args": ["--port", "1"]}, {}, "extra_args: --port is set by Eyas; delete it"),
        ({"extra_args": ["--api-key=x"]}, {}, "extra_args: --api-key=x is set by Eyas"),
        ({"extra_args": ["--host=0.0.0.0"]}, {}, "extra_args: --host=0.0.0.0 is set by Eyas"),
        ({"extra_args": ["--ep", "2", "--tensor-parallel-size", "2"]}, {}, "--tensor-parallel-size is set by Eyas"),
        ({"url": "http://127.0.0.1:1", "extra_args": ["--x"]}, {}, "url is a running server"),
        ({"url": "http://127.0.0.1:1", "quantization": "fp8"}, {}, "url is a running server"),
        ({"url": "127.0.0.1:1"}, {}, "url"),
        ({"url": "http://user:secret@host"}, {}, "url"),
        ({"api_key_env": "not a name"}, {}, "api_key_env"),
        ({"environment": {"A=B": "c"}}, {}, "environment"),
        ({"mem_fraction": 1.5}, {}, "mem_fraction"),
        ({"dump_gb": 0}, {}, "dump_gb"),
        ({"colour": "red"}, {}, "colour"),
        ({"tp": 3}, {"gpu": 8}, "gpu 8 is no multiple of sglang.tp 3"),
        (None, {"replicas": 2, "shards_per_job": 2}, "replicas and shards_per_job both"),
        (None, {"replicas": 2, "engine": "transformers"}, "replicas is for engine: sglang"),
    ],
)
def test_configurations_that_cannot_be_meant(sglang: Any, extraction: dict, message: str) -> None:
    with pytest.raises(EyasError, match=message):
        configured(sglang, **({"engine": "sglang"} | extraction))
