"""A conversation as token ids, and which of them the target itself wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eyas.target.chat import ChatTemplate, Message, Prepared
from eyas.target.reasoning import opens_reasoning
from eyas.target.special import Encoding
from eyas.tokenization.frames import Frames
from eyas.tokenization.spans import Rendering, Turn, find_turns

Encoded = tuple[np.ndarray, np.ndarray]
"""Ids int32 [T] and loss mask uint8 [T]."""


class UnusableRow(Exception):
    """Why a row cannot be trained on."""


@dataclass(frozen=True)
class Layout:
    """A sequence to be made: rendered text, the turns in it that are supervised, and whether its end is cut off."""

    rendering: Rendering
    given: Prepared
    turns: tuple[Turn, ...]
    cut_off: bool


class Encoder:
    """Conversations to ids and masks, by one target's tokenizer and chat template.

    The mask covers what the assistant says and the token that ends its turn (the drafter has to predict
    that too), not the separator that the template adds behind it.

    `end_ids`: ids that end the target's generation. `train_on`: `all_turns` or `last_turn`.
    `reasoning`: `train` supervises thinking, one sequence for each answer where the template drops the thinking
    of earlier ones; `mask` leaves it in the text without supervision; `strip` takes it out.
    `options`: variables of the chat template.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: Sequence[int],
        train_on: str = "all_turns",
        reasoning: str = "train",
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat = ChatTemplate(tokenizer, options)
        self.end_ids = frozenset(map(int, end_ids))
        self.last_turn_only = train_on == "last_turn"
        self.reasoning = reasoning
        self._frames = Frames(self.chat)

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, cut_off: bool = False
    ) -> list[Encoded]:
        """Sequences of a conversation: ids int32 [T] and loss mask uint8 [T] of each.

        With `cut_off` the last answer met the token limit: its sequence ends with the answer, without the
        end of turn that the target never wrote. Raises UnusableRow or TemplateRefusal.
        """
        return self.tokens_of(self.lay_out(messages, tools, cut_off))

    def lay_out(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, cut_off: bool = False
    ) -> list[Layout]:
        """The first half of :meth:`encode`: rendering. A shard does it for many rows before it encodes any:
        templates and tokenizers that take turns row by row cost a fifth more."""
        if any(message.get("tool_calls") for message in messages) and self.chat.tool_call_shape is None:
            raise UnusableRow("the chat template renders no tool calls")
        given = self.chat.prepare(messages, tools, reasoning=self.reasoning != "strip")
        rendering = self._frames.find(messages, given)
        last = len(messages) - 1
        thinking = cut_off and self.chat.opens_reasoning and self._only_thought(given, last)
        if self.reasoning == "train" and (thinking or any(turn.lost for turn in rendering.turns)):
            assistants = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
            parts = [
                (
                    self._broken_thought(given) if thinking and index == last else self._ending_at(given, index),
                    cut_off and index == last,
                )
                for index in (assistants[-1:] if self.last_turn_only else assistants)
            ]
            return [Layout(part, given, part.turns[-1:], cut) for part, cut in parts if part.turns]
        turns = rendering.turns
        if self.last_turn_only:
            wanted = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
            turns = tuple(turn for turn in turns if turn.index == wanted)
        return [Layout(rendering, given, turns, cut_off and messages[last]["role"] == "assistant")]

    def tokens_of(self, layouts: Sequence[Layout]) -> list[Encoded]:
        """The second half of :meth:`encode`: ids and masks. Raises UnusableRow or TemplateRefusal."""
        found = [(ids, mask) for ids, mask in map(self._encoded, layouts) if mask.any()]
        if not found:
            raise UnusableRow("no supervised token (the mask is all zero)")
        return found

    def encode_text(self, text: str) -> list[Encoded]:
        """Ready text, supervised from end to end; the tokenizer's own beginning is added where it lacks."""
        begin = self.tokenizer.bos_token
        add = not (begin and text.startswith(begin))
        ids = np.asarray(self.tokenizer(text, add_special_tokens=add)["input_ids"], dtype=np.int32)
        if not len(ids):
            raise UnusableRow("empty text")
        return [(ids, np.ones(len(ids), dtype=np.uint8))]

    def _only_thought(self, given: Prepared, index: int) -> bool:
        """Whether a message thinks, and says nothing."""
        message, thought, place = given.messages[index], given.thoughts[index], self.chat.reasoning_place
        if thought is None or place is None or message.get("tool_calls"):
            return False
        return not place.answer(message.get("content"), thought).strip()

    def _broken_thought(self, given: Prepared) -> Rendering:
        """A conversation that was cut off before its last answer closed the thought that the prompt opens."""
        index = len(given.messages) - 1
        before = self.chat.render_prepared(given.messages[:index], given.tools, add_generation_prompt=True)
        text = f"{before}{given.thoughts[index]}"
        turn = Turn(index, len(before), None, len(text), len(text), True, thought=True, lost=False, prompted=True)
        return Rendering(text, (turn,), None)

    def _ending_at(self, given: Prepared, index: int) -> Rendering:
        """The conversation up to one answer, as the target saw it when it wrote that."""
        part = given.upto(index + 1)
        rendering = find_turns(self.chat, part)
        turns = tuple(turn for turn in rendering.turns if turn.index == index)
        thought, place = given.thoughts[index], self.chat.reasoning_place
        if thought is None or place is None or not turns or not turns[0].lost:
            return replace(rendering, turns=turns)
        before = self.chat.render_prepared(part.messages[:index], part.tools, add_generation_prompt=True)
        if opens_reasoning(before):
            # The template never renders thinking, but its generation prompt opens it: this is what was written.
            turn = turns[0]
            behind = rendering.text[turn.begin if turn.answer is None else turn.answer :]
            closing = "" if behind.lstrip().startswith(place.closing.strip()) else place.closing
            text = f"{before}{thought}{closing}"
            moved = len(text) + len(behind) - len(rendering.text)
            turn = replace(
                turn, begin=len(before), answer=None if turn.answer is None else len(text),
                close=None if turn.close is None else turn.close + moved, end=turn.end + moved,
                thought=True, lost=False, prompted=True,
            )  # fmt: skip
            return Rendering(text + behind, (turn,), None)
        return replace(rendering, turns=turns)

    # ---- from characters to tokens

    def _encoded(self, layout: Layout) -> Encoded:
        rendering, given, turns = layout.rendering, layout.given, layout.turns
        encoding = self.chat.encode(rendering.text, given.stand_ins)
        ids = np.asarray(encoding.ids, dtype=np.int32)
        mask = np.zeros(len(ids), dtype=np.uint8)
        closed = len(ids)
        for turn in turns:
            for first, close, stop in self._regions(rendering, turn, encoding):
                mask[first:stop], closed = 1, close
                if self.reasoning == "mask" and (turn.thought or turn.lost):
                    answer = close if turn.answer is None else encoding.first_at(turn.answer)
                    if turn.answer is None and ids[stop - 1] in self.end_ids:
                        answer = stop - 1  # whatever closes the thinking goes with it
                    mask[first:answer] = 0
        if layout.cut_off and turns and turns[-1].index == len(given.messages) - 1:
            ids, mask = ids[:closed], mask[:closed]
        return ids, mask

    def _regions(self, rendering: Rendering, turn: Turn, encoding: Encoding) -> list[tuple[int, int, int]]:
        """Token ranges of a turn that are supervised: (first, where its text closes, where it ends)."""
        ids = encoding.ids
        if rendering.marked is None:
            first = encoding.first_at(turn.begin) if turn.prompted else encoding.covering(turn.begin)
            bound = self._at(encoding, rendering, turn.end)
            close = first if turn.close is None else encoding.first_at(turn.close)
            return [(first, *self._end(ids, close, bound, turn.exact, turn.close is not None))]
        following = min((t.begin for t in rendering.turns if t.index > turn.index), default=len(rendering.text))
        regions = []
        for begin, end in rendering.marked:
            if end <= turn.begin or begin >= following:
                continue
            first, stop = encoding.covering(begin), self._at(encoding, rendering, end)  # as transformers does
            close = stop
            while close > first and ids[close - 1] in self.end_ids:
                close -= 1
            if close == stop and stop < len(ids) and (ids[stop] in self.end_ids or ids[stop] in self.chat.special.ids):
                stop += 1  # the template leaves the end of the turn out
            regions.append((first, close, stop))
        return regions

    def _at(self, encoding: Encoding, rendering: Rendering, position: int) -> int:
        return len(encoding.ids) if position >= len(rendering.text) else encoding.first_at(position)

    def _end(self, ids: list[int], close: int, bound: int, exact: bool, closed: bool) -> tuple[int, int]:
        """Where a turn's text closes and where the turn ends, given that it ends before `bound`.

        The end is a token that ends generation, else a control token, else the end of the text itself.
        """
        control = self.chat.special.ids
        # Behind the text of a turn that the template goes on from, the first control token is its end.
        kinds = (self.end_ids | control,) if closed and not exact else (self.end_ids, control)
        for kind in kinds:
            places = [k for k in range(close, bound) if ids[k] in kind]
            if places:
                end = places[-1] if exact else places[0]
                return (close if closed else end), end + 1
        return (close, close) if closed else (bound, bound)
