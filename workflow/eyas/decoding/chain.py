"""Greedy speculative decoding with a chain of drafted tokens, checked against plain greedy decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.attention import rotate
from eyas.drafter.model import Drafter
from eyas.extraction.engines.transformers import Capture
from eyas.target.model import TargetModel


@dataclass
class Decoded:
    """Tokens decoded (the end of turn included), and what they cost.

    `forwards`: target passes after the prefill; each commits the accepted drafts and one token
    of the target's own. `accepted` [rounds]: drafts accepted in each of them.
    """

    ids: list[int]
    forwards: int
    accepted: list[int]


class DrafterCache:
    """The drafter's step-0 keys and values of one sequence, and drafting a chain on top of them."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        shape = drafter.shape
        self.device = drafter.d2t.device
        empty = torch.empty(0, shape.num_key_value_heads, shape.head_dim, device=self.device)
        self.keys, self.values = empty, empty
        self.target_ids = drafter.target_ids

    def _step(self, inputs: Tensor, state: Tensor, positions: Tensor) -> Tensor:
        """Append keys and values at `positions` and return the next states [N, H]."""
        attention = self.drafter.midlayer.self_attn
        cos, sin = self.drafter.rotary(positions)
        key, value = attention.key_value(inputs, cos, sin)
        seen = len(self.keys)
        self.keys, self.values = torch.cat([self.keys, key]), torch.cat([self.values, value])
        query = rotate(attention.q_proj(inputs).unflatten(-1, (-1, self.drafter.shape.head_dim)), cos, sin)
        groups = self.drafter.shape.num_attention_heads // self.drafter.shape.num_key_value_heads
        keys = self.keys.repeat_interleave(groups, 1).transpose(0, 1)
        values = self.values.repeat_interleave(groups, 1).transpose(0, 1)
        scores = query.transpose(0, 1) @ keys.transpose(1, 2) * self.drafter.shape.head_dim**-0.5
        later = torch.arange(len(self.keys), device=self.device)[None] > (
            seen + torch.arange(len(inputs), device=self.device)[:, None]
        )
        mixed = torch.softmax(scores.masked_fill(later, float("-inf")), -1) @ values
        return self.drafter.finish(state, mixed.transpose(0, 1))

    def draft(self, aux: Tensor, next_tokens: Tensor, steps: int) -> list[int]:
        """Take in positions that the target has confirmed and draft `steps` tokens after them.

        Args:
            aux: [N, 3·Ht], the target's states at the new positions.
            next_tokens: int64 [N], the token that follows each of them.

        The keys of drafted steps are dropped again: only confirmed positions stay.
        """
        first = len(self.keys)
        state = self.drafter.fuse(aux.float())
        positions = first + torch.arange(len(aux), device=self.device)
        state = self._step(self.drafter.inputs(next_tokens, state), state, positions)[-1:]
        confirmed = len(self.keys)
        tokens = []
        for step in range(steps):
            choice = self.target_ids[self.drafter.logits(state).argmax(-1)]
            tokens.append(int(choice))
            if step + 1 < steps:
                state = self._step(self.drafter.inputs(choice, state), state, positions[-1:] + 1 + step)
        self.keys, self.values = self.keys[:confirmed], self.values[:confirmed]
        return tokens


@torch.inference_mode()
def greedy(target: TargetModel, prompt: Sequence[int], end_ids: Sequence[int], max_new_tokens: int) -> Decoded:
    """The target's own greedy continuation, one token a forward pass."""
    cache, ends = target.new_cache(), set(end_ids)
    ids = torch.tensor([list(prompt)], device=target.device)
    out: list[int] = []
    while True:
        hidden = target.decode(ids, cache)
        out.append(int(target.head(hidden[:, -1:]).argmax(-1)))
        if out[-1] in ends or len(out) == max_new_tokens:
            return Decoded(out, len(out) - 1, [0] * (len(out) - 1))
        ids = torch.tensor([[out[-1]]], device=target.device)


@torch.inference_mode()
def speculate(
    target: TargetModel,
    drafter: Drafter,
    layers: Sequence[int],
    prompt: Sequence[int],
    end_ids: Sequence[int],
    max_new_tokens: int,
    draft_steps: int,
) -> Decoded:
    """Greedy decoding where each target pass checks a chain of `draft_steps` drafted tokens.

    Every token is the target's argmax after what precedes it, so the output is the target's own.
    """
    cache, ends, drafts = target.new_cache(), set(end_ids), DrafterCache(drafter)
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()  # sliding windows keep what a rejected draft pushed out
    known = torch.tensor([list(prompt)], device=target.device)
    out: list[int] = []
    accepted_by_round: list[int] = []
    with Capture(target, layers) as capture:
        hidden = target.decode(known, cache)
        aux = capture.aux()[0]
        out.append(int(target.head(hidden[:, -1:]).argmax(-1)))
        confirmed = torch.cat([known[0, 1:], known.new_tensor(out)])
        while out[-1] not in ends and len(out) < max_new_tokens:
            chain = drafts.draft(aux.to(drafts.device), confirmed.to(drafts.device), draft_steps)
            checked = torch.tensor([[out[-1], *chain]], device=target.device)
            hidden = target.decode(checked, cache)
            own = target.head(hidden).argmax(-1)[0].tolist()
            accepted = 0
            while accepted < draft_steps and chain[accepted] == own[accepted]:
                accepted += 1
            new = own[: accepted + 1]
            for place, token in enumerate(new):  # nothing after the end of turn is output
                if token in ends or len(out) + place + 1 == max_new_tokens:
                    new = new[: place + 1]
                    break
            accepted_by_round.append(min(accepted, len(new)))
            out += new
            cache.crop(-(draft_steps - accepted))  # negative: how many to remove
            aux = capture.aux()[0, : accepted + 1]
            confirmed = torch.tensor(own[: accepted + 1], device=target.device)
    return Decoded(out, len(accepted_by_round), accepted_by_round)
