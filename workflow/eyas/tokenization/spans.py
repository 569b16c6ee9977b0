"""Where a rendered conversation says what the assistant wrote: found by rendering, never by searching for text.

Two kinds of rendering tell it. *Prefixes*: what the template makes of the messages before a turn, with the
generation prompt, is what the target saw when it began to write. *Marks*: private characters put around the texts
of a message show where the template placed them. Prefixes are exact where the template leaves earlier turns
alone; marks serve where it does not (thinking dropped, another generation prompt).
"""

from __future__ import annotations

import os
from collections.abc import Container, Mapping
from dataclasses import dataclass
from itertools import product

from eyas.target.chat import ChatTemplate, Message, Prepared
from eyas.target.refusal import TemplateRefusal

_MARKS = range(0x100000, 0x10FFFE)
_CALL = {"call", "call id"}  # parts of a message's first tool call
_WHOLE: tuple[tuple[str, ...], ...] = (("thought", "content"), ("content",), ("thought",), ())
Places = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Turn:
    """An assistant turn in rendered text; all positions are characters, ends exclusive.

    `begin`: where the target began to write; `prompted` when that is where its prompt ends, else it is where
    its first text begins. `answer`: where its answer (or first tool call) begins, behind the thinking, None when
    there is none; `lost`: it had thinking, which the template left out. `close`: where its last text ends, None when
    that cannot be told. `end`: where the turn ends; `exact` when that is the end of what the template makes of the
    turn, else no more than a bound.
    """

    index: int
    begin: int
    answer: int | None
    close: int | None
    end: int
    exact: bool
    thought: bool
    lost: bool
    prompted: bool


@dataclass(frozen=True)
class Rendering:
    """Rendered text and its assistant turns, in order.

    `marked`: the ranges that a template with
    `{% generation %}` marks, None for other templates.
    """

    text: str
    turns: tuple[Turn, ...]
    marked: tuple[tuple[int, int], ...] | None


def _core(text: str, start: int = 0) -> tuple[int, int]:
    """Range of a text without the white space around it: templates trim."""
    inner = text[start:].strip()
    begin = text.index(inner, start) if inner else start
    return begin, begin + len(inner)


def _parts(
    chat: ChatTemplate, message: Message, thought: str | None, whole: Container[str] = (), ids: bool = False
) -> dict[str, tuple[str, int, int]]:
    """What of an assistant's message has text to mark: part -> (field, start, end).

    `whole`: the parts to take with the white space around them. `ids`: a call's id too.
    """
    parts = {}
    content = message.get("content") or ""
    answer = 0
    if thought is not None and (place := chat.reasoning_place):
        begin, end = (0, len(thought)) if "thought" in whole else _core(thought)
        if place.field:
            parts["thought"] = (place.field, begin, end)
        elif place.tags:
            start = content.index(thought, len(place.tags[0]))
            parts["thought"] = ("content", start + begin, start + end)
            answer = start + len(thought) + len(place.closing)
    if content[answer:].strip():
        begin, end = (answer, len(content)) if "content" in whole else _core(content, answer)
        parts["content"] = ("content", begin, end)
    if calls := message.get("tool_calls"):
        parts["call"] = ("name", 0, len(calls[0]["function"]["name"]))
        if ids and isinstance(calls[0].get("id"), str):
            parts["call id"] = ("id", 0, len(calls[0]["id"]))
    return parts


def _with_marks(
    message: Message, parts: Mapping[str, tuple[str, int, int]], marks: Mapping[str, tuple[str, str]]
) -> Message:
    changed = dict(message)
    for part, (field, start, end) in sorted(parts.items(), key=lambda item: -item[1][1]):
        opening, closing = marks[part]
        if part in _CALL:
            first, *rest = changed["tool_calls"]
            if field == "name":
                name = opening + first["function"]["name"] + closing
                first = first | {"function": first["function"] | {"name": name}}
            else:
                first = first | {"id": opening + first["id"] + closing}
            changed["tool_calls"] = [first, *rest]
        else:
            text = changed[field]
            changed[field] = text[:start] + opening + text[start:end] + closing + text[end:]
    return changed


@dataclass(frozen=True)
class _Marks:
    """A conversation with marks: `pairs` around the parts of its messages, `places` of the parts in the text."""

    messages: list[Message]
    pairs: dict[int, dict[str, tuple[str, str]]]
    places: dict[int, dict[str, tuple[int, int]]]

    def without(self, text: str) -> str:
        return text.translate(dict.fromkeys(map(ord, self.all)))

    @property
    def all(self) -> set[str]:
        return {mark for own in self.pairs.values() for pair in own.values() for mark in pair}


def _find_marks(chat: ChatTemplate, given: Prepared, text: str) -> _Marks:
    """Marks around the parts of the assistant's messages, and of those that it answers.

    With the white space around them, unless the template trims that. There are no places when marks change
    what the template does; parts that it leaves out (or repeats) have none.
    """
    calling = [index for index, message in enumerate(given.messages) if message.get("tool_calls")]
    # Ids are marked only where calls cannot be found by their names: some templates count an id's letters.
    # And questions are left without marks only at last: some templates compare them with each other.
    best = None
    for questions, ids, whole in product((True, False), (False, True) if calling else (False,), _WHOLE):
        marks = _try_marks(chat, given, text, whole, ids, questions)
        if marks.places and all(marks.places.get(index, {}).keys() & _CALL for index in calling):
            return marks
        best = best if best and best.places else marks
    assert best
    return best


