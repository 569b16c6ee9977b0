"""Loss and chained accuracy on the held-out rows, at the end of an epoch."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from eyas.drafter.dataset import Batch, HiddenStates, ahead
from eyas.drafter.objective import StepCounts
from eyas.drafter.packing import best_fit
from eyas.drafter.processes import Processes
from eyas.errors import EyasError


def validate(
    loss: nn.Module, data: HiddenStates, rows: np.ndarray, counted: np.ndarray, processes: Processes, max_tokens: int
) -> dict[str, Any] | None:
    """`rows`, `loss`, `accuracy_by_step`, `acceptance_length` over all held-out rows, or None without any.

    `loss` is a DrafterLoss, as it is spread over the processes; `counted` [rows of data, steps].
    The loss is the mean over all these rows at once, so it does not depend on how they are packed.
    """
    totals = counted[rows].sum(0)
    if not totals.any():
        return None
    batches = best_fit(rows.tolist(), data.lengths, max_tokens)
    # every process makes the same number of passes
    own = [batches[at : at + 1] for at in range(processes.rank, _up(len(batches), processes.count), processes.count)]
    steps = len(totals)
    sums = torch.zeros(1 + 2 * steps, dtype=torch.float64)

    def load(part: list[list[int]]) -> Batch | None:
        return data.batch(part[0]) if part else None

    unsound: list[int] = []
    loss.eval()
    with torch.no_grad():
        for batch in ahead(load, own):
            value, _, counts = loss(batch if batch is None else batch.to(processes.device), totals)
            sums[0] += float(value)
            if batch is not None and not math.isfinite(float(value)):
                unsound += batch.unsound_rows() or batch.row_ids
            sums[1 : 1 + steps] += counts.reached
            sums[1 + steps :] += counts.right
    loss.train()
    sums = processes.sum(sums)
    if not math.isfinite(float(sums[0])):
        found = sorted({row for own_rows in processes.gather(unsound) for row in own_rows})
        processes.first_then_all(lambda: _refuse(float(sums[0]), found))
    counts = StepCounts(sums[1 : 1 + steps].long(), sums[1 + steps :].long())
    return {
        "rows": len(rows),
        "loss": float(sums[0]),
        "accuracy_by_step": counts.accuracy,
        "acceptance_length": counts.acceptance_length(),
    }


def _refuse(loss: float, rows: list[int]) -> NoReturn:
    raise EyasError(
        f"loss {loss} on the held-out rows, in a pass with rows {rows}; where their hidden states hold NaN or infinity,"
        " delete their shards and run snakemake again"
    )


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
