"""The client of an OpenAI-compatible endpoint: requests, retries, outages, limits, keys; and the fake it meets."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from eyas.errors import EyasError
from fake_endpoint import (
    BadRequest,
    FakeEndpoint,
    answer_to,
    ask,
    check,
    free_port,
    journal_of,
    replay,
    respond,
    respond_command,
    write_prompts,
)

KEY = "sk-do-not-show-0123456789"

# ---- the fake itself ----


def post(port: int, body: dict[str, Any], timeout: float = 5.0, **headers: str) -> tuple[int, dict[str, str], Any]:
    """One request by the standard library; returns status, headers and the parsed body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    response = connection.getresponse()
    raw = response.read()
    return response.status, dict(response.headers), json.loads(raw) if raw[:1] in b"{[" else raw


def body_of(*texts: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"model": "m", "messages": messages} | more


def test_the_fake_answers_by_the_request_alone(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log") as fake:
        status, _, made = post(fake.port, body_of("hello", max_tokens=50), Authorization="Bearer x")
        again = post(fake.port, body_of("hello", max_tokens=50))[2]
        others = [body_of("hallo", max_tokens=50), body_of("hello", max_tokens=51), body_of("hello", seed=1)]
        texts = [post(fake.port, body)[2]["choices"][0]["message"]["content"] for body in others]
    text = made["choices"][0]["message"]["content"]
    assert (status, again) == (200, made)
    assert len({text, *texts}) == 4
    assert made["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": len(text.split()),
        "total_tokens": 4 + len(text.split()),
    }
    assert made["choices"][0]["finish_reason"] == "stop"
    found = fake.requests()
    assert [entry["key"] for entry in found] == ["Bearer x", None, None, None, None]
    assert [entry["body"] for entry in found[2:]] == others
    assert all(entry["time"] <= entry["answered"] for entry in found)


STATUS = {"429": 429, "429date": 429, "429bare": 429, "429junk": 429, "408": 408, "500": 500, "502": 502, "503": 503,
          "400": 400, "401": 401, "404": 404}  # fmt: skip
BROKEN = {
    "drop": http.client.RemoteDisconnected, "reset": ConnectionResetError, "cut": http.client.IncompleteRead,
    "hang": TimeoutError,
}  # fmt: skip
ODD = {"nojson": b"<html>busy</html>", "nochoices": {"error": {"message": "told to", "type": "fake", "code": None}},
       "emptychoices": {"choices": [], "usage": None}}  # fmt: skip


@pytest.mark.parametrize("fault", [*STATUS, *BROKEN, *ODD])
def test_the_fake_misbehaves_as_told_and_then_answers(fault: str, tmp_path: Path) -> None:
    body = body_of(f"hello [[fault:{fault}*2]]")
    with FakeEndpoint(tmp_path / "log", hang=2.0, retry_after=3) as fake:
        for _ in range(2):
            if fault in BROKEN:
                with pytest.raises(BROKEN[fault]):
                    post(fake.port, body, timeout=0.5 if fault == "hang" else 5.0)
                continue
            status, headers, made = post(fake.port, body)
            assert status == STATUS.get(fault, 200)
            assert made == ODD.get(fault, made)
            retry = headers.get("Retry-After")
            assert (retry is not None) == (fault in ("429", "429date", "429junk"))
            assert fault != "429" or retry == "3"
            assert fault != "429date" or (retry or "").endswith(" GMT")
        assert post(fake.port, body)[2]["choices"][0]["message"]["content"] == answer_to(body).content
    assert [entry["fault"] for entry in fake.requests()] == [fault, fault, None]
    assert [entry["answered"] is None for entry in fake.requests()] == [True, True, False]


def test_the_fake_serves_many_at_once_and_out_of_order(tmp_path: Path) -> None:
    bodies = [body_of(f"row {i}") for i in range(64)]
    with FakeEndpoint(tmp_path / "log", delay=0.3, share=0.0) as fake, ThreadPoolExecutor(64) as threads:
        texts = list(
            threads.map(lambda body: post(fake.port, body)[2]["choices"][0]["message"]["content"], bodies)
        )  # fmt: skip
    assert texts == [answer_to(body).content for body in bodies]
    found = fake.requests()
    assert most_at_once(found) > 32
    assert [e["answered"] for e in found] != sorted(e["answered"] for e in found)


def test_the_fakes_faults_by_seed_spare_some_and_end(tmp_path: Path) -> None:
    faults: dict[str, Any] = {"share": 0.5, "faults": ("500", "429"), "times": 3}
    with FakeEndpoint(tmp_path / "log", seed=1, **faults) as fake:
        counts = []
        for i in range(40):
            statuses: list[int] = []
            while not statuses or statuses[-1] != 200:
                statuses.append(post(fake.port, body_of(f"row {i}"))[0])
            counts.append(len(statuses) - 1)
    assert set(counts) == {0, 1, 2, 3}
    assert 8 < counts.count(0) < 32


def test_the_fake_cuts_and_continues(tmp_path: Path) -> None:
    whole = answer_to(body_of("hello [[words:10]]"))
    assert (whole.finish, whole.completion_tokens) == ("stop", 10)
    text, more = "", dict[str, Any]()
    for finish in ("length", "length", "stop"):
        asked = body_of("hello [[words:10]]", *([text] if text else []), max_tokens=4, seed=len(text), **more)
        check(asked)
        part = answer_to(asked)
        assert part.finish == finish
        text, more = text + part.content, {"continue_final_message": True, "add_generation_prompt": False}
    assert text == whole.content
    for wrong in (text[:-1], text.strip() + " ", ""):
        with pytest.raises(BadRequest):
            answer_to(body_of("hello [[words:10]]", wrong, **more))


@pytest.mark.parametrize(
    "messages, more",
    [
        ([], {}),
        ([{"role": "bot", "content": "x"}], {}),
        ([{"role": "user", "content": None}], {}),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], {}),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], {"continue_final_message": True}),
        ([{"role": "user", "content": "x"}, {"role": "tool", "content": "y", "tool_call_id": "c"}], {}),
        ([{"role": "user", "content": "x"}], {"max_tokens": 0}),
        ([{"role": "user", "content": "x"}], {"seed": 2**63}),
    ],
)
def test_the_fake_refuses_what_a_strict_server_would(messages: Any, more: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        check({"model": "m", "messages": messages} | more)


def most_at_once(found: list[dict[str, Any]]) -> int:
    """The most requests that were between arrival and answer at one time."""
    events = sorted(
        (time, step) for e in found if e["answered"] for time, step in ((e["time"], 1), (e["answered"], -1))
    )
    now = most = 0
    for _, step in events:
        now += step
        most = max(most, now)
    return most


# ---- the client ----


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeEndpoint]:
    with FakeEndpoint(tmp_path / "requests.log", hang=5.0) as endpoint:
        yield endpoint


