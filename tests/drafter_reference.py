"""Slow references written from DESIGN section 4, and small synthetic targets, tokens and states.

Nothing of the arithmetic here is taken from eyas: own norm, own rotary positions, plain loops
over rows, positions and steps, every position in full whether it is supervised or not.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eyas.drafter.dataset import Batch
from eyas.drafter.model import Drafter
from eyas.drafter.shape import DrafterShape
from eyas.extraction.manifest import Manifest, read_manifest, write_manifest
from eyas.extraction.shard import extract_shard
from eyas.shards import describe_file, write_arrays, write_json
from eyas.target.tokenizer import TargetReference
from torch import Tensor

TRAINING: dict[str, Any] = dict(
    epochs=3, ttt_steps=3, loss_decay=0.8, learning_rate=2e-2, schedule="cosine", schedule_epochs=3,
    min_learning_rate_ratio=0.05, warmup_steps=3, weight_decay=0.0, beta1=0.9, beta2=0.95, grad_clip=1.0,
    batch_tokens=48, decay_share=0.2, precision="auto",
)  # fmt: skip


# ---- drafters and batches ----


def small_shape(**changes: Any) -> DrafterShape:
    values: dict[str, Any] = dict(
        vocab_size=23, draft_vocab_size=11, hidden_size=12, target_hidden_size=12, intermediate_size=10,
        num_attention_heads=4, num_key_value_heads=2, head_dim=6, rms_norm_eps=1e-5, rope_theta=100.0,
        max_position_embeddings=64, layers=(0, 1, 2),
    )  # fmt: skip
    return DrafterShape(**(values | changes))


def small_drafter(shape: DrafterShape, seed: int = 0) -> Drafter:
    """A drafter with large random weights (norms too), so that every part matters."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
    t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
    t2d[ids] = True
    drafter = Drafter(shape, ids - torch.arange(len(ids)), t2d)
    with torch.no_grad():
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if parameter.dim() == 1 else 0.4 * noise)
    return drafter


