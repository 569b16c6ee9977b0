"""The target's embedding and head, read without loading the model."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.target.tokenizer import TargetReference, text_config
from eyas.target.weights import load_tensors, stored_names

# Where targets keep their text decoder, and their head.
_DECODERS = ("model.", "language_model.model.", "model.language_model.", "")
_HEADS = ("lm_head.", "language_model.lm_head.")


def embedding_and_head(target: TargetReference) -> tuple[str, str]:
    """Stored names of the embedding and of the head (the same one where they are tied); raises EyasError."""
    names = stored_names(target)

    def find(stems: list[str]) -> str | None:
        # By the stem: a quantised weight may have other names beside it only, and is refused as it is read.
        return next((f"{stem}weight" for stem in stems if any(name.startswith(stem) for name in names)), None)

    embedding, head = find([f"{prefix}embed_tokens." for prefix in _DECODERS]), find(list(_HEADS))
    if embedding is None:
        raise EyasError(f"target.path: no embedding (…embed_tokens.weight) among the weights of {target.path}")
    if head is None and not getattr(text_config(target), "tie_word_embeddings", False):
        raise EyasError(f"target.path: no head (lm_head.weight) among the weights of {target.path}")
    return embedding, head or embedding


def _load(target: TargetReference, name: str, dtype: torch.dtype | None = None, rows: Tensor | None = None) -> Tensor:
    advice = "name a copy of the target whose embedding and head are not quantised"
    found = load_tensors(target, [name], dtype, rows, advice)
    if name not in found:
        raise EyasError(f"target.path: no {name} among the weights of {target.path}")
    return found[name]


def load_head(target: TargetReference, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The target's embedding [V, Ht], in its stored dtype, and its head (its `rows`, or all: [D, Ht]), float32.

    The embedding is memory-mapped. Raises EyasError where either is missing or quantised.
    """
    embedding, head = embedding_and_head(target)
    return _load(target, embedding), _load(target, head, torch.float32, rows)


def load_teacher_head(target: TargetReference, rows: Tensor) -> Tensor:
    """The `rows` (int64 [D]) of the target's head: float32 [D, Ht]. Reads nothing else; raises EyasError."""
    return _load(target, embedding_and_head(target)[1], torch.float32, rows)


def load_whole_head(target: TargetReference) -> Tensor:
    """The target's head [V, Ht] in its stored dtype, memory-mapped; raises EyasError as :func:`load_head` does."""
    return _load(target, embedding_and_head(target)[1])
