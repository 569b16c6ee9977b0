"""Before the first step: what does not fit is one message with both values; spoilt shards are named, read once."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from drafter_reference import extracted, random_rows, save_llama, small_shape
from eyas.drafter import checks
from eyas.drafter.checks import require_fit, verify_shards
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest
from eyas.shards import files
from eyas.target.model import target_identity
from eyas.target.tokenizer import TargetReference, tokenizer_hashes
from tiny import make_tokenizer

EXPECTED = {"layers": [0, 1, 3], "dtype": "float32", "rows": 7}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetReference:
    tokenizer = make_tokenizer()
    target = save_llama(tmp_path_factory.mktemp("target"), vocab_size=len(tokenizer))
    tokenizer.save_pretrained(target.path)
    return target


@pytest.fixture
def shape(target: TargetReference) -> DrafterShape:
    vocab_size = json.loads((Path(target.path) / "config.json").read_text())["vocab_size"]
    return small_shape(hidden_size=16, target_hidden_size=16, vocab_size=vocab_size, layers=(0, 1, 3))


@pytest.fixture
def values(target: TargetReference) -> dict[str, Any]:
    """A manifest's values that fit."""
    return {
        "target": target_identity(target), **tokenizer_hashes(make_tokenizer()), "layers": [0, 1, 3],
        "dtype": "float32", "hidden_size": 16, "totals": {"rows": 5, "skipped": 2},
    }  # fmt: skip


def refusal(values: dict[str, Any], target: TargetReference, shape: DrafterShape, expected: dict[str, Any]) -> str:
    with pytest.raises(EyasError) as caught:
        require_fit(Manifest(Path("run/data_config.json"), values), target, shape, expected)
    message = str(caught.value)
    assert message.startswith("run/data_config.json: does not fit: its ") and "\n" not in message
    assert "Correct the configuration, or delete" in message
    return message


def test_what_fits_is_accepted(values: dict[str, Any], target: TargetReference, shape: DrafterShape) -> None:
    manifest = Manifest(Path("data_config.json"), values)
    for expected in (EXPECTED, {}, {"dtype": None, "rows": None}):
        require_fit(manifest, target, shape, expected)


def test_layers_that_are_not_configured_are_the_default_ones(
    values: dict[str, Any], target: TargetReference, shape: DrafterShape
) -> None:
    message = refusal(values, target, shape, {"layers": None})
    assert "its layers is [0, 1, 3], the configuration has [0, 2, 4]" in message
    drafter = DrafterShape(**vars(shape) | {"layers": (0, 2, 4)})
    require_fit(Manifest(Path("data_config.json"), values | {"layers": [0, 2, 4]}), target, drafter, {"layers": None})


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"target": {"config_hash": "sha256:other"}}, "config hash is sha256:other, {path} has {config}"),
    "revision": ({"target": {"revision": "v2"}}, "target's revision is v2, {path} has None"),
    "target's dtype": ({"target": {"dtype": "float16"}}, "target's dtype is float16, the configuration has float32"),
    "tokenizer": ({"tokenizer_hash": "xxh3_128:other"}, "tokenizer hash is xxh3_128:other, {path} has {tokenizer}"),
    "template": (
        {"chat_template_hash": "xxh3_128:other"}, "chat template hash is xxh3_128:other, {path} has {template}",
    ),
    "hidden size": ({"hidden_size": 32}, "hidden size is 32, {path} has 16"),
    "rows": ({"totals": {"rows": 5, "skipped": 1}}, "number of rows is 6, the configuration has 7"),
    "dtype": ({"dtype": "bfloat16"}, "dtype is bfloat16, the configuration has float32"),
    "layers": ({"layers": [0, 1, 2]}, "layers is [0, 1, 2], the configuration has [0, 1, 3]"),
    "drafter's layers": ({"layers": [0, 1, 2]}, "layers is [0, 1, 2], the drafter has [0, 1, 3]"),
    "drafter's width": ({"hidden_size": 32}, "hidden size is 32, the drafter has 16"),
}  # fmt: skip