def small_batch(
    shape: DrafterShape, head: Tensor, lengths: list[int], seed: int = 0, follow: float = 0.7, supervised: float = 0.7
) -> Batch:
    """Packed float64 rows with gaps in their masks; `follow`: share of tokens that are the target's own argmax."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    last = torch.randn(total, shape.target_hidden_size, generator=generator, dtype=torch.float64)
    target = (last @ head.T).argmax(-1)
    tokens = torch.randint(shape.vocab_size, (total,), generator=generator)
    followed = torch.rand(total, generator=generator) < follow
    tokens[1:] = torch.where(followed[1:], target[:-1], tokens[1:])
    ends = np.cumsum(lengths).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return Batch(
        aux=torch.randn(total, 3 * shape.target_hidden_size, generator=generator, dtype=torch.float64),
        last=last,
        tokens=tokens,
        target_token=target,
        mask=torch.rand(total, generator=generator) < supervised,
        positions=torch.cat([torch.arange(length) for length in lengths]),
        spans=spans,
        row_ids=list(range(len(lengths))),
    )


# ---- the whole TTT loss, slowly ----


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def _turn(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotary position of [heads, d]: pairs (j, j + d/2) turned by position · theta^(-2j/d)."""
    half = x.shape[-1] // 2
    angles = [position * theta ** (-2 * j / x.shape[-1]) for j in range(half)]
    # Eyas keeps cosines and sines in float32, as servers do.
    cos = torch.tensor([math.cos(a) for a in angles], dtype=torch.float32).double()
    sin = torch.tensor([math.sin(a) for a in angles], dtype=torch.float32).double()
    first, second = x[:, :half], x[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def reference_states(
    w: dict[str, Tensor], shape: DrafterShape, aux: Tensor, tokens: list[int], steps: int
) -> list[dict]:
    """g¹ … g^steps of one row: `states[i][t]` = gⁱ⁺¹_t, wherever the row has the token t+1+i that it reads."""
    heads, d, eps = shape.num_attention_heads, shape.head_dim, shape.rms_norm_eps
    groups = heads // shape.num_key_value_heads
    layer, theta = "midlayer.self_attn", shape.rope_theta
    state = {t: w["fc.weight"] @ aux[t] for t in range(len(tokens))}
    keys: list[dict[int, Tensor]] = []
    values: list[dict[int, Tensor]] = []
    states = []
    for i in range(steps):
        inputs = {
            t: torch.cat([
                _norm(w["embed_tokens.weight"][tokens[t + 1 + i]], w["midlayer.input_layernorm.weight"], eps),
                _norm(state[t], w["midlayer.hidden_norm.weight"], eps),
            ])
            for t in range(len(tokens) - 1 - i)
        }  # fmt: skip
        keys.append({t: _turn((w[f"{layer}.k_proj.weight"] @ x).view(-1, d), t + i, theta) for t, x in inputs.items()})
        values.append({t: (w[f"{layer}.v_proj.weight"] @ x).view(-1, d) for t, x in inputs.items()})
        after = {}
        for t, x in inputs.items():
            query = _turn((w[f"{layer}.q_proj.weight"] @ x).view(-1, d), t + i, theta)
            seen = [(0, u) for u in range(t + 1)] + [(j, t) for j in range(1, i + 1)]  # causal, then its own later keys
            mixed = []
            for head in range(heads):
                kv = head // groups
                scores = torch.stack([query[head] @ keys[j][u][kv] for j, u in seen]) / math.sqrt(d)
                weights = torch.exp(scores - scores.max())
                weights = weights / weights.sum()
                mixed.append(sum(p * values[j][u][kv] for p, (j, u) in zip(weights, seen, strict=True)))
            own = _norm(state[t], w["midlayer.hidden_norm.weight"], eps) if shape.norm_before_residual else state[t]
            residual = own + w[f"{layer}.o_proj.weight"] @ torch.cat(mixed)
            normed = _norm(residual, w["midlayer.post_attention_layernorm.weight"], eps)
            gate = w["midlayer.mlp.gate_proj.weight"] @ normed
            up = w["midlayer.mlp.up_proj.weight"] @ normed
            after[t] = residual + w["midlayer.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)
        state = after
        states.append(after)
    return states


def reference_loss(
    w: dict[str, Tensor], shape: DrafterShape, batch: Batch, head: Tensor, steps: int, decay: float, lag: int = 0
) -> tuple[Tensor, list[list[int]], dict[tuple[int, int, int], int]]:
    """Loss over all rows; per step, the packed positions that count; the drafter's choice at (row, t, i) as target id.

    `lag` = 1 is the fault that masks of other trainers have: the mask of the token before the predicted one.
    """
    draft = [int(i) for i in w["d2t"] + torch.arange(len(w["d2t"]))]
    losses: list[list[Tensor]] = [[] for _ in range(steps)]
    counted: list[list[int]] = [[] for _ in range(steps)]
    chosen = {}
    for row, (start, end) in enumerate(batch.spans):
        tokens = batch.tokens[start:end].tolist()
        for i, states in enumerate(reference_states(w, shape, batch.aux[start:end], tokens, steps)):
            for t, state in states.items():
                logits = w["lm_head.weight"] @ _norm(state, w["norm.weight"], shape.rms_norm_eps)
                chosen[row, t, i] = draft[int(logits.argmax())]
                if t + 2 + i >= len(tokens) or not batch.mask[start + t + 2 + i - lag]:
                    continue
                full = torch.softmax(head @ batch.last[start + t + 1 + i], 0)  # over the whole target vocabulary
                if int(batch.target_token[start + t + 1 + i]) not in draft:
                    continue
                teacher = full[draft] / full[draft].sum()
                losses[i].append(-(teacher * torch.log_softmax(logits, 0)).sum())
                counted[i].append(start + t)
    total = sum(decay**i * torch.stack(part).mean() for i, part in enumerate(losses) if part)
    return torch.as_tensor(total), counted, chosen


def reference_counts(batch: Batch, steps: int, chosen: dict[tuple[int, int, int], int]) -> tuple[list[int], list[int]]:
    """Per step: chains that got there (supervised, right and on the target's own path so far), and the right ones."""
    reached, right = [0] * steps, [0] * steps
    for row, (start, end) in enumerate(batch.spans):
        for t in range(end - start):
            for i in range(steps):
                if t + 2 + i >= end - start or not batch.mask[start + t + 2 + i]:
                    break
                own = int(batch.target_token[start + t + 1 + i])
                reached[i] += 1
                if chosen[row, t, i] != own:
                    break
                right[i] += 1
                if int(batch.tokens[start + t + 2 + i]) != own:  # the row goes another way from here
                    break
    return reached, right


# ---- synthetic targets, tokens and states on disk ----


def save_llama(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> TargetReference:
    """A random tiny Llama as a transformers folder (weights only, no tokenizer)."""
    from transformers import LlamaConfig, LlamaForCausalLM  # slow, and not needed where the folder is there

    values: dict[str, Any] = dict(
        vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**(values | changes))).eval().to(dtype).save_pretrained(folder)
    return TargetReference(str(folder), dtype=str(dtype).removeprefix("torch."))


def random_rows(lengths: list[int], vocab_size: int = 40, seed: int = 0, first_row: int = 0) -> list[tuple]:
    """(row id, ids int32, mask uint8) for each length; the last two thirds of a row are supervised."""
    random = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        mask = (np.arange(length) >= length // 3).astype(np.uint8)
        rows.append((first_row + number, random.integers(3, vocab_size, length).astype(np.int32), mask))
    return rows


def write_tokens(path: Path, rows: list[tuple], skipped: tuple = ()) -> Path:
    """A tokens shard with the sidecar that extraction reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    offsets = np.concatenate([[0], np.cumsum([len(ids) for _, ids, _ in rows])]).astype(np.int64)
    arrays = {
        "input_ids": np.concatenate([ids for _, ids, _ in rows]),
        "loss_mask": np.concatenate([mask for _, _, mask in rows]),
        "offsets": offsets,
        "row_ids": np.array([number for number, _, _ in rows], dtype=np.int64),
    }
    write_arrays(path, arrays, {"format": "eyas.tokens"})
    write_json(path.with_suffix(".json"), {
        "format_version": 1, "tokenizer_hash": "tok", "chat_template_hash": "template", "rows": len(rows),
        "tokens": int(offsets[-1]),
        "skipped": [{"row": number, "reason": "test"} for number in skipped], "files": {path.name: describe_file(path)},
    })  # fmt: skip
    return path


def extracted(
    folder: Path, target: TargetReference, shards: list[list[tuple]], dtype: str = "float32",
    layers: tuple[int, ...] = (0, 1, 3),
) -> Manifest:  # fmt: skip
    """Tokens in `folder`/tokens, states and manifest in `folder`/hidden_states, for shards of rows without gaps."""
    paths = []
    for rows in shards:
        name = f"rows_{rows[0][0]}-{rows[-1][0] + 1}.safetensors"
        tokens = write_tokens(folder / "tokens" / name, rows)
        paths.append(folder / "hidden_states" / name)
        extract_shard(tokens, paths[-1], target, list(layers), dtype, batch_tokens=64)
    write_manifest(paths, sum(map(len, shards)), folder / "hidden_states" / "data_config.json")
    return read_manifest(folder / "hidden_states" / "data_config.json")


def file_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def read_json_file(path: Path) -> Any:
    """A JSON file's values, without the digest that seals it."""
    values = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(values, dict):
        values.pop("digest", None)
    return values


KILL_AFTER_TWO = """
import os, signal
from eyas.shards import Journal
append, calls = Journal.append, []
def die_after_two(self, *records):
    append(self, *records)
    calls.append(records)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
Journal.append = die_after_two
from eyas.target.tokenizer import TargetReference
from pathlib import Path
"""


def run_killed(code: str) -> None:
    """Run `code` in a process that gets a SIGKILL when its journal has its second entry."""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([sys.executable, "-c", KILL_AFTER_TWO + code], env=environment)
    assert done.returncode == -signal.SIGKILL
