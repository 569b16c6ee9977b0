"""Prompt files to rows: every format, every bad record, and no row that changes its number."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import eyas.conversations.prompts as prompts_module
import pytest
from eyas.conversations import Row, count_records, read_rows, write_prompts, write_rows
from eyas.conversations.formats import UnusableRecord, to_messages
from eyas.conversations.prompts import read_records
from eyas.errors import EyasError

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be brief"}


def jsonl(path: Path, *records: Any) -> Path:
    """Records as JSON lines; text is written as it stands."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def good(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"question {first + i}"} for i in range(count)]


# ---- one record


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [SYSTEM, USER, REPLY, USER]}, [SYSTEM, USER, REPLY, USER]),
        ({"messages": [{**USER, "name": "x"}]}, [USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}]}, [USER]),
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]}, [USER, REPLY]),
        ({"conversations": [SYSTEM, USER, REPLY], "id": 7}, [SYSTEM, USER, REPLY]),  # the other keys
        ({"messages": [{"from": "human", "value": "hi"}]}, [USER]),
        ({"prompt": "hi"}, [USER]),
        ({"prompt": "hi", "response": "yes"}, [USER, REPLY]),
        ("hi", [USER]),
        ({"instruction": "sum up", "input": "a b"}, [{"role": "user", "content": "sum up\n\na b"}]),
        ({"instruction": "hi", "input": " ", "output": "yes"}, [USER, REPLY]),
        ({"instruction": "hi", "input": None, "output": ""}, [USER]),
        ({"instruction": "hi", "system": "be brief"}, [SYSTEM, USER]),
        ({"messages": [{"role": "user", "content": "ä\u2028🦅"}]}, [{"role": "user", "content": "ä\u2028🦅"}]),
    ],
)
def test_formats(record: Any, messages: list[dict[str, str]]):
    assert to_messages(record) == messages


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (3, "no JSON object"),
        ([USER], "no JSON object"),
        ({"text": "hi"}, "no messages, conversations, prompt or instruction among ['text']"),
        ({"messages": []}, "empty conversation"),
        ({"conversations": None}, "empty conversation"),
        ({"messages": ["hi"]}, "turn 1 is no object"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "turn 2 has the role 'tool'"),
        ({"messages": [{"content": "x"}]}, "turn 1 has the role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "turn 1 has the role ['user']"),
        ({"messages": [REPLY, USER]}, "turn 1 is by the assistant, not the user"),
        ({"messages": [USER, USER]}, "turn 2 is by the user, not the assistant"),
        ({"messages": [SYSTEM]}, "no user turn"),
        ({"messages": [USER, REPLY, SYSTEM]}, "a system message after the start"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "turn 1: empty user message"),
        ({"messages": [USER, REPLY, {"role": "user", "content": ""}]}, "turn 3: empty user message"),
        ({"messages": [{"role": "user", "content": None}]}, "turn 1 is no text"),
        ({"messages": [{"role": "user", "content": [{"image": "x"}]}]}, "turn 1 is no text"),
        ({"prompt": ""}, "turn 1: empty user message"),
        ({"prompt": 5}, "the prompt is no text"),
        ({"instruction": "x", "output": 5}, "the answer is no text"),
    ],
)
def test_bad_records(record: Any, reason: str):
    with pytest.raises(UnusableRecord) as caught:
        to_messages(record)
    assert reason in str(caught.value)


def test_half_a_surrogate_pair_can_be_written_and_read(tmp_path: Path):
    """JSON may hold one half of an emoji; UTF-8 may not."""
    source = jsonl(tmp_path / "p.jsonl", r'{"prompt": "a\ud83e"}', r'{"prompt": "\ud83e\udd85"}')
    write_prompts([source], 2, 2, 0, tmp_path / "out")
    contents = [row.messages[0]["content"] for row in read_rows(tmp_path / "out" / "rows_0-2.jsonl")]
    assert contents == ["a?", "🦅"]


