"""One record of a prompt file to messages: which format it is, and what makes it unusable."""

from __future__ import annotations

from typing import Any

# ShareGPT's speakers.
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "system": "system",
}
_ROLES = {"system", "user", "assistant"}


class UnusableRecord(Exception):
    """Why a record cannot become a row."""


def _text(value: Any, where: str) -> str:
    """Message content as text; lists of text parts are joined."""
    if isinstance(value, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in value):
        value = "".join(part["text"] for part in value)
    if not isinstance(value, str):
        raise UnusableRecord(f"{where} is no text")
    # Half a surrogate pair (a JSON escape cut in two) can be neither written nor tokenised.
    return value.encode("utf-8", errors="replace").decode("utf-8")


def _messages(turns: Any, role_keys: tuple[str, ...], text_keys: tuple[str, ...]) -> list[dict[str, str]]:
    if not isinstance(turns, list) or not turns:
        raise UnusableRecord("empty conversation")
    messages = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, dict):
            raise UnusableRecord(f"turn {number} is no object")
        speaker = next((turn[key] for key in role_keys if key in turn), None)
        role = _SPEAKERS.get(speaker, speaker) if isinstance(speaker, str) else None
        if role not in _ROLES:
            raise UnusableRecord(f"turn {number} has the role {speaker!r}; known are system, user and assistant")
        content = next((turn[key] for key in text_keys if key in turn), None)
        messages.append({"role": str(role), "content": _text(content, f"turn {number}")})
    return messages


def to_messages(record: Any) -> list[dict[str, str]]:
    """OpenAI `messages`, ShareGPT `conversations`, or `instruction`/`prompt` (+ `input`) to messages.

    The last form's answer is in `output` or `response`, when there is one.
    Raises UnusableRecord with the reason.
    """
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, dict):
        raise UnusableRecord("no JSON object")
    if "messages" in record:
        messages = _messages(record["messages"], ("role", "from"), ("content", "value"))
    elif "conversations" in record:
        messages = _messages(record["conversations"], ("from", "role"), ("value", "content"))
    elif "instruction" in record or "prompt" in record:
        prompt = _text(record.get("instruction", record.get("prompt")), "the prompt")
        extra = _text(record.get("input") or "", "`input`")
        messages = [{"role": "user", "content": f"{prompt}\n\n{extra}" if extra.strip() else prompt}]
        if system := _text(record.get("system") or "", "`system`"):
            messages.insert(0, {"role": "system", "content": system})
        answer = _text(record.get("output", record.get("response")) or "", "the answer")
        if answer.strip():
            messages.append({"role": "assistant", "content": answer})
    else:
        raise UnusableRecord(f"no messages, conversations, prompt or instruction among {sorted(map(str, record))[:8]}")
    _check_order(messages)
    return messages


def _check_order(messages: list[dict[str, str]]) -> None:
    turns = [m for m in messages if m["role"] != "system"]
    if not turns:
        raise UnusableRecord("no user turn")
    if any(m["role"] == "system" for m in messages[1:]):
        raise UnusableRecord("a system message after the start")
    for number, message in enumerate(turns, 1):
        expected = "user" if number % 2 else "assistant"
        if message["role"] != expected:
            raise UnusableRecord(f"turn {number} is by the {message['role']}, not the {expected}")
        if expected == "user" and not message["content"].strip():
            raise UnusableRecord(f"turn {number}: empty user message")
