"""Static-size draft trees, by SGLang's names and rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eyas.decoding.proposers import Draft
from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.decoding.eagle import DrafterCache


@dataclass(frozen=True)
class TreeSize:
    """`steps` drafter steps (the depth), `topk` children and paths a step, `nodes` drafted tokens to verify."""

    steps: int
    topk: int
    nodes: int

    @classmethod
    def of(cls, steps: int, topk: int, draft_tokens: int | None) -> TreeSize:
        """From SGLang's three numbers; its num_draft_tokens counts the root, the last known token, too.

        None: the whole chain for topk 1. Raises EyasError for numbers that make no tree.
        """
        if steps < 1 or topk < 1:
            raise EyasError(f"draft_steps and topk: at least 1 each, not {steps} and {topk}")
        most = topk + (steps - 1) * topk * topk
        if draft_tokens is None:
            if topk > 1:
                raise EyasError(f"draft_tokens: must be given for topk {topk}, between 2 and {most + 1}")
            draft_tokens = steps + 1
        if topk == 1 and draft_tokens != steps + 1:
            raise EyasError(f"draft_tokens: a chain (topk 1) of {steps} steps has {steps + 1}, not {draft_tokens}")
        if not 2 <= draft_tokens <= most + 1:
            raise EyasError(
                f"draft_tokens: {draft_tokens}, but {steps} steps with topk {topk} make 2 to {most + 1}, the root"
                " included"
            )
        return cls(steps, topk, draft_tokens - 1)


def draft_tree(cache: DrafterCache, state: Tensor, target_ids: Tensor, size: TreeSize) -> Draft:
    """Grow a tree on top of the confirmed positions.

    Each step takes the `topk` most probable children of each of the `topk` best paths, by cumulative
    log-probability; of all candidates the `nodes` best stay. A child is never better than its parent
    and stands behind it, so what stays is a tree.

    `state` [1, H]: what `DrafterCache.confirm` returned. `target_ids` int64 [D].
    """
    topk, device = size.topk, state.device
    scores = torch.zeros(1, device=device)  # of the paths that are extended
    nodes = torch.full((1,), -1, device=device)  # their ends, as indices among all candidates
    seen = torch.zeros(1, 0, dtype=torch.bool, device=device)
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # tokens, parents, scores of each step's candidates
    first = 0  # index of a step's first candidate
    for step in range(size.steps):
        best = torch.log_softmax(cache.drafter.logits(state).float(), -1).topk(min(topk, len(target_ids)), -1)
        children = (scores[:, None] + best.values).flatten()
        tokens = target_ids[best.indices].flatten()
        found.append((tokens, nodes.repeat_interleave(best.values.shape[1]), children))
        if step + 1 == size.steps:
            break
        kept = children.topk(min(topk, len(children)))
        path = kept.indices // best.values.shape[1]
        scores, nodes = kept.values, first + kept.indices
        itself = torch.eye(len(path), dtype=torch.bool, device=device)
        seen = torch.cat([seen[path], itself], 1)
        state = cache.step(tokens[kept.indices], state[path], step + 1, seen)
        first += len(children)
    all_tokens, parents, all_scores = (torch.cat(part) for part in zip(*found, strict=True))
    order = all_scores.argsort(descending=True, stable=True)[: size.nodes].sort().values
    place = torch.full((len(all_tokens) + 1,), -1, device=device)  # the last entry is the root's
    place[order] = torch.arange(len(order), device=device)
    above: list[int] = place[parents[order]].tolist()
    depths: list[int] = []
    for parent in above:
        depths.append(1 + (depths[parent] if parent >= 0 else 0))
    return Draft(all_tokens[order].tolist(), above, max(depths))  # few nodes may leave no path of all steps
