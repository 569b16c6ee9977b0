"""Special tokens that are written in a text, and must stay text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eyas.target.refusal import TemplateRefusal

# Private characters that no text needs: the stand-ins are made of them.
_PRIVATE = range(0xF0000, 0xFFFFE)


@dataclass
class Encoding:
    """Token ids of a text and where each token starts in it."""

    ids: list[int]
    _fast: Any = field(default=None, repr=False)
    _starts: list[int] | None = field(default=None, repr=False)

    @property
    def starts(self) -> list[int]:
        """Character at which each token starts: [T], ascending (the bytes of one character share it)."""
        if self._starts is None:
            self._starts = [start for start, _ in self._fast.offsets]
        return self._starts

    def first_at(self, position: int) -> int:
        """Index of the first token that starts at a character or behind it; T when there is none."""
        if self._fast is not None and self._starts is None:
            index = self._fast.char_to_token(position)
            if index is not None:
                while index and self._fast.token_to_chars(index - 1)[0] >= position:
                    index -= 1  # the bytes of one character
                while index < len(self.ids) and self._fast.token_to_chars(index)[0] < position:
                    index += 1
                return int(index)
        return bisect_left(self.starts, position)

    def covering(self, position: int) -> int:
        """Index of the token that a character is in (the first, where it takes several)."""
        first = self.first_at(position)
        if first and (first == len(self.ids) or self.starts[first] > position):
            first -= 1
        return bisect_left(self.starts, self.starts[first]) if first < len(self.ids) else first


class SpecialTokens:
    """A tokenizer's special tokens: found in texts, replaced by stand-ins, encoded as plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.backend = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder
        self.texts = sorted(
            {str(t) for t in added.values() if t.special} | set(map(str, tokenizer.all_special_tokens)), key=len
        )[::-1]
        self.ids = frozenset(tokenizer.convert_tokens_to_ids(self.texts))
        self._pattern = re.compile("|".join(map(re.escape, self.texts)) or r"(?!)")
        self.search = self._pattern.search

    def stand_ins(self, texts: Iterable[str]) -> dict[str, str]:
        """A private character for every special token that `texts` hold, none of which they hold themselves."""
        used = set().union(*map(set, texts)) if texts else set()
        free = (chr(code) for code in _PRIVATE if chr(code) not in used)
        found = dict.fromkeys(match for text in texts for match in self._pattern.findall(text))
        return dict(zip(found, free, strict=False))

    def replace(self, text: str, stand_ins: Mapping[str, str]) -> str:
        return self._pattern.sub(lambda match: stand_ins[match[0]], text)

    def encode(self, text: str, stand_ins: Mapping[str, str]) -> Encoding:
        """Ids of `text`; a stand-in is encoded as the plain text of the special token it stands for.

        Control tokens cut a text into stretches that are encoded by themselves, in any tokenizer;
        so only stretches with a stand-in are encoded again, with special tokens taken as text.
        Positions count characters of `text`. Raises TemplateRefusal for a tokenizer that cannot do it.
        """
        whole = self.backend.encode(text, add_special_tokens=False)
        if not any(character in text for character in stand_ins):
            return Encoding(whole.ids, whole)
        ids, starts = [], []
        tokens = [(i, start, end) for i, (start, end) in zip(whole.ids, whole.offsets, strict=True)]
        stretch: list[tuple[int, int, int]] = []
        last_end = 0
        for token in [*tokens, None]:
            if token is not None and token[0] not in self.ids:
                stretch.append(token)
                continue
            end = token[1] if token is not None else len(text)
            piece = text[last_end:end]
            if any(character in piece for character in stand_ins):
                stretch = self._stretch(piece, last_end, [i for i, _, _ in stretch], stand_ins)
            ids += [i for i, _, _ in stretch]
            starts += [start for _, start, _ in stretch]
            if token is not None:
                ids.append(token[0])
                starts.append(token[1])
                last_end = token[2]
            stretch = []
        return Encoding(ids, None, starts)

    def _stretch(
        self, piece: str, begin: int, expected: list[int], stand_ins: Mapping[str, str]
    ) -> list[tuple[int, int, int]]:
        """Tokens of text between control tokens, the stand-ins being spelled out: (id, start, end)."""
        restored, places = [], []  # places: position in the original of every restored character
        for index, character in enumerate(piece):
            spelled = stand_ins.get(character, character)
            restored.append(spelled)
            places += [begin + index] * len(spelled)
        before = self.backend.encode_special_tokens
        self.backend.encode_special_tokens = True
        try:
            as_it_was = self.backend.encode(piece, add_special_tokens=False).ids
            found = self.backend.encode("".join(restored), add_special_tokens=False)
        finally:
            self.backend.encode_special_tokens = before
        if as_it_was != expected:
            raise TemplateRefusal("it holds special tokens as text, which this tokenizer cannot keep apart")
        places.append(begin + len(piece))
        return [(i, places[start], places[end]) for i, (start, end) in zip(found.ids, found.offsets, strict=True)]
