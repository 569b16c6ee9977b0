"""What the drafter is trained towards, and how its steps are counted.

Position t of TTT step i predicts the token at t+2+i. It is *supervised* where that token is
supervised and lies in the same row, and *counted* in the loss where besides the target's own
argmax there is in the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.dataset import Batch
from eyas.drafter.loss import StepTargets, ttt_cross_entropy
from eyas.drafter.model import Drafter, StepPositions, TTTPositions
from eyas.drafter.shared import SharedWeights

# Positions are dropped between two steps when at least this share of them has nothing left to predict:
# later steps then do less, at the price of copying the keys of those that stay.
_WORTH_DROPPING = 0.03


@dataclass
class Predictions:
    """Where a batch predicts what: S query positions at step 0, `steps` predictions each.

    `where`: the positions of each step; `slots`: for each step, int64 [Sᵢ], their places among the
    S; `supervised` bool [steps, S]; `goal` int64 [steps, S]: the target's own argmax for the
    predicted token; `on_path` bool [steps, S]: whether the row itself follows the target's argmax
    up to that step (a drafter that was right so far is then still on the row's tokens).
    """

    where: TTTPositions
    slots: list[Tensor]
    supervised: Tensor
    goal: Tensor
    on_path: Tensor


def find_predictions(batch: Batch, steps: int) -> Predictions:
    """Positions that predict any supervised token within `steps`, and for each step those that still do."""
    total = len(batch.tokens)
    lengths = torch.tensor([end - start for start, end in batch.spans])
    ends = torch.repeat_interleave(torch.tensor([end for _, end in batch.spans]), lengths)
    mask, tokens, target_token = batch.mask.cpu(), batch.tokens.cpu(), batch.target_token.cpu()
    predicted = torch.arange(total)[None] + 2 + torch.arange(steps)[:, None]
    supervised = (predicted < ends) & mask[predicted.clamp(max=total - 1)]
    flat = supervised.any(0).nonzero()[:, 0]
    supervised = supervised[:, flat]
    ahead = (flat[None] + 1 + torch.arange(steps)[:, None]).clamp(max=total - 1)
    goal = target_token[ahead]
    follows = tokens[(ahead + 1).clamp(max=total - 1)] == goal
    on_path = torch.cat([torch.ones_like(follows[:1]), follows[:-1]]).cumprod(0).bool()
    device = batch.tokens.device
    slots, stages = [], []
    slot = torch.arange(len(flat))
    for step in range(steps):
        needed = supervised[step:].any(0)[slot]
        kept = None
        if len(slot) - int(needed.sum()) > _WORTH_DROPPING * len(slot):
            kept = needed.nonzero()[:, 0]
            slot = slot[kept]
        slots.append(slot.to(device))
        stages.append(
            StepPositions(flat[slot].to(device), None if kept is None else kept.to(device), _in_row(flat[slot], batch))
        )
    where = TTTPositions(stages, batch.spans)
    return Predictions(where, slots, supervised.to(device), goal.to(device), on_path.to(device))


def _in_row(flat: Tensor, batch: Batch) -> list[Tensor]:
    """Ascending places among the T packed positions, as positions inside each row."""
    bounds = torch.tensor([start for start, _ in batch.spans] + [len(batch.tokens)])
    cuts = torch.searchsorted(flat, bounds).tolist()
    return [flat[a:b] - start for a, b, (start, _) in zip(cuts[:-1], cuts[1:], batch.spans, strict=True)]


@dataclass
class StepCounts:
    """Chained accuracy: of `reached` [steps] predictions whose earlier steps were all right, `right` [steps]."""

    reached: Tensor
    right: Tensor

    @classmethod
    def zero(cls, steps: int) -> StepCounts:
        return cls(torch.zeros(steps, dtype=torch.long), torch.zeros(steps, dtype=torch.long))

    @classmethod
    def of(cls, predictions: Predictions, chosen: Tensor) -> StepCounts:
        """Count drafted target ids `chosen` int64 [steps, S] (-1: nothing drafted) against the target's."""
        hit = (chosen == predictions.goal) & predictions.supervised
        earlier = torch.cat([torch.ones_like(hit[:1]), hit[:-1]]).cumprod(0).bool()
        reached = predictions.supervised & predictions.on_path & earlier
        return cls(reached.sum(1).cpu(), (reached & hit).sum(1).cpu())

    def __iadd__(self, other: StepCounts) -> StepCounts:
        self.reached += other.reached
        self.right += other.right
        return self

    @property
    def accuracy(self) -> list[float | None]:
        """a_i: share right among those whose earlier steps were right; None where none got there."""
        return [int(r) / int(n) if n else None for r, n in zip(self.right, self.reached, strict=True)]

    def acceptance_length(self, steps: int | None = None) -> float:
        """Expected acceptance length of a chain of `steps`: 1 + Σ_i Π_{j≤i} a_j."""
        length, chain = 1.0, 1.0
        for accuracy in self.accuracy[:steps]:
            chain *= accuracy or 0.0
            length += chain
        return length


def ttt_loss(
    drafter: Drafter,
    batch: Batch,
    teacher_head: Tensor,
    draft_ids: Tensor,
    steps: int,
    decay: float,
    totals: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, int, StepCounts]:
    """Σ_i decay^i · mean over counted positions of cross-entropy(teacher, step i).

    Args:
        teacher_head: [D, Ht], draft-vocabulary rows of the target's head.
        draft_ids: int64 [V], draft id of each target id, -1 where there is none.
        totals: counted predictions of each step to divide by, where `batch` is a part of an
            optimizer step; its own otherwise.
        dtype: precision of the matrix products; that of the weights by default.

    Returns:
        the loss, the number of counted predictions over all steps, and the chained accuracy.
    """
    linear = SharedWeights(dtype or drafter.fc.weight.dtype)
    found = find_predictions(batch, steps)
    states = drafter.ttt_states(batch.aux, batch.tokens, batch.positions, found.where, linear)
    counted = found.supervised & (draft_ids[found.goal] >= 0)
    picks = [counted[step, slot].nonzero()[:, 0] for step, slot in enumerate(found.slots)]
    chosen = torch.full_like(found.goal, -1)
    if not any(len(pick) for pick in picks):
        # zero, and zero gradients for every weight: other processes wait for them
        nothing = torch.stack([p.sum() * 0.0 for p in drafter.parameters() if p.requires_grad]).sum()
        return nothing, 0, StepCounts.of(found, chosen)
    # The teacher of (t, i) speaks at t+1+i: once for each such position, not once for each step.
    speaks = [
        step.flat.index_select(0, pick) + 1 + i
        for i, (step, pick) in enumerate(zip(found.where.steps, picks, strict=True))
    ]
    speakers, teacher = torch.cat(speaks).unique(return_inverse=True)
    divisors = totals if totals is not None else counted.sum(1).tolist()
    targets = [
        StepTargets(pick, rows, decay**step / float(divisors[step]) if len(pick) else 0.0)
        for step, (pick, rows) in enumerate(zip(picks, teacher.split([len(p) for p in picks]), strict=True))
    ]
    loss, predicted = ttt_cross_entropy(
        states, targets, drafter.norm.weight, drafter.norm.eps, drafter.lm_head.weight.to(linear.dtype),
        batch.last.index_select(0, speakers), teacher_head,
    )  # fmt: skip
    target_ids = drafter.target_ids
    for step, found_ids in enumerate(predicted):
        chosen[step, found.slots[step][picks[step]]] = target_ids[found_ids]
    return loss, sum(map(len, picks)), StepCounts.of(found, chosen)
