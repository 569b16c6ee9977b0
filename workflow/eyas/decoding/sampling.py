"""Choosing tokens, greedily or by temperature, and the rule that keeps drafted ones from changing the outcome.

The rule is speculative sampling (Leviathan et al. 2023, Chen et al. 2023), for several candidates at a
place as in SpecInfer (Miao et al. 2024) and EAGLE: candidates are tried in turn, and what a rejected
one stood for is taken out of the target's distribution before the next is tried. Whatever drafts, a
token that comes out is distributed as the target's own.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.errors import EyasError

if TYPE_CHECKING:
    from eyas.decoding.proposers import Draft

Odds = NDArray[np.float64]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: `temperature` 0 is greedy; else from softmax(logits / temperature), by `seed`."""

    temperature: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature and not 1e-3 <= self.temperature <= 100.0:
            raise EyasError(f"temperature: {self.temperature} is neither 0 (greedy) nor between 0.001 and 100")


class Sampler:
    """Makes the choices of one sequence; the same seed makes the same ones."""

    def __init__(self, sampling: Sampling) -> None:
        self.temperature = sampling.temperature
        self.random = random.Random(sampling.seed)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def odds(self, logits: Tensor) -> Odds:
        """The distribution [..., V] at this temperature."""
        odds: Odds = torch.softmax(logits.double() / self.temperature, -1).cpu().numpy()
        return odds

    def draw(self, odds: Odds) -> int:
        """An index by its weight in `odds` [V], whose sum may be anything above 0."""
        sums = odds.cumsum()
        index = int(sums.searchsorted(self.random.random() * sums[-1], side="right"))
        # the product may be rounded up to the very sum
        return index if index < len(odds) else int(odds.nonzero()[0][-1])

    def choose(self, logits: Tensor) -> int:
        """The token after `logits` [V]."""
        return int(logits.argmax()) if self.greedy else self.draw(self.odds(logits))

    def follow(self, draft: Draft, logits: Tensor) -> tuple[list[int], int]:
        """The drafted tokens that stand (their indices, a path from the root), and the target's own after them.

        `logits` [1 + n, V]: the target's after the last known token and after each drafted one.
        """
        children = draft.children()
        path: list[int] = []
        own = logits.argmax(-1).tolist() if self.greedy else []
        while True:
            node = path[-1] if path else -1
            here = children.get(node, [])
            candidates = [draft.tokens[index] for index in here]
            if self.greedy:
                token = own[node + 1]
                place = candidates.index(token) if token in candidates else None
            else:
                drawn_from = draft.odds[here[0]] if here and draft.odds else None
                place, token = self.accept(self.odds(logits[node + 1]), candidates, drawn_from)
            if place is None:
                return path, token
            path.append(here[place])

    def accept(self, target: Odds, candidates: Sequence[int], drawn_from: Odds | None) -> tuple[int | None, int]:
        """Which of `candidates` stands (its place, None for none of them), and the token: it, or a drawn one.

        Args:
            target: [V], the target's distribution.
            candidates: distinct tokens.
            drawn_from: [V], the distribution that they were drawn from, one after another without
                replacement; None when they were given without any chance.
        """
        for place, token in enumerate(candidates):
            chance = float(target[token]) if drawn_from is None else float(target[token] / drawn_from[token])
            if self.random.random() < chance:
                return place, token
            if drawn_from is None:
                rest = target.copy()
                rest[token] = 0.0
            else:
                rest = np.maximum(target - drawn_from, 0.0)
            total = rest.sum()
            if total <= 0.0:  # nothing else is possible: the chance was 1 but for rounding
                return place, token
            target = rest / total
            if drawn_from is not None and place + 1 < len(candidates):
                drawn_from = drawn_from.copy()
                drawn_from[token] = 0.0
                drawn_from /= drawn_from.sum()
        return None, self.draw(target)
