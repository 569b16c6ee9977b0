"""An OpenAI-compatible endpoint for tests: answers by rule, misbehaves on request, records every request.

It runs in a process of its own (`FakeEndpoint`), so that killing a client does not touch it. The answer
depends on the request alone: `answer_to(body)` says what it is. Markers in the last user message shape it:

    [[words:40]]         an answer of 40 tokens (a token is a word); it depends on the messages alone, so that
                         it can be continued whatever seed comes with the continuation
    [[say:text]]         this very text
    [[empty]]            no text at all
    [[think:KIND]]       reasoning before it, in the field `reasoning_content` or `reasoning`, in `both`,
                         `inline` (<think>…</think>) or `unopened` (…</think>)
    [[tools:2,1]]        two tool calls in one message, then one more, then the text
    [[talk]]  [[badargs]]  text beside the calls; arguments that are no JSON
    [[nousage]]          no `usage` in the response
    [[fault:429*2]]      this fault twice before the answer (`*inf`: always); several are given in order

Faults, here and by seed (`Behaviour`): 429 (Retry-After in seconds), 429date, 429bare, 429junk, any other
status, drop (closed before any byte), reset (RST), cut (in the middle of the body), nojson, nochoices,
emptychoices, hang. `stale` is none: it answers, then closes the connection without saying so.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from email.utils import formatdate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.conversations import Row

MARKER = re.compile(r"\[\[(\w+)(?::([^\]]*))?\]\]")
WORDS = ["alpha", "bravo", "çedilla", "delta", "echo", "foxtrot", "golf", "日本", "india", "juliett", "🦅", "lima"]
EVERYTHING = 10**9


class BadRequest(Exception):
    """What a strict server refuses with 400."""


# ---- what it answers ----


@dataclass(frozen=True)
class Answer:
    """The answer to a request; `message` is how it is sent, `content` and `reasoning` are what it means."""

    message: dict[str, Any]
    content: str
    reasoning: str
    tool_calls: list[dict[str, Any]]
    finish: str
    prompt_tokens: int
    completion_tokens: int


def markers(messages: list[dict[str, Any]]) -> dict[str, str]:
    """The markers of the last user message, but for its faults."""
    last = [m["content"] for m in messages if m["role"] == "user"][-1]
    return {name: value for name, value in MARKER.findall(last) if name != "fault"}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _plain(message: dict[str, Any]) -> list[Any]:
    """What the answer depends on: not the reasoning of earlier answers, which a client may leave out."""
    calls = [[call["id"], call["function"]["name"]] for call in message.get("tool_calls") or []]
    return [message["role"], message.get("content") or "", calls, message.get("tool_call_id")]


def _stream(chance: random.Random, count: int, first: str) -> list[str]:
    """Tokens: words with what stands before them; the first is given."""
    rest = [chance.choice("   \n") + chance.choice(WORDS) for _ in range(count - 1)]
    return [first, *rest][:count]


def _given(stream: list[str], text: str) -> int | None:
    """How many tokens `text` holds, None where it is not the stream's beginning."""
    made = ""
    for count, token in enumerate([*stream, ""]):
        if made == text:
            return count
        made += token
    return None


def _calls(chance: random.Random, count: int, marks: dict[str, str]) -> list[dict[str, Any]]:
    calls = []
    for _ in range(count):
        arguments = "{oops" if "badargs" in marks else json.dumps({"place": chance.choice(WORDS), "days": 3}, indent=1)
        function = {"name": "weather", "arguments": arguments}
        calls.append({"id": f"call_{chance.getrandbits(64):016x}", "type": "function", "function": function})
    return calls


def _prompt_tokens(messages: list[dict[str, Any]]) -> int:
    return sum(3 + len((message.get("content") or "").split()) for message in messages)


