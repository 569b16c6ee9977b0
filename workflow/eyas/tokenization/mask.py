"""A conversation as the target sees it, and which of its tokens the target itself wrote."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.errors import EyasError
from eyas.target.tokenizer import render

# Templates that say themselves what the assistant writes.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class UnusableRow(Exception):
    """Why a row cannot be trained on."""


def _assistant_spans(tokenizer: Any, messages: Sequence[dict[str, Any]], text: str) -> list[tuple[int, int]]:
    """Character ranges of the assistant turns in `text`, found by rendering, never by searching.

    A turn counts when the rendering up to it is a prefix of the whole one, and the rendering
    before it, with the generation prompt, a prefix of that: then the range is exactly what
    the target would be asked to write. Turns that later turns change are not supervised.
    """
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:index], add_generation_prompt=True)
        upto = text if index == len(messages) - 1 else render(tokenizer, messages[: index + 1])
        if upto.startswith(before) and text.startswith(upto):
            spans.append((len(before), len(upto)))
    return spans


def encode(
    tokenizer: Any,
    messages: Sequence[dict[str, Any]],
    end_ids: Sequence[int],
    cut_off: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Ids int32 [T] and loss mask uint8 [T] of a conversation.

    The mask covers what the assistant says and the token that ends its turn (the drafter
    has to predict that too), not the separator that the template adds behind it. With
    `cut_off` the last answer met the token limit: the row ends with the answer, without the
    end of turn that the target never wrote. Raises UnusableRow or TemplateRefusal.
    """
    text = render(tokenizer, messages)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.asarray(encoded["input_ids"], dtype=np.int32)
    starts = np.asarray([start for start, _ in encoded["offset_mapping"]], dtype=np.int64).reshape(-1)
    if _GENERATION.search(str(tokenizer.chat_template)):
        marked = tokenizer.apply_chat_template(
            list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        if list(marked["input_ids"]) != ids.tolist():
            raise EyasError("the tokenizer gives other ids for the template's rendering than for its text")
        mask = np.asarray(marked["assistant_masks"], dtype=np.uint8)
        last_begin: int | None = 0
    else:
        mask = np.zeros(len(ids), dtype=np.uint8)
        spans = _assistant_spans(tokenizer, messages, text)
        last_begin = spans[-1][0] if spans and spans[-1][1] == len(text) else None  # is the last turn supervised?
        for begin, end in spans:
            inside = np.flatnonzero((starts >= begin) & (starts < end))
            ends = inside[np.isin(ids[inside], end_ids)]
            mask[inside[inside <= ends[-1]] if len(ends) else inside] = 1
    if cut_off and mask.any() and last_begin is not None:
        last = int(np.flatnonzero(mask)[-1])
        length = last if ids[last] in end_ids else last + 1
        ids, mask = ids[:length], mask[:length]
    if not mask.any():
        raise UnusableRow("no supervised token (the mask is all zero)")
    return ids, mask
