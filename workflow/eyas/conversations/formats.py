"""One record of a prompt file to a conversation: which format it is, and what makes it unusable."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

# Formats in the order in which a record that could be several of them is read, and the keys that tell.
FORMATS = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt": ("prompt", "instruction", "question", "turns"),
    "text": ("text",),
}
_FORMAT_OF = {key: name for name, keys in FORMATS.items() for key in keys}
FORMAT_KEYS = frozenset(_FORMAT_OF)
_QUESTIONS, _ANSWERS = ("instruction", "prompt", "question"), ("response", "completion", "output", "answer")
_IDS, _SOURCES = ("id", "conversation_id", "uuid", "prompt_id", "question_id", "task_id"), ("source", "dataset")
# All that is ever read of a record.
RECORD_KEYS = FORMAT_KEYS | {"input", "system", "tools", *_ANSWERS, *_IDS, *_SOURCES}

# Who speaks, in OpenAI's words and in those of ShareGPT's many dialects.
_ROLES = {
    "system": "system",
    "developer": "system",
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation", "tool_response", "function_response", "ipython"), "tool"),
    **dict.fromkeys(("function_call", "tool_call"), "function_call"),
}
_REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_DEEPEST = 100  # levels of arguments and schemas: what every later stage can write and read again
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)

Message = dict[str, Any]


class UnusableRecord(Exception):
    """Why a record cannot become a row."""


class Content(NamedTuple):
    """What a row holds of a record (see `eyas.conversations.Row`)."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    text: str | None = None


def formats_of(record: Any) -> list[str]:
    """The formats that a record could be, in order of precedence; fields that are null do not count."""
    if isinstance(record, str):
        return ["prompt"]
    if not isinstance(record, dict):
        return []
    return [name for key, name in _FORMAT_OF.items() if record.get(key) is not None]


def detect(records: Iterable[Any]) -> str | None:
    """The first format, in order of precedence, that any of these records could be; None for none."""
    found = {name for record in records for name in formats_of(record)}
    return next((name for name in FORMATS if name in found), None)


def read_content(record: Any, expected: str | None = None, forced: bool = False) -> Content:
    """A record's conversation or text. `expected` is its file's format; `forced` allows no other.

    Raises UnusableRecord with the reason.
    """
    try:
        return _content(record, expected, forced)
    except RecursionError:
        raise UnusableRecord("nested too deeply") from None


def _content(record: Any, expected: str | None, forced: bool) -> Content:
    formats = formats_of(record)
    if not isinstance(record, dict):
        if not isinstance(record, str):
            raise UnusableRecord("no JSON object")
        record = {"prompt": record}
    if expected in formats:
        chosen = expected
    elif forced and expected:
        *first, last = (f"`{key}`" for key in FORMATS[expected])
        keys = f"{', '.join(first)} or {last}" if first else last
        raise UnusableRecord(f"no {keys} in it; data.format is {expected}")
    elif formats:
        chosen = formats[0]
    else:
        known = "no messages, conversations, prompt, instruction, question, turns or text"
        raise UnusableRecord(f"{known} among {[str(key)[:40] for key in sorted(record, key=str)[:8]]}")
    if chosen == "text":
        return _ready_text(record["text"])
    if chosen == "prompt":
        messages, numbers = _single_turn(record)
    else:
        key = FORMATS[chosen][0]
        messages, numbers = _conversation(record[key], key)
    system = _text(record.get("system") or "", "`system`")
    if system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        numbers.insert(0, 0)
    _check_order(messages, numbers)
    tools = record.get("tools")
    return Content(messages, _tools(tools) if tools is not None else None)


def identity_of(record: Any) -> tuple[str | None, str | int | None]:
    """The record's own `source` and `id`, where it has them."""
    if not isinstance(record, dict):
        return None, None
    source = next((record[key] for key in _SOURCES if isinstance(record.get(key), str) and record[key]), None)
    name = next((record[key] for key in _IDS if record.get(key) not in (None, "")), None)
    if isinstance(name, bytes):
        name = name.decode("utf-8", "replace")
    if name is not None and type(name) is not int:
        name = writable(str(name))
    return writable(source) if source else None, name


# ---- texts


