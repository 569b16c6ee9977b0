"""Prompt files to rows: every format, every bad record, and no row that changes its number."""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eyas.config.schema import PromptFiles
from eyas.conversations import Row, read_rows, write_prompts, write_rows
from eyas.conversations.duplicates import Duplicates
from eyas.conversations.formats import Content, UnusableRecord, detect, formats_of, identity_of, read_content
from eyas.errors import EyasError

SCRIPT = Path(__file__).parents[2] / "workflow" / "scripts" / "number_prompts.py"

USER = {"role": "user", "content": "hi"}
REPLY = {"role": "assistant", "content": "yes"}
SYSTEM = {"role": "system", "content": "be brief"}
TOOL = {"role": "tool", "content": "21"}
FUNCTION = {"name": "weather", "arguments": {"city": "Rome", "days": [1, None]}}
CALL = {"type": "function", "function": FUNCTION}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
DESCRIBED = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": DESCRIBED}]


def turns(*pairs: tuple[str, Any]) -> dict[str, Any]:
    """A ShareGPT record."""
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in pairs]}


def jsonl(path: Path, *records: Any) -> Path:
    """Records as JSON lines; text is written as it stands."""
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def files(*paths: Path, **options: Any) -> list[PromptFiles]:
    return [PromptFiles(path=str(path), **options) for path in paths]


def good(count: int, first: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"question {first + i}"} for i in range(count)]


def skipped_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text(encoding="utf-8").splitlines()]


# ---- one record


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": [SYSTEM, USER, REPLY, USER]}, [SYSTEM, USER, REPLY, USER]),
        ({"messages": [{**USER, "name": "x"}]}, [USER]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"text": "i"}]}]}, [USER]),
        ({"messages": [{"role": "user", "content": ["h", {"type": "text", "value": "i"}]}]}, [USER]),
        ({"messages": json.dumps([USER, REPLY])}, [USER, REPLY]),  # JSON text, as tables have it
        ({"messages": [{"role": "developer", "content": "be brief"}, USER]}, [SYSTEM, USER]),
        ({"messages": [USER], "system": "be brief"}, [SYSTEM, USER]),
        ({"messages": [{"from": "human", "value": "hi"}]}, [USER]),
        ({"messages": [{"role": None, "from": "human", "content": None, "value": "hi"}]}, [USER]),
        (turns(("human", "hi"), ("gpt", "yes")), [USER, REPLY]),
        (turns(("system", "be brief"), ("user", "hi"), ("bard", "yes")), [SYSTEM, USER, REPLY]),
        ({"conversations": [SYSTEM, USER, REPLY], "id": 7}, [SYSTEM, USER, REPLY]),  # the other keys
        (turns(("human", "hi")) | {"system": "be brief"}, [SYSTEM, USER]),
        (turns(("system", "be brief"), ("human", "hi")) | {"system": "other"}, [SYSTEM, USER]),  # its own wins
        (turns(("human", "hi")) | {"system": ""}, [USER]),
        ({"prompt": "hi"}, [USER]),
        *[({"prompt": "hi", key: "yes"}, [USER, REPLY]) for key in ("response", "completion", "output", "answer")],
        ("hi", [USER]),
        ({"instruction": "sum up", "input": "a b"}, [{"role": "user", "content": "sum up\n\na b"}]),
        ({"instruction": "hi", "input": " ", "output": "yes"}, [USER, REPLY]),
        ({"instruction": "hi", "input": None, "output": ""}, [USER]),
        ({"instruction": "hi", "system": "be brief"}, [SYSTEM, USER]),
        ({"prompt": b"hi", "answer": None}, [USER]),
        ({"messages": None, "conversations": None, "prompt": "hi"}, [USER]),
        ({"messages": [{"role": "user", "content": "ä\u2028🦅"}]}, [{"role": "user", "content": "ä\u2028🦅"}]),
    ],
)
def test_formats(record: Any, messages: list[dict[str, str]]):
    assert read_content(record) == Content(messages)


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"content": None, "tool_calls": [CALL]}, CALLS),
        ({"tool_calls": [CALL]}, CALLS),
        ({"content": "so", "tool_calls": json.dumps([CALL])}, {**CALLS, "content": "so"}),
        ({"tool_calls": [FUNCTION]}, CALLS),
        ({"tool_calls": json.dumps(FUNCTION)}, CALLS),
        ({"tool_calls": [{"name": "weather", "arguments": json.dumps(FUNCTION["arguments"])}]}, CALLS),
        ({"tool_calls": [{**CALL, "id": "c1", "index": 0}]}, {**CALLS, "tool_calls": [{"id": "c1", **CALL}]}),
        ({"tool_calls": [{**CALL, "id": None}]}, CALLS),
        (
            {"tool_calls": [{"name": "f", "arguments": "cut {"}, {"name": "g"}, {"name": "h", "arguments": "[1]"}]},
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": "cut {"}},
                {"type": "function", "function": {"name": "g", "arguments": {}}},
                {"type": "function", "function": {"name": "h", "arguments": "[1]"}},
            ]},
        ),
        ({"content": "yes", "tool_calls": []}, REPLY),
        ({"content": "yes", "tool_calls": ""}, REPLY),
        ({"content": "yes", "reasoning_content": "so"}, {**REPLY, "reasoning_content": "so"}),
        ({"content": "yes", "reasoning": "so"}, {**REPLY, "reasoning_content": "so"}),
        ({"content": "yes", "thinking": "so", "reasoning_content": None}, {**REPLY, "reasoning_content": "so"}),
        ({"content": "yes", "reasoning": {"effort": "high"}}, REPLY),
        ({"content": "<think>so</think>yes"}, {"role": "assistant", "content": "<think>so</think>yes"}),
        (  # parts, as in LLaMA-Factory's reason_tool_use_demo_50.jsonl
            {"content": [{"type": "reasoning", "value": "so"}, {"type": "tool_call", "value": json.dumps(FUNCTION)}]},
            {**CALLS, "reasoning_content": "so"},
        ),
        ({"content": [{"type": "thinking", "thinking": "so"}, {"text": "yes"}]}, {**REPLY, "reasoning_content": "so"}),
    ],
)  # fmt: skip
def test_what_an_assistant_says_and_calls(turn: dict[str, Any], message: dict[str, Any]):
    assert read_content({"messages": [USER, {"role": "assistant", **turn}]}).messages == [USER, message]


