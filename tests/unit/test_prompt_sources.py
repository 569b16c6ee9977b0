"""Prompt files as they lie on disk: containers, compression, damage, patterns, counting, memory."""

from __future__ import annotations

import datetime
import gzip
import io
import json
import os
import subprocess
import sys
import tracemalloc
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import eyas.conversations.json_list as json_list_module
import eyas.conversations.prompts as prompts_module
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from eyas.config.schema import PromptFiles
from eyas.conversations import count_records, expand, read_rows, write_prompts
from eyas.conversations.sources import Record, container_of, kind_of, read_records
from eyas.errors import EyasError
from hypothesis import given, settings
from hypothesis import strategies as st

CONTAINERS = ["jsonl", "ndjson", "jsonl.gz", "jsonl.zst", "json", "json.gz", "json.zst", "object.json", "parquet"]


def pack(data: bytes, name: str) -> bytes:
    if name.endswith(".gz"):
        return gzip.compress(data, mtime=0)
    return zstandard.ZstdCompressor(write_checksum=True).compress(data) if name.endswith(".zst") else data


def save(folder: Path, container: str, records: list[Any], ensure_ascii: bool = False) -> Path:
    """The records as a file of one of CONTAINERS."""
    path = folder / f"p.{container}"
    if container == "parquet":
        pq.write_table(pa.Table.from_pylist(records), path, row_group_size=3)
        return path
    if "json." in container or container.endswith("json") and "ndjson" not in container:
        text = json.dumps(
            {"version": 1.5, "data": records} if "object" in container else records, ensure_ascii=ensure_ascii
        )
    else:
        text = "".join(json.dumps(record, ensure_ascii=ensure_ascii) + "\n" for record in records)
    path.write_bytes(pack(text.encode(), container))
    return path


def values(path: Path) -> list[Any]:
    records = list(read_records(str(path)))
    assert all(record.unreadable is None for record in records)
    return [record.value for record in records]


def plain(*paths: Path | str, **options: Any) -> list[PromptFiles]:
    return [PromptFiles(path=str(path), **options) for path in paths]


def rows_of(path: Path, count: int, out: Path, **options: Any) -> list[Any]:
    write_prompts(plain(path), count, max(count, 1), 0, out, duplicates="keep", **options)
    return read_rows(out / f"rows_0-{count}.jsonl")


