"""The manifest: written only over a complete set of shards that agree, refused when anything differs."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from eyas.errors import EyasError
from eyas.extraction.manifest import FORMAT_VERSION as MANIFEST_VERSION
from eyas.extraction.manifest import read_manifest, require, write_manifest
from eyas.extraction.shard import FORMAT_VERSION, LAYER_CONVENTION, shard_layout
from eyas.shards import TensorFileWriter, checksum, describe_file, write_json

HIDDEN = 4
COMMON = {
    "target": {"path": "models/tiny", "revision": None, "config_hash": "xxh3_128:aa", "dtype": "float32"},
    "tokenizer_hash": "xxh3_128:bb",
    "chat_template_hash": "xxh3_128:cc",
    "layers": [1, 2, 3],
    "dtype": "bfloat16",
    "hidden_size": HIDDEN,
}
Change = dict[str, Any]


def make_shard(folder: Path, start: int, end: int, skipped: tuple[int, ...] = (), **changes: Any) -> Path:
    """A shard of zeros, three tokens a row, and its sidecar with some facts changed."""
    folder.mkdir(exist_ok=True)
    path = folder / f"rows_{start}-{end}.safetensors"
    rows = end - start - len(skipped)
    with TensorFileWriter(path, shard_layout(3 * rows, rows, HIDDEN, "bfloat16")):
        pass
    facts = {
        "format_version": FORMAT_VERSION, "fingerprint": "f", **COMMON, "tokens_checksum": f"xxh3_128:{start}",
        "rows": rows, "sequences": rows, "tokens": 3 * rows, **describe_file(path), "skipped": [{"row": r, "reason": "x"} for r in skipped],
        "failed": [], "seconds": float(start), "tokens_per_second": 1.0, "files": {},
    }  # fmt: skip
    write_json(path.with_suffix(".json"), {key: value for key, value in (facts | changes).items() if value is not None})
    return path


def three(folder: Path, **changes: Any) -> list[Path]:
    """Shards of rows 0 to 9; the facts of the second are changed."""
    return [make_shard(folder, 0, 4), make_shard(folder, 4, 8, (5, 6), **changes), make_shard(folder, 8, 10)]


def refusal(shards: list[Path], rows: int, output: Path) -> str:
    with pytest.raises(EyasError) as caught:
        write_manifest(shards, rows, output)
    assert not output.exists() and not any(name.endswith((".partial", ".lock")) for name in os.listdir(output.parent))
    return str(caught.value)


def test_complete_and_agreeing(tmp_path: Path):
    shards, output = three(tmp_path / "h"), tmp_path / "h" / "data_config.json"
    write_manifest(shards[::-1], 10, output)  # in any order
    values = json.loads(output.read_text())
    assert {key: values[key] for key in COMMON} == COMMON
    assert (values["format_version"], values["last_hidden_state"]) == (MANIFEST_VERSION, "after_final_norm")
    assert values["layer_convention"] == LAYER_CONVENTION and "hidden_states[j + 1]" in LAYER_CONVENTION
    assert [(e["file"], e["rows"], e["tokens"]) for e in values["shards"]] == [
        ("rows_0-4.safetensors", 4, 12), ("rows_4-8.safetensors", 2, 6), ("rows_8-10.safetensors", 2, 6)
    ]  # fmt: skip
    assert all(e["checksum"] == checksum(s) for e, s in zip(values["shards"], shards, strict=True))
    assert values["shards"][1]["tokens_checksum"] == "xxh3_128:4"
    size = sum(shard.stat().st_size for shard in shards)
    assert values["totals"] == {"rows": 8, "sequences": 8, "tokens": 24, "bytes": size, "skipped": 2, "failed": 0}


def test_a_row_of_several_sequences_counts_once(tmp_path: Path):
    shards, output = three(tmp_path / "h", sequences=5), tmp_path / "h" / "data_config.json"
    write_manifest(shards, 10, output)
    values = json.loads(output.read_text())
    assert [(e["rows"], e["sequences"]) for e in values["shards"]] == [(4, 4), (2, 5), (2, 2)]
    assert (values["totals"]["rows"], values["totals"]["sequences"]) == (8, 11)
    values["totals"]["sequences"] = 8
    output.write_text(json.dumps(values))
    with pytest.raises(EyasError, match=r"the shards' sequences do not add up to the total \(11, not 8\)"):
        read_manifest(output)


def test_numeric_order_of_shards(tmp_path: Path):
    """Sorted as text, rows_10-12 would come before rows_2-10."""
    shards = [make_shard(tmp_path / "h", *ends) for ends in ((0, 2), (2, 10), (10, 12))]
    write_manifest(shards, 12, tmp_path / "h" / "data_config.json")
    manifest = read_manifest(tmp_path / "h" / "data_config.json")
    assert manifest.shards == shards and (manifest.hidden_size, manifest.layers) == (HIDDEN, [1, 2, 3])


def test_depends_on_the_contents_alone(tmp_path: Path):
    texts = []
    for folder, seconds in (("a", 1.0), ("b", 2.0)):
        output = tmp_path / folder / "data_config.json"
        write_manifest(three(tmp_path / folder, seconds=seconds, tokens_per_second=seconds), 10, output)
        texts.append(output.read_bytes())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kept", [(1, 2), (0, 2), (0, 1), ()], ids=["first", "middle", "last", "all"])
def test_shard_missing_from_the_list(tmp_path: Path, kept: tuple[int, ...]):
    shards = three(tmp_path / "h")
    message = refusal([shards[i] for i in kept], 10, tmp_path / "h" / "data_config.json")
    words = {
        (1, 2): rf"{shards[1]}: starts at row 4, .*\b0;",
        (0, 2): rf"{shards[2]}: starts at row 8, .*\b4;",
        (0, 1): r"the shards hold rows 0 to 7 of 10;",
        (): r"of 10; run snakemake again",
    }
    assert re.search(words[kept], message)


def test_overlapping_shards(tmp_path: Path):
    shards = [make_shard(tmp_path / "h", 0, 4), make_shard(tmp_path / "h", 3, 10)]
    message = refusal(shards, 10, tmp_path / "h" / "data_config.json")
    assert re.search(rf"{shards[1]}: starts at row 3, .*\b4;", message)


def test_more_rows_than_asked_for(tmp_path: Path):
    assert "rows 0 to 9 of 8" in refusal(three(tmp_path / "h"), 8, tmp_path / "h" / "data_config.json")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("layers", [1, 2, 4]), ("dtype", "float16"), ("tokenizer_hash", "xxh3_128:zz"), ("hidden_size", 8),
        ("chat_template_hash", "xxh3_128:zz"), ("target", COMMON["target"] | {"revision": "main"}),
    ],
)  # fmt: skip
def test_disagreeing_shard_names_both_values(tmp_path: Path, key: str, value: Any):
    shards = three(tmp_path / "h", **{key: value})
    message = refusal(shards, 10, tmp_path / "h" / "data_config.json")
    assert message.startswith(f"{shards[1]}: its {key} is {value}, other shards have {COMMON[key]};")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 3}, "3 rows and 2 skipped are not its 4"),
        ({"format_version": FORMAT_VERSION + 1}, f"format version {FORMAT_VERSION + 1}, not {FORMAT_VERSION}"),
        ({"bytes": 7}, "7 when it was written"),
        ({"layers": None}, "layers"),  # a fact that is not there
        ({"checksum": None}, "checksum"),
        ({"sequences": None}, "lacks sequences"),
    ],
)
def test_shard_whose_facts_cannot_be(tmp_path: Path, changes: Change, words: str):
    shards = three(tmp_path / "h", **changes)
    message = refusal(shards, 10, tmp_path / "h" / "data_config.json")
    assert message.startswith(f"{shards[1]}") and words in message


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_damaged_sidecar(tmp_path: Path, content: str):
    shards = three(tmp_path / "h")
    shards[1].with_suffix(".json").write_text(content)
    assert str(shards[1].with_suffix("")) in refusal(shards, 10, tmp_path / "h" / "data_config.json")


def test_shard_on_disk_is_not_what_was_written(tmp_path: Path):
    shards, output = three(tmp_path / "h"), tmp_path / "h" / "data_config.json"
    size = shards[1].stat().st_size
    shards[1].write_bytes(bytes(size - 1))
    assert f"{shards[1]}: {size - 1} bytes on disk, {size} when it was written" in refusal(shards, 10, output)
    shards[1].unlink()
    assert str(shards[1]) in refusal(shards, 10, output)
    shards[1].with_suffix(".json").unlink()
    assert f"{shards[1].with_suffix('.json')}: this shard sidecar is missing" in refusal(shards, 10, output)


def test_every_row_skipped(tmp_path: Path):
    shards = [make_shard(tmp_path / "h", 0, 2, (0, 1))]
    assert "every one of the 2 rows was skipped" in refusal(shards, 2, tmp_path / "h" / "data_config.json")


# ---- reading


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    write_manifest(three(tmp_path / "h"), 10, tmp_path / "h" / "data_config.json")
    return tmp_path / "h" / "data_config.json"


def test_reading_refuses_another_format(manifest: Path):
    values = json.loads(manifest.read_text())
    for version in (MANIFEST_VERSION + 1, None, str(MANIFEST_VERSION)):
        manifest.write_text(json.dumps(values | {"format_version": version}))
        with pytest.raises(EyasError, match=f"format version {version}, this Eyas reads {MANIFEST_VERSION}"):
            read_manifest(manifest)
    for text in ("[]", "{"):
        manifest.write_text(text)
        with pytest.raises(EyasError, match=r"data_config\.json: "):
            read_manifest(manifest)
    manifest.unlink()
    with pytest.raises(EyasError, match=r"data_config\.json: this manifest is missing"):
        read_manifest(manifest)


def test_reading_refuses_a_shard_of_another_size_or_none(manifest: Path):
    shard = read_manifest(manifest).shards[1]
    size = shard.stat().st_size
    shard.write_bytes(bytes(size + 1))
    with pytest.raises(EyasError, match=rf"rows_4-8\.safetensors: {size + 1} bytes, the manifest says {size}\b"):
        read_manifest(manifest)
    shard.unlink()
    with pytest.raises(EyasError, match=rf"rows_4-8\.safetensors: missing, the manifest says {size}\b"):
        read_manifest(manifest)


@pytest.mark.parametrize(
    "damage", [{"shards": None}, {"shards": [3]}, {"totals": {}}, {"totals": {"rows": 9, "sequences": 8, "tokens": 24}}]
)
def test_reading_refuses_a_damaged_manifest(manifest: Path, damage: Change):
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | damage))
    with pytest.raises(EyasError, match=r"data_config\.json: (damaged|the shards' rows do not add up)"):
        read_manifest(manifest)


def test_digest_follows_the_data(manifest: Path, tmp_path: Path):
    digest = read_manifest(manifest).digest
    other = tmp_path / "other" / "data_config.json"
    write_manifest(three(tmp_path / "other"), 10, other)
    assert read_manifest(other).digest == digest  # another place, the same states
    write_manifest(three(tmp_path / "other", checksum="xxh3_128:0"), 10, other)
    assert read_manifest(other).digest != digest


def test_require_names_both_values(manifest: Path):
    found = read_manifest(manifest)
    require(found, layers=[1, 2, 3], dtype="bfloat16")
    with pytest.raises(EyasError, match=r"its layers is \[1, 2, 3\], expected \[1, 2, 4\];"):
        require(found, dtype="bfloat16", layers=[1, 2, 4])
    with pytest.raises(EyasError, match="its nothing is None, expected 1;"):
        require(found, nothing=1)
