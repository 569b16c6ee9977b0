"""The thinking of reasoning targets: found in what they wrote, and put where their chat template looks for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# How targets that think aloud mark it.
TAGS = (("<think>", "</think>"), ("◁think▷", "◁/think▷"), ("[THINK]", "[/THINK]"))
# Fields of a message in which chat templates look for it.
FIELDS = ("reasoning_content", "reasoning", "thinking")


def split_reasoning(content: str, opened: bool = False) -> tuple[str | None, str]:
    """Thinking at the start of `content` and what follows it, without the tags and the line breaks at them.

    `opened`: the prompt opens the tag, so that only its end is in the content. Thinking that was
    not closed is no thinking: None, and the content as it is.
    """
    for begin, end in TAGS:
        stripped = content.lstrip()
        if stripped.startswith(begin):
            thought, found, rest = stripped[len(begin) :].partition(end)
        elif opened and begin not in content:
            thought, found, rest = content.partition(end)
        else:
            continue
        if found:
            return thought.strip("\n"), rest.lstrip("\n")
    return None, content


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends in the middle of a thought: the target begins with thinking."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in TAGS))


@dataclass(frozen=True)
class ReasoningPlace:
    """Where a chat template wants the thinking: a field of the message, or tags in the content.

    `closing`: what stands between the thinking and the answer.
    """

    field: str | None = None
    tags: tuple[str, str] | None = None
    closing: str = "\n</think>\n\n"

    def put(self, message: dict[str, Any], thought: str) -> dict[str, Any]:
        """The message (without thinking) with it."""
        if self.field:
            return message | {self.field: thought}
        assert self.tags
        return message | {"content": f"{self.tags[0]}\n{thought}{self.closing}{message.get('content') or ''}"}

    def answer(self, content: str | None, thought: str) -> str:
        """What the content says besides the thinking that was put into it."""
        content = content or ""
        return content[len(f"{self.tags[0]}\n{thought}{self.closing}") :] if self.tags else content


def find_place(
    render: Callable[[Sequence[dict[str, Any]]], str | None], template: str, vocabulary: Callable[[str], bool]
) -> ReasoningPlace | None:
    """Try a template with thinking in each field; None when it knows no thinking at all.

    `render` gives None where the template refuses; `vocabulary` tells whether a text is one token.
    """
    asked = {"role": "user", "content": "QxQuestionxQ"}
    # Some templates keep only the thinking between tool calls.
    calls = [{"id": "abcdefghi", "type": "function", "function": {"name": "QxNamexQ", "arguments": {}}}]
    for field in FIELDS:
        for rest in ({"content": "QxAnswerxQ"}, {"content": "", "tool_calls": calls}):
            text = render([asked, {"role": "assistant", field: "QxThoughtxQ", **rest}])
            if text is not None and "QxThoughtxQ" in text:
                ends = "|".join(re.escape(end) for _, end in TAGS)
                closing = re.match(rf"\s*({ends})\s*", text.partition("QxThoughtxQ")[2])
                return ReasoningPlace(field=field, closing=closing[0] if closing else "\n</think>\n\n")
    if any(re.search(rf"\b{field}\b", template) for field in FIELDS[:2]):
        return None  # it knows thinking, and its options keep it out
    for tags in TAGS:
        if tags[1] in template or vocabulary(tags[1]):
            return ReasoningPlace(tags=tags, closing=f"\n{tags[1]}\n\n")
    return None
