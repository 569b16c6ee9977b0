"""Epoch 0: the drafter before training, from the target's last layer or from random weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint, save_checkpoint
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, require, require_target
from eyas.target.model import config_hash, load_tensors
from eyas.target.tokenizer import TargetReference, text_config
from eyas.vocabulary import VocabularyMap

log = logging.getLogger(__name__)

_LAYER = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj", "input_layernorm", "post_attention_layernorm",
)  # fmt: skip


def load_head(target: TargetReference, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The target's embedding [V, Ht] and head (its `rows`, or all: [D, Ht]), float32; tied ones are one."""
    prefixes = ("model.", "language_model.model.", "model.language_model.", "")
    names = [f"{p}embed_tokens.weight" for p in prefixes]
    heads = ["lm_head.weight", "language_model.lm_head.weight"]
    found = load_tensors(target, names + heads)
    embedding = next((found[name] for name in names if name in found), None)
    if embedding is None:
        raise EyasError(f"target.path: no embedding (…embed_tokens.weight) among the weights of {target.path}")
    tied = bool(getattr(text_config(target), "tie_word_embeddings", False))
    head = next((found[name] for name in heads if name in found), None)
    if head is None and not tied:
        raise EyasError(f"target.path: no head (lm_head.weight) among the weights of {target.path}")
    head = embedding if head is None else head
    return embedding, head if rows is None else head[rows]


def random_weights(shape: DrafterShape, seed: int) -> dict[str, Tensor]:
    """Normal weights (std 0.02), norms at one; the map's tensors are not among them."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in tensor_shapes(shape).items():
        if name in ("d2t", "t2d"):
            continue
        weights[name] = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
    return weights


def _from_target_layer(weights: dict[str, Tensor], shape: DrafterShape, target: TargetReference) -> None:
    """Put the target's last layer into the drafter's, in place.

    The half of q, k and v that reads the state takes the layer's own projections; the half
    that reads the embedding stays small and random. `fc` hands on the highest aux state.
    """
    depth = int(text_config(target).num_hidden_layers)
    prefixes = ("model.", "language_model.model.", "model.language_model.")
    found = load_tensors(target, [f"{p}layers.{depth - 1}.{part}.weight" for p in prefixes for part in _LAYER])
    layer = {name.split(f"layers.{depth - 1}.")[1]: tensor for name, tensor in found.items()}
    places = {f"{part}.weight": f"midlayer.{part}.weight" for part in _LAYER}
    places["input_layernorm.weight"] = "midlayer.hidden_norm.weight"
    for source, place in places.items():
        goal, tensor = weights[place], layer.get(source)
        wide = source.startswith(("self_attn.q", "self_attn.k", "self_attn.v"))
        fits = tensor is not None and tensor.shape == (goal.shape[0], goal.shape[1] // 2) if wide else (
            tensor is not None and tensor.shape == goal.shape
        )  # fmt: skip
        if tensor is None or not fits:
            shape_text = "no such weight" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise EyasError(
                f"model.init: target_layer needs a target whose last layer is Llama-like and of the drafter's sizes,"
                f" but {source} has {shape_text}; set model.init: random"
            )
        if wide:
            goal[:, shape.hidden_size :] = tensor
        else:
            goal.copy_(tensor)
    fc = weights["fc.weight"]
    fc.zero_()
    fc[:, 2 * shape.target_hidden_size :] = torch.eye(shape.hidden_size)


def _final_norm(target: TargetReference) -> Tensor | None:
    found = load_tensors(
        target, [f"{p}norm.weight" for p in ("model.", "language_model.model.", "model.language_model.")]
    )
    return next(iter(found.values()), None)


def initialise(
    target: TargetReference,
    manifest: Manifest,
    mapping: VocabularyMap,
    model_settings: dict[str, Any],
    seed: int,
    output: Path,
    fingerprint: str,
) -> None:
    """Write the epoch-0 checkpoint. Raises EyasError when target, manifest and map do not fit together."""
    config = text_config(target)
    require_target(manifest, config_hash(target), target.path)
    require(manifest, hidden_size=int(config.hidden_size))
    if len(mapping.t2d) != config.vocab_size:
        raise EyasError(
            f"the vocabulary map is for {len(mapping.t2d)} target tokens, the target has {config.vocab_size}"
        )
    shape = DrafterShape.for_target(config, model_settings, len(mapping.d2t), manifest.layers)
    target_ids = torch.from_numpy(mapping.target_ids)
    embedding, head = load_head(target, target_ids)
    weights = random_weights(shape, seed)
    frozen_embedding = shape.hidden_size == shape.target_hidden_size
    if frozen_embedding:
        weights["embed_tokens.weight"] = embedding
    if model_settings["init"] == "target_layer":
        _from_target_layer(weights, shape, target)
        weights["lm_head.weight"] = head.clone()
        norm = _final_norm(target)
        if norm is not None and norm.shape == weights["norm.weight"].shape:
            weights["norm.weight"] = norm
    weights["d2t"] = torch.from_numpy(mapping.d2t.copy())
    weights["t2d"] = torch.from_numpy(mapping.t2d.copy())
    trained = sorted(set(weights) - {"d2t", "t2d"} - ({"embed_tokens.weight"} if frozen_embedding else set()))
    facts = {
        "epoch": 0,
        "step": 0,
        "manifest_digest": manifest.digest,
        "trained": trained,
        "parameters": sum(weights[name].numel() for name in trained),
        "history": [],
    }
    save_checkpoint(Checkpoint(shape, weights, {}, facts), output, fingerprint)
    log.info(
        "Wrote %s: %s; %d trainable parameters, init %s.",
        output,
        shape.describe(),
        facts["parameters"],
        model_settings["init"],
    )
