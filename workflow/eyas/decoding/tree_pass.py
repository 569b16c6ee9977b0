"""A draft tree in one pass of the target: what each node sees, and what stays in the cache afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas.decoding.proposers import Draft
from eyas.errors import EyasError
from eyas.target.model import TargetModel


def tree_places(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """What each node of a tree sees, and its depth: bool [1 + n, 1 + n] and int64 [1 + n]; node 0 is the root.

    A node sees the root, its ancestors and itself. `parents` [n]: as in `Draft`.
    """
    seen = torch.eye(len(parents) + 1, dtype=torch.bool)
    for index, parent in enumerate(parents):
        seen[index + 1] |= seen[parent + 1]
    return seen, seen.sum(1) - 1


def tree_arguments(target: TargetModel, cache: Any, draft: Draft) -> dict[str, Any]:
    """The target's attention_mask and position_ids for a pass over [last known token, *draft.tokens].

    Masks are added to the scores: [1, 1, 1 + n, keys], one for each kind of layer where there are two.
    """
    seen, depth = (part.to(target.device) for part in tree_places(draft.parents))
    positions = cache.get_seq_length() + depth
    masks: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        kind = "sliding_attention" if layer.is_sliding else "full_attention"
        if kind in masks:
            continue
        length, offset = cache.get_mask_sizes(len(depth), index)
        before = torch.arange(offset, offset + length - len(depth), device=target.device)
        visible = torch.cat([seen.new_ones(len(depth), len(before)), seen], 1)
        if layer.is_sliding:  # a window counts positions, and brothers stand at the same one
            distance = positions[:, None] - torch.cat([before, positions])[None]
            visible &= distance < layer.sliding_window
        dtype = target.head.weight.dtype
        masks[kind] = torch.zeros(visible.shape, dtype=dtype, device=target.device)  # type: ignore[arg-type]
        masks[kind].masked_fill_(~visible, torch.finfo(dtype).min)  # type: ignore[arg-type]
        masks[kind] = masks[kind][None, None]
    mask = next(iter(masks.values())) if len(masks) == 1 else masks
    return {"attention_mask": mask, "position_ids": positions[None]}


def compact(cache: Any, path: Sequence[int], drafted: int) -> None:
    """Move the keys and values of the drafted tokens on `path` in front of those of the other `drafted` ones.

    The drafted tokens' are the last ones in the cache. For a chain nothing moves.
    """
    if list(path) == list(range(len(path))):
        return
    for layer in cache.layers:
        start = layer.keys.shape[-2] - drafted
        places = torch.tensor([start + index for index in path], device=layer.keys.device)
        for states in (layer.keys, layer.values):
            states[..., start : start + len(path), :] = states.index_select(-2, places)


@torch.inference_mode()
def require_trees(target: TargetModel) -> None:
    """Raise EyasError when the target cannot verify a tree; found out once, by verifying one.

    A model may ignore a mask or have layers that read more than keys and values, so a small tree's logits,
    and those after what stays of it, are compared with the same paths in plain passes.
    """
    if target.takes_trees:
        return
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    from eyas.decoding.verify import Verifier

    name = type(target.model).__name__
    kinds = {type(layer) for layer in target.new_cache().layers}
    windows = {layer.sliding_window for layer in target.new_cache().layers if getattr(layer, "is_sliding", False)}
    types = set(getattr(target.config, "layer_types", None) or ())
    if not kinds <= {DynamicLayer, DynamicSlidingWindowLayer} or len(windows) > 1 or "chunked_attention" in types:
        raise EyasError(
            f"topk: {name} has layers that cannot take a tree of drafted tokens (its cache is not keys and values of"
            " full or sliding attention); use topk: 1"
        )

    def plain(tokens: list[int]) -> Tensor:
        hidden = target.decode(torch.tensor([tokens], device=target.device), target.new_cache())
        logits: Tensor = target.head(hidden[0, -1])
        return logits.float()

    prompt, root, draft, path = [1, 2, 3, 4], 5, Draft([1, 2, 3, 4, 5], [-1, -1, 1, 0, 1], 2), [1, 4]
    try:
        with Verifier(target, (), speculative=True) as verifier:
            verifier.prefill(prompt)
            found = [*verifier.verify(root, draft).float()]
            verifier.keep(path)
            found += [*verifier.verify(0, Draft()).float()]
    except EyasError:
        raise
    except Exception as exc:  # a model that takes no such mask fails in its own way
        reason = " ".join(str(exc).split())[:200]
        raise EyasError(f"topk: {name} cannot take a tree of drafted tokens ({reason}); use topk: 1") from None
    paths = [[5], [5, 1], [5, 2], [5, 2, 3], [5, 1, 4], [5, 2, 5], [5, 2, 5, 0]]
    for logits, tokens in zip(found, paths, strict=True):
        expected = plain([*prompt, *tokens])
        if not float((logits - expected).abs().max()) <= 0.02 * float(expected.abs().max()):
            raise EyasError(f"topk: {name} does not keep the paths of a tree of drafted tokens apart; use topk: 1")
    target.takes_trees = True
