"""Acceptance from hidden states: chained accuracy on held-out rows, no target needed."""

from __future__ import annotations

import torch

from eyas.drafter.dataset import HiddenStates
from eyas.drafter.model import Drafter
from eyas.drafter.objective import StepCounts, find_predictions
from eyas.drafter.packing import best_fit

# Positions whose draft-vocabulary logits exist at the same time.
_CHUNK = 1024

DEFINITION = (
    "accuracy_by_step[i]: share of draft step i (0-based) that equals the target's own argmax, among supervised"
    " positions whose earlier steps were all right and whose row follows the target's argmax up to there;"
    " tokens outside the draft vocabulary count as wrong."
    " expected_acceptance_length for a chain of n: 1 + sum over i < n of the product of the first i+1 accuracies"
)


@torch.inference_mode()
def chained_accuracy(
    drafter: Drafter, data: HiddenStates, rows: list[int], steps: int, batch_tokens: int = 4096
) -> StepCounts:
    """Count, over the rows at positions `rows` of `data`, how often the drafter's chain meets the target's argmax."""
    device = drafter.d2t.device
    target_ids = drafter.target_ids
    counts = StepCounts.zero(steps)
    for indices in best_fit(rows, data.lengths, batch_tokens):
        batch = data.batch(indices).to(device)
        found = find_predictions(batch, steps)
        states = drafter.ttt_states(batch.aux, batch.tokens, batch.positions, found.where)
        chosen = torch.full_like(found.goal, -1)
        for step, (state, slots) in enumerate(zip(states, found.slots, strict=True)):
            for part, places in zip(state.split(_CHUNK), slots.split(_CHUNK), strict=True):
                chosen[step, places] = target_ids[drafter.logits(part).argmax(-1)]
        counts += StepCounts.of(found, chosen)
    return counts
