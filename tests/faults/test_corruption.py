"""Random damage to every file of a finished run: `eyas verify` finds it, readers refuse it, one command rebuilds it."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
from eyas.cli.verify import verify_run
from eyas.errors import EyasError
from ledger import Faults
from workflow_runs import Workdir

NOT_ARTEFACTS = {"logs", "benchmarks"}


def artefacts(run: Path) -> dict[str, list[Path]]:
    """The files of a run by kind: their names without numbers."""
    kinds = defaultdict(list)
    for file in sorted(run.rglob("*")):
        name = file.relative_to(run)
        if file.is_file() and name.parts[0] not in NOT_ARTEFACTS and file.stat().st_size:
            kinds[re.sub(r"\d+", "N", name.as_posix())].append(file)
    return dict(kinds)


def damage(faults: Faults, whole: bytes) -> dict[str, bytes]:
    """One bit, one cut, and one block of zeros, at random places."""
    chance = faults.random
    flipped = bytearray(whole)
    flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
    begin = chance.randrange(len(whole))
    zeros = bytes(min(chance.randrange(1, 4096), len(whole) - begin))
    damaged = {
        "a flipped bit": bytes(flipped),
        "a cut": whole[: chance.randrange(len(whole))],
        "bytes too many": whole + chance.randbytes(chance.randrange(1, 9)),
        "a block of zeros": whole[:begin] + zeros + whole[begin + len(zeros) :],
    }
    return {what: content for what, content in damaged.items() if content != whole}


@pytest.mark.timeout(3600)
def test_verify_finds_it_and_names_the_file_and_the_command(faults: Faults, finished: Workdir) -> None:
    results = finished.path / "results"
    for kind, files in artefacts(finished.run_folder).items():
        for _ in range(faults.count(2, 40)):
            file = faults.random.choice(files)
            whole = file.read_bytes()
            for what, content in damage(faults, whole).items():
                file.write_bytes(content)
                with faults.tried(f"{what}: found by eyas verify", kind):
                    problems = verify_run("tiny", results)["problems"]
                    assert any(
                        problem.startswith(f"{file}: ") and f"run `snakemake {file}`" in problem for problem in problems
                    ), problems or "nothing found"
            file.write_bytes(whole)
    assert verify_run("tiny", results)["problems"] == []


@pytest.mark.timeout(3600)
def test_the_command_rebuilds_just_that(faults: Faults, finished: Workdir, reference: Workdir) -> None:
    """The file is deleted and made again by the command of the message, with the bytes that it had."""
    kinds = artefacts(finished.run_folder)
    chosen = faults.random.sample(sorted(kinds), faults.count(2, len(kinds)))
    wanted = reference.digests()
    for kind in chosen:
        file = faults.random.choice(kinds[kind])
        goal = file.relative_to(finished.path).as_posix()
        with faults.tried("a deleted file: rebuilt by the command of the message", goal):
            file.unlink()
            # what was made from it is up to date by its contents, but not by its time
            result = finished.run("--", goal)
            assert file.is_file(), result.text[-3000:]
            name = file.relative_to(finished.run_folder).as_posix()
            assert {name: finished.digests().get(name)} == {name: wanted.get(name)}


def is_sealed(file: Path) -> bool:
    return "digest" in json.loads(file.read_text())


@pytest.mark.timeout(3600)
def test_sealed_files_and_checkpoints_are_refused_before_use(faults: Faults, finished: Workdir) -> None:
    from eyas.drafter.checkpoint import load_checkpoint
    from eyas.shards import read_json

    run = finished.run_folder
    sealed = [file for file in run.rglob("*.json") if file.parts[-2] not in NOT_ARTEFACTS and is_sealed(file)]
    checkpoint = run / "drafters" / "small" / "epoch_1"
    for _ in range(faults.count(20, 1000)):
        file = faults.random.choice(sealed)
        whole = file.read_bytes()
        values = read_json(file)
        for what, content in damage(faults, whole).items():
            file.write_bytes(content)
            with faults.tried(f"{what} in a sealed file: refused when read", file.name):
                try:
                    # the digest's own line may be what was damaged: then nothing that counts is
                    assert {key: found for key, found in read_json(file).items() if key in values} == values
                except EyasError as exc:
                    assert str(file) in str(exc) and "snakemake" in str(exc)
        file.write_bytes(whole)
    for name in ("model.safetensors", "config.json", "trainer_state.safetensors", "trainer_state.json"):
        file = checkpoint / name
        whole = file.read_bytes()
        for _ in range(faults.count(3, 100)):
            for what, content in damage(faults, whole).items():
                file.write_bytes(content)
                with (
                    faults.tried(f"{what} in a checkpoint: refused when read", name),
                    pytest.raises(EyasError, match=name),
                ):
                    load_checkpoint(checkpoint)
        file.write_bytes(whole)
    load_checkpoint(checkpoint)


@pytest.mark.timeout(3600)
def test_training_refuses_damaged_shards(faults: Faults, finished: Workdir) -> None:
    """By real Snakemake: the shards' checksums are compared before the first step."""
    for _ in range(faults.count(1, 6)):
        number = faults.random.choice(["0-20", "20-40"])
        file = finished.run_folder / "hidden_states" / f"rows_{number}.safetensors"
        whole, times = file.read_bytes(), file.stat()
        for what, content in damage(faults, whole).items():
            if what == "bytes too many":
                continue
            file.write_bytes(content)
            shutil.rmtree(finished.run_folder / "drafters" / "small" / "epoch_2", ignore_errors=True)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
            with faults.tried(f"{what} in a shard: refused by the trainer", number):
                goal = "results/tiny/drafters/small/epoch_2/model.safetensors"
                result = finished.snakemake("--", goal)
                assert result.code == 1 and file.name in result.text and "Traceback" not in result.text, result.text[
                    -3000:
                ]
        file.write_bytes(whole)
