"""One optimizer step's pieces: the module that gives the loss, the optimizer and its moments, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from eyas.drafter.dataset import Batch
from eyas.drafter.model import Drafter
from eyas.drafter.objective import StepCounts, ttt_loss
from eyas.drafter.processes import like, whole


class DrafterLoss(nn.Module):
    """Drafter and teacher in one module, so that what spreads a module over processes sees one forward pass."""

    def __init__(
        self, drafter: Drafter, teacher_head: Tensor, draft_ids: Tensor, steps: int, decay: float, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self.steps, self.decay, self.dtype = steps, decay, dtype
        self.teacher_head: Tensor
        self.draft_ids: Tensor
        self.register_buffer("teacher_head", teacher_head, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    def forward(self, batch: Batch | None, totals: Sequence[float]) -> tuple[Tensor, int, StepCounts]:
        """:func:`ttt_loss` of a part of a step; `totals`: what each TTT step's sum is divided by.

        None is a pass without rows: zero, with zero gradients, for processes that have to meet.
        """
        if batch is None:
            nothing = torch.stack([p.sum() * 0.0 for p in self.drafter.parameters() if p.requires_grad]).sum()
            return nothing, 0, StepCounts.zero(self.steps)
        return ttt_loss(
            self.drafter, batch, self.teacher_head, self.draft_ids, self.steps, self.decay, totals, self.dtype
        )


def product_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Precision of the matrix products: `precision` is auto, float32 or bfloat16."""
    if precision == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.bfloat16 if precision == "bfloat16" else torch.float32


def learning_rate(step: int, steps_per_epoch: int, settings: dict[str, Any]) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then decay to the floor over `schedule_epochs`.

    The horizon does not depend on how many epochs are asked for, so that asking for more
    leaves the finished ones as they are.
    """
    peak, floor = settings["learning_rate"], settings["learning_rate"] * settings["min_learning_rate_ratio"]
    warmup = settings["warmup_steps"]
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    horizon = max(settings["schedule_epochs"] * steps_per_epoch - warmup, 1)
    done = min((step - warmup) / horizon, 1.0)
    kind = settings["schedule"]
    if kind == "constant":
        share = 1.0
    elif kind == "linear":
        share = 1 - done
    elif kind == "wsd":
        share = min((1 - done) / settings["decay_share"], 1.0)
    else:
        share = 0.5 * (1 + math.cos(math.pi * done))
    return float(floor + (peak - floor) * share)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by its name in the checkpoint, in a fixed order."""
    found = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            found[name.rsplit("drafter.", 1)[-1]] = parameter
    return dict(sorted(found.items()))


def make_optimizer(parameters: dict[str, nn.Parameter], settings: dict[str, Any]) -> torch.optim.AdamW:
    """AdamW; only matrices decay."""
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings["beta1"], settings["beta2"]))


def restore_moments(
    optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter], moments: dict[str, Tensor], step: int
) -> None:
    """Put `exp_avg.{name}` and `exp_avg_sq.{name}`, where there are any, back into the optimizer."""
    for name, parameter in parameters.items():
        if f"exp_avg.{name}" in moments:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": like(moments[f"exp_avg.{name}"], parameter),
                "exp_avg_sq": like(moments[f"exp_avg_sq.{name}"], parameter),
            }


def read_moments(optimizer: torch.optim.AdamW, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """The inverse of :func:`restore_moments`; all processes must call it."""
    moments = {}
    for name, parameter in parameters.items():
        if parameter in optimizer.state:
            for key in ("exp_avg", "exp_avg_sq"):
                moments[f"{key}.{name}"] = whole(optimizer.state[parameter][key])
    return moments
