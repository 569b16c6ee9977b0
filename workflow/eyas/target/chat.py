"""Conversations as the target sees them: rendered by its chat template, encoded by its tokenizer.

Special tokens that somebody wrote into a message stay plain text. Servers that render and encode in one go
make control tokens of them; whoever types `<|im_end|>` would then end a turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from eyas.target.reasoning import FIELDS, ReasoningPlace, find_place, opens_reasoning, split_reasoning
from eyas.target.refusal import TemplateRefusal
from eyas.target.special import Encoding, SpecialTokens

Message = dict[str, Any]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of nested lists and mappings with every text changed (keys are left alone)."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_texts(entry, change) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(entry, change) for entry in value]
    return value


_SAID = ("content", *FIELDS, "tool_calls", "name")  # what a message's author wrote


@dataclass(frozen=True)
class Prepared:
    """A conversation as a template takes it.

    `thoughts`: the thinking that was put into each message, None where there is none. `stand_ins`: private
    characters in the texts, and the special token that each is the plain text of.
    """

    messages: list[Message]
    thoughts: list[str | None]
    tools: Any
    stand_ins: dict[str, str]

    def upto(self, count: int) -> Prepared:
        """The first `count` messages."""
        return Prepared(self.messages[:count], self.thoughts[:count], self.tools, self.stand_ins)


class ChatTemplate:
    """The target's chat template with `options` (its variables, as in `{"enable_thinking": False}`).

    Messages are Eyas's own form (see `eyas.conversations.Row`); each template gets thinking and
    tool calls in the shape that it understands, found out by trying.
    """

    def __init__(self, tokenizer: Any, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = dict(options or {})
        self.special = SpecialTokens(tokenizer)

    # ---- the template

    @cached_property
    def _compiled(self) -> Callable[..., str] | None:
        """The compiled template; None for a tokenizer with several or with a way of its own."""
        from transformers import PreTrainedTokenizerBase
        from transformers.utils import chat_template_utils

        own = type(self.tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template
        compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
        if own or compile_template is None or not isinstance(self.tokenizer.chat_template, str):
            return None
        try:
            template = compile_template(self.tokenizer.chat_template)
        except Exception:  # transformers says what is wrong with it
            return None
        given = {**self.tokenizer.special_tokens_map, **self.options}
        return lambda **values: template.render(given, **values)

    def render_prepared(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Text of messages that :meth:`prepare` made; raises TemplateRefusal."""
        try:
            if self._compiled and not tools:
                # The same call that transformers makes; two thirds of its time go to arguments that we never give.
                return self._compiled(
                    messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt
                )
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tools=list(tools) if tools else None, tokenize=False,
                add_generation_prompt=add_generation_prompt, **self.options,
            )  # fmt: skip
        except Exception as exc:  # jinja's errors and whatever a template raises
            raise TemplateRefusal(f"the chat template refuses it: {' '.join(str(exc).split())[:200]}") from None
        return text

    def generation_spans(
        self, messages: Sequence[Message], tools: Sequence[Any] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Text, and the character ranges that a template with `{% generation %}` marks; raises TemplateRefusal."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(
                conversations=[list(messages)], tools=list(tools) if tools else None,
                chat_template=self.tokenizer.chat_template, return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )  # fmt: skip
        except Exception as exc:
            raise TemplateRefusal(f"the chat template refuses it: {' '.join(str(exc).split())[:200]}") from None
        texts, spans = rendered
        return texts[0], [(int(begin), int(end)) for begin, end in spans[0]]

    @cached_property
    def marks_generation(self) -> bool:
        """Whether the template says itself what the assistant writes."""
        return bool(re.search(r"\{%-?\s*generation\s*-?%\}", str(self.tokenizer.chat_template)))

    def _attempt(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.render_prepared(messages)
        except TemplateRefusal:
            return None

    # ---- the shape that this template understands

    @cached_property
    def reasoning_place(self) -> ReasoningPlace | None:
        """Where the template wants thinking; None when it knows none."""
        unknown = self.tokenizer.unk_token_id

        def in_vocabulary(text: str) -> bool:
            return self.tokenizer.convert_tokens_to_ids(text) not in (None, unknown)

        return find_place(self._attempt, str(self.tokenizer.chat_template), in_vocabulary)

    @cached_property
    def opens_reasoning(self) -> bool:
        """Whether the generation prompt opens a thought."""
        try:
            return opens_reasoning(self.render_prepared([{"role": "user", "content": "x"}], add_generation_prompt=True))
        except TemplateRefusal:
            return False

    @cached_property
    def tool_call_shape(self) -> tuple[bool, str | None] | None:
        """Whether arguments go in as an object (or as JSON text), and the content of a message that only calls.

        None when the template renders no tool calls.
        """
        for as_object in (True, False):
            for content in ("", None):
                arguments: Any = {"QxKeyxQ": "QxValuexQ"}
                call = {"name": "QxNamexQ", "arguments": arguments if as_object else json.dumps(arguments)}
                calls = [{"id": "abcdefghi", "type": "function", "function": call}]
                asked = {"role": "user", "content": "QxQuestionxQ"}
                calling = {"role": "assistant", "content": content, "tool_calls": calls}
                result = {"role": "tool", "content": "QxResultxQ", "name": "QxNamexQ", "tool_call_id": "abcdefghi"}
                text = self._attempt([asked, calling, result]) or self._attempt([asked, calling])
                if text and "QxNamexQ" in text and '"QxValuexQ"' in text and "None" not in text:
                    return as_object, content
        return None

    def thought_and_answer(self, message: Message) -> tuple[str | None, str]:
        """An assistant's thinking (None without any) and what it says behind it."""
        thought, content = message.get("reasoning_content"), message.get("content") or ""
        if not thought:
            thought, content = split_reasoning(content, self.opens_reasoning)
        return (thought if thought and thought.strip() else None), content

    def prepare(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, reasoning: bool = True
    ) -> Prepared:
        """Messages in the shape that the template understands; `reasoning` False takes the thinking out."""
        plain: list[Message] = []
        for message in messages:
            if message["role"] == "assistant":
                thought, content = self.thought_and_answer(message)
                message = {key: value for key, value in message.items() if key not in FIELDS} | {"content": content}
                if thought and reasoning and self.reasoning_place:
                    message["reasoning_content"] = thought
            plain.append(message)
        escaped, changed, stand_ins = self._escape(plain, tools)
        thoughts = [message.get("reasoning_content") for message in escaped]
        shaped = [self._shaped(m) if m["role"] == "assistant" else m for m in escaped]
        return Prepared(shaped, thoughts, changed, stand_ins)

    def _shaped(self, message: Message) -> Message:
        thought = message.pop("reasoning_content", None)
        if message.get("tool_calls"):
            as_object, empty = self.tool_call_shape or (True, "")
            calls = []
            for call in message["tool_calls"]:
                function = dict(call["function"])
                if not as_object and not isinstance(function.get("arguments"), str):
                    function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
                calls.append(call | {"function": function})
            message = message | {"tool_calls": calls, "content": message["content"] or empty}
        if thought is not None and self.reasoning_place:
            message = self.reasoning_place.put(message, thought)
        return message

    # ---- text and ids

    def _escape(self, messages: list[Message], tools: Any) -> tuple[list[Message], Any, dict[str, str]]:
        """Messages and tools with stand-ins for the special tokens in their texts, and what each stands for."""
        texts = [*_texts_of(messages), *_texts(tools)]
        if not any(map(self.special.search, texts)):
            return messages, tools, {}
        stand_ins = self.special.stand_ins(texts)

        def change(text: str) -> str:
            return self.special.replace(text, stand_ins)

        changed = [
            {key: map_texts(value, change) if key in _SAID else value for key, value in message.items()}
            for message in messages
        ]
        return changed, map_texts(tools, change), {stand_in: text for text, stand_in in stand_ins.items()}

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> Encoding:
        """Ids of rendered text, in which stand-ins are the plain text of special tokens."""
        return self.special.encode(text, stand_ins)

    def prompt_ids(self, history: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Token ids of a conversation up to an open assistant turn; raises TemplateRefusal."""
        prepared = self.prepare(history, tools)
        text = self.render_prepared(prepared.messages, prepared.tools, add_generation_prompt=True)
        return self.encode(text, prepared.stand_ins).ids


def _texts_of(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        for key in message:
            if key in _SAID:
                value = message[key]
                if isinstance(value, str):
                    yield value
                else:
                    yield from _texts(value)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _texts(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _texts(entry)
