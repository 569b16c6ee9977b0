"""For a machine with a GPU: is the CUDA path of the attention right, and what does a large step cost?

    python benchmarks/cuda_check.py

Compares forward and gradients of TTT attention in bfloat16 on the GPU with float64 on the CPU, then times
a training step at H 4096, 32,000 draft tokens, 8,192 tokens, 7 TTT steps. Not run so far: there was no GPU.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from eyas.drafter.attention import ttt_attention
from eyas.drafter.step import DrafterLoss, make_optimizer, trained
from eyas_worker import ADAMW, make_batches, make_drafter
from workloads import dense_flops

LARGE = {
    "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 128256,
    "draft_vocab": 32000, "ttt_steps": 7, "loss_decay": 0.8, "seed": 0,
}  # fmt: skip


def attention_errors(steps: int = 4) -> dict[str, float]:
    """Largest relative errors of the output and of all gradients, over rows of unequal length with gaps."""
    generator = torch.Generator().manual_seed(0)
    lengths, heads, kv_heads, d = [700, 5, 130], 8, 2, 128
    picked = [torch.arange(300, 700), torch.tensor([0, 3]), torch.cat([torch.arange(40), torch.arange(90, 130)])]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = list(zip([0, *ends[:-1]], ends, strict=True))
    counts = [ends[-1]] + [sum(map(len, picked))] * (steps - 1)
    sizes = [(counts[-1], heads, d)] + [(n, kv_heads, d) for n in counts] * 2
    wide = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.bfloat16)):
        leaves = [w.to(device, torch.bfloat16).to(dtype).requires_grad_() for w in wide]
        out = ttt_attention(leaves[0], leaves[1 : 1 + steps], leaves[1 + steps :], picked, spans)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(device, dtype)
        found.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    names = ["output", "query", *(f"{what}_{i}" for what in ("key", "value") for i in range(steps))]
    return {
        name: float((ours.double().cpu() - true).abs().max() / true.abs().max())
        for name, true, ours in zip(names, *found, strict=True)
    }


def step_time(tokens: int = 8192, repeats: int = 5) -> dict[str, float]:
    """Seconds of a step, and FLOP/s of its dense products."""
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    work = LARGE | {"rows": [{"length": 2048, "prompt": 0}] * (tokens // 2048)}
    drafter = make_drafter(work, generator)
    batches = make_batches(work, drafter, generator)
    head = torch.randn(work["draft_vocab"], work["hidden"], generator=generator) * 0.02
    loss_module = DrafterLoss(
        drafter, head.bfloat16(), drafter.draft_ids, work["ttt_steps"], work["loss_decay"], torch.bfloat16
    ).to(device)
    parameters = trained(loss_module)
    optimizer = make_optimizer(parameters, ADAMW)
    on_device = [batch.to(device) for batch in batches]
    seconds = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for batch in on_device:
            loss_module(batch, None)[0].backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    best = min(seconds[1:])
    return {"seconds": best, "dense_tflops": dense_flops(work)["done"] * tokens / best / 1e12}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("error: no GPU here; this check is for a machine that has one")
    errors = attention_errors()
    result = {
        "gpu": torch.cuda.get_device_name(), "attention_relative_errors": errors,
        "attention_right": max(errors.values()) < 0.03, "step": step_time(),
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if not result["attention_right"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