def test_tool_calls_as_in_glaive():
    """The shape of LLaMA-Factory's glaive_toolcall_en_demo.json."""
    record = turns(
        ("human", "hi"),
        ("function_call", json.dumps(FUNCTION)),
        ("observation", '{"t": 21}'),
        ("gpt", "Warm."),
        ("human", "And?"),
        ("gpt", "I look."),
        ("function_call", json.dumps([FUNCTION, {"name": "time", "arguments": {}}])),
        ("tool_response", "21"),
        ("ipython", "noon"),
    ) | {"tools": json.dumps([DESCRIBED])}
    time = {"type": "function", "function": {"name": "time", "arguments": {}}}
    assert read_content(record) == Content(
        [
            USER,
            CALLS,
            {"role": "tool", "content": '{"t": 21}'},
            {"role": "assistant", "content": "Warm."},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "I look.", "tool_calls": [CALL, time]},
            TOOL,
            {"role": "tool", "content": "noon"},
        ],
        TOOLS,
    )


def test_a_thought_before_a_function_call_stays_text():
    record = turns(("human", "hi"), ("function_call", f"<think>so</think>\n{json.dumps(FUNCTION)}"))
    assert read_content(record).messages[1] == {**CALLS, "content": "<think>so</think>\n"}


def test_tool_messages_keep_name_and_call():
    tool = {**TOOL, "tool_call_id": "c1", "name": "weather"}
    record = {"messages": [USER, CALLS, {**tool, "extra": 1}, {**TOOL, "name": None}, REPLY]}
    assert read_content(record).messages == [USER, CALLS, tool, TOOL, REPLY]


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        (TOOLS, TOOLS),
        ([DESCRIBED], TOOLS),
        ([{"type": "function", **DESCRIBED}], TOOLS),
        (json.dumps(TOOLS), TOOLS),
        ([json.dumps(DESCRIBED)], TOOLS),
        *[(empty, None) for empty in ([], "[]", "", None, "null")],
        (
            [{"name": "f", "parameters": {"enum": [None, "a\ud83e"], "x": decimal.Decimal("1.5")}}],
            [{"type": "function", "function": {"name": "f", "parameters": {"enum": [None, "a?"], "x": "1.5"}}}],
        ),
    ],
)
def test_tools(tools: Any, expected: Any):
    assert read_content({"messages": [USER], "tools": tools}) == Content([USER], expected)
    assert read_content({"prompt": "hi", "tools": tools}) == Content([USER], expected)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (3, "no JSON object"),
        (None, "no JSON object"),
        ([USER], "no JSON object"),
        ({"txt": "hi"}, "no messages, conversations, prompt, instruction, question, turns or text among ['txt']"),
        ({"conversations": None}, "no messages, conversations, prompt, instruction, question, turns or text among ['conversations']"),
        ({"messages": []}, "empty conversation"),
        ({"messages": 5}, "`messages` is no list"),
        ({"messages": "hi"}, "`messages` is not JSON"),
        ({"messages": ["hi"]}, "turn 1 is no object"),
        ({"messages": [USER, {"role": "tool", "content": "x"}]}, "turn 2 is by the tool, not the assistant"),
        ({"messages": [USER, REPLY, TOOL]}, "turn 3 is by the tool, not the user"),
        ({"messages": [USER, CALLS, USER]}, "turn 3 is by the user, not the tool"),
        ({"messages": [USER, CALLS, REPLY]}, "turn 3 is by the assistant, not the tool"),
        ({"messages": [USER, CALLS, TOOL, USER]}, "turn 4 is by the user, not the tool or the assistant"),
        ({"messages": [{"content": "x"}]}, "turn 1 has the role None"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "turn 1 has the role ['user']"),
        ({"messages": [USER, {"role": "robot\ud83e", "content": "x"}]}, "turn 2 has the role 'robot\\ud83e'; known are"),
        ({"messages": [REPLY, USER]}, "turn 1 is by the assistant, not the user"),
        ({"messages": [USER, USER]}, "turn 2 is by the user, not the assistant"),
        ({"messages": [SYSTEM, USER, REPLY, REPLY]}, "turn 4 is by the assistant, not the user"),
        ({"messages": [SYSTEM]}, "no user turn"),
        ({"messages": [USER, REPLY, SYSTEM]}, "turn 3 is a system message after the start"),
        ({"messages": [SYSTEM, SYSTEM, USER]}, "turn 2 is a system message after the start"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "turn 1: empty user message"),
        ({"messages": [USER, REPLY, {"role": "user", "content": ""}]}, "turn 3: empty user message"),
        ({"messages": [{"role": "user", "content": None}]}, "turn 1 is no text"),
        ({"messages": [USER, {"role": "assistant", "content": None, "tool_calls": []}]}, "turn 2 is no text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1 is no text: it has a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}, "a part of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": ["text"], "text": "x"}]}]}, "a part of type"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": {}, "x": 1}]}]}, "turn 2 is no text"),
        ({"messages": [USER, {"role": "assistant", "content": [{"type": "reasoning"}]}]}, "a part of type 'reasoning'"),
        ({"messages": [{**USER, "tool_calls": [CALL]}]}, "turn 1 is by the user and has tool calls"),
        ({"messages": [USER, {**CALLS, "tool_calls": "{"}]}, "turn 2: `tool_calls` is not JSON"),
        ({"messages": [USER, {**CALLS, "tool_calls": 3}]}, "turn 2: `tool_calls` is no list"),
        ({"messages": [USER, {**CALLS, "tool_calls": [CALL, {"id": "x"}]}]}, "turn 2: call 2 names no function"),
        ({"messages": [USER, {**CALLS, "tool_calls": ["f"]}]}, "turn 2: call 1 names no function"),
        ({"messages": [USER, {**CALLS, "tool_calls": [{"name": "f", "arguments": [1]}]}]}, "call 1 has arguments that"),
        ({"messages": [USER, {**CALLS, "tool_calls": [{"name": "f", "arguments": {"x": float("nan")}}]}]}, "(nan)"),
        (turns(("human", "hi"), ("function_call", "call it")), "turn 2: the function call is not JSON"),
        (turns(("human", "hi"), ("function_call", "[]")), "turn 2 calls no function"),
        (turns(("human", "hi"), ("function_call", "{}")), "turn 2: call 1 names no function"),
        (turns(("human", "hi"), ("function_call", "{}"), ("gpt", "x")), "turn 2: call 1 names no function"),
        (turns(("function_call", json.dumps(FUNCTION))), "turn 1 is by the assistant, not the user"),
        (turns(("human", "hi"), ("gpt", "a"), ("function_call", json.dumps(FUNCTION)), ("gpt", "x")), "turn 4 is by"),
        ({"messages": [USER], "tools": "weather"}, "`tools` is not JSON"),
        ({"messages": [USER], "tools": [{"description": "x"}]}, "tool 1 describes no function"),
        ({"messages": [USER], "tools": [3]}, "tool 1 describes no function"),
        ({"messages": [USER], "system": 3}, "`system` is no text"),
        ({"prompt": ""}, "turn 1: empty user message"),
        ({"prompt": 5}, "the prompt is no text"),
        ({"instruction": "x", "output": 5}, "the answer is no text"),
        ({"text": " "}, "empty text"),
        ({"text": ["a"]}, "`text` is no text"),
        ({"text": 5}, "`text` is no text"),
    ],
)  # fmt: skip
def test_bad_records(record: Any, reason: str):
    with pytest.raises(UnusableRecord) as caught:
        read_content(record)
    assert reason in str(caught.value)
    str(caught.value).encode()  # can be written