def writable(text: str) -> str:
    """The text without halves of surrogate pairs (JSON escapes cut in two), which UTF-8 cannot hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def _text(value: Any, where: str) -> str:
    """Content as text; lists of text parts are joined."""
    if isinstance(value, list):
        value = "".join([_part(part, where) for part in value])
    elif isinstance(value, bytes):  # old Parquet files do not say that a column is text
        value = value.decode("utf-8", "replace")
    if not isinstance(value, str):
        raise UnusableRecord(f"{where} is no text")
    return writable(value)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        text = part.get("text") if part.get("text") is not None else part.get("value")
        if isinstance(text, str) and part.get("type") in _TEXT_PARTS:
            return text
        raise UnusableRecord(f"{where} is no text: it has a part of type {str(part.get('type'))[:40]!r}")
    raise UnusableRecord(f"{where} is no text")


def _ready_text(value: Any) -> Content:
    if isinstance(value, list):
        raise UnusableRecord("`text` is no text")
    text = _text(value, "`text`")
    if not text.strip():
        raise UnusableRecord("empty text")
    return Content([], text=text)


def _single_turn(record: dict[str, Any]) -> tuple[list[Message], list[int]]:
    """`instruction`, `prompt` or `question`, with `input`, and the answer if there is one; their numbers.

    Of `turns` (MT-bench: what a user says, turn by turn, without the answers) the first is the prompt: the
    later ones need the target's own answers before them.
    """
    asked = next((record[key] for key in _QUESTIONS if record.get(key) is not None), None)
    prompt = _first_turn(record["turns"]) if asked is None else _text(asked, "the prompt")
    extra = _text(record.get("input") or "", "`input`")
    messages = [{"role": "user", "content": f"{prompt}\n\n{extra}" if extra.strip() else prompt}]
    answer = next((record[key] for key in _ANSWERS if record.get(key) is not None), "")
    if (answer := _text(answer, "the answer")).strip():
        messages.append({"role": "assistant", "content": answer})
    return messages, [1, 2]


def _first_turn(turns: Any) -> str:
    turns = _listed(turns, "`turns`")
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise UnusableRecord("`turns` is no list of texts")
    return writable(turns[0])


# ---- conversations


def _conversation(turns: Any, key: str) -> tuple[list[Message], list[int]]:
    """Messages, and the number of the turn that each one is from."""
    turns = _listed(turns, f"`{key}`")
    if not turns:
        raise UnusableRecord("empty conversation")
    messages: list[Message] = []
    numbers: list[int] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise UnusableRecord(f"turn {number} is no object")
        speaker = turn["role"] if turn.get("role") is not None else turn.get("from")
        role = _ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            said = repr(speaker)[:60]
            raise UnusableRecord(f"turn {number} has the role {said}; known are system, user, assistant and tool")
        message = _message(role, turn, f"turn {number}")
        before = messages[-1] if messages else {}
        if role == "function_call" and before.get("role") == "assistant" and "tool_calls" not in before:
            # What the assistant said before it called a function is the same message.
            before |= message | {"content": before["content"] + message["content"]}
            continue
        messages.append(message)
        numbers.append(number)
    return messages, numbers


def _message(role: str, turn: dict[str, Any], where: str) -> Message:
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if role in ("assistant", "function_call"):
        return _assistant(role, turn, content, where)
    if turn.get("tool_calls"):
        raise UnusableRecord(f"{where} is by the {role} and has tool calls")
    message = {"role": role, "content": _text(content, where)}
    if role == "tool":
        for key in ("tool_call_id", "name"):
            if turn.get(key) not in (None, ""):
                message[key] = writable(str(turn[key]))
    return message


def _assistant(role: str, turn: dict[str, Any], content: Any, where: str) -> Message:
    """An assistant's message; thinking and calls may be fields of the turn or parts of its content."""
    thoughts = [turn[key] for key in _REASONING if isinstance(turn.get(key), str) and turn[key]][:1]
    calls = _listed(turn.get("tool_calls"), f"{where}: `tool_calls`")
    if role == "function_call":
        said = ""
        if isinstance(content, str) and (thought := _THOUGHT.match(content)):
            said, content = thought[0], content[thought.end() :]
        calls = [*calls, *_listed([content] if isinstance(content, dict) else content, f"{where}: the function call")]
        if not calls:
            raise UnusableRecord(f"{where} calls no function")
        content = said
    elif isinstance(content, list):
        rest = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            value = next((part[key] for key in ("text", "value", "thinking") if part.get(key)), None) if kind else None
            if kind in ("reasoning", "thinking") and isinstance(value, str):
                thoughts.append(value)
            elif kind == "tool_call":
                calls = [*calls, *_listed([value] if isinstance(value, dict) else value, f"{where}: the tool call")]
            else:
                rest.append(part)
        content = rest
    message: Message = {"role": "assistant", "content": "" if content is None and calls else _text(content, where)}
    if thoughts:
        message["reasoning_content"] = writable("".join(thoughts))
    if calls:
        message["tool_calls"] = [tool_call(call, f"{where}: call {number}") for number, call in enumerate(calls, 1)]
    return message