def changed(values: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    return values | change | {"target": values["target"] | change.get("target", {})}


def filled(words: str, values: dict[str, Any], target: TargetReference) -> str:
    return words.format(
        path=target.path, config=values["target"]["config_hash"], tokenizer=values["tokenizer_hash"],
        template=values["chat_template_hash"],
    )  # fmt: skip


@pytest.mark.parametrize("what", CHANGES)
def test_each_disagreement_names_both_values(
    what: str, values: dict[str, Any], target: TargetReference, shape: DrafterShape
) -> None:
    change, words = CHANGES[what]
    message = refusal(changed(values, change), target, shape, EXPECTED)
    assert filled(words, values, target) in message
    assert message.count(" has ") == (2 if "layers" in change or "hidden_size" in change else 1)


def test_all_disagreements_are_in_one_message(
    values: dict[str, Any], target: TargetReference, shape: DrafterShape
) -> None:
    spoilt = values.copy()
    for change, _ in CHANGES.values():
        spoilt = changed(spoilt, change)
    message = refusal(spoilt, target, shape, EXPECTED)
    for _, words in CHANGES.values():
        assert filled(words, values, target) in message
    assert message.count(" has ") == len(CHANGES)


def test_a_drafter_that_does_not_fit(values: dict[str, Any], target: TargetReference, shape: DrafterShape) -> None:
    other = DrafterShape(**vars(shape) | {"layers": (0, 2, 4), "target_hidden_size": 8})
    message = refusal(values, target, other, EXPECTED)
    assert "layers is [0, 1, 3], the drafter has [0, 2, 4]" in message
    assert "hidden size is 16, the drafter has 8" in message
    message = refusal(values, target, DrafterShape(**vars(shape) | {"vocab_size": 99}), EXPECTED)
    assert re.search(r"vocabulary size is 99, \S+ has 3\d\d", message)


# ---- shards ----


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    """Two shards, in a folder of their own."""
    shards = [random_rows([4, 6]), random_rows([5, 7, 3], seed=1, first_row=2)]
    return extracted(tmp_path, save_llama(tmp_path / "target"), shards)


def tokens_of(manifest: Manifest) -> Path:
    return manifest.path.parents[1] / "tokens"


def flip(path: Path, keep_time: bool = False) -> None:
    """One bit of a file, whose size stays what it was."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x20
    path.write_bytes(content)
    if keep_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files whose checksum was taken, as folder/name."""
    found: list[str] = []
    checksum = checks.checksum
    monkeypatch.setattr(
        checks, "checksum", lambda file: found.append(f"{file.parent.name}/{file.name}") or checksum(file)
    )
    return found


ALL = [f"{folder}/rows_{name}.safetensors" for folder in ("hidden_states", "tokens") for name in ("0-2", "2-5")]


@pytest.mark.parametrize("place", ALL)
def test_a_flipped_bit_names_the_file_and_the_command(place: str, manifest: Manifest) -> None:
    verify_shards(manifest, tokens_of(manifest), None)
    file = manifest.path.parents[1] / place
    flip(file)
    with pytest.raises(EyasError) as caught:
        verify_shards(manifest, tokens_of(manifest), None)
    assert str(caught.value).startswith(f"{file}: its checksum is not the manifest's")
    assert f"delete it and run `snakemake {file}` to rebuild it" in str(caught.value)


def test_a_missing_file_names_it_and_the_command(manifest: Manifest) -> None:
    file = tokens_of(manifest) / "rows_2-5.safetensors"
    file.unlink()
    with pytest.raises(EyasError, match=f"{file}: cannot be read .*`snakemake {file}`"):
        verify_shards(manifest, tokens_of(manifest), None)


def test_what_is_on_record_is_not_read_again(manifest: Manifest, reads: list[str], tmp_path: Path) -> None:
    record = tmp_path / "logs" / "verified.json"
    verify_shards(manifest, tokens_of(manifest), record)
    assert sorted(reads) == ALL
    reads.clear()
    verify_shards(manifest, tokens_of(manifest), record)
    assert reads == []
    verify_shards(manifest, tokens_of(manifest), None)
    assert sorted(reads) == ALL
    reads.clear()
    time.sleep(0.02)  # the kernel's clock for files has steps
    os.utime(manifest.shards[1])  # touched: only this one
    verify_shards(manifest, tokens_of(manifest), record)
    assert reads == ["hidden_states/rows_2-5.safetensors"]


@pytest.mark.parametrize("place", ALL)
def test_a_rewritten_file_is_read_again_whatever_its_time_says(
    place: str, manifest: Manifest, reads: list[str], tmp_path: Path
) -> None:
    record = tmp_path / "verified.json"
    verify_shards(manifest, tokens_of(manifest), record)
    reads.clear()
    time.sleep(0.02)
    flip(manifest.path.parents[1] / place, keep_time=True)
    for _ in range(2):  # a failure is not put on record
        with pytest.raises(EyasError, match=f"{place}: its checksum is not the manifest's"):
            verify_shards(manifest, tokens_of(manifest), record)
    assert reads == [place, place]


def test_a_manifest_of_other_states_is_compared_with_the_files(
    manifest: Manifest, reads: list[str], tmp_path: Path
) -> None:
    """The record is of a file with a checksum, not of a file."""
    record = tmp_path / "verified.json"
    verify_shards(manifest, tokens_of(manifest), record)
    reads.clear()
    entries = [entry | {"checksum": "xxh3_128:0"} for entry in manifest.values["shards"]]
    with pytest.raises(EyasError, match="rows_0-2.safetensors: its checksum is not"):
        verify_shards(Manifest(manifest.path, manifest.values | {"shards": entries}), tokens_of(manifest), record)


@pytest.mark.parametrize("content", ["", "{", "[1, 2]", "null", "5", '"text"', '{"x": 1}', "\0\0\0"])
def test_a_damaged_record_is_ignored_and_replaced(
    content: str, manifest: Manifest, reads: list[str], tmp_path: Path
) -> None:
    record = tmp_path / "verified.json"
    record.write_text(content)
    verify_shards(manifest, tokens_of(manifest), record)
    assert sorted(reads) == ALL
    reads.clear()
    verify_shards(manifest, tokens_of(manifest), record)
    assert reads == []


def test_jobs_of_two_drafters_keep_one_record(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second comes while the first has written its record and not yet put it in place."""
    record, tokens, sync, failures = tmp_path / "verified.json", tokens_of(manifest), files.sync_file, []

    def verify() -> None:
        try:
            verify_shards(manifest, tokens, record)
        except Exception as exc:
            failures.append(exc)

    second = threading.Thread(target=verify)

    def sync_slowly(path: Path) -> None:
        monkeypatch.setattr(files, "sync_file", sync)
        second.start()
        second.join(timeout=0.3)
        sync(path)

    monkeypatch.setattr(files, "sync_file", sync_slowly)
    verify()
    second.join(timeout=20)
    assert (failures, second.is_alive()) == ([], False)
    assert len(json.loads(record.read_text())) == 4
    assert {path.name for path in tmp_path.iterdir()} == {"verified.json", "target", "tokens", "hidden_states"}