USER = {"role": "user", "content": "hi ä\u2028🦅"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"city": "Rome"}}}
DESCRIBED = {"name": "f", "description": "d", "parameters": {"type": "object"}}
TALK = [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "21"}]
SPOKEN = [
    {"from": "human", "value": USER["content"]},
    {"from": "function_call", "value": '{"name": "f", "arguments": {"city": "Rome"}}'},
    {"from": "observation", "value": "21"},
]
FORMATS: dict[str, tuple[dict[str, Any], Any, str | None]] = {
    "messages": ({"messages": TALK, "tools": [DESCRIBED]}, (TALK, True), None),
    "sharegpt": ({"conversations": SPOKEN, "tools": json.dumps([DESCRIBED])}, (TALK, True), None),
    "prompt": (
        {"prompt": USER["content"], "answer": "yes"},
        ([USER, {"role": "assistant", "content": "yes"}], False),
        None,
    ),
    "text": ({"text": USER["content"]}, ([], False), USER["content"]),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_every_container(tmp_path: Path, name: str, container: str):
    record, (messages, has_tools), text = FORMATS[name]
    path = save(tmp_path, container, [{"id": i, **record} for i in range(5)])
    assert count_records([str(path)]) == 5
    rows = rows_of(path, 5, tmp_path / "out")
    for number, row in enumerate(rows):
        assert (row.skipped, row.id, row.place, row.source) == (None, number, f"{path}:{number + 1}", path.name)
        assert (row.messages, row.text) == (messages, text)
        assert row.tools == ([{"type": "function", "function": DESCRIBED}] if has_tools else None)
    entry = json.loads((tmp_path / "out" / "index.json").read_text())["formats"][str(path)]
    kind = {"ndjson": "jsonl", "object": "json"}.get(container.split(".")[0], container.split(".")[0])
    compression = {"gz": "+gzip", "zst": "+zstd"}.get(container.split(".")[-1], "")
    assert entry == {"container": kind + compression, "format": name}


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
CONVERSATIONS = st.lists(
    st.fixed_dictionaries(
        {
            "messages": st.lists(st.tuples(TEXTS.filter(str.strip), TEXTS), min_size=1, max_size=3).map(
                lambda pairs: [
                    message
                    for asked, said in pairs
                    for message in ({"role": "user", "content": asked}, {"role": "assistant", "content": said})
                ]
            ),
            "id": st.integers(-(2**63), 2**63 - 1),
        }
    ),
    min_size=1,
    max_size=8,
)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(records=CONVERSATIONS, container=st.sampled_from(CONTAINERS), chunk=st.integers(1, 64), escaped=st.booleans())
def test_conversations_come_back_as_they_were(tmp_path_factory, records, container, chunk, escaped):
    folder = tmp_path_factory.mktemp("source")
    path = save(folder, container, records, escaped)
    before, json_list_module._CHUNK = json_list_module._CHUNK, chunk
    try:
        rows = rows_of(path, len(records), folder / "out")
    finally:
        json_list_module._CHUNK = before
    assert [(row.messages, row.id) for row in rows] == [(record["messages"], record["id"]) for record in records]


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    records=st.lists(JSON_VALUES, max_size=6),
    chunk=st.integers(1, 40),
    indent=st.sampled_from([None, 1]),
    escaped=st.booleans(),
)
def test_json_lists_are_read_as_json_loads_reads_them(records, chunk, indent, escaped):
    """Types too: 1 stays an int, 1.0 a float; wherever the text is cut into chunks."""
    text = json.dumps(records, indent=indent, ensure_ascii=escaped)
    for form in (text, f'{{"a": 1e+5, "b": {{"c": []}}, "data": {text}, "n": -12}}'):
        stream = lambda form=form: io.BytesIO(form.encode("utf-8", "replace"))  # noqa: E731
        before, json_list_module._CHUNK = json_list_module._CHUNK, chunk
        try:
            found = list(json_list_module.json_records(stream))
        except json_list_module.NoList:
            assert form != text and not any(isinstance(record, dict | str) for record in records)
            continue
        finally:
            json_list_module._CHUNK = before
        expected = json.loads(text.encode("utf-8", "replace"))
        assert repr(found) == repr([(value, None) for value in expected])


# ---- JSON


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('[{"a": NaN}]', {"a": float("nan")}),
        ('[{"a": -Infinity, "b": 1e400}]', {"a": float("-inf"), "b": float("inf")}),
        ('[{"a": 1, "a": 2}]', {"a": 2}),
        ('[ {"a": 123456789012345678901234567890, "b": 1.0, "c": -0, "d": true} ] \n', None),
        (r'["a\ud83e"]', "a\ud83e"),
    ],
)
def test_json_that_other_readers_refuse(tmp_path: Path, text: str, value: Any):
    (tmp_path / "p.json").write_text(text)
    (found,) = values(tmp_path / "p.json")
    assert repr(found) == repr(json.loads(text)[0]) and (value is None or repr(found) == repr(value))