def test_nesting_without_end_is_a_bad_record():
    deep: dict[str, Any] = {}
    for _ in range(50_000):
        deep = {"x": deep}
    for record in ({"prompt": "hi", "tools": [{"name": "f", "parameters": deep}]}, {"messages": "[" * 50_000}):
        with pytest.raises(UnusableRecord, match="nested too deeply"):
            read_content(record)
    cut = {"name": "f", "arguments": '{"x":' * 50_000}
    assert (
        read_content({"messages": [USER, {**CALLS, "tool_calls": [cut]}]}).messages[1]["tool_calls"][0]["function"]
        == cut
    )


def test_ready_text():
    assert read_content({"text": "Once\n", "id": 3}) == Content([], None, "Once\n")


# ---- which format


def test_formats_by_precedence():
    everything = {"text": "t", "prompt": "p", "conversations": [], "messages": []}
    assert formats_of(everything) == ["messages", "sharegpt", "prompt", "text"]
    assert formats_of({**everything, "messages": None}) == ["sharegpt", "prompt", "text"]
    assert formats_of({"instruction": "x", "text": "Below is an instruction"}) == ["prompt", "text"]
    assert formats_of("x") == ["prompt"] and formats_of(3) == [] and formats_of({"x": 1}) == []
    assert detect([3, {"text": "t"}, {"prompt": "p"}]) == "prompt"
    assert detect([]) is None and detect([{"x": 1}]) is None