def answer_to(body: dict[str, Any]) -> Answer:
    """The one right answer to a request; raises BadRequest for a continuation of what was never said."""
    messages, partial = body["messages"], None
    if messages[-1]["role"] == "assistant":
        messages, partial = messages[:-1], messages[-1]["content"]
    marks = markers(messages)
    said = [_plain(message) for message in messages] + [[tool["function"]["name"] for tool in body.get("tools") or []]]
    chance = random.Random(_digest(said if "words" in marks else [said, body.get("seed"), body.get("max_tokens")]))
    since = len(messages) - 1 - max(i for i, message in enumerate(messages) if message["role"] == "user")
    turns = sum(message["role"] == "assistant" for message in messages[len(messages) - since :]) if since else 0
    rounds = [int(count) for count in marks.get("tools", "").split(",") if count]
    if turns < len(rounds):
        calls, text = _calls(chance, rounds[turns], marks), "one moment" if "talk" in marks else ""
        message = {"role": "assistant", "content": text or None, "tool_calls": calls}
        return Answer(message, text, "", calls, "tool_calls", _prompt_tokens(messages), 5 * len(calls))
    thoughts = _stream(chance, 4, f"hm{chance.getrandbits(32):08x}") if "think" in marks else []
    length = 0 if "empty" in marks else int(marks.get("words", 0)) or chance.randint(3, 9)
    text_tokens = _stream(chance, length, f"{chance.getrandbits(48):012x}")
    text_tokens = [marks["say"]] if "say" in marks else text_tokens
    kind = marks.get("think", "")
    before = {"inline": "<think>\n", "unopened": ""}.get(kind)
    if before is not None:  # one stream of text, tags and all
        text_tokens = [before + thoughts[0], *thoughts[1:], "\n</think>\n\n" + text_tokens[0], *text_tokens[1:]]
        thoughts = []
    stream, start = thoughts + text_tokens, 0
    if partial is not None:
        count = _given(text_tokens, partial)
        if not partial or count is None:
            raise BadRequest(f"the last message is not the beginning of an answer: {partial!r}")
        start = len(thoughts) + count
    limit = body.get("max_tokens", EVERYTHING)
    part = stream[start : start + limit]
    split = max(len(thoughts) - start, 0)
    reasoning, raw = "".join(part[:split]), "".join(part[split:])
    finish = "stop" if start + limit >= len(stream) else "length"
    message = {"role": "assistant", "content": raw or None}
    message |= {name: reasoning for name in ("reasoning_content", "reasoning") if kind in (name, "both") and reasoning}
    content = raw
    if before is not None and "</think>" in raw:
        reasoning, content = (piece.strip() for piece in raw.removeprefix("<think>").split("</think>"))
    return Answer(message, content, reasoning, [], finish, _prompt_tokens(body["messages"]), len(part))


def check(body: Any) -> None:
    """Raise BadRequest for what OpenAI, vLLM or SGLang would refuse."""
    if not isinstance(body, dict) or not isinstance(body.get("model"), str) or not body.get("messages"):
        raise BadRequest("model and messages are required")
    if not isinstance(body.get("max_tokens", 1), int) or body.get("max_tokens", 1) < 1:
        raise BadRequest("max_tokens must be at least 1")
    if "seed" in body and (not isinstance(body["seed"], int) or not -(2**63) <= body["seed"] < 2**63):
        raise BadRequest("seed must be an integer of 64 bits")
    open_calls: set[str] = set()
    for message in body["messages"]:
        role, calls = message.get("role"), message.get("tool_calls")
        if role not in ("system", "user", "assistant", "tool"):
            raise BadRequest(f"unknown role {role!r}")
        if not isinstance(message.get("content"), str) and not (role == "assistant" and calls):
            raise BadRequest(f"content of a {role} message must be text")
        if role == "tool" and message.get("tool_call_id") not in open_calls:
            raise BadRequest(f"tool_call_id {message.get('tool_call_id')!r} answers no call")
        if role == "tool":
            open_calls.remove(message["tool_call_id"])
        else:
            open_calls = {call["id"] for call in calls or []}
        if any(not isinstance(call["function"]["arguments"], str) for call in calls or []):
            raise BadRequest("arguments of a tool call must be a string")
    last = body["messages"][-1]["role"]
    if last == "assistant" and not body.get("continue_final_message"):
        raise BadRequest("the last message is the assistant's")
    if body.get("continue_final_message") and (last != "assistant" or body.get("add_generation_prompt", True)):
        raise BadRequest("continue_final_message needs add_generation_prompt: false and a final assistant message")


def response_to(body: dict[str, Any]) -> dict[str, Any]:
    answer = answer_to(body)
    made: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "model": body["model"],
        "choices": [{"index": 0, "message": answer.message, "finish_reason": answer.finish}],
    }
    if "nousage" not in markers(body["messages"]):
        total = answer.prompt_tokens + answer.completion_tokens
        made["usage"] = {
            "prompt_tokens": answer.prompt_tokens,
            "completion_tokens": answer.completion_tokens,
            "total_tokens": total,
        }
    return made


# ---- how it misbehaves ----


