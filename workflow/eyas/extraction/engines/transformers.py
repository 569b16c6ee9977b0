"""The transformers engine: prefill in-process, outputs of three layers captured by hooks."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from types import TracebackType
from typing import Any

import numpy as np
import torch

from eyas.errors import EyasError
from eyas.extraction.engines.base import Captured, CapturedRow
from eyas.target.model import TargetModel, load_target
from eyas.target.tokenizer import TargetReference

# Tokens whose [tokens, vocabulary] logits are held at once for the argmax.
_LOGIT_TOKENS = 1024


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut rows into batches of at most `batch_tokens` padded tokens, alike in length.

    Depends on the lengths alone, so that a resumed job makes the same batches. A row that is
    longer than `batch_tokens` gets a batch of its own.
    """
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    batches: list[list[int]] = []
    for index in order:  # ascending, so the row at hand is the widest of its batch
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


class Capture:
    """Captures outputs of decoder layers `layers` (0-based ids) of a target's forward passes."""

    def __init__(self, target: TargetModel, layers: Sequence[int]) -> None:
        if max(layers) >= len(target.layers):
            raise EyasError(
                f"extraction.layers: {list(layers)} reaches outside the target, whose layers are 0 to"
                f" {len(target.layers) - 1}"
            )
        self.target = target
        self.layers = list(layers)
        self.states: dict[int, torch.Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> Capture:
        for layer in self.layers:
            self._handles.append(self.target.layers[layer].register_forward_hook(self._keep(layer)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _keep(self, layer: int) -> Any:
        def hook(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            self.states[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    def aux(self) -> torch.Tensor:
        """The captured outputs of the last pass, concatenated: [B, T, 3·H]."""
        device = self.states[self.layers[-1]].device
        return torch.cat([self.states[layer].to(device) for layer in self.layers], -1)


@torch.inference_mode()
def check_head(target: TargetModel) -> None:
    """Raise EyasError unless head(last hidden state) gives the target's logits.

    Drafters learn from logits recomputed that way; a model that scales or caps them
    elsewhere would teach something else in silence.
    """
    ids = torch.arange(1, 6, device=target.device)[None]
    hidden = target.decoder(input_ids=ids, use_cache=False).last_hidden_state
    expected = target.model(input_ids=ids, use_cache=False).logits.float()
    logits = target.head(hidden).float()
    scale = float(expected.abs().max()) + 1e-6
    expected = expected.to(logits.device)
    if float((logits - expected).abs().max()) > 0.02 * scale:
        raise EyasError(
            f"target.path: {type(target.model).__name__} does more to its logits than multiply the last hidden state"
            " by the head (a cap or a scale); such targets are not supported yet"
        )


@torch.inference_mode()
def capture_rows(
    target: TargetModel, layers: Sequence[int], rows: Sequence[np.ndarray], batches: Sequence[Sequence[int]]
) -> Generator[list[tuple[int, Captured]], None, None]:
    """Run each batch of `rows` (ids int32 [T]) and yield its captured rows with their indices.

    Rows are padded on the right: every position sees only those before it, so no state of a
    row depends on the padding, and the padding is cut away. Batches of one length have none.
    """
    with Capture(target, layers) as capture:
        for batch in batches:
            width = max(len(rows[i]) for i in batch)
            ids = torch.zeros(len(batch), width, dtype=torch.long)
            for b, index in enumerate(batch):
                ids[b, : len(rows[index])] = torch.from_numpy(np.array(rows[index], dtype=np.int64))
            last = target.decoder(input_ids=ids.to(target.device), use_cache=False).last_hidden_state
            aux = capture.aux()
            result: list[tuple[int, Captured]] = []
            for b, index in enumerate(batch):
                length = len(rows[index])
                states = last[b, :length]
                tokens = torch.cat([target.head(part).argmax(-1) for part in states.split(_LOGIT_TOKENS)])
                result.append(
                    (index, CapturedRow(aux[b, :length].cpu(), states.cpu(), tokens.to("cpu", torch.int32).numpy()))
                )
            yield result


class TransformersEngine:
    """Prefill in this process, in batches of at most `batch_tokens` padded tokens. The target is loaded once."""

    journal_seconds = 0.0  # every batch

    def __init__(self, target: TargetReference, layers: Sequence[int], batch_tokens: int, gpus: int) -> None:
        self.target, self.layers, self.gpus = target, list(layers), gpus
        self.batch_tokens = batch_tokens
        self._model: TargetModel | None = None

    @property
    def way(self) -> dict[str, Any]:
        """Rows of other batches differ in their last bits: a shard is not resumed with another size."""
        return {"batch_tokens": self.batch_tokens}

    def begin(self) -> None:
        if self._model is None:
            self._model = load_target(self.target, self.gpus)
            check_head(self._model)

    def capture(
        self, name: str, sequences: Sequence[np.ndarray], finished: frozenset[int]
    ) -> Generator[list[tuple[int, Captured]], None, None]:
        """Batches that are not wholly among the `finished` indices; see `engines.base.Engine`."""
        batches = plan_batches([len(ids) for ids in sequences], self.batch_tokens)
        missing = [batch for batch in batches if not finished.issuperset(batch)]
        if missing:
            self.begin()
            assert self._model
            yield from capture_rows(self._model, self.layers, sequences, missing)

    def close(self) -> None:
        self._model = None
