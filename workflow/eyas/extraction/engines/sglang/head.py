"""The target's own next token at every position, from its last hidden states."""

from __future__ import annotations

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.target.head import load_whole_head
from eyas.target.tokenizer import TargetReference, text_config

# What a model may do to its logits besides the head's product.
_MORE = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_LOGITS = 1 << 27  # [tokens, vocabulary] values at once


class TargetHead:
    """The target's head, in its dtype, on a GPU of this job if it has one."""

    def __init__(self, target: TargetReference, gpus: int) -> None:
        config = text_config(target)
        for name in _MORE:
            value = getattr(config, name, None)
            if value not in (None, 1, 1.0):
                raise EyasError(
                    f"target.path: {target.path} does more to its logits than multiply the last hidden state"
                    f" by the head ({name}: {value}); such targets are not supported yet"
                )
        self.device = torch.device("cuda" if gpus and torch.cuda.is_available() else "cpu")
        self.dtype = getattr(torch, target.dtype) if self.device.type == "cuda" else torch.float32
        self._weight = load_whole_head(target).to(self.device, self.dtype)

    @torch.inference_mode()
    def best(self, states: torch.Tensor) -> np.ndarray:
        """Argmax of the logits of `states` [T, H]: int32 [T]."""
        step = max(_LOGITS // len(self._weight), 1)
        found = [self._logits(part).argmax(-1).to(torch.int32).cpu() for part in states.split(step)]
        return torch.cat(found).numpy()

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        return states.to(self.device, self.dtype) @ self._weight.T

    @torch.inference_mode()
    def require_same(self, states: torch.Tensor, token: int | None) -> None:
        """Raise EyasError unless `token` is what a greedy target would write behind `states` [T, H]."""
        logits = self._logits(states[-1:]).float()[0]
        if token is None or not 0 <= token < len(logits):
            raise EyasError(f"extraction.sglang: the server answers a probe with token {token}")
        best, spread = float(logits.max()), float(logits.max() - logits.mean())
        if best - float(logits[token]) > 0.02 * spread + 1e-5:
            raise EyasError(
                f"extraction.sglang: the server writes token {token} behind a probe, the head gives"
                f" {int(logits.argmax())} from the captured state; its states are not those of {states.shape[-1]}-wide"
                " last layer of this target"
            )