@dataclass(frozen=True)
class Behaviour:
    """By `seed`, a `share` of all requests gets one to `times` of the `faults` first; `always` is given without end.

    `delay`: answers take up to so many seconds, by chance. `hang`: seconds that a hanging request takes.
    `retry_after`: seconds in 429's header. `die_after`: full answers, after which the process ends.
    `key`: what must follow `Bearer`; `message`: the text of errors. `shape`: how an error's body looks.
    """

    seed: int = 0
    share: float = 0.0
    faults: tuple[str, ...] = ()
    times: int = 1
    always: str | None = None
    delay: float = 0.0
    hang: float = 30.0
    retry_after: float = 0
    die_after: int | None = None
    key: str | None = None
    message: str = "told to"
    shape: str = "openai"

    def planned(self, body: dict[str, Any]) -> list[str]:
        """The faults of a request, in order, before it is answered."""
        chance = random.Random(f"{self.seed} {_digest(body)}")
        text = [m["content"] for m in body["messages"] if m["role"] == "user"][-1]
        found: list[str] = []
        for _, value in (mark for mark in MARKER.findall(text) if mark[0] == "fault"):
            name, _, count = value.partition("*")
            found += [name] * (1000 if count == "inf" else int(count or 1))
        if self.faults and chance.random() < self.share:
            found += [chance.choice(self.faults) for _ in range(chance.randint(1, self.times))]
        return found

    def error(self, message: str) -> bytes:
        bodies: dict[str, Any] = {
            "openai": {"error": {"message": message, "type": "fake", "code": None}},
            "flat": {"object": "error", "message": message, "type": "fake"},
            "detail": {"detail": message},
            "string": {"error": message},
        }
        return message.encode() if self.shape == "text" else json.dumps(bodies[self.shape]).encode()

    def retry_header(self, fault: str) -> dict[str, str]:
        if fault == "429date":  # whole seconds only: the next one, so that it is never too soon
            return {"Retry-After": formatdate(math.ceil(time.time() + self.retry_after), usegmt=True)}
        return {"429": {"Retry-After": f"{self.retry_after:g}"}, "429junk": {"Retry-After": "soon"}}.get(fault, {})


# ---- the server's process ----


