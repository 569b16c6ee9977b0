"""Rotary positions and the attention of training-time test."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, head_dim] for positions [N] (Llama's half-split layout), in float32."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.double()[:, None] * inverse[None]
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [N, heads, head_dim]."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None].to(x.dtype) + torch.cat([-second, first], -1) * sin[:, None].to(x.dtype)


def ttt_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    query_index: Sequence[Tensor],
    row_spans: Sequence[tuple[int, int]],
) -> Tensor:
    """Attention of one step of training-time test (EAGLE-3, section 3.2), over packed rows.

    Args:
        query: [S, heads, d], the queries of all rows, one row after the other.
        keys: `keys[0]` [T, kv_heads, d] of step 0 at every position; `keys[1:]` [S, kv_heads, d]
            of the later steps, at the queries' own positions.
        values: as `keys`.
        query_index: for each row, the positions of its queries inside the row, ascending.
        row_spans: for each row, its (start, end) among the T positions.

    Returns:
        [S, heads, d]. A query at position t sees the step-0 keys at positions <= t of its row
        and the later steps' keys at t only; one softmax runs over both.
    """
    groups = query.shape[1] // keys[0].shape[1]
    scale = query.shape[-1] ** -0.5
    later_keys = [k.repeat_interleave(groups, 1) for k in keys[1:]]
    later_values = [v.repeat_interleave(groups, 1) for v in values[1:]]
    own = [(query * k).sum(-1) * scale for k in later_keys]  # [S, heads] each
    outputs, first = [], 0
    for positions, (start, end) in zip(query_index, row_spans, strict=True):
        count = len(positions)
        if count == 0:
            continue
        rows = slice(first, first + count)
        first += count
        visible = int(positions[-1]) + 1  # no query of the row sees further
        assert start + visible <= end
        key = keys[0][start : start + visible].repeat_interleave(groups, 1).transpose(0, 1)
        value = values[0][start : start + visible].repeat_interleave(groups, 1).transpose(0, 1)
        scores = query[rows].transpose(0, 1) @ key.transpose(1, 2) * scale  # [heads, count, visible]
        hidden = torch.arange(visible, device=query.device)[None] > positions.to(query.device)[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
        extra = [s[rows].transpose(0, 1)[..., None] for s in own]
        weights = torch.softmax(torch.cat([scores, *extra], -1), -1)
        mixed = weights[..., :visible] @ value  # [heads, count, d]
        for step, later in enumerate(later_values):
            mixed = mixed + weights[..., visible + step, None] * later[rows].transpose(0, 1)
        outputs.append(mixed.transpose(0, 1))
    return torch.cat(outputs) if outputs else query.new_zeros(query.shape)
