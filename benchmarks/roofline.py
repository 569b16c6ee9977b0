"""What the matrix products of a training step could reach at best on one thread of this machine."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch


def matmul_gflops(sizes: dict[str, Any], rows: int = 512, repeats: int = 5) -> float:
    """GFLOP/s of a step's dense products alone, forward and backward, into memory that is there already.

    For each weight [out, in]: x · Wᵀ, dy · W, dyᵀ · x with `rows` rows; the median of `repeats` passes
    over all of them, as the contestants' figures are medians.
    """
    h, inner = sizes["hidden"], sizes["intermediate"]
    q, kv = sizes["heads"] * sizes["head_dim"], sizes["kv_heads"] * sizes["head_dim"]
    shapes = [
        (q, 2 * h),
        (kv, 2 * h),
        (kv, 2 * h),
        (h, q),
        (inner, h),
        (inner, h),
        (h, inner),
        (sizes["draft_vocab"], h),
    ]
    products, flops = [], 0.0
    for out, into in shapes:
        x, w, dy = torch.randn(rows, into), torch.randn(out, into), torch.randn(rows, out)
        products += [
            (x, w.T, torch.empty(rows, out)), (dy, w, torch.empty(rows, into)), (dy.T, x, torch.empty(out, into))
        ]  # fmt: skip
        flops += 3 * 2.0 * rows * out * into
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(repeats + 1):
        started = time.process_time()
        for left, right, result in products:
            torch.mm(left, right, out=result)
        seconds.append(time.process_time() - started)
    torch.set_num_threads(threads)
    return flops / statistics.median(seconds[1:]) / 1e9
