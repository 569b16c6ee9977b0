"""The drafter at work: its key/value cache, and the chains and trees that it drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eyas.decoding.proposers import Draft
from eyas.decoding.sampling import Sampler
from eyas.decoding.tree import TreeSize, draft_tree
from eyas.drafter.model import Drafter


class EagleProposer:
    """Drafts with an EAGLE-3 drafter that reads the target's `layers`.

    `steps`, `topk` and `draft_tokens` are SGLang's speculative_num_steps, speculative_eagle_topk and
    speculative_num_draft_tokens (see `TreeSize`). A chain (topk 1) is drawn from the drafter's distribution
    when the target samples; a tree holds the most probable tokens at any temperature, because dropping
    drawn ones for being improbable would change the outcome. Raises EyasError for sizes that make no tree.
    """

    def __init__(
        self, drafter: Drafter, layers: Sequence[int], steps: int, topk: int = 1, draft_tokens: int | None = None
    ) -> None:
        self.drafter, self.layers = drafter, list(layers)
        self.size = TreeSize.of(steps, topk, draft_tokens)
        self.trees = topk > 1
        self.target_ids = drafter.target_ids

    def begin(self, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler) -> EagleDrafting:
        return EagleDrafting(self, len(prompt) + max_new_tokens, sampler)


class EagleDrafting:
    """One sequence: its drafter cache, and drafting on top of it."""

    def __init__(self, proposer: EagleProposer, positions: int, sampler: Sampler) -> None:
        self.drafter, self.size, self.sampler = proposer.drafter, proposer.size, sampler
        self.target_ids = proposer.target_ids
        self.cache = DrafterCache(proposer.drafter, positions, self.size.steps * self.size.topk)

    def draft(self, states: Tensor | None, tokens: list[int]) -> Draft:
        assert states is not None
        state = self.cache.confirm(states, tokens)
        if self.size.topk > 1:
            return draft_tree(self.cache, state, self.target_ids, self.size)
        drafted, odds = [], []
        for step in range(self.size.steps):
            logits = self.drafter.logits(state)
            if self.sampler.greedy:
                choice = self.target_ids[logits.argmax(-1)]
            else:
                # The drafter's distribution lies on the draft vocabulary: every other token has chance 0.
                inside = self.sampler.odds(logits[0])
                whole = np.zeros(self.drafter.shape.vocab_size)
                whole[self.target_ids.numpy(force=True)] = inside
                odds.append(whole)
                choice = self.target_ids[[self.sampler.draw(inside)]]
            drafted.append(choice)
            if step + 1 < self.size.steps:
                state = self.cache.step(choice, state, step + 1)
        return Draft.chain(torch.cat(drafted).tolist(), odds or None)


class DrafterCache:
    """The drafter's keys and values of one sequence: [kv_heads, room, head_dim] each, allocated once.

    First those of the `length` positions that the target has confirmed, made from its own states (the
    step-0 keys of training); behind them, until the next `confirm`, those of drafted tokens.
    """

    def __init__(self, drafter: Drafter, positions: int, drafts: int) -> None:
        self.drafter = drafter
        shape, device = drafter.shape, drafter.d2t.device
        room = positions + drafts
        self.keys = torch.empty(shape.num_key_value_heads, room, shape.head_dim, device=device)
        self.values = torch.empty_like(self.keys)
        self.cos, self.sin = drafter.rotary(torch.arange(room, device=device))
        self.length = 0

    def confirm(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """Append confirmed positions and return the next state [1, H] at the last one.

        `states` [N, 3·Ht]: the target's at the new positions; `tokens` [N]: what follows each of them.
        """
        first, self.length = self.length, self.length + len(tokens)
        device = self.keys.device
        state = self.drafter.fuse(states.to(device, self.keys.dtype))
        inputs = self.drafter.inputs(torch.tensor(tokens, device=device), state)
        self._put(inputs, first, slice(first, self.length))
        # One layer deep, nothing but keys and values is ever read of the positions before the last.
        residual = self.drafter.residual(state, inputs[:, state.shape[1] :])
        return self._attend(inputs[-1:], residual[-1:], slice(self.length - 1, self.length), self.length, None)

    def step(self, tokens: Tensor, states: Tensor, step: int, seen: Tensor | None = None) -> Tensor:
        """The next states [n, H] of n drafted tokens, all of them at draft step `step` (from 1).

        Args:
            tokens: int64 [n]. Their keys and values stay, in the places behind those of earlier steps.
            states: [n, H], the state that each was drafted from.
            seen: bool [n, step * n], which drafted tokens each one sees: those on its own path and itself.
                None: all.
        """
        first = self.length + (step - 1) * len(tokens)
        position = self.length - 1 + step
        at = slice(position, position + 1)
        inputs = self.drafter.inputs(tokens, states)
        self._put(inputs, first, at)
        residual = self.drafter.residual(states, inputs[:, states.shape[1] :])
        return self._attend(inputs, residual, at, first + len(tokens), seen)

    def _put(self, inputs: Tensor, first: int, at: slice) -> None:
        key, value = self.drafter.midlayer.self_attn.key_value(inputs, self.cos[at], self.sin[at])
        self.keys[:, first : first + len(inputs)] = key.transpose(0, 1)
        self.values[:, first : first + len(inputs)] = value.transpose(0, 1)

    def _attend(self, inputs: Tensor, residual: Tensor, at: slice, stop: int, seen: Tensor | None) -> Tensor:
        """The next states of queries at positions `at`, over the keys up to `stop`."""
        query = self.drafter.midlayer.self_attn.query(inputs, self.cos[at], self.sin[at])
        n, kv_heads = len(inputs), len(self.keys)
        # The query heads that share a key head stand beside each other: one product per key head, no copies.
        query = query.unflatten(1, (kv_heads, -1)).transpose(0, 1)  # [kv, n, groups, d]
        shape = query.shape
        scores = query.flatten(1, 2) @ self.keys[:, :stop].transpose(1, 2) * shape[-1] ** -0.5
        if seen is not None:
            drafted = scores.view(*shape[:3], stop)[..., self.length :]
            drafted.masked_fill_(~seen[:, None], float("-inf"))
        mixed = torch.softmax(scores, -1) @ self.values[:, :stop]
        mixed = mixed.view(shape).transpose(0, 1).reshape(n, -1, shape[-1])
        return self.drafter.finish(residual, mixed)
