"""Any EAGLE-3 drafter, ready to draft: a checkpoint or export of Eyas, or a published head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from eyas.drafter.checkpoint import build_drafter
from eyas.drafter.imported import (
    UnusableDrafter,
    import_drafter,
    layers_of,
    open_drafter,
    read_drafter_config,
    reading,
)  # fmt: skip
from eyas.drafter.model import Drafter
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.target.model import TargetModel


def _shape_of(folder: Path, config: dict[str, Any], target: TargetModel, layers: tuple[int, ...]) -> DrafterShape:
    """The drafter's own sizes, from its tensors where they tell; the vocabulary is the target's."""
    stored = open_drafter(folder)
    with reading(folder):
        shapes = {}
        for name in stored.files:
            shapes[name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name] = stored.shape(
                name
            )
    needed = ["norm.weight", "fc.weight", "lm_head.weight", "midlayer.mlp.gate_proj.weight"]
    needed += [f"midlayer.self_attn.{part}_proj.weight" for part in ("q", "k")]
    if any(len(shapes.get(name, ())) != (1 if name == "norm.weight" else 2) for name in needed):
        missing = [name for name in needed if name not in shapes] or needed
        raise UnusableDrafter(folder, f"lacks {', '.join(missing)}; take a one-layer Llama-like EAGLE-3 drafter")
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise UnusableDrafter(folder, "its config.json has no num_attention_heads; copy the drafter's own there")
    q, kv = (shapes[f"midlayer.self_attn.{part}_proj.weight"][0] for part in ("q", "k"))
    head_dim = config.get("head_dim") or max(q // heads, 1)
    rope = config.get("rope_parameters") or {}
    return DrafterShape(
        vocab_size=int(target.config.vocab_size),
        draft_vocab_size=shapes["lm_head.weight"][0],
        hidden_size=shapes["norm.weight"][0],
        target_hidden_size=int(target.config.hidden_size),
        intermediate_size=shapes["midlayer.mlp.gate_proj.weight"][0],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or max(kv // head_dim, 1),
        head_dim=head_dim,
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),  # Llama's own default
        rope_theta=float(config.get("rope_theta") or rope.get("rope_theta") or 10000.0),
        max_position_embeddings=int(config.get("max_position_embeddings") or 2048),
        layers=layers,
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        norm_before_residual=bool(config.get("norm_before_residual")),
    )


def _load(folder: Path, target: TargetModel) -> Drafter:
    open_drafter(folder)  # says what is missing
    config = read_drafter_config(folder)
    depth = len(target.layers)
    try:
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if (kind := scaling.get("rope_type") or scaling.get("type") or "default") != "default":
            raise UnusableDrafter(folder, f"its rope_scaling is {kind}, and Eyas's drafter turns positions without one")
        model_type = str(target.config.model_type)
        layers = layers_of(folder, config, model_type, depth)
        shape = _shape_of(folder, config, target, layers)
        exist = len(layers) == 3 and all(0 <= layer < depth for layer in layers)
    except (AttributeError, TypeError, ValueError) as exc:
        raise UnusableDrafter(folder, f"config.json is not one of an EAGLE-3 drafter ({exc})") from None
    if not exist:
        raise UnusableDrafter(
            folder, f"it reads the outputs of layers {list(layers)}, and the target has layers 0 to {depth - 1}"
        )
    imported = import_drafter(folder, shape, depth, model_type)
    weights = dict(imported.weights)
    if "embed_tokens.weight" not in weights:  # of the target's width: servers share the target's
        weights["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().to("cpu", torch.bfloat16)
    weights["lm_head.weight"] = imported.lm_head.float()
    weights["d2t"] = imported.target_ids - torch.arange(len(imported.target_ids))
    weights["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
    weights["t2d"][imported.target_ids] = True
    return build_drafter(shape, weights)


def load_any_drafter(folder: Path, target: TargetModel) -> Drafter:
    """The drafter in `folder` as a server would run it on `target`, float32 on the CPU.

    Names as SGLang's (`midlayer.…`), vLLM's (`layers.0.…`) or speculators'; draft vocabulary from its own `d2t`;
    `shape.layers` in Eyas's counting. Raises EyasError when it is damaged or not one for this target.
    """
    try:
        return _load(folder, target)
    except UnusableDrafter as exc:
        raise EyasError(f"{exc.folder}: {exc.what}") from None
