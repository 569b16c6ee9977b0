"""Cross-entropy with the target's own distribution, without the logits of all positions at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.shared import normalise, normalise_backward

# Predictions whose [predictions, D] logits exist at the same time. More keep the matrix
# products efficient, fewer keep the logits in the caches.
_CHUNK = 512


@dataclass(frozen=True)
class StepTargets:
    """What one TTT step is to predict.

    `pick` int64 [N], ascending: which of the step's states count. `teacher` int64 [N], ascending:
    which of the U teachers each of them is to match. `weight`: of each of them in the loss.
    """

    pick: Tensor
    teacher: Tensor
    weight: float


def _chunks(targets: Sequence[StepTargets], teachers: int, size: int) -> Iterator[tuple[slice, list[slice]]]:
    """Cut the teachers into ranges for which about `size` states are to match; for each step, which these are.

    Each teacher is in one range: it is computed once, whatever the number of steps.
    """
    counts = torch.zeros(teachers, dtype=torch.long)
    for step in targets:
        counts += torch.bincount(step.teacher.cpu(), minlength=teachers)
    filled = counts.cumsum(0)
    bounds, first, done = [0], 0, 0
    while first < teachers:
        # at least one teacher, however many states it speaks for
        first = max(int(torch.searchsorted(filled, done + size, right=True)), first + 1)
        done = int(filled[first - 1])
        bounds.append(first)
    cuts = [torch.searchsorted(step.teacher.cpu(), torch.tensor(bounds)).tolist() for step in targets]
    for number, (start, stop) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
        yield slice(start, stop), [slice(cut[number], cut[number + 1]) for cut in cuts]


class _TTTCrossEntropy(torch.autograd.Function):
    """Σ weight · (logsumexp(z) − Σ_d p_d z_d) over all steps and states, z = head · RMSNorm(state).

    Gradients are computed in the forward pass, chunk by chunk in the same buffers, so that no
    logits are kept.
    """

    @staticmethod
    def forward(
        ctx: Any,
        targets: Sequence[StepTargets],
        last: Tensor,
        teacher_head: Tensor,
        norm: Tensor,
        eps: float,
        head: Tensor,
        *states: Tensor,
    ) -> tuple[Tensor, ...]:
        need = any(ctx.needs_input_grad)
        wide = torch.promote_types(head.dtype, torch.float32)
        total = head.new_zeros((), dtype=torch.float64)
        predicted = [torch.empty_like(step.pick) for step in targets]
        grad_norm = torch.zeros_like(norm)
        grad_head = torch.zeros_like(head, dtype=wide) if need else None
        grads = [torch.zeros_like(state) for state in states] if need else []
        buffers: list[Tensor] = []
        for speakers, parts in _chunks(targets, len(last), _CHUNK):
            picks = [step.pick[part] for step, part in zip(targets, parts, strict=True)]
            sizes = [len(pick) for pick in picks]
            count = sum(sizes)
            if count == 0:
                continue
            rows = torch.cat([state.index_select(0, pick) for state, pick in zip(states, picks, strict=True)])
            normed, scale = normalise(rows, norm, eps)
            narrow = normed.to(head.dtype)
            which = torch.cat([step.teacher[part] for step, part in zip(targets, parts, strict=True)]) - speakers.start
            weight = torch.repeat_interleave(
                torch.tensor([step.weight for step in targets], dtype=wide), torch.tensor(sizes)
            ).to(head.device)
            if not buffers or len(buffers[0]) < count:
                buffers = [head.new_empty(max(count, _CHUNK), len(head), dtype=wide) for _ in range(3)]
            logits, probability, share = (buffer[:count] for buffer in buffers)
            if wide == head.dtype:
                torch.mm(narrow, head.T, out=logits)
            else:
                logits.copy_(narrow @ head.T)
            torch.index_select(teacher_probabilities(last[speakers], teacher_head).to(wide), 0, which, out=probability)
            top, choice = logits.max(-1)
            for place, found in zip(zip(predicted, parts, strict=True), choice.split(sizes), strict=True):
                place[0][place[1]] = found
            expected = torch.mul(probability, logits, out=share).sum(-1)
            torch.softmax(logits, -1, out=share)
            # lse = z − log softmax(z), at the largest z, whose share is far from zero
            lse = top - share.gather(1, choice[:, None])[:, 0].log_()
            total += ((lse - expected).double() * weight.double()).sum()
            if grad_head is None:
                continue
            # d loss / d z = (softmax(z) − p) · weight
            grad = share.sub_(probability).mul_(weight[:, None]).to(head.dtype)
            if wide == head.dtype:
                grad_head.addmm_(grad.T, narrow)
            else:
                grad_head += grad.T @ narrow
            grad_rows, grad_weight = normalise_backward(grad @ head, rows, norm, scale)
            grad_norm += grad_weight
            for state_grad, pick, found in zip(grads, picks, grad_rows.split(sizes), strict=True):
                state_grad.index_copy_(0, pick, found)
        ctx.found = [grad_norm, grad_head, *grads]
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(*predicted)
        return total.to(wide), *predicted

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor, *unused: Tensor) -> Any:
        found, ctx.found = ctx.found, None
        if found is None:
            raise RuntimeError("the gradients of this loss have been used; run the forward pass again")
        if float(grad_total) != 1.0:
            found = [grad.mul_(grad_total) for grad in found]
        grad_norm, grad_head, *grads = found
        return None, None, None, grad_norm, None, grad_head.to(ctx.head_dtype), *grads


def ttt_cross_entropy(
    states: Sequence[Tensor],
    targets: Sequence[StepTargets],
    norm: Tensor,
    eps: float,
    head: Tensor,
    last: Tensor,
    teacher_head: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """Weighted sum over all TTT steps of cross-entropies with soft targets, and the drafter's choices.

    Args:
        states: for each step, [Sᵢ, H], not normed.
        targets: for each step, which of its states count, and towards which teacher.
        norm, eps: the final norm's weight [H] and its epsilon.
        head: [D, H].
        last: [U, Ht], the target's states behind its final norm, where a teacher speaks.
        teacher_head: [D, Ht], the draft vocabulary's rows of the target's head.

    Returns:
        the loss (a scalar) and, for each step, the most likely draft id of each state that counts.
        No more than a chunk's logits exist at a time, and each teacher is computed once. Its
        gradients can be taken once.
    """
    loss, *predicted = _TTTCrossEntropy.apply(targets, last, teacher_head, norm, eps, head, *states)
    return loss, predicted


def teacher_probabilities(last: Tensor, head: Tensor) -> Tensor:
    """The target's distribution restricted to the draft vocabulary and renormalised: [U, D].

    Args:
        last: [U, Ht], states after the target's final norm.
        head: [D, Ht], the draft vocabulary's rows of the target's head.
    """
    return torch.softmax((last.to(head.dtype) @ head.T).to(torch.promote_types(head.dtype, torch.float32)), -1)