def _check_order(messages: list[Message], numbers: list[int]) -> None:
    """System first, if at all; then user and assistant in turn, and tools after an assistant that calls them."""
    expected: tuple[str, ...] = ("user",)
    for index, (message, number) in enumerate(zip(messages, numbers, strict=False)):
        role = message["role"]
        if role == "system":
            if index:
                raise UnusableRecord(f"turn {number} is a system message after the start")
            continue
        if role not in expected:
            raise UnusableRecord(f"turn {number} is by the {role}, not the {' or the '.join(expected)}")
        if role == "user":
            if not message["content"].strip():
                raise UnusableRecord(f"turn {number}: empty user message")
            expected = ("assistant",)
        elif role == "tool":
            expected = ("tool", "assistant")
        else:
            expected = ("tool",) if "tool_calls" in message else ("user",)
    if messages[-1]["role"] == "system":
        raise UnusableRecord("no user turn")


# ---- functions


def _listed(value: Any, what: str) -> list[Any]:
    """A list, the JSON text of one, or the JSON text of its only entry; nothing is the empty list."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError:
            raise UnusableRecord(f"{what} is not JSON") from None
        value = [value] if isinstance(value, dict) else value
    if value is None or value == "":
        return []
    if not isinstance(value, list):
        raise UnusableRecord(f"{what} is no list")
    return value


def tool_call(call: Any, where: str) -> dict[str, Any]:
    """A call in OpenAI's form, from that or from the bare `{"name", "arguments"}`."""
    call = call if isinstance(call, dict) else {}
    function = call["function"] if call.get("function") is not None else call
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str) or not name.strip():
        raise UnusableRecord(f"{where} names no function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _object_or_text(arguments)
    elif arguments is None:
        arguments = {}
    elif not isinstance(arguments, dict):
        raise UnusableRecord(f"{where} has arguments that are neither an object nor text")
    made = {"type": "function", "function": {"name": writable(name), "arguments": _plain(arguments, where)}}
    if call.get("id") not in (None, ""):
        made = {"id": writable(str(call["id"]))} | made
    return made


def _object_or_text(text: str) -> dict[str, Any] | str:
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Descriptions of functions in OpenAI's form; None for an empty list."""
    tools = []
    for number, tool in enumerate(_listed(value, "`tools`"), 1):
        where = f"tool {number}"
        if isinstance(tool, str):
            tool = (_listed(tool, where) or [None])[0]
        function = tool.get("function") if isinstance(tool, dict) and tool.get("function") is not None else tool
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UnusableRecord(f"{where} describes no function")
        if function is tool:
            tool = {"function": {key: value for key, value in tool.items() if key != "type"}}
        tools.append(_plain({"type": "function"} | tool, where))
    return tools or None


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """The value as JSON in UTF-8 can hold it."""
    if depth > _DEEPEST:
        raise UnusableRecord(f"{where} is nested too deeply")
    if isinstance(value, str):
        return writable(value)
    if isinstance(value, dict):
        return {writable(str(key)): _plain(entry, where, depth + 1) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, where, depth + 1) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise UnusableRecord(f"{where} has a number that JSON cannot hold ({value})")
    if value is None or isinstance(value, bool | int | float):
        return value
    return writable(value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value))