def test_detected_formats_are_a_preference_and_forced_ones_a_demand():
    both = {"messages": [USER], "text": "ready"}
    assert read_content(both, "text").text == "ready" and read_content(both, "messages").messages == [USER]
    assert read_content({"text": "ready"}, "messages") == Content([], None, "ready")
    assert read_content(both, "text", forced=True).text == "ready"
    for record, forced, reason in (
        ({"text": "x"}, "messages", "no `messages` in it; data.format is messages"),
        ("x", "messages", "no `messages` in it; data.format is messages"),
        (both, "prompt", "no `prompt`, `instruction`, `question` or `turns` in it; data.format is prompt"),
        ({"conversations": None}, "sharegpt", "no `conversations` in it; data.format is sharegpt"),
        (3, "text", "no JSON object"),
    ):
        with pytest.raises(UnusableRecord) as caught:
            read_content(record, forced, forced=True)
        assert str(caught.value) == reason
    assert read_content("hi", "prompt", forced=True) == Content([USER])


@pytest.mark.parametrize(
    ("record", "source", "identity"),
    [
        ({"id": 0, "uuid": "u"}, None, 0),
        ({"id": None, "conversation_id": "c"}, None, "c"),
        ({"id": "", "prompt_id": 2**70}, None, 2**70),
        ({"id": 1.5, "source": ""}, None, "1.5"),
        ({"id": True, "source": 3, "dataset": "d"}, "d", "True"),
        ({"id": {"a": 1}, "source": "s\ud83e"}, "s?", "{'a': 1}"),
        ({"uuid": b"ab"}, None, "ab"),
        ({"id": datetime.date(2026, 1, 2)}, None, "2026-01-02"),
        ("hi", None, None),
    ],
)
def test_source_and_id(record: Any, source: str | None, identity: Any):
    assert identity_of(record) == (source, identity)
    assert type(identity_of(record)[1]) is type(identity)