def test_a_record_that_is_no_json_spoils_only_itself(tmp_path: Path):
    deep = "[" * 50_000 + "]" * 50_000
    text = f'["a", {{"x": tru, "y": "]}}, \\\\"}}, {deep}, nul, "\\q", {"9" * 5000}, "b"]'
    (tmp_path / "p.json").write_text(text)
    records = list(read_records(str(tmp_path / "p.json")))
    assert [record.line for record in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [record.value for record in records] == ["a", None, None, None, None, None, "b"]
    assert records[0] == Record(1, "a") and records[1].unreadable == "not JSON (Expecting value)"
    assert records[2].unreadable == "not JSON (nested too deeply)"
    assert all(record.unreadable.startswith("not JSON (") for record in records[1:6])
    assert count_records([str(tmp_path / "p.json")]) == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is not valid JSON (the file is empty) after record 0"),
        ('[{"prompt"', "is not valid JSON (the file ends inside a record) after record 0"),
        ('["a", "b"', "is not valid JSON (the file ends where , or ] should) after record 2"),
        ('["a" "b"]', "after record 1"),
        ('["a",]', "is not valid JSON (a comma without a record) after record 1"),
        ('["a"] ["b"]', "is not valid JSON (more follows after its end) after record 1"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', "one record a line goes in a .jsonl file"),
        ('{"data": ["a", "b"', "is not valid JSON (the file ends"),
        ('{"data": ["a"]', "is not valid JSON (the file ends"),
        ('{"data": ["a"], "x": tru}', "is not valid JSON (Expecting value)"),
        ("{data: []}", "is not valid JSON ('d' stands where \" should)"),
        ("[" * 100_000, "is not valid JSON (the file ends inside a record)"),
        ("{" * 100_000, "is not valid JSON"),
        ("3", "holds no JSON list of records: it holds a single value"),
        ('{"prompt": "hi"}', "holds no JSON list of records: it is an object, which must hold exactly one"),
        ('{"a": [{}], "b": [{}]}', "holds 2 (a, b)"),
        ('{"a": [1], "b": {"c": [{}]}}', "and holds none"),
        ('{"messages": [{"role": "user", "content": "hi"}]}', "it is a single record; put it in a list"),
    ],
)
def test_json_without_a_list_of_records(tmp_path: Path, text: str, words: str):
    path = tmp_path / "p.json"
    path.write_text(text)
    for read in (lambda: write_prompts(plain(path), 9, 9, 0, tmp_path / "out"), lambda: count_records([str(path)])):
        with pytest.raises(EyasError) as caught:
            read()
        assert str(caught.value).startswith(f"data.prompts: {path} ") and words in str(caught.value)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize(
    "text",
    [
        '{"data": [{"prompt": "a"}, {"prompt": "b"}]}',
        '\ufeff {"columns": ["x", "y"], "empty": [], "data": [null, {"prompt": "b"}], "n": {"x": [1]}}',
        '{"prompts": ["a", "b"]}',
    ],
)
def test_an_object_with_one_list_of_records(tmp_path: Path, text: str):
    (tmp_path / "p.json").write_text(text)
    assert count_records([str(tmp_path / "p.json")]) == 2
    assert values(tmp_path / "p.json")[1] in ({"prompt": "b"}, "b")


def test_records_without_end_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(json_list_module, "_LONGEST", 10_000)
    monkeypatch.setattr(json_list_module, "_CHUNK", 100)
    (tmp_path / "p.json").write_text('["' + "a" * 100_000)
    with pytest.raises(EyasError, match="a record goes on for over 10,000 characters"):
        list(read_records(str(tmp_path / "p.json")))


# ---- compression


@pytest.mark.parametrize("named", ["p.jsonl", "p.jsonl.gz", "p.jsonl.zst", "p.json.gz", "p.ndjson.zst"])
@pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
def test_compression_is_told_by_the_first_bytes(tmp_path: Path, named: str, packed: str):
    (tmp_path / named).write_bytes(pack(b'["a"]\n' if named.startswith("p.json.") else b'"a"\n', packed))
    assert container_of(str(tmp_path / named))[1] == {"": None, ".gz": "gzip", ".zst": "zstd"}[packed]
    assert values(tmp_path / named) == ["a"]


def test_several_members_and_frames_are_one_file(tmp_path: Path):
    (tmp_path / "p.jsonl.gz").write_bytes(
        gzip.compress(b'"a"\n"b') + gzip.compress(b'"\n') + gzip.compress(b'"c"') + bytes(100)
    )
    skipped = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
    compress = zstandard.ZstdCompressor(write_content_size=False).compress
    (tmp_path / "p.jsonl.zst").write_bytes(
        skipped + compress(b'"a"\n"b') + compress(b"") + compress(b'"\n"c"') + skipped
    )
    assert values(tmp_path / "p.jsonl.gz") == values(tmp_path / "p.jsonl.zst") == ["a", "b", "c"]


