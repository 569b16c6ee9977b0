"""Batched decoding with the target, in-process: greedy, or sampled with one seed a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.target.cache import growing_cache
from eyas.target.model import TargetModel


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; temperature 0 is greedy."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Reply:
    """Generated ids (the end-of-turn token included where it came) and how they ended."""

    ids: list[int]
    finish: str  # "stop" or "length"


def _choose(logits: torch.Tensor, sampling: Sampling, streams: Sequence[torch.Generator]) -> torch.Tensor:
    """Next token [B] from logits [B, V]; row b draws from its own stream, whoever shares its batch."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    probabilities = torch.softmax(logits.double() / sampling.temperature, -1)
    ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    ordered = ordered.masked_fill(before >= sampling.top_p, 0.0)
    cumulative = ordered.cumsum(-1)
    draws = torch.stack([torch.rand((), dtype=torch.float64, generator=stream) for stream in streams])
    points = draws.to(logits.device) * cumulative[:, -1]
    index = torch.searchsorted(cumulative, points[:, None], right=True).clamp(max=logits.shape[-1] - 1)
    return ids.gather(-1, index)[:, 0]


@torch.inference_mode()
def generate(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    end_ids: Sequence[int],
    sampling: Sampling,
    keys: Sequence[int],
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[Reply]:
    """Decode every prompt to its end of turn or to `max_new_tokens`, all of them as one batch.

    Prompts are padded on the left and masked; rows that have ended leave the batch.
    `keys` (one integer a row) seed the rows' random streams. `on_tokens` hears how many
    tokens each step made.
    """
    device, count = target.device, len(prompts)
    width = max(len(p) for p in prompts)
    ids = torch.zeros(count, width, dtype=torch.long)
    mask = torch.zeros(count, width, dtype=torch.long)
    for b, prompt in enumerate(prompts):
        ids[b, width - len(prompt) :] = torch.tensor(prompt)
        mask[b, width - len(prompt) :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    streams = [torch.Generator().manual_seed((sampling.seed * 1_000_003 + key) % 2**63) for key in keys]
    ends = torch.tensor(sorted(end_ids), device=device)
    cache = growing_cache(target.config)
    alive = list(range(count))
    replies: list[list[int]] = [[] for _ in prompts]
    finish = ["length"] * count
    for step in range(sampling.max_new_tokens):
        logits = target.next_logits(ids, mask, positions, cache)
        chosen = _choose(logits, sampling, [streams[b] for b in alive])
        ended = torch.isin(chosen, ends)
        for slot, b in enumerate(alive):
            replies[b].append(int(chosen[slot]))
            if bool(ended[slot]):
                finish[b] = "stop"
        on_tokens(len(alive))
        if step + 1 == sampling.max_new_tokens or bool(ended.all()):
            break
        if bool(ended.any()):
            keep = (~ended).nonzero()[:, 0]
            alive = [alive[slot] for slot in keep.tolist()]
            cache.batch_select_indices(keep.cpu())  # its layers may lie on several devices
            chosen, mask, positions = chosen[keep], mask[keep], positions[keep]
        ids = chosen[:, None]
        mask = torch.cat([mask, mask.new_ones(len(alive), 1)], 1)
        positions = positions[:, -1:] + 1
    return [Reply(r, f) for r, f in zip(replies, finish, strict=True)]
