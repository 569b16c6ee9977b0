"""A conversation replayed: user turns and tool results of the data, every assistant turn the target's own."""

from __future__ import annotations

import json
import re
from typing import Any

from eyas.conversations import Row
from eyas.conversations.formats import UnusableRecord, tool_call
from eyas.target.reasoning import split_reasoning

_CALL = re.compile(r"\s*<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)

Message = dict[str, Any]


class Replay:
    """Where a row is in its replay. Give it each answer in turn; `open` says whether it waits for one.

    Tool results of the data follow the target's own calls, in order and with the ids of those calls; results
    that it did not ask for are left out. Where it calls and the data has no result, the conversation ends.
    """

    def __init__(self, row: Row) -> None:
        self.row = row
        self.messages: list[Message] = []
        self.turn = 0
        self._given = [message for message in row.messages if message["role"] != "assistant"]
        self.open = row.skipped is None and row.text is None and self._next_user()

    def _next_user(self) -> bool:
        while self._given and self._given[0]["role"] != "user":
            message = self._given.pop(0)
            if message["role"] == "system":
                self.messages.append(message)
        if self._given:
            self.messages.append(self._given.pop(0))
            return True
        return False

    def answer(self, message: Message, ends: bool = False) -> None:
        """Take the target's answer; `ends`: it was cut off, nothing can follow."""
        self.messages.append(message)
        self.turn += 1
        if ends:
            self.open = False
        elif calls := message.get("tool_calls"):
            results: list[Message] = []
            while self._given and self._given[0]["role"] == "tool" and len(results) < len(calls):
                results.append(self._given.pop(0))
            self.open = len(results) == len(calls)
            if self.open:
                self.messages += [
                    result | ({"tool_call_id": call["id"]} if "id" in call else {})
                    for call, result in zip(calls, results, strict=True)
                ]
        else:
            self.open = self._next_user()


def parsed_calls(calls: Any) -> list[Message]:
    """Tool calls of an answer in Eyas's form; what is no call is left out."""
    parsed = []
    for call in calls if isinstance(calls, list) else []:
        try:
            parsed.append(tool_call(call, "the call"))
        except UnusableRecord:
            pass
    return parsed


def message_of(content: str, reasoning: str | None = None, calls: Any = None) -> Message:
    """An assistant's message; thinking in tags at the start of the content is taken out of it."""
    if not reasoning:
        reasoning, content = split_reasoning(content, opened=True)
    message: Message = {"role": "assistant", "content": content}
    if reasoning and reasoning.strip():
        message["reasoning_content"] = reasoning
    if tool_calls := parsed_calls(calls):
        message["tool_calls"] = tool_calls
    return message


def message_of_text(text: str, tools: bool) -> Message:
    """What a target wrote in-process; with `tools`, calls in `<tool_call>` tags are taken out of the text."""
    message = message_of(text)
    calls = []
    if tools:
        for number, found in enumerate(_CALL.finditer(message["content"])):
            try:
                call = json.loads(found[1])
            except (ValueError, RecursionError):
                return message
            calls.append({"id": f"call_{number}", "function": call})
    if parsed := parsed_calls(calls):
        message |= {"content": _CALL.sub("", message["content"]).rstrip("\n"), "tool_calls": parsed}
    return message


def said_nothing(message: Message) -> bool:
    return not message["content"].strip() and not message.get("tool_calls")