# ---- rows of files


def test_half_a_surrogate_pair_can_be_written_and_read(tmp_path: Path):
    """JSON may hold one half of an emoji; UTF-8 may not."""
    source = jsonl(
        tmp_path / "p.jsonl",
        r'{"prompt": "a\ud83e", "id": "\ud83e", "source": "\ud83e", "tools": [{"name": "f", "\ud83e": "\ud83e"}]}',
        r'{"prompt": "\ud83e\udd85"}',
        r'{"messages": [{"role": "\ud83e", "content": ""}], "\ud83e": 1}',
        r'{"\ud83e": 1}',
    )
    write_prompts(files(source), 4, 4, 2, tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "rows_0-4.jsonl")
    assert [row.messages[0]["content"] for row in rows[:2]] == ["a?", "🦅"]
    assert (rows[0].id, rows[0].source, rows[0].tools[0]["function"]["?"]) == ("?", "?", "?")


def test_rows_are_numbered_across_files_and_cut_into_shards(tmp_path: Path):
    first = jsonl(tmp_path / "a.jsonl", *good(3), "", "  ")  # blank lines are no records
    second = tmp_path / "b.json"
    second.write_text("\ufeff" + json.dumps(good(4, first=3)))  # with a byte order mark
    out = tmp_path / "out"
    write_prompts(files(first, second), 5, 2, 0, out)
    shards = ["rows_0-2", "rows_2-4", "rows_4-5"]
    assert sorted(os.listdir(out)) == ["index.json", *(f"{name}.jsonl" for name in shards), "skipped.jsonl"]
    rows = [row for name in shards for row in read_rows(out / f"{name}.jsonl")]
    assert [row.row for row in rows] == [0, 1, 2, 3, 4]
    assert [row.messages[0]["content"] for row in rows] == [f"question {i}" for i in range(5)]
    assert [(row.place, row.source) for row in rows[2:]] == [
        (f"{first}:3", "a.jsonl"),
        (f"{second}:1", "b.json"),
        (f"{second}:2", "b.json"),
    ]
    index = json.loads((out / "index.json").read_text())
    assert (index["rows"], index["shard_rows"], index["skipped"], index["duplicates"]) == (5, 2, 0, 0)
    assert index["files"]["rows_4-5.jsonl"]["bytes"] == (out / "rows_4-5.jsonl").stat().st_size
    assert index["formats"] == {
        str(first): {"container": "jsonl", "format": "prompt"},
        str(second): {"container": "json", "format": "prompt"},
    }
    assert index["sources"] == {"a.jsonl": 3, "b.json": 2}
    assert skipped_lines(out) == []


