"""Any EAGLE-3 drafter, ready to draft: a checkpoint or export of Eyas, or a published head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eyas.drafter.checkpoint import FACTS, build_drafter
from eyas.drafter.imported import UnusableDrafter, import_drafter, open_drafter, read_drafter_config, reading
from eyas.drafter.model import Drafter
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.target.model import TargetModel

# Targets for which SGLang 0.5.23 adds 1 to layer ids only when the first of them is 1.
_DEEPSEEK_LIKE = ("deepseek", "kimi")
_OWN_CHECKPOINT = (FACTS, "selection.json")


def layers_of(folder: Path, config: dict[str, Any], model_type: str, depth: int) -> tuple[int, ...]:
    """The layers that a drafter reads, in Eyas's counting (id j is the output of decoder layer j).

    `config`: see `read_drafter_config`, which has turned the ids of vLLM's and speculators' form already.
    `model_type` and `depth` (decoder layers) are the target's. A checkpoint of Eyas counts as Eyas does, all other
    folders as SGLang, which captures the input of a layer: for Llama-like targets it adds 1 to the ids itself, for
    DeepSeek-like ones only to a list that begins with 1.
    """
    ids = config["layers"]
    if not ids:  # what servers capture for heads that name none: the inputs of layers 2, n//2 and n-3
        return (1, depth // 2 - 1, depth - 4)
    if config["counted_from_zero"] or any((folder / name).is_file() for name in _OWN_CHECKPOINT):
        return tuple(ids)
    if model_type.lower().startswith(_DEEPSEEK_LIKE) and ids[0] != 1:
        return tuple(layer - 1 for layer in ids)
    return tuple(ids)


def _shape_of(folder: Path, config: dict[str, Any], target: TargetModel) -> DrafterShape:
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
        # as written: `layers_of` says what they mean
        layers=tuple(config["layers"] or (1, len(target.layers) // 2 - 1, len(target.layers) - 4)),
        bos_token_id=config.get("bos_token_id"),
        eos_token_id=config.get("eos_token_id"),
        pad_token_id=config.get("pad_token_id"),
    )


def _load(folder: Path, target: TargetModel) -> Drafter:
    open_drafter(folder)  # says what is missing
    config = read_drafter_config(folder)
    depth = len(target.layers)
    try:
        scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if (kind := scaling.get("rope_type") or scaling.get("type") or "default") != "default":
            raise UnusableDrafter(folder, f"its rope_scaling is {kind}, and Eyas's drafter turns positions without one")
        shape = _shape_of(folder, config, target)
        layers = layers_of(folder, config, str(target.config.model_type), depth)
        exist = len(layers) == 3 and all(0 <= layer < depth for layer in layers)
    except (AttributeError, TypeError, ValueError) as exc:
        raise UnusableDrafter(folder, f"config.json is not one of an EAGLE-3 drafter ({exc})") from None
    if not exist:
        raise UnusableDrafter(
            folder, f"it reads the outputs of layers {list(layers)}, and the target has layers 0 to {depth - 1}"
        )
    imported = import_drafter(folder, shape, depth)
    weights = dict(imported.weights)
    if "embed_tokens.weight" not in weights:  # of the target's width: servers share the target's
        weights["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().to("cpu", torch.bfloat16)
    weights["lm_head.weight"] = imported.lm_head.float()
    weights["d2t"] = imported.target_ids - torch.arange(len(imported.target_ids))
    weights["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
    weights["t2d"][imported.target_ids] = True
    return build_drafter(replace(shape, layers=layers), weights)


def load_any_drafter(folder: Path, target: TargetModel) -> Drafter:
    """The drafter in `folder` as a server would run it on `target`, float32 on the CPU.

    Names as SGLang's (`midlayer.…`), vLLM's (`layers.0.…`) or speculators'; draft vocabulary from its own `d2t`;
    `shape.layers` in Eyas's counting. Raises EyasError when it is damaged or not one for this target.
    """
    try:
        return _load(folder, target)
    except UnusableDrafter as exc:
        raise EyasError(f"{exc.folder}: {exc.what}") from None
