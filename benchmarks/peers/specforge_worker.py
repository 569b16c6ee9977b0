"""One training step of SpecForge's EAGLE-3, as the benchmark's driver calls it: see `../train_step.py`.

It is SpecForge's own model, offline strategy, target head and sample normaliser, used as its offline
trainer uses them, on a CPU in fp32. What differs from SpecForge as shipped, each for lack of a GPU or in its favour:

- The loss is a Triton kernel there. Here it is the same loss by torch's fused soft cross-entropy; like the
  kernel it skips positions that do not count.
- The small functions under `torch.compile` run eagerly: on a CPU compiling gains nothing that lasts.
- No DDP wrapper and no fp32 master copies (`BF16Optimizer`): in fp32 on one process both only cost time.
  AdamW is torch's fused one.
- With `"keep_freed_memory": true` in the workload (`--tuned-peers`) malloc keeps what was freed and torch asks for
  huge pages. SpecForge's step takes and frees gigabytes, and the kernel's page faults are up to half of it.

Attention is its sdpa backend; flex attention has no backward on a CPU, flash attention none at all. One row is one
forward without padding. `"compact_teacher": true` takes its compact teacher. `"rows_per_step": n` sums the
gradients of n rows before each optimizer step (default: 1).
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import sys
import tempfile
import time
import types
from importlib.metadata import version
from typing import Any

if __name__ == "__main__":  # read by torch when it first allocates
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "0")

import torch
import torch.nn.functional as F
from torch import Tensor

GATHER_BELOW = 0.6  # share of counted positions under which a copy of their logits is cheaper than the others' loss
TRIM_ABOVE_MIB = 6144  # beyond this, memory goes back between passes, so that other contestants find room


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what was freed for the next allocation."""
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(-4, 0)  # M_MMAP_MAX
    mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class LogSoftmaxLoss:
    """Stands in for SpecForge's Triton loss: masked soft cross-entropy, divided by all positions."""

    @staticmethod
    def apply(logits: Tensor, target: Tensor, position_mask: Tensor) -> Tensor:
        batch, length, vocabulary = logits.shape
        flat, teacher, counted = logits.view(-1, vocabulary), target.view(-1, vocabulary), position_mask.view(-1)
        if int(counted.sum()) <= GATHER_BELOW * len(counted):
            rows = counted.nonzero().squeeze(1)
            flat, teacher = flat.index_select(0, rows), teacher.index_select(0, rows)
            return F.cross_entropy(flat, teacher, reduction="sum") / (batch * length)
        return (F.cross_entropy(flat, teacher, reduction="none") * counted).sum() / (batch * length)


def stand_in_for_triton() -> None:
    """Put the loss above where SpecForge's model imports its own, whose module needs Triton."""
    module = types.ModuleType("specforge.core.loss")
    module.LogSoftmaxLoss = LogSoftmaxLoss  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module


def build(work: dict[str, Any]) -> tuple[Any, list[Tensor]]:
    """SpecForge's offline strategy over a random drafter and target head, and what is trained."""
    from specforge.algorithms.eagle3.model import OnlineEagle3Model
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from specforge.modeling.target.target_head import TargetHead
    from specforge.training.strategies.base import Eagle3TrainStrategy
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=work["hidden"], intermediate_size=work["intermediate"], num_attention_heads=work["heads"],
        num_key_value_heads=work["kv_heads"], head_dim=work["head_dim"], vocab_size=work["vocab"],
        num_hidden_layers=1, max_position_embeddings=max(row["length"] for row in work["rows"]) + work["ttt_steps"],
        pad_token_id=0, draft_vocab_size=work["draft_vocab"],
    )  # fmt: skip
    draft = LlamaForCausalLMEagle3(config, attention_backend="sdpa")
    draft.freeze_embedding()
    ids = torch.randperm(work["vocab"])[: work["draft_vocab"]].sort().values
    draft.t2d.zero_()
    draft.t2d[ids] = True
    draft.d2t.copy_(ids - torch.arange(len(ids)))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        head = TargetHead(folder)
    head.freeze_weights()
    # The target's own choice is in the draft vocabulary everywhere, so that every supervised position counts.
    torch.nn.init.normal_(head.fc.weight, std=0.1)
    head.fc.weight.data[~draft.t2d] *= 0.1
    strategy = Eagle3TrainStrategy(
        OnlineEagle3Model(draft, length=work["ttt_steps"], attention_backend="sdpa"), target_head=head,
        ploss_decay=work["loss_decay"], compact_teacher=bool(work.get("compact_teacher", False)),
    )  # fmt: skip
    return strategy, [p for p in strategy.trainable_module().parameters() if p.requires_grad]


def make_batches(work: dict[str, Any]) -> list[Any]:
    """Random states for the rows, each a batch, as SpecForge's offline reader hands them over."""
    from specforge.algorithms.eagle3.data import normalize_offline_sample
    from specforge.runtime.contracts import TrainBatch

    batches = []
    for number, row in enumerate(work["rows"]):
        length = row["length"]
        raw = {
            "aux_hidden_state": torch.randn(1, length, 3 * work["hidden"]),
            "hidden_state": torch.randn(1, length, work["hidden"]),
            "input_ids": torch.randint(work["vocab"], (length,)),
            "loss_mask": (torch.arange(length) >= row["prompt"]).long(),
        }
        tensors = normalize_offline_sample(raw, length)
        batches.append(TrainBatch([str(number)], "eagle3", tensors, {"target_repr": "hidden_state"}))
    return batches


def one_pass(
    work: dict[str, Any], strategy: Any, batches: list[Any], trained: list[Tensor], optimizer: torch.optim.Optimizer
) -> float:
    """Train once on every batch; the mean of their losses."""
    size, losses = work.get("rows_per_step", 1), []
    for start in range(0, len(batches), size):
        group = batches[start : start + size]
        for batch in group:
            loss = strategy.forward_loss(batch).loss
            (loss / len(group)).backward()
            losses.append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return sum(losses) / len(losses)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # the peer may print: only answers go to the driver
    os.dup2(2, 1)
    with open(sys.argv[1], encoding="utf-8") as file:
        work = json.load(file)
    keep = work.get("keep_freed_memory", False)
    if keep:
        keep_freed_memory()
    torch.set_num_threads(work["threads"])
    torch.manual_seed(work["seed"])
    torch.compiler.set_stance("force_eager")
    stand_in_for_triton()
    strategy, trained = build(work)
    batches = make_batches(work)
    optimizer = torch.optim.AdamW(trained, lr=work.get("learning_rate", 1e-3), weight_decay=0.0, fused=True)
    teacher = "compact" if work.get("compact_teacher", False) else "full-vocabulary"
    variant = f"sdpa attention, {teacher} teacher, one row a forward" + (", freed memory kept" if keep else "")
    print(json.dumps({"ready": True, "version": version("specforge"), "variant": variant}), file=answers, flush=True)
    for line in sys.stdin:
        if line.strip() != "run":
            break
        cpu, wall = time.process_time(), time.perf_counter()
        loss = one_pass(work, strategy, batches, trained, optimizer)
        result = {
            "cpu_s": time.process_time() - cpu,
            "wall_s": time.perf_counter() - wall,
            "tokens": sum(row["length"] for row in work["rows"]),
            "supervised": sum(row["length"] - row["prompt"] for row in work["rows"]),
            "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "loss": loss,
        }
        print(json.dumps(result), file=answers, flush=True)
        if keep and result["peak_rss_mb"] > TRIM_ABOVE_MIB:
            ctypes.CDLL(None).malloc_trim(0)


if __name__ == "__main__":
    main()
