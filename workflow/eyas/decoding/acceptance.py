"""Acceptance figures of decoded outputs."""

from __future__ import annotations

from collections.abc import Iterable

from eyas.decoding.decode import Round

DEFINITION = (
    "acceptance_length: 1 + drafted tokens accepted per target forward pass after the prefill."
    " acceptance_by_step[i]: share of the rounds in which draft step i (0-based; the depth, in a tree) was accepted,"
    " among those in which it was on offer, all earlier steps were accepted, and the output did not end before it"
    " was decided"
)


class StepAcceptance:
    """How often each draft step was decided, and how often it was accepted."""

    def __init__(self, steps: int) -> None:
        self.decided, self.right = [0] * steps, [0] * steps
        self.rounds = self.accepted = 0

    def add(self, rounds: Iterable[Round]) -> None:
        for round in rounds:
            self.rounds += 1
            self.accepted += round.accepted
            # the step after the accepted ones was rejected, unless the output ended with the last accepted one
            decided = round.accepted if round.cut else min(round.accepted + 1, round.depth)
            for step in range(decided):
                self.decided[step] += 1
                self.right[step] += step < round.accepted

    @property
    def by_step(self) -> list[float | None]:
        """The share by step; None for a step that was never decided."""
        return [right / n if n else None for right, n in zip(self.right, self.decided, strict=True)]

    @property
    def length(self) -> float | None:
        """The acceptance length; None without a round."""
        return 1 + self.accepted / self.rounds if self.rounds else None
