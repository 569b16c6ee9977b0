"""The frames of a chat template: what it puts around the texts of a conversation, learned once a shape.

Most conversations of a data set have few shapes (user, assistant, user, assistant; with or without thinking), and a
template puts the same frame around each. A frame is learned from a conversation of that shape whose texts are single
private characters; another conversation's turns are then where its frame says. Whether the template really did the
same is checked against its own rendering of every conversation, so a frame saves time and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from eyas.target.chat import ChatTemplate, Message, Prepared
from eyas.target.refusal import TemplateRefusal
from eyas.tokenization.spans import Rendering, Turn, find_turns

_TEXTS = range(0x10A000, 0x10FFFE)
_MOST = 4096  # shapes remembered


@dataclass(frozen=True)
class _Frame:
    """`literals` with a text between each two: the texts' numbers are `order`; `learned` is the probe's rendering."""

    literals: tuple[str, ...]
    order: tuple[int, ...]
    where: tuple[int, ...]  # where each literal begins in the probe's text
    learned: Rendering

    def fill(self, texts: Sequence[str]) -> Rendering:
        """The rendering with other texts in the frame."""
        pieces, moves, move = [self.literals[0]], [0], 0
        for number, literal in zip(self.order, self.literals[1:], strict=True):
            text = texts[number]
            pieces += (text, literal)
            move += len(text) - 1
            moves.append(move)

        def moved(position: int) -> int:
            return position + moves[bisect_right(self.where, position) - 1]

        def turn(t: Turn) -> Turn:
            answer, close = (None if place is None else moved(place) for place in (t.answer, t.close))
            return replace(t, begin=moved(t.begin), answer=answer, close=close, end=moved(t.end))

        marked = self.learned.marked
        return replace(
            self.learned,
            text="".join(pieces),
            turns=tuple(map(turn, self.learned.turns)),
            marked=None if marked is None else tuple((moved(a), moved(b)) for a, b in marked),
        )


class Frames:
    """Finds the turns of prepared conversations, by frame where one fits."""

    def __init__(self, chat: ChatTemplate) -> None:
        self.chat = chat
        self._known: dict[Hashable, _Frame | None] = {}

    def find(self, messages: Sequence[Message], given: Prepared) -> Rendering:
        """`messages` as they came, `given` as they were prepared. Raises TemplateRefusal."""
        frame = None
        if not given.tools and all(m.keys() <= {"role", "content", "reasoning_content"} for m in messages):
            texts: list[str] = []
            shape = []
            for message, prepared, thought in zip(messages, given.messages, given.thoughts, strict=True):
                said = prepared["content"]
                if thought is not None and self.chat.reasoning_place:
                    said = self.chat.reasoning_place.answer(said, thought)
                parts = ([thought] if thought is not None else []) + ([said] if said.strip() else [])
                texts += parts
                shape.append((message["role"], thought is not None, bool(said.strip()), said == ""))
            frame = self._frame(tuple(shape))
        if frame:
            filled = frame.fill(texts)
            if filled.text == self.chat.render_prepared(given.messages):
                return filled
        return find_turns(self.chat, given)

    def _frame(self, shape: tuple[tuple[str, bool, bool, bool], ...]) -> _Frame | None:
        if shape not in self._known:
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[shape] = self._learn(shape)
        return self._known[shape]

    def _learn(self, shape: tuple[tuple[str, bool, bool, bool], ...]) -> _Frame | None:
        """The frame of a shape; None when the template does more than put texts into one."""
        characters = [chr(code) for code in _TEXTS]
        free = iter(characters)
        messages: list[Message] = []
        count = 0
        for role, thought, content, empty in shape:
            if not content and not empty:
                return None  # nothing but white space
            message = {"role": role}
            if thought:
                message["reasoning_content"] = next(free)
            message["content"] = next(free) if content else ""
            count += thought + content
            messages.append(message)
        try:
            learned = find_turns(self.chat, self.chat.prepare(messages))
        except TemplateRefusal:
            return None
        number = {character: k for k, character in enumerate(characters[:count])}
        literals, order, where, start = [], [], [0], 0
        for position, character in enumerate(learned.text):
            if character in number:
                literals.append(learned.text[start:position])
                order.append(number[character])
                start = position + 1
                where.append(start)
        if len(set(order)) < len(order):
            return None
        return _Frame((*literals, learned.text[start:]), tuple(order), tuple(where), learned)
