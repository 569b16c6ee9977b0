"""Rotary positions and the attention of training-time test, without a matrix of scores."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.drafter import flash
from eyas.drafter.shared import Elementwise, Shared


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [N, head_dim] for positions [N] (Llama's half-split layout), in float32."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device) / head_dim)
    angles = positions.double()[:, None] * inverse[None]
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


@Elementwise
def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """The rotation of [N, heads, d] by ± the angles; `cos`, `sin` [N, d] in the dtype of x."""
    first, second = x.chunk(2, -1)
    c, s = cos[:, None, : first.shape[-1]], sin[:, None, : first.shape[-1]]
    return torch.cat([(first * c).addcmul_(second, s, value=-sign), (second * c).addcmul_(first, s, value=sign)], -1)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _turned(grad, cos, sin, -1.0), None, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to [N, heads, head_dim]."""
    out: Tensor = _Rotate.apply(x, cos.to(x.dtype), sin.to(x.dtype))
    return out


@dataclass(frozen=True)
class Block:
    """Neighbouring queries of one row.

    Queries `first`…`last` (half-open, among the S) stand at the keys `own`, `own`+1, … among the T
    step-0 keys; they see the keys from `start`, where their row begins, up to their own.
    """

    first: int
    last: int
    start: int
    own: int


def find_blocks(query_index: Sequence[Tensor], row_spans: Sequence[tuple[int, int]], size: int) -> list[Block]:
    """Cut the queries of each row into runs of neighbours, at most `size` long."""
    blocks, first = [], 0
    for positions, (start, end) in zip(query_index, row_spans, strict=True):
        places = positions.tolist()
        assert not places or start + places[-1] < end
        at = 0
        while at < len(places):
            stop = at + 1
            while stop < len(places) and stop - at < size and places[stop] == places[stop - 1] + 1:
                stop += 1
            blocks.append(Block(first + at, first + stop, start, start + places[at]))
            at = stop
        first += len(places)
    return blocks


def _parts(block: Block) -> Iterator[tuple[slice, bool]]:
    """The step-0 keys that a block's queries see: all those before it, and its own, causally."""
    if block.start < block.own:
        yield slice(block.start, block.own), False
    yield slice(block.own, block.own + block.last - block.first), True


def _grouped(query: Tensor, kv_heads: int) -> Tensor:
    """[n, heads, d] as [n, kv_heads, groups, d]."""
    return query.unflatten(1, (kv_heads, -1))


class _TTTAttention(torch.autograd.Function):
    """One softmax over the fused kernel's keys and the later steps' own keys, merged by log-sum-exp."""

    @staticmethod
    def forward(
        ctx: Any,
        blocks: Sequence[Block],
        query: Tensor,
        keys: Sequence[Shared],
        values: Sequence[Shared],
        *used: Tensor,
    ) -> Tensor:
        # `used` repeats the values of keys and values, so that autograd sees them
        steps = len(used) // 2
        key, value = used[:steps], used[steps:]
        scale, kv_heads = query.shape[-1] ** -0.5, key[0].shape[1]
        out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)
        wide = torch.promote_types(query.dtype, torch.float32)
        lse = torch.empty(query.shape[:2], dtype=wide, device=query.device)
        for block in blocks:
            rows = slice(block.first, block.last)
            own = query[rows]
            found = [flash.forward(own, key[0][part], value[0][part], causal) for part, causal in _parts(block)]
            grouped = _grouped(own, kv_heads)
            scores = [(grouped * k[rows, :, None]).sum(-1, dtype=wide).mul_(scale).flatten(1) for k in key[1:]]
            total = found[0][1]
            for other in [lse_part for _, lse_part in found[1:]] + scores:
                total = torch.logaddexp(total, other)
            lse[rows] = total
            mixed = out[rows]
            for part_out, part_lse in found:
                mixed.addcmul_(part_out, torch.exp(part_lse - total).to(out.dtype)[..., None])
            by_group = _grouped(mixed, kv_heads)
            for score, v in zip(scores, value[1:], strict=True):
                weight = torch.exp(score - total).to(out.dtype)
                by_group.addcmul_(weight.unflatten(1, (kv_heads, -1))[..., None], v[rows, :, None])
        ctx.blocks, ctx.keys, ctx.values = blocks, keys, values
        ctx.save_for_backward(query, out, lse, *used)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, out, lse, *used = ctx.saved_tensors
        steps = len(used) // 2
        key, value = used[:steps], used[steps:]
        scale, kv_heads = query.shape[-1] ** -0.5, key[0].shape[1]
        grad_query = torch.zeros_like(query)
        for block in ctx.blocks:
            rows = slice(block.first, block.last)
            own, own_grad, own_out, own_lse = query[rows], grad[rows], out[rows], lse[rows]
            for part, causal in _parts(block):
                # the final output and lse make each part's probabilities those of the whole softmax
                dq, dk, dv = flash.backward(own_grad, own, key[0][part], value[0][part], own_out, own_lse, causal)
                grad_query[rows] += dq
                ctx.keys[0].sum[part] += dk
                ctx.values[0].sum[part] += dv
            if steps == 1:
                continue
            delta = torch.linalg.vecdot(own_grad, own_out).to(lse.dtype)
            by_group, grad_by_group = _grouped(own, kv_heads), _grouped(own_grad, kv_heads)
            dq_by_group = _grouped(grad_query[rows], kv_heads)
            for later in range(1, steps):
                k, v = key[later][rows, :, None], value[later][rows, :, None]
                score = (by_group * k).sum(-1, dtype=lse.dtype).mul_(scale).flatten(1)
                weight = torch.exp(score - own_lse)
                score_grad = (grad_by_group * v).sum(-1, dtype=lse.dtype).flatten(1)
                score_grad = score_grad.sub_(delta).mul_(weight).mul_(scale).to(query.dtype)
                score_grad = score_grad.unflatten(1, (kv_heads, -1))[..., None]
                weight = weight.to(query.dtype).unflatten(1, (kv_heads, -1))[..., None]
                dq_by_group.addcmul_(score_grad, k)
                if by_group.shape[2] == 1:
                    ctx.keys[later].sum[rows].addcmul_(score_grad[:, :, 0], own)
                    ctx.values[later].sum[rows].addcmul_(weight[:, :, 0], own_grad)
                else:
                    ctx.keys[later].sum[rows] += (score_grad * by_group).sum(2)
                    ctx.values[later].sum[rows] += (weight * grad_by_group).sum(2)
        return None, grad_query, None, None, *[None] * len(used)


def attend(query: Tensor, keys: Sequence[Shared], values: Sequence[Shared], blocks: Sequence[Block]) -> Tensor:
    """:func:`ttt_attention` over tensors whose gradients are summed over the steps."""
    used = [shared.value for shared in (*keys, *values)]
    out: Tensor = _TTTAttention.apply(blocks, query, list(keys), list(values), *used)  # callers go on appending
    return out


def ttt_attention(
    query: Tensor,
    keys: Sequence[Tensor],
    values: Sequence[Tensor],
    query_index: Sequence[Tensor],
    row_spans: Sequence[tuple[int, int]],
) -> Tensor:
    """Attention of one step of training-time test (EAGLE-3, section 3.2), over packed rows.

    The causal part runs through a fused kernel that also returns the log-sum-exp of its scores;
    the later steps' keys are merged by it (DESIGN, section 4). No tensor is larger than
    [S, heads, d] or [T, kv_heads, d], forward or backward.

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
    blocks = find_blocks(query_index, row_spans, flash.block_size(query.device))
    return attend(query, [Shared(k) for k in keys], [Shared(v) for v in values], blocks)