def test_sources_ids_and_tools_stay_with_their_rows(tmp_path: Path):
    own = jsonl(tmp_path / "a.jsonl", {"prompt": "1", "source": "chat", "id": 7}, {"prompt": "2", "dataset": "qa"}, "x")
    named = jsonl(tmp_path / "b.jsonl", {"messages": [USER], "source": "chat", "tools": [DESCRIBED], "uuid": "u"})
    out = tmp_path / "out"
    write_prompts(files(own) + files(named, source="mine"), 4, 4, 1, out)
    rows = read_rows(out / "rows_0-4.jsonl")
    assert [(row.source, row.id, row.tools) for row in rows] == [
        ("chat", 7, None),
        ("qa", None, None),
        ("a.jsonl", None, None),
        ("mine", "u", TOOLS),
    ]
    assert json.loads((out / "index.json").read_text())["sources"] == {"chat": 1, "qa": 1, "a.jsonl": 1, "mine": 1}


def test_index_names_no_more_than_a_thousand_sources(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", *({"prompt": f"{i}", "source": f"page {i}"} for i in range(1003)))
    write_prompts(files(source), 1003, 2000, 0, tmp_path / "out")
    sources = json.loads((tmp_path / "out" / "index.json").read_text())["sources"]
    assert len(sources) == 1001 and sources["(others)"] == 3 and sum(sources.values()) == 1003


def test_skipped_records_keep_their_row(tmp_path: Path):
    source = jsonl(
        tmp_path / "p.jsonl", good(1)[0], '{"prompt": "cut', "", {"messages": [], "id": 5}, good(1, first=3)[0]
    )
    write_prompts(files(source), 4, 4, 2, tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "rows_0-4.jsonl")
    assert [(row.row, row.skipped is None) for row in rows] == [(0, True), (1, False), (2, False), (3, True)]
    assert rows[1].skipped.startswith("bad record: not JSON") and rows[1].messages == []
    assert rows[2].skipped == "bad record: empty conversation" and rows[2].id == 5
    assert rows[3].messages[0]["content"] == "question 3" and rows[3].place == f"{source}:5"
    assert json.loads((tmp_path / "out" / "index.json").read_text())["skipped"] == 2
    assert skipped_lines(tmp_path / "out") == [
        {"row": 1, "file": str(source), "line": 2, "reason": rows[1].skipped},
        {"row": 2, "file": str(source), "line": 4, "reason": "bad record: empty conversation"},
    ]


def test_too_many_bad_records_are_listed_with_place_and_reason(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", good(1)[0], "{", {"messages": [REPLY]}, *good(3))
    with pytest.raises(EyasError) as caught:
        write_prompts(files(source), 6, 2, 1, tmp_path / "out")
    first, second, summary = str(caught.value).split("\n")
    assert first.startswith(f"{source}:2: not JSON (")
    assert second == f"{source}:3: turn 1 is by the assistant, not the user"
    assert "2 bad record(s) among the first 3" in summary and "data.max_bad_rows = 1" in summary
    assert not (tmp_path / "out" / "index.json").exists() and not (tmp_path / "out" / "skipped.jsonl").exists()
    assert not any(name.endswith(".partial") for name in os.listdir(tmp_path / "out"))


def test_of_many_bad_records_twenty_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    source = jsonl(tmp_path / "p.jsonl", *["{"] * 30, *good(10))
    with caplog.at_level(logging.INFO, logger="eyas"), pytest.raises(EyasError) as caught:
        write_prompts(files(source), 40, 10, 24, tmp_path / "out")
    lines = str(caught.value).split("\n")
    assert len(lines) == 21 and lines[19].startswith(f"{source}:20: ") and "25 bad record(s)" in lines[20]
    assert sum("is skipped" in record.message for record in caplog.records) == 20


def test_bytes_that_are_no_text_spoil_one_record_only(tmp_path: Path):
    source = tmp_path / "p.jsonl"
    source.write_bytes(b'\xff\xfe\n{"prompt": "hi"}\n' + b"[" * 200_000 + b'\n{"prompt": "\xffa"}\n{"prompt": NaN}\n')
    write_prompts(files(source), 5, 5, 3, tmp_path / "out")
    rows = read_rows(tmp_path / "out" / "rows_0-5.jsonl")
    assert [row.skipped is None for row in rows] == [False, True, False, True, False]
    assert rows[3].messages[0]["content"] == "\ufffda" and rows[2].skipped == "bad record: not JSON (nested too deeply)"


def test_too_few_records_name_the_number_to_write(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", *good(3))
    with pytest.raises(EyasError, match=r"data\.rows: 4 are asked for, .* hold 3; write data\.rows: 3"):
        write_prompts(files(source), 4, 2, 0, tmp_path / "out")
    assert not (tmp_path / "out" / "index.json").exists()


def test_formats_are_detected_for_each_file_shown_and_can_be_forced(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    talk = jsonl(tmp_path / "a.jsonl", "3", *good(2), turns(("human", "hi")), {"text": "t", "messages": [REPLY, USER]})
    text = jsonl(tmp_path / "b.jsonl", {"text": "Once", "prompt": "p"}, {"prompt": "q"})
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO, logger="eyas"):
        write_prompts(files(talk) + files(text, format="text"), 7, 7, 3, out)
    rows = read_rows(out / "rows_0-7.jsonl")
    assert [row.skipped for row in rows] == [
        "bad record: no JSON object",
        None,
        None,
        None,
        "bad record: turn 1 is by the assistant, not the user",  # messages come before text
        None,
        "bad record: no `text` in it; data.format is text",
    ]
    assert rows[3].messages == [USER] and rows[5].text == "Once" and rows[5].messages == []
    formats = json.loads((out / "index.json").read_text())["formats"]
    assert [entry["format"] for entry in formats.values()] == ["messages", "text"]
    said = [record.getMessage() for record in caplog.records]
    assert f"{talk}: jsonl, format messages (detected)." in said and f"{text}: jsonl, format text (forced)." in said


def test_the_data_format_is_for_files_without_one(tmp_path: Path):
    both = {"text": "Once", "prompt": "p"}
    a, b = jsonl(tmp_path / "a.jsonl", both), jsonl(tmp_path / "b.jsonl", {**both, "prompt": "q"})
    write_prompts(files(a) + files(b, format="auto"), 2, 2, 0, tmp_path / "out", data_format="text")
    first, second = read_rows(tmp_path / "out" / "rows_0-2.jsonl")
    assert first.text == "Once" and second.messages[0]["content"] == "q"


def test_a_format_is_told_by_a_hundred_readable_records_and_no_more(tmp_path: Path):
    both = {"messages": [USER], "prompt": "other"}
    for good_ones, seen in ((99, "messages"), (100, "prompt")):
        source = jsonl(tmp_path / f"{good_ones}.jsonl", *["{"] * 50, *good(good_ones), both)
        rows = 51 + good_ones
        write_prompts(files(source), rows, 500, 50, tmp_path / str(good_ones))
        index = json.loads((tmp_path / str(good_ones) / "index.json").read_text())
        assert index["formats"][str(source)]["format"] == seen
        last = read_rows(tmp_path / str(good_ones) / f"rows_0-{rows}.jsonl")[-1]
        assert last.messages[0]["content"] == {"messages": "hi", "prompt": "other"}[seen]


def test_no_more_is_read_than_the_rows_that_are_asked_for(tmp_path: Path):
    source = jsonl(tmp_path / "a.jsonl", *good(3), "{")
    write_prompts(files(source, tmp_path / "none.jsonl"), 3, 2, 0, tmp_path / "out")
    assert list(json.loads((tmp_path / "out" / "index.json").read_text())["formats"]) == [str(source)]


# ---- duplicates


def test_duplicates_are_skipped_or_kept(tmp_path: Path):
    call = {"name": "f", "arguments": {"a": 1, "b": 2}}
    records = [
        {"prompt": "hi", "id": 1},
        {"messages": [USER], "source": "elsewhere"},  # the same content
        {"prompt": "hi", "tools": [DESCRIBED]},  # not the same: it has tools
        {"text": "hi"},
        {"messages": [USER, {"role": "assistant", "tool_calls": [call]}]},
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**call, "arguments": '{"b":2,"a":1}'}]}]},
        {"messages": [REPLY]},
        {"messages": [REPLY]},  # bad, and not a duplicate
        "hi",
    ]
    source = jsonl(tmp_path / "p.jsonl", *(json.dumps(record) for record in records))
    write_prompts(files(source), 9, 2, 2, tmp_path / "skip")
    reasons = {entry["row"]: (entry["line"], entry["reason"]) for entry in skipped_lines(tmp_path / "skip")}
    bad = "bad record: turn 1 is by the assistant, not the user"
    assert reasons == {
        1: (2, "duplicate of row 0"),
        5: (6, "duplicate of row 4"),
        6: (7, bad),
        7: (8, bad),
        8: (9, "duplicate of row 0"),
    }
    index = json.loads((tmp_path / "skip" / "index.json").read_text())
    assert (index["skipped"], index["duplicates"], index["sources"]) == (5, 3, {"p.jsonl": 8, "elsewhere": 1})
    assert read_rows(tmp_path / "skip" / "rows_0-2.jsonl")[1].skipped == "duplicate of row 0"
    write_prompts(files(source), 9, 2, 2, tmp_path / "keep", duplicates="keep")
    assert [entry["row"] for entry in skipped_lines(tmp_path / "keep")] == [6, 7]
    assert json.loads((tmp_path / "keep" / "index.json").read_text())["duplicates"] == 0


