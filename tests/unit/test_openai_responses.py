"""Answers over an endpoint: the target's own turns, tools, reasoning, cut-off answers, spending, the same bytes."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from eyas.conversations import Row
from eyas.errors import EyasError
from fake_endpoint import (
    FakeEndpoint,
    answer_to,
    ask,
    free_port,
    journal_of,
    replay,
    respond,
    respond_command,
    write_prompts,
)
from hypothesis import HealthCheck, given
from hypothesis import settings as options
from hypothesis import strategies as st

SHARD = ("rows_0-9.jsonl", "rows_0-9.json")


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeEndpoint]:
    with FakeEndpoint(tmp_path / "requests.log") as endpoint:
        yield endpoint


def shard_bytes(folder: Path) -> list[bytes]:
    return [(folder / "conversations" / name).read_bytes() for name in SHARD]


def asked(fake: FakeEndpoint) -> list[list[dict[str, Any]]]:
    """The messages of each request."""
    return [entry["body"]["messages"] for entry in fake.requests()]


def contents(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message.get("content") or "") for message in messages]


# ---- turns ----


def test_every_assistant_turn_is_the_targets_own(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [
        ask(3, "row 3, first", "second", "third", system="be kind"),
        Row(4, "b", skipped="bad record: x", place="b.jsonl:7"),
        Row(5, "c", [{"role": "user", "content": "row 5"}], place="c.jsonl:9", id="five"),
    ]
    found, facts = respond(tmp_path, rows, [fake.url], concurrency=1)
    whole, finish, tokens = replay(rows[0])
    assert [message["role"] for message in whole] == ["system", *["user", "assistant"] * 3]
    assert found[0] == Row(3, "a", whole, None, finish, tokens)
    assert found[1] == rows[1]
    assert (found[2].messages, found[2].place, found[2].id) == (replay(rows[2])[0], "c.jsonl:9", "five")
    assert "never the data's" not in (tmp_path / "conversations" / SHARD[0]).read_text(encoding="utf-8")
    first = [messages for messages in asked(fake) if messages[-1]["content"] != "row 5"]
    assert [contents(messages) for messages in first] == [contents(whole[:end]) for end in (2, 4, 6)]
    assert (facts["rows"], facts["truncated"]) == (2, 0)
    assert facts["reply_tokens"] == tokens + replay(rows[2])[2]
    assert facts["skipped"] == [{"row": 4, "reason": "bad record: x"}]
    assert found[2].finish == "stop"


def test_rows_are_written_in_order_whatever_order_they_come_in(tmp_path: Path) -> None:
    rows = [ask(i, f"row {i}", *(["more"] if i % 3 == 0 else [])) for i in range(100, 160)]
    with FakeEndpoint(tmp_path / "log", delay=0.05) as fake:
        found, _ = respond(tmp_path, rows, [fake.url], concurrency=32)
    answered = [entry["answered"] for entry in fake.requests()]
    assert answered != sorted(answered)
    assert [row.row for row in found] == list(range(100, 160))
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="["), min_size=1, max_size=12)


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A system turn or none, then user turns; the data's own answers here and there, the last turn's too."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(1, 3))):
        marks = draw(st.sampled_from(["", "[[think:reasoning]]", "[[think:inline]]", "[[fault:503]]", "[[words:12]]"]))
        messages.append({"role": "user", "content": f"{draw(TEXT)} {turn} {marks}"})
        if draw(st.booleans()) or turn == 0:
            messages.append({"role": "assistant", "content": draw(TEXT)})
    # Two user turns with no answer between them are left out: what they are is the data reader's question.
    kept: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "user" and kept and kept[-1]["role"] == "user":
            kept.append({"role": "assistant", "content": "x"})
        kept.append(message)
    return kept


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeEndpoint]:
    with FakeEndpoint(tmp_path_factory.mktemp("lasting") / "log", delay=0.01) as endpoint:
        yield endpoint


@options(derandomize=True, deadline=None, max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(conversations(), min_size=1, max_size=5))
def test_any_conversation_equals_the_replay(
    lasting: FakeEndpoint, tmp_path_factory: pytest.TempPathFactory, drawn: list[list[dict[str, Any]]]
) -> None:
    rows = [Row(i, "a", messages) for i, messages in enumerate(drawn)]
    found, facts = respond(tmp_path_factory.mktemp("any"), rows, [lasting.url])
    for row, made in zip(rows, found, strict=True):
        messages, finish, tokens = replay(row)
        assert (made.messages, made.finish, made.reply_tokens, made.skipped) == (messages, finish, tokens, None)
    assert facts["rows"] == len(rows)


def test_an_empty_answer_is_skipped(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(0, "row 0 [[empty]]"), ask(1, "row 1", "more [[empty]]", "never asked"), ask(2, "row 2 [[say:  ]]")]
    found, facts = respond(tmp_path, rows, [fake.url])
    assert all(row.skipped is not None and row.skipped.startswith("empty") for row in found)
    assert len(fake.requests()) == 4
    assert (facts["rows"], facts["reply_tokens"]) == (0, 0)


def test_an_answer_without_usage_is_an_answer(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(0, "row 0 [[nousage]]")]
    found, _ = respond(tmp_path, rows, [fake.url], input_price=1.0, output_price=1.0)
    assert (found[0].skipped, found[0].messages) == (None, replay(rows[0])[0])


def test_line_separators_and_odd_characters_come_through(fake: FakeEndpoint, tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\x85d\x00e\ufeff f\r\ng \U0001f985 \\n \"q\" {'x'}"
    rows = [ask(0, f"[[say:{odd}]]"), ask(1, "row 1")]
    found, _ = respond(tmp_path, rows, [fake.url])
    assert found[0].messages[-1]["content"] == odd
    assert found[1].messages == replay(rows[1])[0]


# ---- tools ----


def tool(content: str, call: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call, "name": "weather"}


def called(*calls: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"place": "the data's"}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": i, "type": "function", "function": function} for i in calls],
    }


def test_tool_results_of_the_data_answer_the_targets_calls(fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(0, "row 0 [[tools:2,1]]", tools=["weather", "time"])
    row.messages = [
        row.messages[0], called("x", "y"), tool("rain", "x"), tool("snow", "y"), called("z"), tool("hail", "z"),
        {"role": "assistant", "content": "the data's"}, {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    (found,), _ = respond(tmp_path, [row], [fake.url])
    whole, finish, tokens = replay(row)
    roles = ["user", "assistant", "tool", "tool", "assistant", "tool", "assistant", "user", "assistant"]
    assert [message["role"] for message in whole] == roles
    assert [message.get("tool_call_id") for message in found.messages if message["role"] == "tool"] == [
        call["id"] for message in found.messages for call in message.get("tool_calls", [])
    ]
    assert (found.messages, found.finish, found.reply_tokens) == (whole, finish, tokens)
    assert found.messages[1]["tool_calls"][0]["function"]["arguments"].keys() == {"place", "days"}
    assert found.tools == row.tools
    assert [entry["body"]["tools"] for entry in fake.requests()] == [row.tools] * 4
    assert [entry["fault"] for entry in fake.requests()] == [None] * 4  # the strict server took all of them
    assert [contents(m) for m in asked(fake)] == [contents(whole[:end]) for end in (1, 4, 6, 8)]


def test_results_without_ids_are_given_in_order(fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(0, "row 0 [[tools:2]][[talk]]", tools=["weather"])
    row.messages[1:] = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "snow"}]
    (found,), _ = respond(tmp_path, [row], [fake.url])
    assert found.messages == replay(row)[0]
    assert found.messages[1]["content"] == "one moment"
    assert [message["content"] for message in found.messages[2:4]] == ["rain", "snow"]


def test_a_call_without_a_result_in_the_data_ends_the_conversation(fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(0, "row 0 [[tools:1]][[badargs]]", "never asked", tools=["weather"])
    (found,), facts = respond(tmp_path, [row], [fake.url])
    assert len(fake.requests()) == 1
    assert (found.skipped, found.finish, found.reply_tokens) == (None, "tool_calls", 5)
    assert found.messages == replay(row)[0]
    assert found.messages[-1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{oops"}
    assert (facts["rows"], facts["truncated"]) == (1, 0)


def test_results_that_the_target_did_not_ask_for_are_left_out(fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(0, "row 0", "more", tools=["weather"])
    row.messages[1:2] = [called("x"), tool("rain", "x"), {"role": "assistant", "content": "the data's"}]
    (found,), _ = respond(tmp_path, [row], [fake.url])
    assert found.messages == replay(row)[0]
    assert [message["role"] for message in found.messages] == ["user", "assistant", "user", "assistant"]


# ---- reasoning ----


@pytest.mark.parametrize("kind", ["reasoning_content", "reasoning", "both", "inline", "unopened"])
def test_reasoning_is_kept_beside_the_answer(kind: str, fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(0, f"row 0 [[think:{kind}]]", "more")
    (found,), _ = respond(tmp_path, [row], [fake.url])
    thinking, plain = found.messages[1], found.messages[3]
    assert re.fullmatch(r"hm[0-9a-f]{8}(\s\S+){3}", thinking["reasoning_content"])
    assert re.match(r"[0-9a-f]{12}\s", thinking["content"]) and "think>" not in thinking["content"]
    assert thinking.keys() == {"role", "content", "reasoning_content"}
    assert "reasoning_content" not in plain
    assert (found.messages, *replay(row)[1:]) == (replay(row)[0], found.finish, found.reply_tokens)


def test_think_tags_later_in_an_answer_are_text(fake: FakeEndpoint, tmp_path: Path) -> None:
    text = "write <think>so</think> to think"
    (found,), _ = respond(tmp_path, [ask(0, f"[[say:{text}]]")], [fake.url])
    assert found.messages[-1] == {"role": "assistant", "content": text}


def test_reasoning_alone_is_no_answer(fake: FakeEndpoint, tmp_path: Path) -> None:
    (found,), _ = respond(tmp_path, [ask(0, "row 0 [[think:reasoning]][[empty]]")], [fake.url])
    assert found.skipped is not None and found.skipped.startswith("empty")


# ---- cut off ----

LONG = "row 0 [[words:10]]"


def test_answers_that_were_cut_off_are_skipped(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(0, LONG, "never asked"), ask(1, "row 1 [[words:4]]")]
    found, facts = respond(tmp_path, rows, [fake.url], {"max_new_tokens": 4})
    assert found[0].skipped is not None and found[0].skipped.startswith("truncated: ")
    assert (found[0].finish, found[0].reply_tokens) == ("length", 4)
    assert (found[1].skipped, found[1].finish, found[1].reply_tokens) == (None, "stop", 4)
    assert (facts["rows"], facts["reply_tokens"], len(fake.requests())) == (1, 4, 2)


def test_answers_that_were_cut_off_are_kept_and_end_the_conversation(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(0, "hello", LONG, "never asked"), ask(1, "row 1 [[words:4]]")]
    found, facts = respond(tmp_path, rows, [fake.url], {"max_new_tokens": 9, "truncated": "keep"})
    assert (found[0].skipped, found[0].finish, found[0].reply_tokens) == (None, "length", 9)
    whole = [*replay(rows[0], 9)[0][:4]]
    assert found[0].messages == whole
    assert answer_to({"messages": whole[:3]}).content.startswith(whole[3]["content"])
    assert (facts["rows"], facts["truncated"], len(fake.requests())) == (2, 1, 3)


@pytest.mark.parametrize("kind", ["", "[[think:reasoning_content]]", "[[think:inline]]"])
def test_answers_that_were_cut_off_are_continued(kind: str, fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(0, LONG + kind, "more [[words:4]]"), ask(1, "row 1 [[words:4]]")]
    limit = {"max_new_tokens": 6, "truncated": "continue"}
    found, facts = respond(tmp_path, rows, [fake.url], limit, concurrency=1)
    uncut = replay(Row(0, "a", rows[0].messages[:1]), 10**9)
    assert found[0].messages[:2] == uncut[0]
    assert [m["role"] for m in found[0].messages] == ["user", "assistant"] * 2
    assert found[0].finish == "stop"
    assert (facts["truncated"], facts["skipped"]) == (0, [])
    assert found[1].messages == replay(rows[1])[0]
    first = [e["body"] for e in fake.requests() if LONG + kind == e["body"]["messages"][0]["content"]]
    more = [body for body in first if body["messages"][-1]["role"] == "assistant"]
    assert len(more) in (1, 2) and all(body["continue_final_message"] is True for body in more)
    assert "continue_final_message" not in first[0] and first[-1]["messages"][-1]["role"] == "user"


def test_a_continued_answer_counts_all_its_tokens(fake: FakeEndpoint, tmp_path: Path) -> None:
    (found,), facts = respond(tmp_path, [ask(0, LONG)], [fake.url], {"max_new_tokens": 4, "truncated": "continue"})
    assert (found.finish, found.reply_tokens, facts["reply_tokens"]) == ("stop", 10, 10)
    assert len(fake.requests()) == 3


def test_an_answer_without_end_is_given_up(fake: FakeEndpoint, tmp_path: Path) -> None:
    limit = {"max_new_tokens": 4, "truncated": "continue", "max_continuations": 2}
    rows = [ask(0, "row 0 [[words:13]]"), ask(1, "row 1 [[words:12]]")]
    found, _ = respond(tmp_path, rows, [fake.url], limit)
    assert found[0].skipped is not None and found[0].skipped.startswith("truncated: ")
    assert (found[1].skipped, found[1].reply_tokens) == (None, 12)
    assert len(fake.requests()) == 6


@pytest.mark.parametrize("kind", ["reasoning_content", "inline"])
def test_reasoning_that_was_cut_off_never_passes_for_an_answer(kind: str, fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(0, f"row 0 [[words:5]][[think:{kind}]]")
    limit = {"max_new_tokens": 3, "truncated": "continue", "max_continuations": 5}
    (found,), _ = respond(tmp_path / "go on", [row], [fake.url], limit)
    if found.skipped is None:
        assert found.messages == replay(row, 10**9)[0]
    else:
        assert found.skipped.startswith("truncated: ")
    (found,), _ = respond(tmp_path / "skip", [row], [fake.url], limit | {"truncated": "skip"})
    assert found.skipped is not None and found.skipped.startswith("truncated: ")


# ---- the same bytes ----

MIXED = [
    ask(i, f"row {i} {mark}", *(["and then?"] if i % 4 == 1 else []), tools=["weather"] if "tools" in mark else None)
    for i, mark in enumerate(
        ["", "", "[[words:30]]", "[[think:inline]]", "[[tools:1]]", "[[empty]]", "[[think:reasoning]]", ""] * 5
    )
]


@pytest.mark.parametrize("truncated", ["skip", "keep", "continue"])
def test_bytes_do_not_depend_on_timing_or_faults(truncated: str, tmp_path: Path) -> None:
    settings = {"truncated": truncated, "max_new_tokens": 16, "temperature": 1.0, "seed": 5}
    with FakeEndpoint(tmp_path / "calm.log") as calm:
        respond(tmp_path / "calm", MIXED, [calm.url], settings, concurrency=1)
    wild: dict[str, Any] = {
        "faults": ("429", "500", "reset", "cut", "nojson", "stale"),
        "share": 0.4,
        "times": 2,
        "delay": 0.05,
    }
    with FakeEndpoint(tmp_path / "1.log", seed=1, **wild) as a, FakeEndpoint(tmp_path / "2.log", seed=2, **wild) as b:
        respond(tmp_path / "wild", MIXED, [a.url, b.url], settings, concurrency=32, max_tries=20)
    assert sum(entry["fault"] not in (None, "stale") for entry in a.requests() + b.requests()) > 10
    assert shard_bytes(tmp_path / "wild") == shard_bytes(tmp_path / "calm")


def test_a_finished_shard_asks_nothing(fake: FakeEndpoint, tmp_path: Path) -> None:
    respond(tmp_path, [ask(0, "row 0")], [fake.url])
    before = shard_bytes(tmp_path)
    respond(tmp_path, [ask(0, "row 0")], [f"http://127.0.0.1:{free_port()}/v1"], concurrency=1)
    assert (len(fake.requests()), shard_bytes(tmp_path)) == (1, before)


def test_other_settings_ask_again(fake: FakeEndpoint, tmp_path: Path) -> None:
    for settings in ({}, {"model": "another"}, {"extra_body": {"top_k": 1}}, {"seed": 1}):
        respond(tmp_path, [ask(0, "row 0")], [fake.url], settings)
    assert len(fake.requests()) == 4


# ---- spending ----


def spent(fake: FakeEndpoint, input_price: float, output_price: float) -> float:
    made = [answer_to(entry["body"]) for entry in fake.requests() if entry["answered"]]
    return sum(a.prompt_tokens * input_price + a.completion_tokens * output_price for a in made) / 1e6


def test_the_job_stops_before_it_has_cost_too_much_and_goes_on_with_more(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(i, f"row {i} [[words:{5 + i % 4}]]") for i in range(40)]
    prices: dict[str, Any] = {"output_price": 1e6, "concurrency": 4}  # one token costs one
    settings = {"max_new_tokens": 10}
    with pytest.raises(EyasError, match="max_spend") as caught:
        respond(tmp_path, rows, [fake.url], settings, max_spend=100.0, **prices)
    assert "\n" not in str(caught.value).strip()
    assert 50 < spent(fake, 0, 1e6) <= 100
    assert len(journal_of(tmp_path)) == len(fake.requests())
    with pytest.raises(EyasError, match="max_spend"):
        respond(tmp_path, rows, [fake.url], settings, max_spend=160.0, **prices)
    assert 100 < spent(fake, 0, 1e6) <= 160
    found, _ = respond(tmp_path, rows, [fake.url], settings, max_spend=1000.0, **prices)
    assert [row.messages for row in found] == [replay(row, 10)[0] for row in rows]
    assert set(Counter(messages[0]["content"] for messages in asked(fake)).values()) == {1}
    assert math.isclose(spent(fake, 0, 1e6), sum(5 + i % 4 for i in range(40)))


def test_the_cost_is_that_of_all_shards_of_the_run(fake: FakeEndpoint, tmp_path: Path) -> None:
    prices: dict[str, Any] = {"output_price": 1e6, "concurrency": 1, "max_spend": 120.0}
    settings = {"max_new_tokens": 10}
    respond(tmp_path, [ask(i, f"row {i} [[words:8]]") for i in range(10)], [fake.url], settings, **prices)
    rows = [ask(i, f"row {i} [[words:8]]") for i in range(10, 20)]
    with pytest.raises(EyasError, match="max_spend"):
        respond(tmp_path, rows, [fake.url], settings, "rows_10-20", **prices)
    assert 80 < spent(fake, 0, 1e6) <= 120
    found, _ = respond(tmp_path / "another", rows, [fake.url], settings, "rows_10-20", **prices)
    assert all(row.skipped is None for row in found)


def test_prompts_cost_too(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(i, f"row {i} " + "word " * 30) for i in range(20)]
    with pytest.raises(EyasError, match="max_spend"):
        respond(tmp_path, rows, [fake.url], input_price=1e6, max_spend=350.0, concurrency=1)
    assert 0 < spent(fake, 1e6, 0) <= 350


def test_an_answer_that_skips_its_row_was_paid_too(fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(i, f"row {i} [[words:30]]") for i in range(20)]
    with pytest.raises(EyasError, match="max_spend"):
        respond(tmp_path, rows, [fake.url], {"max_new_tokens": 10}, output_price=1e6, max_spend=95.0, concurrency=1)
    assert 0 < spent(fake, 0, 1e6) <= 95


# ---- what one sees ----


def test_the_log_tells_how_it_goes(tmp_path: Path) -> None:
    rows = [ask(i, f"row {i}" + (" [[fault:503]]" if i < 3 else "")) for i in range(20)]
    write_prompts(tmp_path, rows, "rows_0-9")
    with FakeEndpoint(tmp_path / "requests.log") as fake:
        command = respond_command(tmp_path, [fake.url], output_price=1e6)
        done = subprocess.run(**command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "rows_0-9.log").read_text(encoding="utf-8")
    tokens = sum(replay(row)[2] for row in rows)
    assert re.search(r"20 (of 20|/ ?20)", text)
    assert re.search(r"tok(ens)?/s", text)
    assert re.search(rf"\b{tokens:,}\b", text)  # tokens out, and spent: one each
    assert re.search(r"503\D+3\b|\b3\D+503", text)


def test_the_sidecar_holds_what_the_next_stage_reads(fake: FakeEndpoint, tmp_path: Path) -> None:
    _, facts = respond(tmp_path, [ask(0, "row 0")], [fake.url])
    assert {"format_version", "fingerprint", "rows", "reply_tokens", "truncated", "skipped", "files"} <= facts.keys()
    assert "127.0.0.1" not in json.dumps(facts)