def tries_of(fake: FakeEndpoint) -> Counter[str]:
    """Requests by their last user message."""
    return Counter([m["content"] for m in e["body"]["messages"] if m["role"] == "user"][-1] for e in fake.requests())


def test_a_request_says_what_the_settings_say(fake: FakeEndpoint, tmp_path: Path) -> None:
    row = ask(3, "hello", system="be kind", tools=["weather"])
    respond(tmp_path, [row], [fake.url + "/"], {"max_new_tokens": 17, "top_p": 0.5})
    (entry,) = fake.requests()
    assert entry["key"] is None
    assert entry["body"] == {
        "model": "fake/target",
        "messages": [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hello"}],
        "max_tokens": 17,
        "temperature": 0.0,
        "top_p": 0.5,
        "tools": row.tools,
    }


def test_extra_body_goes_over_the_rest(fake: FakeEndpoint, tmp_path: Path) -> None:
    extra = {"top_k": 20, "top_p": 0.25, "chat_template_kwargs": {"enable_thinking": False}}
    respond(tmp_path, [ask(0, "hello")], [fake.url], {"extra_body": extra})
    (entry,) = fake.requests()
    assert {name: entry["body"][name] for name in extra} == extra
    assert entry["body"]["temperature"] == 0.0


def seeds(folder: Path, **settings: Any) -> dict[tuple[str, int], int]:
    """Seeds of two rows of two turns, by row and number of messages."""
    with FakeEndpoint(folder / "requests.log") as fake:
        respond(folder, [ask(i, f"row {i}", "more") for i in (4, 9)], [fake.url], {"temperature": 0.7} | settings)
    bodies = [entry["body"] for entry in fake.requests()]
    return {(body["messages"][0]["content"], len(body["messages"])): body["seed"] for body in bodies}


def test_sampled_requests_are_seeded_by_seed_row_and_turn(tmp_path: Path) -> None:
    found = seeds(tmp_path / "a")
    assert len(set(found.values())) == len(found) == 4
    assert seeds(tmp_path / "b") == found
    assert not set(found.values()) & set(seeds(tmp_path / "c", seed=1).values())
    assert all(type(seed) is int and 0 <= seed < 2**63 for seed in found.values())


def test_the_key_of_the_environment_is_sent(
    fake: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    respond(tmp_path, [ask(0, "hello"), ask(1, "hallo")], [fake.url], api_key_env="EYAS_TEST_KEY")
    assert [entry["key"] for entry in fake.requests()] == [f"Bearer {KEY}"] * 2


PASSING = ["429", "429date", "429bare", "429junk", "408", "500", "502", "503", "504", "drop", "reset", "cut", "hang",
           "nojson", "nochoices", "emptychoices"]  # fmt: skip


def test_passing_faults_are_tried_again(fake: FakeEndpoint, tmp_path: Path) -> None:
    # Good rows between them: thirty faults in a row would be an outage to the circuit breaker, which pauses for long.
    rows = [ask(2 * i, f"row {i} [[fault:{fault}*2]]") for i, fault in enumerate(PASSING)]
    good = [ask(row.row + 1, f"good {row.row}") for row in rows]
    rows = sorted(rows + good, key=lambda row: row.row)
    found, facts = respond(tmp_path, rows, [fake.url], concurrency=2, timeout_seconds=4.0)
    assert [row.skipped for row in found] == [None] * len(rows)
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]
    assert sorted(tries_of(fake).values()) == [1] * len(good) + [3] * len(PASSING)
    assert facts["skipped"] == []


def test_a_connection_that_closes_after_its_answer_costs_no_row(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log", always="stale") as fake:
        rows = [ask(i, f"row {i}") for i in range(40)]
        found, _ = respond(tmp_path, rows, [fake.url], concurrency=2)
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]


@pytest.mark.parametrize("fault", ["429", "429date"])
def test_retry_after_is_kept_to(fault: str, tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log", retry_after=2.0) as fake:
        found, _ = respond(tmp_path, [ask(0, f"row 0 [[fault:{fault}]]")], [fake.url])
    first, second = fake.requests()
    assert second["time"] - first["time"] >= 1.99
    assert found[0].skipped is None


def test_waits_grow(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log") as fake:
        respond(tmp_path, [ask(0, "row 0 [[fault:503*4]]")], [fake.url])
    times = [entry["time"] for entry in fake.requests()]
    waits = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert len(waits) == 4
    assert waits[2] + waits[3] > waits[0] + waits[1]


@pytest.mark.parametrize("fault", ["500", "drop", "nojson", "429bare", "hang"])
def test_a_row_is_given_up_after_max_tries(fault: str, fake: FakeEndpoint, tmp_path: Path) -> None:
    rows = [ask(0, "row 0"), ask(1, f"row 1 [[fault:{fault}*inf]]"), ask(2, "row 2")]
    found, facts = respond(tmp_path, rows, [fake.url], max_tries=3, timeout_seconds=1.0 if fault == "hang" else 20.0)
    assert tries_of(fake) == {"row 0": 1, rows[1].messages[0]["content"]: 3, "row 2": 1}
    assert [row.skipped is None for row in found] == [True, False, True]
    assert found[1].skipped is not None and found[1].skipped.startswith("failed: ")
    assert fault not in ("500", "429bare") or fault[:3] in found[1].skipped
    assert facts["skipped"] == [{"row": 1, "reason": found[1].skipped}]
    assert facts["rows"] == 2


@pytest.mark.parametrize("shape", ["openai", "flat", "detail", "string", "text"])
@pytest.mark.parametrize("fault", ["400", "422"])
def test_other_client_errors_are_the_rows_own(fault: str, shape: str, tmp_path: Path) -> None:
    rows = [ask(0, "row 0"), ask(1, f"row 1 [[fault:{fault}*inf]]"), ask(2, "row 2")]
    with FakeEndpoint(tmp_path / "log", message="the prompt is 9999 tokens long", shape=shape) as fake:
        found, facts = respond(tmp_path, rows, [fake.url])
    assert set(tries_of(fake).values()) == {1}
    assert found[1].skipped is not None and found[1].skipped.startswith("refused: ")
    assert fault in found[1].skipped and "the prompt is 9999 tokens long" in found[1].skipped
    assert facts["skipped"] == [{"row": 1, "reason": found[1].skipped}]
    assert [row.skipped for row in (found[0], found[2])] == [None, None]


def test_a_row_that_fails_in_a_later_turn_is_skipped(fake: FakeEndpoint, tmp_path: Path) -> None:
    found, _ = respond(tmp_path, [ask(0, "row 0", "more [[fault:404]]", "never asked")], [fake.url])
    assert found[0].skipped is not None and found[0].skipped.startswith("refused: ") and "404" in found[0].skipped
    assert len(fake.requests()) == 2


def test_a_wrong_key_stops_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_TEST_KEY", KEY)
    with FakeEndpoint(tmp_path / "log", key="another", message="incorrect key") as fake:
        with pytest.raises(EyasError, match="EYAS_TEST_KEY") as caught:
            respond(tmp_path, [ask(i, f"row {i}") for i in range(50)], [fake.url], api_key_env="EYAS_TEST_KEY")
        assert KEY not in str(caught.value)
        assert "\n" not in str(caught.value).strip()
        assert len(fake.requests()) < 50
        with pytest.raises(EyasError, match="api_key_env"):  # none was sent: say where to name it
            respond(tmp_path, [ask(0, "row 0")], [fake.url])
    assert not (tmp_path / "conversations" / "rows_0-9.jsonl").exists()


def test_a_key_that_is_not_set_stops_the_job_first(
    fake: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EYAS_TEST_KEY", raising=False)
    with pytest.raises(EyasError, match="EYAS_TEST_KEY"):
        respond(tmp_path, [ask(0, "row 0")], [fake.url], api_key_env="EYAS_TEST_KEY")
    assert fake.requests() == []


@pytest.mark.parametrize("fault", [None, "401", "400", "503"])
def test_the_key_is_written_nowhere(fault: str | None, tmp_path: Path) -> None:
    """Even where the server says it back."""
    folder = tmp_path / "run"
    text = f"[[fault:{fault}*inf]]" if fault else "[[fault:429]]"
    write_prompts(folder, [ask(0, f"row 0 {text}"), ask(1, "row 1")], "rows_0-9")
    with FakeEndpoint(tmp_path / "log", message=f"Incorrect key: {KEY}") as fake:
        command = respond_command(folder, [fake.url], api_key_env="EYAS_TEST_KEY", max_tries=2)
        command["env"] |= {"EYAS_TEST_KEY": KEY}
        done = subprocess.run(**command, capture_output=True, text=True, timeout=60)
    assert fake.requests()[0]["key"] == f"Bearer {KEY}"
    assert done.returncode == (fault == "401"), done.stderr
    assert KEY not in done.stdout + done.stderr and "Traceback" not in done.stderr
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert folder / "rows_0-9.log" in files
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


def test_a_dead_endpoint_stops_the_job_and_finished_rows_stay(tmp_path: Path) -> None:
    rows = [ask(i, f"row {i}") for i in range(30)]
    with FakeEndpoint(tmp_path / "requests.log", die_after=12) as fake:
        started = time.monotonic()
        with pytest.raises(EyasError) as caught:
            respond(tmp_path, rows, [fake.url], concurrency=2, outage_minutes=0.03)
        assert time.monotonic() - started >= 1.7
    assert fake.url in str(caught.value)
    assert "refused" in str(caught.value).lower()
    answered = {entry["row"] for entry in journal_of(tmp_path)}
    assert 10 <= len(answered) <= 12
    assert not (tmp_path / "conversations" / "rows_0-9.jsonl").exists()
    with FakeEndpoint(tmp_path / "again.log", port=fake.port) as again:
        found, _ = respond(tmp_path, rows, [again.url], concurrency=2)
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]
    assert set(tries_of(again)) == {f"row {i}" for i in range(30) if i not in answered}


def test_a_short_outage_costs_no_row(tmp_path: Path) -> None:
    """Fewer tries than the outage lasts: the wait for a dead endpoint is no row's fault."""
    rows = [ask(i, f"row {i}") for i in range(12)]
    port = free_port()
    with ThreadPoolExecutor(1) as threads:
        made = threads.submit(respond, tmp_path, rows, [f"http://127.0.0.1:{port}/v1"], max_tries=2, concurrency=4)
        time.sleep(2.5)
        with FakeEndpoint(tmp_path / "requests.log", port=port):
            found, _ = made.result(timeout=60)
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]


def test_nothing_listens_at_all(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    with pytest.raises(EyasError) as caught:
        respond(tmp_path, [ask(0, "row 0")], [url], outage_minutes=0.0)
    assert url in str(caught.value) and "refused" in str(caught.value).lower()
    assert "\n" not in str(caught.value).strip()


@pytest.mark.parametrize("fault", ["drop", "503", "nobody", "hang"])
def test_one_dead_url_of_two_costs_no_row(fault: str, tmp_path: Path) -> None:
    rows = [ask(i, f"row {i}") for i in range(100)]
    always = None if fault == "nobody" else fault
    with FakeEndpoint(tmp_path / "good") as good, FakeEndpoint(tmp_path / "bad", always=always, hang=5.0) as bad:
        url = f"http://127.0.0.1:{free_port()}/v1" if fault == "nobody" else bad.url
        found, _ = respond(tmp_path, rows, [url, good.url], timeout_seconds=1.0, concurrency=4)
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]
    assert len(good.requests()) == 100
    assert fault == "nobody" or 1 <= len(bad.requests()) <= 20


def test_a_url_that_comes_back_is_used_again(tmp_path: Path) -> None:
    """The breaker closes: a server that was restarted gets its share."""
    rows = [ask(i, f"row {i}") for i in range(400)]
    port = free_port()
    with ThreadPoolExecutor(1) as threads, FakeEndpoint(tmp_path / "good", delay=0.2) as good:
        urls = [f"http://127.0.0.1:{port}/v1", good.url]
        made = threads.submit(respond, tmp_path, rows, urls, concurrency=4)
        time.sleep(1.0)
        with FakeEndpoint(tmp_path / "late", port=port) as late:
            found, _ = made.result(timeout=90)
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]
    assert len(late.requests()) > 20


def test_several_urls_share_the_work(tmp_path: Path) -> None:
    rows = [ask(i, f"row {i}") for i in range(60)]
    with FakeEndpoint(tmp_path / "a") as a, FakeEndpoint(tmp_path / "b") as b, FakeEndpoint(tmp_path / "c") as c:
        found, _ = respond(tmp_path, rows, [a.url, b.url, c.url])
    assert [row.messages for row in found] == [replay(row)[0] for row in rows]
    assert [len(fake.requests()) for fake in (a, b, c)] == [20, 20, 20]


def test_concurrency_is_used_and_kept_to(tmp_path: Path) -> None:
    rows = [ask(i, f"row {i}") for i in range(60)]
    with FakeEndpoint(tmp_path / "log", delay=0.2) as fake:
        respond(tmp_path, rows, [fake.url], concurrency=6)
    assert 4 <= most_at_once(fake.requests()) <= 6


def start_jobs(folder: Path, url: str, count: int, rows: int, **endpoint: Any) -> list[subprocess.Popen[bytes]]:
    """Jobs of one run, side by side, each with a shard."""
    names = write_shards(folder, count, rows)
    return [subprocess.Popen(**respond_command(folder, [url], name=name, **endpoint)) for name in names]


def write_shards(folder: Path, count: int, rows: int) -> list[str]:
    """Prompts of a run of `count` shards."""
    names = []
    for i in range(count):
        names.append(f"rows_{i * rows}-{(i + 1) * rows}")
        write_prompts(folder, [ask(n, f"row {n}") for n in range(i * rows, (i + 1) * rows)], names[-1])
    return names


def test_jobs_of_a_run_share_the_concurrency(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log", delay=0.2) as fake:
        jobs = start_jobs(tmp_path / "run", fake.url, 2, 40, concurrency=4)
        assert [job.wait(90) for job in jobs] == [0, 0]
    found = fake.requests()
    assert len(found) == 80
    assert 2 <= most_at_once(found) <= 4


def within(found: list[dict[str, Any]], cost: dict[int, float], per_minute: float, burst: float) -> bool:
    """Whether no stretch of the requests, from one arrival to another, went over the rate by more than the burst."""
    times = [entry["time"] for entry in found]
    return all(
        sum(cost[i] for i in range(first, last)) <= (times[last] - times[first] + 0.3) * per_minute / 60 + burst
        for first in range(len(times))
        for last in range(first + 1, len(times))
    )


def test_requests_a_minute_are_kept_to(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log") as fake:
        respond(tmp_path, [ask(i, f"row {i}") for i in range(15)], [fake.url], requests_per_minute=90)
    found = fake.requests()
    assert within(found, dict.fromkeys(range(15), 1.0), 90, 9)
    assert found[-1]["time"] - found[0]["time"] >= (15 - 9 - 1) / 1.5


def test_requests_a_minute_are_kept_to_by_two_jobs_of_a_run(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log") as fake:
        jobs = start_jobs(tmp_path / "run", fake.url, 2, 10, requests_per_minute=120)
        assert [job.wait(60) for job in jobs] == [0, 0]
    assert within(fake.requests(), dict.fromkeys(range(20), 1.0), 120, 12)
    assert not (tmp_path / "run" / "conversations" / ".staging").exists()


def test_requests_a_minute_are_kept_to_by_jobs_one_after_another(tmp_path: Path) -> None:
    with FakeEndpoint(tmp_path / "log") as fake:
        for name in write_shards(tmp_path / "run", 3, 5):
            subprocess.run(
                **respond_command(tmp_path / "run", [fake.url], name=name, requests_per_minute=60), check=True
            )
    # Half of what a burst in each job would be.
    assert within(fake.requests(), dict.fromkeys(range(15), 1.0), 60, 6)
    assert not (tmp_path / "run" / "conversations" / ".staging").exists()


def test_tokens_a_minute_are_kept_to(tmp_path: Path) -> None:
    rows = [ask(i, f"row {i} [[words:20]]") for i in range(17)]
    with FakeEndpoint(tmp_path / "log") as fake:
        respond(tmp_path, rows, [fake.url], {"max_new_tokens": 21}, tokens_per_minute=3000, concurrency=4)
    found = fake.requests()
    made = [answer_to(entry["body"]) for entry in found]
    cost = {i: float(answer.prompt_tokens + answer.completion_tokens) for i, answer in enumerate(made)}
    assert sum(cost.values()) == 17 * 26  # a half more than the burst
    assert within(found, cost, 3000, 300)


def test_the_script_says_what_a_dead_endpoint_is(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    write_prompts(tmp_path, [ask(0, "row 0")], "rows_0-9")
    done = subprocess.run(
        **respond_command(tmp_path, [url], outage_minutes=0.0), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert url in done.stderr and "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert os.path.exists(tmp_path / "rows_0-9.log")