# ---- files of records


def test_rows_are_numbered_across_files_and_cut_into_shards(tmp_path: Path):
    first = jsonl(tmp_path / "a.jsonl", *good(3), "", "  ")  # blank lines are no records
    second = tmp_path / "b.json"
    second.write_text("\ufeff" + json.dumps(good(4, first=3)))  # with a byte order mark
    out = tmp_path / "out"
    write_prompts([first, second], 5, 2, 0, out)
    assert sorted(os.listdir(out)) == ["index.json", "rows_0-2.jsonl", "rows_2-4.jsonl", "rows_4-5.jsonl"]
    rows = [row for name in ("rows_0-2", "rows_2-4", "rows_4-5") for row in read_rows(out / f"{name}.jsonl")]
    assert [row.row for row in rows] == [0, 1, 2, 3, 4]
    assert [row.messages[0]["content"] for row in rows] == [f"question {i}" for i in range(5)]
    assert [row.source for row in rows[2:]] == [f"{first}:3", f"{second}:1", f"{second}:2"]
    index = json.loads((out / "index.json").read_text())
    assert (index["rows"], index["shard_rows"], index["skipped"]) == (5, 2, 0)
    assert index["files"]["rows_4-5.jsonl"]["bytes"] == (out / "rows_4-5.jsonl").stat().st_size


def test_skipped_records_keep_their_row(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", good(1)[0], '{"prompt": "cut', {"messages": []}, good(1, first=3)[0])
    write_prompts([source], 4, 4, 2, tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "rows_0-4.jsonl")
    assert [(row.row, row.skipped is None) for row in rows] == [(0, True), (1, False), (2, False), (3, True)]
    assert rows[1].skipped.startswith("bad record: not JSON") and rows[1].messages == []
    assert rows[2].skipped == "bad record: empty conversation"
    assert rows[3].messages[0]["content"] == "question 3" and rows[3].source == f"{source}:4"
    assert json.loads((tmp_path / "out" / "index.json").read_text())["skipped"] == 2


def test_too_many_bad_records_are_listed_with_place_and_reason(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", good(1)[0], "{", {"messages": [REPLY]}, *good(3))
    with pytest.raises(EyasError) as caught:
        write_prompts([source], 6, 2, 1, tmp_path / "out")
    first, second, summary = str(caught.value).split("\n")
    assert first.startswith(f"{source}:2: not JSON (")
    assert second == f"{source}:3: turn 1 is by the assistant, not the user"
    assert "2 bad record(s) among the first 3" in summary and "data.max_bad_rows = 1" in summary
    assert not (tmp_path / "out" / "index.json").exists()
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path / "out"))


def test_bytes_that_are_no_text_spoil_one_record_only(tmp_path: Path):
    source = tmp_path / "p.jsonl"
    source.write_bytes(b'\xff\xfe\n{"prompt": "hi"}\n' + b"[" * 200_000 + b"\n")
    write_prompts([source], 3, 3, 2, tmp_path / "out")
    assert [row.skipped is None for row in read_rows(tmp_path / "out" / "rows_0-3.jsonl")] == [False, True, False]


def test_too_few_records_name_the_number_to_write(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", *good(3))
    with pytest.raises(EyasError, match=r"data\.rows: 4 are asked for, .* hold 3; write data\.rows: 3"):
        write_prompts([source], 4, 2, 0, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("p.jsonl", "\n\n", "no prompts in"),
        ("p.json", "[]", "no prompts in"),
        ("p.json", '{"prompt": "hi"}', "holds no JSON list"),
        ("p.json", '[{"prompt"', "is not valid JSON"),
        ("p.json", "[" * 100_000, "is not valid JSON"),
        ("p.jsonl", None, "does not exist"),
        ("p.json", None, "does not exist"),
    ],
)
def test_files_without_records(tmp_path: Path, name: str, content: str | None, words: str):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(EyasError, match=rf"^data\.prompts: .*{words}") as caught:
        write_prompts([tmp_path / name], 1, 1, 0, tmp_path / "out")
    assert str(tmp_path / name) in str(caught.value)


# ---- counting


def test_count_over_several_files(tmp_path: Path):
    first = jsonl(tmp_path / "a.jsonl", *good(3), "", "not JSON")  # a bad record is a row too
    (tmp_path / "b.json").write_text(json.dumps(good(2)))
    assert count_records([str(first), str(tmp_path / "b.json")]) == 6


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt":\r"a"}\n"b"\n',  # a carriage return is white space in JSON, and ends no line
        b'"a"\r"b"\r',
        b'"a"\r\n\r\n"b"',
        '\u3000\n"a"\n\u00a0\n'.encode(),  # white space, but only of Unicode
        b'\xef\xbb\xbf\n"a"\n',
        b'"a"\n\x1c\n\x85\n',
    ],
)
def test_counting_and_reading_agree(tmp_path: Path, content: bytes):
    """Otherwise `rows: auto` asks for rows that are not there, or loses the tail in silence."""
    (tmp_path / "p.jsonl").write_bytes(content)
    assert count_records([str(tmp_path / "p.jsonl")]) == len(list(read_records(tmp_path / "p.jsonl")))