@pytest.mark.parametrize("container", ["jsonl.gz", "jsonl.zst", "json.gz", "json.zst", "parquet"])
def test_truncated_files_say_how_far_they_went(tmp_path: Path, container: str):
    records = [{"prompt": f"{i} " + os.urandom(500).hex()} for i in range(2000)]
    path = save(tmp_path, container, records)
    whole = path.read_bytes()
    for size in (0, 1, 3, 20, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        for read in (
            lambda: write_prompts(plain(path), 2000, 500, 5000, tmp_path / "out"),
            lambda: count_records([str(path)]),
        ):
            with pytest.raises(EyasError, match="cut off|not valid JSON") as caught:
                read()
            assert str(path) in str(caught.value) and "\n" not in str(caught.value)
        if size == len(whole) // 2 and container != "parquet":
            opened = zlib.decompressobj(31) if ".gz" in container else zstandard.ZstdDecompressor().decompressobj()
            there = opened.decompress(whole[:size]).count(b'"}\n' if "jsonl" in container else b'"}, ')
            assert there > 800 and f"after record {there} (" in str(caught.value)
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize("container", ["jsonl.gz", "jsonl.zst", "parquet"])
def test_files_with_a_flipped_byte_are_damaged(tmp_path: Path, container: str):
    path = save(tmp_path, container, [{"prompt": f"{i} " + os.urandom(50).hex()} for i in range(200)])
    whole = bytearray(path.read_bytes())
    if container == "parquet":
        whole[4:200] = b"\xff" * 196
    else:
        whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(EyasError, match=r"damaged or cut off after record \d+ \("):
        write_prompts(plain(path), 400, 500, 500, tmp_path / "out")


# ---- Parquet


def test_parquet_oddities(tmp_path: Path):
    """Null fields of structs, maps, nanoseconds, decimals, bytes, dictionaries, columns that are not read."""
    call = pa.struct(
        [
            ("id", pa.string()),
            ("function", pa.struct([("name", pa.string()), ("arguments", pa.map_(pa.string(), pa.string()))])),
        ]
    )
    turn = pa.struct(
        [
            ("role", pa.dictionary(pa.int8(), pa.string())),
            ("content", pa.string()),
            ("tool_calls", pa.list_(call)),
            ("at", pa.timestamp("ns")),
            ("took", pa.duration("ns")),
            ("price", pa.decimal128(9, 2)),
        ]
    )
    parameter = pa.struct([("type", pa.string()), ("enum", pa.large_list(pa.string())), ("default", pa.float32())])
    tool = pa.struct([("name", pa.string()), ("parameters", pa.struct([("a", parameter), ("b", parameter)]))])
    schema = pa.schema(
        [
            ("id", pa.decimal128(9, 2)),
            ("messages", pa.large_list(turn)),
            ("prompt", pa.binary()),
            ("tools", pa.list_(tool)),
            ("seen", pa.timestamp("ns", "Europe/Rome")),
            ("image", pa.binary()),
        ]
    )
    record = {
        "id": Decimal("1.50"),
        "messages": [
            {"role": "user", "content": "hi", "at": 1, "took": 1, "price": Decimal("0.01")},
            {
                "role": "assistant",
                "tool_calls": [{"function": {"name": "f", "arguments": [("city", "Rome"), ("x", None)]}}],
            },
        ],
        "tools": [{"name": "f", "parameters": {"a": {"type": "string", "enum": ["x", None]}}}],
        "seen": 1,
        "image": b"\xff\x00",
    }
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([record, {"prompt": b"hi"}], schema), path)
    first, second = rows_of(path, 2, tmp_path / "out")
    assert first.id == "1.50" and second.id is None
    assert first.messages == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]
    assert first.tools == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"a": {"type": "string", "enum": ["x", None]}}},
        }
    ]
    assert second.messages == [{"role": "user", "content": "hi"}] and second.tools is None


