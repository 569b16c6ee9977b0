"""The rows of a shard, answered over an endpoint: many at once, each answer journalled as it comes."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import xxhash

from eyas.conversations import Row
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.regeneration.endpoint import Client, EndpointOptions, Failed, Refused
from eyas.regeneration.limits import SharedLimits, Usage
from eyas.regeneration.replay import Message, Replay, message_of, said_nothing
from eyas.shards import Journal

log = logging.getLogger(__name__)


def used_by(records: Sequence[dict[str, Any]]) -> Usage:
    """Tokens that the requests of a journal were charged."""
    total = Usage()
    for record in records:
        total += Usage(*record["paid"])
    return total


def _sendable(messages: Sequence[Message]) -> list[Message]:
    """Messages as the endpoint takes them: arguments as text, thinking only within the turn that is going on."""
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    sent = []
    for index, message in enumerate(messages):
        message = dict(message)
        if index < last_user:
            message.pop("reasoning_content", None)
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                call | {"function": call["function"] | {"arguments": _as_text(call["function"]["arguments"])}}
                for call in calls
            ]
        sent.append(message)
    return sent


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _usage(said: Any) -> Usage:
    """What a server says that a request took; nothing where it says nothing."""
    counts = said if isinstance(said, dict) else {}
    prompt, answer = counts.get("prompt_tokens"), counts.get("completion_tokens")
    return Usage(prompt if isinstance(prompt, int) else 0, answer if isinstance(answer, int) else 0)


class EndpointRun:
    """Answers all rows of a shard. `settings`: what the answers depend on; `journal`: where they are kept."""

    def __init__(
        self, settings: dict[str, Any], options: EndpointOptions, journal: Journal, limits: SharedLimits, name: str
    ) -> None:
        self.settings, self.options, self.journal, self.limits, self.name = settings, options, journal, limits, name
        self.usage = self.earlier = self.journalled = used_by(journal.records)
        self.stopped: EyasError | None = None

    def run(self, rows: Sequence[Row]) -> list[Row]:
        """The rows with answers, in their order. Raises EyasError when the job must stop; answers stay journalled."""
        done: dict[int, list[dict[str, Any]]] = {}
        for record in self.journal.records:
            done.setdefault(record["row"], []).append(record)
        replays = {row.row: Replay(row) for row in rows}
        ends: dict[int, dict[str, Any]] = {}
        for number, records in done.items():
            for record in sorted(records, key=lambda r: r["turn"]):
                self._apply(replays[number], record, ends)
        waiting = deque(replay for replay in replays.values() if replay.open)
        answerable = sum(row.skipped is None and row.text is None for row in rows)
        self.progress = Progress(f"Responses {self.name}", answerable, "rows", already=answerable - len(waiting))
        if waiting:
            asyncio.run(self._answer_all(waiting, ends))
        log.info("%s.", self.progress.line(self._note()))
        if self.stopped:
            raise self.stopped
        return [self._finished(replays[row.row], ends.get(row.row)) for row in rows]

    async def _answer_all(self, waiting: deque[Replay], ends: dict[int, dict[str, Any]]) -> None:
        self.client = Client(self.options)
        workers: set[asyncio.Task[None]] = set()
        try:
            while (waiting and not self.stopped) or workers:
                if waiting and not self.stopped and len(workers) < self.options.concurrency:
                    slot = self.limits.take_slot()
                    if slot is not None:
                        workers.add(asyncio.create_task(self._work(slot, waiting, ends)))
                        await asyncio.sleep(0)
                        continue
                if not workers:  # other jobs have all the slots
                    await asyncio.sleep(0.05)
                    continue
                done, workers = await asyncio.wait(workers, timeout=0.05, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            for task in workers:
                task.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            await self.client.close()

    async def _work(self, slot: int, waiting: deque[Replay], ends: dict[int, dict[str, Any]]) -> None:
        """Answer one row after the other, until there is none."""
        try:
            while waiting and not self.stopped:
                replay = waiting.popleft()
                while replay.open and not self.stopped:
                    record = await self._turn(replay)
                    self.journal.append(record)
                    self.journalled += Usage(*record["paid"])
                    self._apply(replay, record, ends)
                if not replay.open:
                    self.progress.advance(1, self._note())
        except EyasError as exc:
            # Requests that are under way are let to their end: they are paid for.
            self.stopped = self.stopped or exc
        finally:
            self.limits.give_slot(slot)

    async def _turn(self, replay: Replay) -> dict[str, Any]:
        """One answer of the target, as the journal keeps it."""
        base = {"row": replay.row.row, "turn": replay.turn}
        paid = Usage()
        content, thinking, calls, tokens, part = "", "", None, 0, 0
        try:
            while True:
                values, used = await self._ask(replay, content, thinking, part)
                paid += used
                tokens += used.answer
                choice = values["choices"][0]
                message = choice["message"]
                new = message.get("content")
                content += new if isinstance(new, str) else ""
                thought = message.get("reasoning_content") or message.get("reasoning")
                thinking += thought if isinstance(thought, str) else ""
                calls = message.get("tool_calls") or calls
                cut = choice.get("finish_reason") == "length"
                part += 1
                # Over this interface only an answer can be gone on with, no thinking that is still open.
                goes_on = self.settings["truncated"] == "continue" and part <= self.settings["max_continuations"]
                if not (cut and goes_on and content.strip()):
                    break
        except (Failed, Refused) as exc:
            kind = "failed" if isinstance(exc, Failed) else "refused"
            tries = f"{self.options.max_tries} tries, last " if kind == "failed" else ""
            return base | {"skipped": f"{kind}: {tries}{exc}", "paid": [paid.prompt, paid.answer]}
        answer = message_of(content, thinking or None, calls)
        finish = "length" if cut else "tool_calls" if answer.get("tool_calls") else "stop"
        record = base | {"message": answer, "finish": finish, "tokens": tokens, "paid": [paid.prompt, paid.answer]}
        if cut and self.settings["truncated"] != "keep":
            how = self.settings["truncated"]
            record["skipped"] = f"truncated: no end of turn within {tokens} tokens (responses.truncated: {how})"
        elif said_nothing(answer):
            record["skipped"] = "empty: the target answered nothing"
        return record

    async def _ask(self, replay: Replay, content: str, thinking: str, part: int) -> tuple[dict[str, Any], Usage]:
        body = self._body(replay, content, thinking, part)
        size = len(json.dumps(body["messages"], ensure_ascii=False).encode())
        most = Usage(size + 16 * len(body["messages"]), int(body["max_tokens"]))  # a token has at least a byte
        about = sum(len(str(m.get("content"))) for m in body["messages"]) // 4 + int(body["max_tokens"])
        self.limits.reserve(most)
        used = Usage()
        try:
            while wait := self.limits.wait_for_rate(about):
                await asyncio.sleep(wait)
            values = await self.client.complete(body)
            used = _usage(values.get("usage"))
            self.limits.correct_rate(used.prompt + used.answer - about)
            self.usage += used
            return values, used
        finally:
            self.limits.settle(most, used)

    def _body(self, replay: Replay, content: str, thinking: str, part: int) -> dict[str, Any]:
        settings = self.settings
        body: dict[str, Any] = {
            "model": settings["model"],
            "messages": _sendable(replay.messages),
            "max_tokens": settings["max_new_tokens"],
            "temperature": settings["temperature"],
            "top_p": settings["top_p"],
        }
        if replay.row.tools:
            body["tools"] = replay.row.tools
        if settings["temperature"] > 0:
            key = f"{settings['seed']}:{replay.row.row}:{replay.turn}:{part}"
            body["seed"] = xxhash.xxh3_64_intdigest(key.encode()) % 2**31
        if part:
            message = {"role": "assistant", "content": content}
            if thinking:
                message["reasoning_content"] = thinking
            body["messages"].append(message)
            body |= {"continue_final_message": True, "add_generation_prompt": False}
        return body | settings["extra_body"]

    @staticmethod
    def _apply(replay: Replay, record: dict[str, Any], ends: dict[int, dict[str, Any]]) -> None:
        ends[replay.row.row] = record
        if "skipped" in record:
            replay.open = False
        else:
            replay.answer(record["message"], ends=record["finish"] == "length")

    def _finished(self, replay: Replay, end: dict[str, Any] | None) -> Row:
        row = replay.row
        if row.skipped is not None:
            return row
        if row.text is not None:
            return row.skip("ready text has no turns to answer (responses.engine: keep takes it as it is)")
        if end is None:
            return row.skip("no user turn to answer")
        if "skipped" in end:
            return row.skip(end["skipped"], end.get("finish"), end.get("tokens"))
        return Row(
            row.row, row.source, replay.messages, None, end["finish"], end["tokens"], row.place, row.id, row.tools
        )

    def _note(self) -> str:
        new = self.usage.answer - self.earlier.answer
        words = [
            f"{self.usage.prompt:,} tokens in, {self.usage.answer:,} out",
            f"{new / max(self.progress.seconds, 1e-9):,.0f} tok/s",
        ]
        client = getattr(self, "client", None)
        if client and client.errors:
            words.append("errors: " + ", ".join(f"{kind} × {count}" for kind, count in sorted(client.errors.items())))
        if self.options.input_price or self.options.output_price:
            words.append(f"spent {self.usage.cost(self.options):,.2f}")
        return "; ".join(words)