def _try_marks(
    chat: ChatTemplate, given: Prepared, text: str, whole: Container[str], ids: bool, questions: bool
) -> _Marks:
    roles = [message["role"] for message in given.messages]
    parts = {
        index: _parts(chat, message, given.thoughts[index], whole, ids)
        for index, message in enumerate(given.messages)
        if "assistant" in roles[index : index + 1 + questions] and isinstance(message.get("content") or "", str)
    }
    used = set(text)
    free = (chr(code) for code in _MARKS if chr(code) not in used)
    pairs = {index: {part: (next(free), next(free)) for part in own} for index, own in parts.items()}
    messages = [
        _with_marks(message, parts[index], pairs[index]) if parts.get(index) else message
        for index, message in enumerate(given.messages)
    ]
    marks = _Marks(messages, pairs, {})
    try:
        rendered = chat.render_prepared(messages, given.tools)
    except TemplateRefusal:
        return marks
    every = marks.all
    found: dict[str, list[int]] = {}
    plain: list[str] = []
    for character in rendered:
        if character in every:
            found.setdefault(character, []).append(len(plain))
        else:
            plain.append(character)
    if "".join(plain) != text:
        return marks
    for index, own in pairs.items():
        marks.places[index] = {
            part: (found[opening][0], found[closing][0])
            for part, (opening, closing) in own.items()
            if len(found.get(opening, [])) == 1 or (part in _CALL and opening in found)  # results repeat them
        }
    return marks


def find_turns(chat: ChatTemplate, given: Prepared) -> Rendering:
    """Render a conversation and find the assistant's turns in it. Raises TemplateRefusal."""
    marked: tuple[tuple[int, int], ...] | None = None
    if chat.marks_generation:
        text, spans = chat.generation_spans(given.messages, given.tools)
        marked = tuple(spans)
    else:
        text = chat.render_prepared(given.messages, given.tools)
    marks = _find_marks(chat, given, text)
    found = (
        _turn(chat, given, index, marks, text)
        for index, message in enumerate(given.messages)
        if message["role"] == "assistant"
    )
    return Rendering(text, tuple(turn for turn in found if turn), marked)


def _turn(chat: ChatTemplate, given: Prepared, index: int, marks: _Marks, text: str) -> Turn | None:
    """One assistant turn; None when the template made something else of it."""
    own = marks.places.get(index, {})
    parts = _parts(chat, given.messages[index], given.thoughts[index])
    said_nothing = not parts
    begin = _prefix(chat, given, index, text, prompt=True)
    end = len(text) if index == len(given.messages) - 1 else _prefix(chat, given, index + 1, text, prompt=False)
    if not own and not said_nothing and (begin is None or end is None):
        return None
    prompted = begin is not None
    if begin is None:
        first = min((start for start, _ in own.values()), default=len(text))
        begin, prompted = _behind_prompt(chat, given, index, marks, text[:first])
        if own and not prompted:
            begin = first
    exact = end is not None and end >= begin
    if said_nothing and not exact:
        return None  # nothing in the text shows where it ends
    if end is None or not exact:
        later = (start for i, parts in marks.places.items() if i > index for start, _ in parts.values())
        end = min((start for start in later if start >= begin), default=len(text))
    close = max((stop for _, stop in own.values()), default=None)
    if own.keys() & _CALL:
        close = None  # the end of a call's name is not the end of the call
    elif said_nothing:
        close = begin
    starts = [own[part][0] for part in ("content", *_CALL) if part in own]
    answer = max(begin, min(starts)) if starts else (begin if parts.keys() - {"thought"} else None)
    thought = given.thoughts[index] is not None
    lost = thought and "thought" not in own
    return Turn(index, begin, answer, close, end, exact, thought and not lost, lost, prompted)


def _behind_prompt(chat: ChatTemplate, given: Prepared, index: int, marks: _Marks, before: str) -> tuple[int, bool]:
    """How far the text has behind the last message what the prompt has there, and whether that is all of it.

    For templates that move something else about (a system message goes with the last user's).
    """
    nowhere = (len(before), False)
    last = marks.places.get(index - 1, {}).get("content")
    if last is None:
        return nowhere
    try:
        prompt = chat.render_prepared(marks.messages[:index], given.tools, add_generation_prompt=True)
    except TemplateRefusal:
        return nowhere
    _, found, tail = prompt.partition(marks.pairs[index - 1]["content"][1])
    if not found or marks.without(tail) != tail:
        return nowhere
    same = len(os.path.commonprefix([before[last[1] :], tail]))
    return last[1] + same, same == len(tail)


def _prefix(chat: ChatTemplate, given: Prepared, count: int, text: str, prompt: bool) -> int | None:
    """Length of the first messages' rendering, when the text begins with it."""
    try:
        part = chat.render_prepared(given.messages[:count], given.tools, add_generation_prompt=prompt)
    except TemplateRefusal:
        return None
    return len(part) if text.startswith(part) else None