def test_json_keeps_the_nulls_that_someone_wrote(tmp_path: Path):
    call = {"name": "f", "arguments": {"x": None}}
    record = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]}
    (row,) = rows_of(save(tmp_path, "jsonl", [record]), 1, tmp_path / "out")
    assert row.messages[1]["tool_calls"][0]["function"] == call


def test_one_row_that_python_cannot_hold_is_one_bad_record(tmp_path: Path):
    broken = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0\3\0\0\0"), pa.py_buffer(b"\xff\xfea")]
    )
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": broken, "id": pa.array([1, 2])}), path)
    write_prompts(plain(path), 2, 2, 1, tmp_path / "out")
    bad, fine = read_rows(tmp_path / "out" / "rows_0-2.jsonl")
    assert bad.skipped.startswith("bad record: unreadable values (") and fine.messages[0]["content"] == "a"
    assert (bad.source, fine.id) == ("p.parquet", 2)


def test_dates_and_times_as_ids(tmp_path: Path):
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    path = save(tmp_path, "parquet", [{"prompt": "a", "id": day}])
    assert rows_of(path, 1, tmp_path / "out")[0].id == "2026-01-02 03:04:05.000006"


def test_parquet_files_without_prompts(tmp_path: Path):
    path = save(tmp_path, "parquet", [{"query": "a", "answer": "b"}])
    with pytest.raises(EyasError, match=r"has none of the columns conversations, .*; it has query, answer$"):
        write_prompts(plain(path), 1, 1, 1, tmp_path / "out")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(EyasError, match="no prompts in"):
        write_prompts(plain(path), 1, 1, 0, tmp_path / "out")
    path.write_bytes(b'{"prompt": "hi"}\n')
    with pytest.raises(EyasError, match="damaged or cut off"):
        count_records([str(path)])


def test_a_parquet_column_whose_name_is_no_utf8(tmp_path: Path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "säll": ["b"]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace("ä".encode(), b"\xe5 "))
    with pytest.raises(EyasError, match=r"p\.parquet is damaged or cut off after record 0 \('utf-8' codec"):
        list(read_records(str(path)))


# ---- missing and unreadable files


@pytest.mark.parametrize("name", ["p.jsonl", "p.json", "p.json.gz", "p.jsonl.zst", "p.parquet"])
def test_missing_files_and_folders(tmp_path: Path, name: str):
    path = tmp_path / name
    with pytest.raises(EyasError, match=r"^data\.prompts: .* does not exist; name files of prompts \(\.jsonl"):
        write_prompts(plain(path), 1, 1, 0, tmp_path / "out")
    path.mkdir()
    with pytest.raises(EyasError, match=r"^data\.prompts: .* cannot be read \(|damaged"):
        write_prompts(plain(path), 1, 1, 0, tmp_path / "out")


@pytest.mark.parametrize(("name", "content"), [("p.jsonl", "\n\n"), ("p.json", "[]"), ("p.json", "\ufeff[ ]\n")])
def test_files_without_records(tmp_path: Path, name: str, content: str):
    (tmp_path / name).write_text(content)
    with pytest.raises(EyasError, match=r"^data\.prompts: no prompts in ") as caught:
        write_prompts(plain(tmp_path / name), 1, 1, 0, tmp_path / "out")
    assert str(tmp_path / name) in str(caught.value)


# ---- patterns


