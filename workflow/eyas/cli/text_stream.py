"""Tokens that come a few at a time, as text: whole characters only."""

from __future__ import annotations

from typing import Any

_LOST = "\ufffd"  # what a decoder puts for the bytes of a character that is not whole


class TextStream:
    """Decodes an answer as it comes.

    What a tokenizer makes of a token depends on what is before it (a word's leading space), so each piece
    is decoded together with the one before; and a character may be cut over several tokens.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self._marks: list[bool] = []
        self._before = self._read = 0  # the last piece told is ids[before:read]

    def add(self, token: int, mark: bool) -> tuple[str, bool] | None:
        """The text that a token completes, and whether all its tokens are marked; None while a character is open."""
        self.ids.append(token)
        self._marks.append(mark)
        return self._tell(final=False)

    def rest(self) -> tuple[str, bool] | None:
        """What is left when nothing more comes; bytes of a character that never became whole are U+FFFD."""
        return self._tell(final=True)

    def _tell(self, final: bool) -> tuple[str, bool] | None:
        if self._read == len(self.ids):
            return None
        told, text = self._decode(self.ids[self._before : self._read]), self._decode(self.ids[self._before :])
        if text.endswith(_LOST) and not final:
            return None
        piece = text[len(told) :] if text.startswith(told) else self._decode(self.ids[self._read :])
        mark = all(self._marks[self._read :])
        self._before, self._read = self._read, len(self.ids)
        return piece, mark

    def _decode(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text