def test_duplicates_take_little_memory_and_the_first_row_wins():
    seen = Duplicates()
    assert [seen.first(Content([{"role": "user", "content": text}]), row) for row, text in enumerate("abab")] == [
        None,
        None,
        0,
        1,
    ]
    assert all(len(digest) == 16 for digest in seen._rows)


# ---- the script


def run_script(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(SCRIPT),
        "--output",
        str(tmp_path / "out" / "index.json"),
        "--shard-rows",
        "2",
        *options,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_script(tmp_path: Path):
    source = jsonl(tmp_path / "p.jsonl", {"text": "Once", "prompt": "p"}, {"text": "Once"})
    listed = json.dumps([{"path": str(source), "format": None, "source": "mine"}])
    done = run_script(tmp_path, "--files", listed, "--rows", "2", "--format", "text", "--duplicates", "keep")
    assert done.returncode == 0, done.stderr
    rows = read_rows(tmp_path / "out" / "rows_0-2.jsonl")
    assert [(row.text, row.source, row.skipped) for row in rows] == [("Once", "mine", None)] * 2
    for wrong in ("{", '[{"file": "x"}]', "3"):
        failed = run_script(tmp_path, "--files", wrong, "--rows", "2")
        assert failed.returncode == 1 and "error: --files:" in failed.stderr and "Traceback" not in failed.stderr


# ---- files of rows


def test_rows_round_trip(tmp_path: Path):
    rows = [
        Row(3, "a", [USER, {"role": "assistant", "content": "line\n\u2028\u0085🦅"}], None, "stop", 5, "a:4"),
        Row(4, "a", skipped="bad record: x", place="a:5", id="u"),
        Row(5, "a", [], "truncated", "length", 64, "a:6", 0),
        Row(6, "a", [USER, CALLS, TOOL], place="a:7", tools=TOOLS),
        Row(7, "a", text="Once", place="a:8"),
    ]
    write_rows(tmp_path / "rows.jsonl", rows)
    assert read_rows(tmp_path / "rows.jsonl") == rows


@pytest.mark.parametrize("damage", ['{"row": 1, "sou', '{"row": 1}', '{"row": 1, "source": "x", "new": 1}', "[1]", "3"])
def test_damaged_rows_name_the_line(tmp_path: Path, damage: str):
    (tmp_path / "rows.jsonl").write_text(Row(0, "a:1", [USER]).to_json() + "\n" + damage)
    with pytest.raises(EyasError, match=r"rows\.jsonl: damaged at line 2 \("):
        read_rows(tmp_path / "rows.jsonl")
