"""Greedy decoding under its former names, until nothing asks for them."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.decoding.decode import Decoded, decode
from eyas.decoding.eagle import EagleProposer
from eyas.drafter.model import Drafter
from eyas.target.model import TargetModel

__all__ = ["Decoded", "greedy", "speculate"]


def greedy(target: TargetModel, prompt: Sequence[int], end_ids: Sequence[int], max_new_tokens: int) -> Decoded:
    return decode(target, None, prompt, end_ids, max_new_tokens)


def speculate(
    target: TargetModel,
    drafter: Drafter,
    layers: Sequence[int],
    prompt: Sequence[int],
    end_ids: Sequence[int],
    max_new_tokens: int,
    draft_steps: int,
) -> Decoded:
    return decode(target, EagleProposer(drafter, layers, draft_steps), prompt, end_ids, max_new_tokens)
