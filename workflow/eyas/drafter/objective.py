"""What the drafter is trained towards, and how its steps are counted.

Position t of TTT step i predicts the token at t+2+i. It is *supervised* where that token is
supervised and lies in the same row, and *counted* in the loss where besides the target's own
argmax there is in the draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.drafter.dataset import Batch
from eyas.drafter.loss import soft_cross_entropy, teacher_probabilities
from eyas.drafter.model import Drafter, TTTPositions


@dataclass
class Predictions:
    """Where a batch predicts what: S query positions, `steps` predictions each.

    `where`: the S positions; `supervised` bool [steps, S]; `goal` int64 [steps, S]: the
    target's own argmax for the predicted token; `on_path` bool [steps, S]: whether the row
    itself follows the target's argmax up to that step (a drafter that was right so far is then
    still on the row's tokens).
    """

    where: TTTPositions
    supervised: Tensor
    goal: Tensor
    on_path: Tensor


def find_predictions(batch: Batch, steps: int) -> Predictions:
    """Positions that predict any supervised token within `steps`."""
    total = len(batch.tokens)
    ends = torch.empty(total, dtype=torch.long)
    for start, end in batch.spans:
        ends[start:end] = end
    here = torch.arange(total)
    supervised = torch.zeros(steps, total, dtype=torch.bool)
    for step in range(steps):
        predicted = here + 2 + step
        inside = predicted < ends
        supervised[step] = inside & batch.mask.cpu()[predicted.clamp(max=total - 1)]
    flat = supervised.any(0).nonzero()[:, 0]
    supervised = supervised[:, flat]
    ahead = (flat[None] + 1 + torch.arange(steps)[:, None]).clamp(max=total - 1)
    goal = batch.target_token.cpu()[ahead]
    follows = batch.tokens.cpu()[(ahead + 1).clamp(max=total - 1)] == goal
    on_path = torch.cat([torch.ones_like(follows[:1]), follows[:-1]]).cumprod(0).bool()
    in_row = []
    for start, end in batch.spans:
        in_row.append(flat[(flat >= start) & (flat < end)] - start)
    device = batch.tokens.device
    where = TTTPositions(flat.to(device), in_row, batch.spans)
    return Predictions(where, supervised.to(device), goal.to(device), on_path.to(device))


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
    drafter: Drafter, batch: Batch, teacher_head: Tensor, draft_ids: Tensor, steps: int, decay: float
) -> tuple[Tensor, int, StepCounts]:
    """Σ_i decay^i · mean over counted positions of cross-entropy(teacher, step i).

    Args:
        teacher_head: [D, Ht], draft-vocabulary rows of the target's head.
        draft_ids: int64 [V], draft id of each target id, -1 where there is none.

    Returns:
        the loss, the number of counted predictions over all steps, and the chained accuracy.
    """
    found = find_predictions(batch, steps)
    flat = found.where.flat
    states = drafter.ttt_states(batch.aux, batch.tokens, batch.positions, found.where, steps)
    counted = found.supervised & (draft_ids[found.goal] >= 0)
    per_step = counted.sum(1)
    picks = [counted[step].nonzero()[:, 0] for step in range(steps)]
    hidden = torch.cat([state.index_select(0, pick) for state, pick in zip(states, picks, strict=True)])
    if len(hidden) == 0:
        return hidden.sum() * 0.0, 0, StepCounts.of(found, torch.full_like(found.goal, -1))
    # The teacher of (t, i) speaks at t+1+i: once for each such position, not once for each step.
    speaks = torch.cat([flat.index_select(0, pick) + 1 + step for step, pick in enumerate(picks)])
    speakers, teacher_row = speaks.unique(return_inverse=True)
    with torch.no_grad():
        teacher = teacher_probabilities(batch.last.index_select(0, speakers), teacher_head)
    share = [decay**step / max(int(per_step[step]), 1) for step in range(steps)]
    weight = torch.cat([hidden.new_full((len(pick),), share[step]) for step, pick in enumerate(picks)])
    loss, predicted = soft_cross_entropy(drafter.norm(hidden), drafter.lm_head.weight, teacher, teacher_row, weight)
    chosen = torch.full_like(found.goal, -1)
    target_ids = drafter.target_ids
    for step, part in enumerate(predicted.split([len(pick) for pick in picks])):
        chosen[step, picks[step]] = target_ids[part]
    return loss, len(hidden), StepCounts.of(found, chosen)