def never(path: str) -> bool:
    return False


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("d/b.jsonl", "d/a.jsonl", "d/deep/c.jsonl", "d/p.parquet", "x[1].jsonl", "d/.hidden.jsonl"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('"a"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (["d/*.jsonl"], ["d/a.jsonl", "d/b.jsonl"]),
        (["d/**/*.jsonl"], ["d/a.jsonl", "d/b.jsonl", "d/deep/c.jsonl"]),
        (["**/*.jsonl"], ["d/a.jsonl", "d/b.jsonl", "d/deep/c.jsonl", "x[1].jsonl"]),
        (["d/p.parquet", "d/[ab].jsonl"], ["d/p.parquet", "d/a.jsonl", "d/b.jsonl"]),
        (["x[1].jsonl"], ["x[1].jsonl"]),  # as it stands, since there is such a file
        (["later.jsonl", "a/../later.json.gz"], ["later.jsonl", "a/../later.json.gz"]),
        (["y[1].jsonl"], ["y[1].jsonl"]),  # a rule brings it
    ],
)
def test_expand(tree: Path, patterns: list[str], expected: list[str]):
    found = expand(plain(*patterns, format="text", source="s"), lambda path: path == "y[1].jsonl")
    assert found == plain(*expected, format="text", source="s")


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["none/*.jsonl"], "none/*.jsonl matches no file; "),
        (["y[1].jsonl"], "y[1].jsonl matches no file; "),
        (["d"], "d is a folder; name the files in it, as in d/*.jsonl"),
        (["d/"], "d/ is a folder; name the files in it, as in d/*.jsonl"),
        (["a.csv"], "a.csv: files of this kind are not read; name .jsonl, .ndjson and .json (also as .gz or .zst)"),
        (["a.parquet.gz"], "a.parquet.gz: files of this kind are not read"),
        (["a.jsonl.bz2"], "a.jsonl.bz2: files of this kind are not read"),
        (["jsonl"], "jsonl: files of this kind are not read"),
        (["d/a.jsonl", "d/*.jsonl"], "d/a.jsonl is named twice, by d/a.jsonl and by d/*.jsonl; "),
        (["d/a.jsonl", "d/a.jsonl"], "d/a.jsonl is named twice"),
        (["d/a.jsonl", "d/../d/a.jsonl"], "d/../d/a.jsonl is named twice"),
        (["later.jsonl", "./later.jsonl"], "./later.jsonl is named twice"),
    ],
)
def test_patterns_that_cannot_be(tree: Path, patterns: list[str], words: str):
    with pytest.raises(EyasError) as caught:
        expand(plain(*patterns), never)
    assert str(caught.value).startswith(f"data.prompts: {words}")


def test_links_to_one_file_are_that_file_and_broken_ones_are_not_passed_over(tree: Path):
    os.symlink("a.jsonl", "d/z.jsonl")
    with pytest.raises(EyasError, match="named twice"):
        expand(plain("d/*.jsonl"), never)
    os.remove("d/z.jsonl")
    os.symlink("nowhere.jsonl", "d/z.jsonl")
    assert [file.path for file in expand(plain("d/*.jsonl"), never)] == ["d/a.jsonl", "d/b.jsonl", "d/z.jsonl"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("A.JSONL.GZ", "jsonl"), ("a.ndjson", "jsonl"), ("a.b.json.zst", "json"), ("dir.json/x.Parquet", "parquet")],
)
def test_kinds_by_name(name: str, kind: str):
    assert kind_of(name) == kind


# ---- counting


