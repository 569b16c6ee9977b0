"""The fused attention kernels that return log-sum-exp: one row's queries against one range of keys.

The CPU kernel is the one behind `scaled_dot_product_attention`. The CUDA kernel is PyTorch's
FlashAttention 2; its path has not been run (see docs/decisions.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

# Queries handled together. The CPU kernel computes the upper half of a causal square as well, so
# smaller blocks waste less, and the calls themselves begin to cost; the CUDA kernels need no cut.
_CPU_BLOCK = 256

_aten = torch.ops.aten


def block_size(device: torch.device) -> int:
    """Neighbouring queries that are best handled by one call."""
    return _CPU_BLOCK if device.type == "cpu" else 1 << 30


def _heads_first(x: Tensor) -> Tensor:
    """[n, heads, d] as [1, heads, n, d], without a copy."""
    return x.transpose(0, 1)[None]


def forward(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [n, heads, d] and log-sum-exp [n, heads] of queries [n, heads, d] on keys [m, kv_heads, d].

    `causal` needs n = m: query i sees keys 0 … i. heads is a multiple of kv_heads.
    """
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            _heads_first(query), _heads_first(key), _heads_first(value), 0.0, causal
        )
        return out[0].transpose(0, 1), lse[0].T
    out, lse, *_ = _aten._flash_attention_forward(
        query, key, value, _bounds(query), _bounds(key), len(query), len(key), 0.0, causal, False
    )
    return out, lse.T


def _bounds(x: Tensor) -> Tensor:
    """Cumulative lengths of one sequence, as the varlen kernels take them."""
    return torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)


def backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out`, `lse` may be those of a softmax over more keys than these."""
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad), _heads_first(query), _heads_first(key), _heads_first(value), _heads_first(out),
            lse.T[None], 0.0, causal,
        )  # fmt: skip
        dq, dk, dv = (x[0].transpose(0, 1) for x in found)
        return dq, dk, dv
    state, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), torch.empty(0, device=query.device)
    dq, dk, dv = _aten._flash_attention_backward(
        grad.contiguous(), query, key, value, out, lse.T.contiguous(), _bounds(query), _bounds(key), len(query),
        len(key), 0.0, causal, state, unused,
    )  # fmt: skip
    return dq, dk, dv
