"""The same training step written plainly: explicit scores, full logits, every position in every step, row by row.

What the driver compares with when the peers are not there (`--quick`). Protocol: see `train_step.py`.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from eyas.drafter.attention import rotary
from eyas.drafter.dataset import Batch
from eyas.drafter.model import Drafter
from eyas_worker import make_batches, make_drafter
from torch import Tensor


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def row_loss(drafter: Drafter, batch: Batch, head: Tensor, draft_ids: Tensor, steps: int, decay: float) -> Tensor:
    """The TTT loss of one row [T]: scores [heads, T, T + i] and logits [T, D] of each step exist at once."""
    shape, layer = drafter.shape, drafter.midlayer
    length, d = len(batch.tokens), shape.head_dim
    here = torch.arange(length)
    state = drafter.fc(batch.aux)
    own_choice = draft_ids[batch.target_token]
    teacher = torch.softmax(batch.last @ head.T, -1)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total = torch.zeros(())
    for i in range(steps):
        token = batch.tokens[(here + 1 + i).clamp(max=length - 1)]
        x = torch.cat([layer.input_layernorm(drafter.embed_tokens(token)), layer.hidden_norm(state)], -1)
        cos, sin = rotary(here + i, d, shape.rope_theta)
        q, k, v = (
            proj(x).view(length, -1, d).transpose(0, 1)
            for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        keys.append(_turn(k, cos, sin))
        values.append(v)
        query = _turn(q, cos, sin)
        scores = query @ keys[0].transpose(1, 2) * d**-0.5
        scores = scores.masked_fill(here[None] > here[:, None], float("-inf"))
        extra = [(query * key).sum(-1, keepdim=True) * d**-0.5 for key in keys[1:]]
        weights = torch.softmax(torch.cat([scores, *extra], -1), -1)
        mixed = weights[..., :length] @ values[0]
        for j, value in enumerate(values[1:]):
            mixed = mixed + weights[..., length + j, None] * value
        residual = state + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        normed = layer.post_attention_layernorm(residual)
        state = residual + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed))
        log_share = torch.log_softmax(drafter.lm_head(drafter.norm(state)), -1)
        speaker, predicted = (here + 1 + i).clamp(max=length - 1), here + 2 + i
        counts = (predicted < length) & batch.mask[predicted.clamp(max=length - 1)] & (own_choice[speaker] >= 0)
        entropy = -(teacher[speaker] * log_share).sum(-1)
        total = total + decay**i * (entropy * counts).sum() / counts.sum().clamp(min=1)
    return total


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        work: dict[str, Any] = json.load(file)
    torch.set_num_threads(work["threads"])
    generator = torch.Generator().manual_seed(work["seed"])
    drafter = make_drafter(work, generator)
    head = torch.randn(work["draft_vocab"], work["hidden"], generator=generator) * 0.02
    rows = [batch for row in work["rows"] for batch in make_batches(work | {"rows": [row]}, drafter, generator)]
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    print(json.dumps({"ready": True, "version": None, "variant": "explicit scores and logits"}), flush=True)
    for line in sys.stdin:
        if line.strip() != "run":
            break
        cpu, wall, loss_sum = time.process_time(), time.perf_counter(), 0.0
        for batch in rows:
            loss = row_loss(drafter, batch, head, drafter.draft_ids, work["ttt_steps"], work["loss_decay"])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss_sum += float(loss.detach())
        result = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "tokens": sum(row["length"] for row in work["rows"]),
            "supervised": sum(int(batch.mask.sum()) for batch in rows),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "loss": loss_sum / len(rows),
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