def test_count_is_remembered_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source, cache = jsonl(tmp_path / "a.jsonl", *good(3)), tmp_path / "cache" / "counts.json"
    counted: list[Path] = []
    count = prompts_module._count
    monkeypatch.setattr(prompts_module, "_count", lambda path: counted.append(path) or count(path))
    assert [count_records([str(source)], cache) for _ in range(3)] == [3, 3, 3] and len(counted) == 1
    jsonl(source, *good(5))
    assert count_records([str(source)], cache) == 5 and len(counted) == 2
    size = source.stat().st_size
    jsonl(source, *good(4), " " * (size // 5 - 1))  # as many bytes, other contents
    assert source.stat().st_size == size
    os.utime(source, ns=(1, 1))
    assert count_records([str(source)], cache) == 4 and len(counted) == 3


@pytest.mark.parametrize("content", ["{", "[]", "3", "{PATH: {}}", "{PATH: {'stamp': STAMP}}"])
def test_damaged_count_cache_is_counted_anew(tmp_path: Path, content: str):
    source, cache = jsonl(tmp_path / "a.jsonl", *good(3)), tmp_path / "counts.json"
    stamp = [source.stat().st_size, source.stat().st_mtime_ns]
    cache.write_text(content.replace("PATH", f'"{source}"').replace("'", '"').replace("STAMP", str(stamp)))
    assert count_records([str(source)], cache) == 3


def test_count_without_files_or_records(tmp_path: Path):
    with pytest.raises(EyasError, match=r"^data\.rows: auto counts the records of .*none\.jsonl, which is not there"):
        count_records([str(tmp_path / "none.jsonl")])
    with pytest.raises(EyasError, match=r"^data\.prompts: no prompts in .*a\.jsonl"):
        count_records([str(jsonl(tmp_path / "a.jsonl", "", ""))])


# ---- files of rows


def test_rows_round_trip(tmp_path: Path):
    rows = [
        Row(3, "a:4", [USER, {"role": "assistant", "content": "line\n\u2028\u0085🦅"}], None, "stop", 5),
        Row(4, "a:5", skipped="bad record: x"),
        Row(5, "a:6", [], "truncated", "length", 64),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("damage", ['{"row": 1, "sou', '{"row": 1}', '{"row": 1, "source": "x", "new": 1}', "[1]", "3"])
def test_damaged_rows_name_the_line(tmp_path: Path, damage: str):
    (tmp_path / "rows.jsonl").write_text(Row(0, "a:1", [USER]).to_json() + "\n" + damage)
    with pytest.raises(EyasError, match=r"rows\.jsonl: damaged at line 2 \("):
        read_rows(tmp_path / "rows.jsonl")
