"""The target's side of decoding: its cache, the passes that verify drafts, and what stays of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eyas.decoding.proposers import Draft
from eyas.decoding.tree_pass import compact, tree_arguments
from eyas.errors import EyasError
from eyas.extraction.engines.transformers import Capture
from eyas.target.model import TargetModel


class Verifier:
    """One sequence in the target. A context: while it is open, the target's `layers` are captured."""

    def __init__(self, target: TargetModel, layers: Sequence[int], speculative: bool) -> None:
        self.target = target
        self.cache = target.new_cache()
        self.speculative = speculative
        if speculative and hasattr(self.cache, "activate_past_recording"):
            self.cache.activate_past_recording()  # sliding windows keep what a rejected draft pushed out
        self.capture = Capture(target, layers) if layers else None
        self._draft = Draft()
        self._states: Tensor | None = None

    def __enter__(self) -> Verifier:
        if self.capture:
            self.capture.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.capture:
            self.capture.__exit__(kind, value, trace)

    def prefill(self, prompt: Sequence[int]) -> Tensor:
        """Take in the prompt and return the logits [V] after it."""
        hidden = self.target.decode(self._ids(prompt), self.cache)
        if self.speculative and not getattr(self.cache, "is_croppable", True):
            raise EyasError(
                f"{type(self.target.model).__name__} keeps a recurrent state that cannot be put back, so a rejected"
                " draft cannot be taken out of it; decode without a drafter, or measure on a server (engine: sglang)"
            )
        if self.speculative:
            self.cache.crop(0)  # sliding windows forget what no later pass can see
        if self.capture:
            self._states = self.capture.aux()[0]
        logits: Tensor = self.target.head(hidden[:, -1:])[0, 0]
        return logits

    def verify(self, token: int, draft: Draft) -> Tensor:
        """Logits [1 + n, V] after the last known token and after each drafted one; `keep` must follow."""
        places = {} if draft.is_chain else tree_arguments(self.target, self.cache, draft)
        hidden = self.target.decode(self._ids([token, *draft.tokens]), self.cache, **places)
        self._draft = draft
        logits: Tensor = self.target.head(hidden)[0]
        return logits

    def keep(self, path: Sequence[int]) -> None:
        """Leave the last known token and the drafted ones on `path` (indices) in the cache, and nothing else."""
        count = len(self._draft.tokens)
        if self.speculative:
            compact(self.cache, path, count)
            self.cache.crop(len(path) - count)  # negative: how many to remove
        if self.capture:
            self._states = self.capture.aux()[0, [0, *(index + 1 for index in path)]]

    def states(self) -> Tensor | None:
        """The captured states [N, layers * H] of the positions that the last pass left, or None without layers."""
        return self._states

    def _ids(self, tokens: Sequence[int]) -> Any:
        return torch.tensor([list(tokens)], device=self.target.device)