class Server:
    """HTTP/1.1 with keep-alive, as far as a client of one method needs it."""

    def __init__(self, behaviour: Behaviour, log: Path) -> None:
        self.behaviour, self.chance = behaviour, random.Random(behaviour.seed)
        self.log = open(log, "a", encoding="utf-8")  # noqa: SIM115 (open as long as the process lives)
        self.tries: Counter[str] = Counter()
        self.count = self.answered = 0

    def record(self, **values: Any) -> None:
        self.log.write(json.dumps(values) + "\n")
        self.log.flush()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self.request(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Take one request and answer it; True where the connection stays open."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        arrived, number = time.time(), self.count
        self.count += 1
        method, path = head[0].split(" ")[:2]
        key = headers.get("authorization")
        if (method, path) != ("POST", "/v1/chat/completions"):
            self.record(n=number, time=arrived, method=method, path=path, key=key, body=None, fault="404")
            return await self.send(writer, 404, self.behaviour.error(f"no {path} here"))
        try:
            body = json.loads(raw)
            check(body)
            response_to(body)
        except (ValueError, BadRequest) as exc:
            self.record(n=number, time=arrived, path=path, key=key, body=raw.decode(), fault="invalid")
            return await self.send(writer, 400, self.behaviour.error(f"invalid: {exc}"))
        fault = self.fault(body, key)
        self.record(n=number, time=arrived, path=path, key=key, body=body, fault=fault)
        await asyncio.sleep(self.chance.uniform(0, self.behaviour.delay))
        if fault not in (None, "stale"):
            return await self.misbehave(fault, body, key, writer)
        if not writer.transport.is_closing():  # recorded first, so that whoever has the answer finds it in the log
            self.record(n=number, answered=time.time())
        open_still = await self.send(writer, 200, json.dumps(response_to(body)).encode())
        self.answered += 1
        if self.answered == self.behaviour.die_after:
            os._exit(0)
        return open_still and fault is None and headers.get("connection", "").lower() != "close"

    def fault(self, body: dict[str, Any], key: str | None) -> str | None:
        if self.behaviour.always:
            return self.behaviour.always
        if self.behaviour.key is not None and key != f"Bearer {self.behaviour.key}":
            return "401"
        digest, planned = _digest(body), self.behaviour.planned(body)
        self.tries[digest] += 1
        return planned[self.tries[digest] - 1] if self.tries[digest] <= len(planned) else None

    async def send(
        self, writer: asyncio.StreamWriter, status: int, body: bytes, more: dict[str, str] | None = None, part: int = -1
    ) -> bool:
        """Send a response (`part`: so many bytes of its body only)."""
        lines = {"Content-Type": "application/json", "Content-Length": str(len(body))} | (more or {})
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        sent = body if part < 0 else body[:part]
        writer.write(f"HTTP/1.1 {status} Fake\r\n{head}\r\n".encode() + sent)
        await writer.drain()
        return True

    async def misbehave(self, fault: str, body: dict[str, Any], key: str | None, writer: asyncio.StreamWriter) -> bool:
        """Do the wrong thing; True where the connection stays open."""
        if fault == "reset":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        if fault in ("drop", "reset"):
            return False
        if fault == "hang":
            await asyncio.sleep(self.behaviour.hang)
            return False
        if fault == "cut":
            full = json.dumps(response_to(body)).encode()
            await self.send(writer, 200, full, part=len(full) // 2)
            return False
        odd = {
            "nojson": b"<html>busy</html>",
            "nochoices": self.behaviour.error(self.behaviour.message),
            "emptychoices": b'{"choices": [], "usage": null}',
        }
        if fault in odd:
            return await self.send(writer, 200, odd[fault])
        message = f"{self.behaviour.message} ({key})" if fault == "401" else self.behaviour.message
        return await self.send(
            writer, int(fault[:3]), self.behaviour.error(message), self.behaviour.retry_header(fault)
        )


async def _serve(server: Server, port: int) -> None:
    listening = await asyncio.start_server(server.connected, "127.0.0.1", port, backlog=256, limit=2**24)
    print(listening.sockets[0].getsockname()[1], flush=True)
    await listening.serve_forever()


def _end_with_parent() -> None:
    sys.stdin.read()  # returns when whoever started this process is gone
    os._exit(0)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--behaviour", type=json.loads)
    args = parser.parse_args()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    asyncio.run(_serve(Server(Behaviour(**args.behaviour), args.log), args.port))


# ---- the test's side ----


def free_port() -> int:
    """A port where nothing listens now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class FakeEndpoint:
    """The endpoint as a context; stopped and entered again it has the same port and goes on with its log."""

    def __init__(self, log: Path, port: int = 0, **behaviour: Any) -> None:
        self.log, self.port, self.behaviour = log, port, Behaviour(**behaviour)
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> FakeEndpoint:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        told = ["--log", str(self.log), "--port", str(self.port), "--behaviour", json.dumps(asdict(self.behaviour))]
        self.process = subprocess.Popen(
            [sys.executable, __file__, *told], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        return self

    def __exit__(self, *exc: object) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def requests(self) -> list[dict[str, Any]]:
        """All requests so far, by arrival: time, path, key, body, fault, and `answered` (a time, or None)."""
        found: dict[tuple[int, int], dict[str, Any]] = {}
        starts = 0  # of the process: each counts from 0
        for line in self.log.read_text(encoding="utf-8").split("\n")[:-1] if self.log.exists() else []:
            entry = json.loads(line)
            if "answered" in entry:
                found[starts, entry["n"]]["answered"] = entry["answered"]
                continue
            starts += entry["n"] == 0
            found[starts, entry["n"]] = entry | {"answered": None}
        return list(found.values())


# ---- shards over it (eyas is imported inside: the server's process has no need of it) ----

SETTINGS: dict[str, Any] = dict(
    engine="openai", model="fake/target", extra_body={}, max_new_tokens=64, temperature=0.0, top_p=1.0, seed=0,
    truncated="skip", max_continuations=3, max_length=4096,
)  # fmt: skip
ENDPOINT: dict[str, Any] = dict(
    api_key_env=None, concurrency=8, timeout_seconds=20.0, max_tries=6, outage_minutes=0.5, requests_per_minute=None,
    tokens_per_minute=None, input_price=0.0, output_price=0.0, max_spend=None,
)  # fmt: skip
REPOSITORY = Path(__file__).parents[1]


def ask(row: int, *users: str, system: str | None = None, tools: list[str] | None = None) -> Row:
    """A row of user turns with answers that no target gave between them; `tools`: names of functions on offer."""
    from eyas.conversations import Row

    messages = [{"role": "system", "content": system}] if system else []
    for text in users:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": "never the data's"}]
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    offered = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in tools or []]
    return Row(row, "a", messages, tools=offered or None)


def respond(
    folder: Path, rows: list[Row], urls: list[str], settings: dict[str, Any] | None = None, name: str = "rows_0-9",
    **endpoint: Any,
) -> tuple[list[Row], dict[str, Any]]:  # fmt: skip
    """Answer one shard in this process; returns its rows and its sidecar."""
    from eyas.conversations import read_rows
    from eyas.regeneration.endpoint import EndpointOptions
    from eyas.regeneration.responses import respond_shard
    from eyas.shards import checksum
    from eyas.target.tokenizer import TargetReference

    output = folder / "conversations" / f"{name}.jsonl"
    respond_shard(
        write_prompts(folder, rows, name), output, TargetReference("no/such/target"), SETTINGS | (settings or {}),
        endpoint=EndpointOptions.from_json(json.dumps(ENDPOINT | {"urls": urls} | endpoint)),
    )  # fmt: skip
    facts = json.loads(output.with_suffix(".json").read_text(encoding="utf-8"))
    assert facts["files"] == {output.name: {"bytes": output.stat().st_size, "checksum": checksum(output)}}
    return read_rows(output), facts


def write_prompts(folder: Path, rows: list[Row], name: str) -> Path:
    from recorded_rows import write_recorded_rows

    return write_recorded_rows(folder / "prompts" / f"{name}.jsonl", rows, folder / "prompts" / "index.json")


def respond_command(
    folder: Path, urls: list[str], settings: dict[str, Any] | None = None, name: str = "rows_0-9", **endpoint: Any
) -> dict[str, Any]:
    """Arguments of subprocess for respond.py over a shard of prompts that is there."""
    start, end = map(int, name.removeprefix("rows_").split("-"))
    told = {
        "run": str(folder),
        "rows": name,
        "total-rows": str(end),
        "shard-rows": str(end - start),
        "target": json.dumps({"path": "no/such/target"}),
        "settings": json.dumps(SETTINGS | (settings or {})),
        "endpoint": json.dumps(ENDPOINT | {"urls": urls} | endpoint),
        "log": str(folder / f"{name}.log"),
    }
    script = REPOSITORY / "workflow" / "scripts" / "respond.py"
    paths = os.pathsep.join([str(REPOSITORY / "workflow"), os.environ.get("PYTHONPATH", "")])
    options = [word for name, value in told.items() for word in (f"--{name}", value)]
    return {"args": [sys.executable, str(script), *options], "env": os.environ | {"PYTHONPATH": paths}}


def journal_of(folder: Path, name: str = "rows_0-9") -> list[dict[str, Any]]:
    """What an unfinished shard has journalled, without a torn last line."""
    path = folder / "conversations" / ".staging" / name / "journal.jsonl"
    lines = path.read_text(encoding="utf-8").split("\n")[:-1] if path.exists() else []
    return [entry for entry in map(json.loads, lines) if "row" in entry]


def replay(row: Row, limit: int = 64) -> tuple[list[dict[str, Any]], str, int]:
    """The greedy conversation that the data's turns and the target make together, written from the rules alone.

    Returns messages (as a row holds them), and how the last answer ended, with its tokens.
    """
    given = [message for message in row.messages if message["role"] != "assistant"]
    messages: list[dict[str, Any]] = []
    while True:
        while given and given[0]["role"] != "user":  # the system turn; tool results that nobody asked for
            messages += [given[0]] if given[0]["role"] == "system" else []
            given = given[1:]
        if not given:
            break
        messages.append(given.pop(0))
        while True:
            answer = answer_to({"messages": messages, "max_tokens": limit, "tools": row.tools})
            said: dict[str, Any] = {"role": "assistant", "content": answer.content}
            said |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
            said |= {"tool_calls": [_as_object(call) for call in answer.tool_calls]} if answer.tool_calls else {}
            messages.append(said)
            if not answer.tool_calls:
                break
            if not given or given[0]["role"] != "tool":
                return messages, answer.finish, answer.completion_tokens
            for call in answer.tool_calls:
                messages.append(given.pop(0) | {"tool_call_id": call["id"]})
    return messages, answer.finish, answer.completion_tokens


def _as_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    try:
        arguments = json.loads(arguments)
    except ValueError:
        pass
    return call | {"function": call["function"] | {"arguments": arguments}}


if __name__ == "__main__":
    _main()