def test_count_over_several_files(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('"a"\n\nnot JSON\n  \n"b"')  # a bad record is a row too
    (tmp_path / "b.json").write_text('["a", "b"]')
    assert count_records([str(tmp_path / "a.jsonl"), str(tmp_path / "b.json")]) == 5


@pytest.mark.parametrize(
    ("content", "count"),
    [
        (b'{"prompt":\r"a"}\n"b"\n', 2),  # a carriage return is white space in JSON, and ends no line
        (b'"a"\r"b"\r', 1),
        (b'"a"\r\n\r\n"b"', 2),
        ('\u3000\n"a"\n\u00a0\n'.encode(), 1),  # white space, but only of Unicode
        (b'\xef\xbb\xbf\n"a"\n', 1),
        (b'\xef\xbb\xbf"a"\n\xef\xbb\xbf"b"\n', 2),
        (b'"a"\n\x1c\n\x85\n', 2),
        ('"a\u2028b"\n"c\u0085"\n'.encode(), 2),
        (b'\x0b\x0c \t\n"a"', 1),
    ],
)
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_counting_and_reading_agree(tmp_path: Path, content: bytes, count: int, packed: str):
    """Otherwise `rows: auto` asks for rows that are not there, or loses the tail in silence."""
    path = tmp_path / f"p.jsonl{packed}"
    path.write_bytes(pack(content, path.name))
    assert count_records([str(path)]) == len(list(read_records(str(path)))) == count


def test_count_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, cache = tmp_path / "a.jsonl", tmp_path / "cache" / "counts.json"
    source.write_text('"a"\n' * 3)
    counted: list[str] = []
    count = prompts_module.count_file
    monkeypatch.setattr(prompts_module, "count_file", lambda path: counted.append(path) or count(path))
    assert [count_records([str(source)], cache) for _ in range(3)] == [3, 3, 3] and len(counted) == 1
    source.write_text('"a"\n' * 5)
    assert count_records([str(source)], cache) == 5 and len(counted) == 2
    source.write_text('"a"\n' * 4 + "   \n")  # as many bytes, other contents
    os.utime(source, ns=(1, 1))
    assert count_records([str(source)], cache) == 4 and len(counted) == 3


@pytest.mark.parametrize("content", ["{", "[]", "3", "{PATH: {}}", "{PATH: {'stamp': STAMP}}"])
def test_damaged_count_cache_is_counted_anew(tmp_path: Path, content: str):
    source, cache = tmp_path / "a.jsonl", tmp_path / "counts.json"
    source.write_text('"a"\n' * 3)
    stamp = [source.stat().st_size, source.stat().st_mtime_ns]
    cache.write_text(content.replace("PATH", f'"{source}"').replace("'", '"').replace("STAMP", str(stamp)))
    assert count_records([str(source)], cache) == 3


def test_count_without_files_or_records(tmp_path: Path):
    with pytest.raises(EyasError, match=r"^data\.rows: auto counts the records of .*none\.jsonl, which is not there"):
        count_records([str(tmp_path / "none.jsonl")])
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(EyasError, match=r"^data\.prompts: no prompts in .*a\.jsonl"):
        count_records([str(tmp_path / "a.jsonl")])


# ---- memory and weight


@pytest.mark.parametrize("container", ["jsonl", "json.gz", "jsonl.zst", "object.json"])
def test_memory_does_not_grow_with_the_file(tmp_path: Path, container: str):
    def peak(count: int) -> int:
        path = save(tmp_path, container, [{"prompt": f"{i} {'word ' * 20}"} for i in range(count)])
        tracemalloc.start()
        try:
            write_prompts(plain(path), count, 500, 0, tmp_path / f"out{count}")
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    few, many = peak(1_000), peak(11_000)
    # Digests of duplicates; the checksum takes a buffer of 8 MB, whatever the size.
    assert many - few < 10_000 * 170 and many < 12_000_000, (few, many)


def test_memory_of_fifty_thousand_rows(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"prompt": f"{i} {'word ' * 40}"}) + "\n" for i in range(50_000))
    tracemalloc.start()
    try:
        write_prompts(plain(path), 50_000, 500, 0, tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20_000_000, peak  # 8 MB are the buffer for checksums; the records would be 40 MB


def test_very_repetitive_zstd_is_read_in_small_pieces(tmp_path: Path):
    """A few hundred KB that stand for hundreds of MB."""
    line = b'"' + b"a" * 1000 + b'"\n'
    path = tmp_path / "p.jsonl.zst"
    with open(path, "wb") as file, zstandard.ZstdCompressor().stream_writer(file) as packed:
        for _ in range(200):
            packed.write(line * 1000)
    assert path.stat().st_size < 50_000
    tracemalloc.start()
    try:
        assert count_records([str(path)]) == 200_000
        assert tracemalloc.get_traced_memory()[1] < 150_000_000
    finally:
        tracemalloc.stop()


def test_importing_conversations_is_light():
    code = (
        "import sys, eyas.conversations;"
        " print([m for m in ('pyarrow', 'zstandard', 'ijson', 'torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
