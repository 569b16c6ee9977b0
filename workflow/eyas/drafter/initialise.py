"""Epoch 0: the drafter before training, from a layer of the target, from another drafter, or random."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint, save_checkpoint
from eyas.drafter.imported import import_drafter
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, require, require_target
from eyas.target.head import embedding_and_head, load_head
from eyas.target.model import target_identity
from eyas.target.tokenizer import TargetReference, text_config
from eyas.target.weights import load_tensors, stored_names
from eyas.vocabulary import VocabularyMap

log = logging.getLogger(__name__)

_PROJECTIONS = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
# Their norms multiply by 1 + weight (transformers 5.24), the drafter's by its weight.
_NORMS_AROUND_ONE = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "qwen3_next", "qwen3_5_text", "muse_glimmer_text",
    "muse_spark_text", "step3p5", "step3p7", "minimax_m3_vl_text",
}  # fmt: skip


def random_weights(shape: DrafterShape, seed: int, embedding: bool = True) -> dict[str, Tensor]:
    """Normal weights (std 0.02), norms at one, float32; the map's tensors are not among them.

    Without `embedding` there is no `embed_tokens.weight`, which is the largest; the others are the same.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, size in tensor_shapes(shape).items():  # the embedding comes last: no other draws change without it
        if name in ("d2t", "t2d") or (name == "embed_tokens.weight" and not embedding):
            continue
        weights[name] = torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.02
    return weights


def _norm_places(names: set[str]) -> dict[str, str]:
    """The drafter's norms by the target layer's: what each normalises is what counts, not its name."""
    # Where a layer also normalises what comes out of its blocks, "post attention" is that, and has no place here.
    before_mlp = "pre_feedforward_layernorm.weight"
    if before_mlp not in names:
        before_mlp = "post_attention_layernorm.weight"
    return {
        "input_layernorm.weight": "midlayer.hidden_norm.weight",
        before_mlp: "midlayer.post_attention_layernorm.weight",
    }


def _from_target_layer(
    weights: dict[str, Tensor], shape: DrafterShape, target: TargetReference, layer: int | None
) -> None:
    """Put a layer of the target (null: its last one) and its final norm into the drafter's, in place.

    The half of q, k and v that reads the state takes the layer's own projections; the half
    that reads the embedding stays small and random. `fc` hands on the highest aux state.
    What the drafter has no place for is named in one warning.
    """
    config = text_config(target)
    depth = int(config.num_hidden_layers)
    layer = depth - 1 if layer is None else layer
    if not 0 <= layer < depth:
        raise EyasError(f"model.init_layer: {layer} is no layer of the target, whose layers are 0 to {depth - 1}")
    decoder = embedding_and_head(target)[0].removesuffix("embed_tokens.weight")
    prefix = f"{decoder}layers.{layer}."
    names = {name.removeprefix(prefix) for name in stored_names(target) if name.startswith(prefix)}
    places = {f"{part}.weight": f"midlayer.{part}.weight" for part in _PROJECTIONS} | _norm_places(names)
    final_norm = f"{decoder}norm.weight"
    found = load_tensors(target, [*(prefix + name for name in places), final_norm], advice="set model.init: random")
    around_one = float(config.model_type in _NORMS_AROUND_ONE)
    for source, place in places.items():
        goal, tensor = weights[place], found.get(prefix + source)
        wide = source.startswith(("self_attn.q", "self_attn.k", "self_attn.v"))
        expected = (goal.shape[0], shape.hidden_size) if wide else tuple(goal.shape)
        if tensor is None or tuple(tensor.shape) != expected:
            has = "is not there" if tensor is None else f"has the shape {tuple(tensor.shape)}, not {expected}"
            raise EyasError(
                "model.init: target_layer needs a layer of the target that is Llama-like and of the drafter's sizes,"
                f" but {source} of layer {layer} {has}; set model.init: random"
            )
        if wide:
            goal[:, shape.hidden_size :] = tensor
        else:
            goal.copy_(tensor if tensor.dim() > 1 else tensor.float() + around_one)
    fc = weights["fc.weight"]
    fc.zero_()
    fc[:, 2 * shape.target_hidden_size :] = torch.eye(shape.hidden_size)
    norm = found.get(final_norm)
    if norm is not None and norm.shape == weights["norm.weight"].shape:
        weights["norm.weight"] = norm.float() + around_one
    _warn_of_what_is_left_out(target, layer, names - set(places), config)


def _warn_of_what_is_left_out(target: TargetReference, layer: int, names: set[str], config: Any) -> None:
    left_out = sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))  # a constant
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "silu"
    if activation not in ("silu", "swish"):
        left_out.append(f"the activation {activation} (the drafter's is silu)")
    if left_out:
        log.warning(
            "Layer %d of %s has parts that the drafter has no place for; they are left out, and training has to make"
            " up for them: %s.", layer, target.path, ", ".join(left_out),
        )  # fmt: skip


def initialise(
    target: TargetReference,
    manifest: Manifest,
    mapping: VocabularyMap,
    model_settings: dict[str, Any],
    seed: int,
    output: Path,
    fingerprint: str,
) -> None:
    """Write the epoch-0 checkpoint. `model_settings`: the fields of config.DrafterModel.

    Raises EyasError when target, manifest, map and what the drafter starts from do not fit together.
    """
    config = text_config(target)
    require_target(manifest, target_identity(target))
    require(manifest, hidden_size=int(config.hidden_size))
    if len(mapping.t2d) != config.vocab_size:
        raise EyasError(
            f"the vocabulary map is for {len(mapping.t2d)} target tokens, the target has {config.vocab_size}"
        )
    shape = DrafterShape.for_target(config, model_settings, len(mapping.d2t), manifest.layers)
    target_ids = torch.from_numpy(mapping.target_ids)
    # Read whatever the start is: a head that the trainer cannot use is better refused now.
    embedding, head = load_head(target, target_ids)
    frozen_embedding = shape.hidden_size == shape.target_hidden_size
    weights = random_weights(shape, seed, embedding=not frozen_embedding)
    if frozen_embedding:
        weights["embed_tokens.weight"] = embedding
    if model_settings["init"] == "target_layer":
        _from_target_layer(weights, shape, target, model_settings.get("init_layer"))
        weights["lm_head.weight"] = head
    elif model_settings["init"] == "checkpoint":
        if frozen_embedding:
            weights["lm_head.weight"] = head  # of the draft ids that the other drafter does not have
        depth, model_type = int(config.num_hidden_layers), str(config.model_type)
        start = import_drafter(Path(model_settings["init_from"]), shape, depth, model_type)
        start.put_into(weights, target_ids)
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
