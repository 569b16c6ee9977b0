"""What runs the target's prefill, as the shard's writer sees it."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass
class CapturedRow:
    """States of one sequence: `aux` [T, 3·H], `last` [T, H] (after the final norm), `target_token` int32 [T]."""

    aux: torch.Tensor
    last: torch.Tensor
    target_token: np.ndarray

    def release(self) -> None:
        """The states are written: what they were read from can go."""


@dataclass
class FailedRow:
    """Why a sequence has no states."""

    reason: str

    def release(self) -> None:
        """Nothing to let go of."""


Captured = CapturedRow | FailedRow


class Engine(Protocol):
    """Captures hidden states of sequences. `journal_seconds`: how much finished work a kill may cost."""

    journal_seconds: float

    @property
    def way(self) -> dict[str, Any]:
        """What a shard that is resumed must have been begun with."""

    def begin(self) -> None:
        """Load the target, or start its server, where that is not done yet: nothing that counts as speed."""

    def capture(
        self, name: str, sequences: Sequence[np.ndarray], finished: frozenset[int]
    ) -> Generator[list[tuple[int, Captured]], None, None]:
        """States of `sequences` (ids int32 [T]) of shard `name`, in any order, some at a time, by their index.

        Those in `finished` are there from before; an engine may capture some of them again.
        """

    def close(self) -> None:
        """Let go of the target."""
