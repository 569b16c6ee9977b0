"""What drafts tokens for the target to verify: the interface that decoding knows, and what a draft is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from eyas.decoding.sampling import Odds, Sampler


@dataclass(frozen=True)
class Draft:
    """Drafted tokens that may follow the last known one: a chain or a tree.

    `tokens` [n]: parents stand before their children, siblings in the order in which they are tried.
    `parents` [n]: the index of each one's parent, -1 for the last known token.
    `depth`: how many steps were on offer; a round in which fewer are accepted rejected one.
    `odds` [n]: the distribution [V] that each token was drawn from (siblings: the first one's, the next
    drawn from what it leaves). None where no token was drawn: all of them follow from what is before them.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depth: int = 0
    odds: list[Odds] | None = None

    @classmethod
    def chain(cls, tokens: list[int], odds: list[Odds] | None = None) -> Draft:
        return cls(tokens, list(range(-1, len(tokens) - 1)), len(tokens), odds)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self.parents) - 1))

    def children(self) -> dict[int, list[int]]:
        """The indices of each node's children, by the node's own index (-1: the last known token)."""
        found: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(index)
        return found


class Drafting(Protocol):
    """The drafting of one sequence."""

    def draft(self, states: Tensor | None, tokens: list[int]) -> Draft:
        """Take in what is known since the last call, and draft on.

        Args:
            states: [N, layers * H], the target's states at the N new positions; None without `layers`.
            tokens: [N], the token that follows each of them. On the first call the positions are the
                prompt's, so the first token is the prompt's second one and the last the first of the answer.
        """
        ...


class Proposer(Protocol):
    """Drafts tokens. One serves any number of sequences, one after another."""

    @property
    def layers(self) -> Sequence[int]:
        """The target's layers whose outputs it reads (0-based), or none."""
        ...

    @property
    def trees(self) -> bool:
        """Whether its drafts may be trees, which not every target can take."""
        ...

    def begin(self, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Drafting: ...
