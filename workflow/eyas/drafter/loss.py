"""Cross-entropy with the target's own distribution, without the logits of all positions at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Positions whose [positions, D] logits exist at the same time.
_CHUNK = 1024


class _SoftCrossEntropy(torch.autograd.Function):
    """Σ_n weight_n · (logsumexp(z_n) − Σ_d p_nd z_nd) with z = hidden · headᵀ.

    Gradients are computed in the forward pass, chunk by chunk, so that no logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, teacher: Tensor, teacher_row: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        need = any(ctx.needs_input_grad)
        total = hidden.new_zeros((), dtype=torch.float64)
        predicted = torch.empty(len(hidden), dtype=torch.long, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need else None
        grad_head = torch.zeros_like(head) if need else None
        for start in range(0, len(hidden), _CHUNK):
            part = slice(start, start + _CHUNK)
            logits = hidden[part] @ head.T
            if logits.dtype in (torch.bfloat16, torch.float16):
                logits = logits.float()
            probability = teacher.index_select(0, teacher_row[part])
            predicted[part] = logits.argmax(-1)
            lse = torch.logsumexp(logits, -1)
            loss = lse - (probability * logits).sum(-1)
            total += (loss.double() * weight[part].double()).sum()
            if grad_hidden is not None and grad_head is not None:
                # d loss / d z = (softmax(z) - p) · weight, written over the logits
                grad = logits.sub_(lse[:, None]).exp_().sub_(probability).mul_(weight[part][:, None])
                grad = grad.to(hidden.dtype)
                grad_hidden[part] = grad @ head
                grad_head.addmm_(grad.T, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(predicted)
        return total.to(weight.dtype), predicted

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, grad_predicted: Tensor) -> Any:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_total, grad_head * grad_total, None, None, None


def soft_cross_entropy(
    hidden: Tensor, head: Tensor, teacher: Tensor, teacher_row: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies with soft targets, and the drafter's choices.

    Args:
        hidden: [N, H], normed states.
        head: [D, H].
        teacher: [U, D], the target's probabilities over the draft vocabulary.
        teacher_row: int64 [N], which row of `teacher` each state is to match.
        weight: [N].

    Returns:
        the loss (a scalar) and the most likely draft id of each state, int64 [N].
    """
    loss, predicted = _SoftCrossEntropy.apply(hidden, head, teacher, teacher_row, weight)
    return loss, predicted


def teacher_probabilities(last: Tensor, head: Tensor) -> Tensor:
    """The target's distribution restricted to the draft vocabulary and renormalised: [U, D].

    Args:
        last: [U, Ht], states after the target's final norm.
        head: [D, Ht], the draft vocabulary's rows of the target's head.
    """
    return torch.softmax((last.to(head.dtype) @ head.T).to(torch.promote_types(head.dtype, torch.float32)), -1)
