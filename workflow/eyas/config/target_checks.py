"""Checks of the configuration against the target's sizes; reads config.json, imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from eyas.config.schema import Config, Drafter
from eyas.config.sglang import sglang_problem
from eyas.errors import EyasError


@dataclass(frozen=True)
class TargetSizes:
    """The target's sizes, from its config.json (or `target.expect` before it exists)."""

    vocab_size: int
    num_hidden_layers: int
    hidden_size: int
    values: dict = field(default_factory=dict, compare=False, repr=False)
    """The (text) configuration that they come from, as far as there is one."""

    @classmethod
    def from_model_config(cls, values: dict, where: str) -> TargetSizes:
        """Sizes from the contents of a config.json; multimodal targets keep them in text_config."""
        text: dict = values["text_config"] if isinstance(values.get("text_config"), dict) else values
        try:
            return cls(int(text["vocab_size"]), int(text["num_hidden_layers"]), int(text["hidden_size"]), text)
        except (KeyError, TypeError, ValueError) as exc:
            raise EyasError(
                f"{where}: not a transformers model configuration ({exc} is missing or no number)"
            ) from None


def default_layers(num_hidden_layers: int) -> list[int]:
    """The three layers whose outputs are stored: low, middle, high (EAGLE-3, section 3).

    `[1, n//2 - 1, n - 4]`; targets too shallow for three different ids that way get the
    first, the middle and the last layer.
    """
    n = num_hidden_layers
    layers = [1, n // 2 - 1, n - 4]
    if layers[0] < layers[1] < layers[2]:
        return layers
    if n < 3:
        raise EyasError(f"extraction.layers: the target has {n} layers; an EAGLE-3 drafter reads three")
    return [0, n // 2, n - 1]


def read_target_sizes(config: Config) -> TargetSizes | None:
    """Sizes of a local target, or the expected ones, or None when nothing is known yet."""
    expect = config.target.expect
    expected = TargetSizes(**expect.model_dump(), values=expect.model_dump()) if expect else None
    file = Path(config.target.path) / "config.json"
    if not file.is_file():
        if Path(config.target.path).is_dir() and not config.target.gguf:
            raise EyasError(f"target.path: {config.target.path} has no config.json; it is no transformers model folder")
        return expected
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise EyasError(f"target.path: {file} cannot be read as JSON ({exc})") from None
    if not isinstance(values, dict):
        raise EyasError(f"target.path: {file} is no JSON object")
    sizes = TargetSizes.from_model_config(values, f"target.path: {file}")
    if expected and expected != sizes:
        raise EyasError(f"target.expect: says {expected}, but {file} says {sizes}; correct or delete target.expect")
    return sizes


_SHAPE_KEYS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


def _starts_from_layer(name: str, drafter: Drafter, sizes: TargetSizes) -> list[str]:
    """Why the drafter cannot start from a target layer, as far as config.json tells."""
    if drafter.model.init != "target_layer":
        return []
    problems = []
    layer = drafter.model.init_layer
    if layer is not None and layer >= sizes.num_hidden_layers:
        problems.append(
            f"drafters.{name}.model.init_layer: {layer} is no layer of the target, whose layers are"
            f" 0 to {sizes.num_hidden_layers - 1}"
        )
    for key in _SHAPE_KEYS:
        ours, theirs = getattr(drafter.model, key), sizes.values.get(key, getattr(sizes, key, None))
        if ours is not None and theirs is not None and ours != theirs:
            problems.append(
                f"drafters.{name}.model.{key}: {ours} differs from the target's {theirs}, so the drafter cannot"
                " start from a target layer; set model.init: random"
            )
    if experts := next((key for key in _EXPERT_KEYS if sizes.values.get(key)), None):
        problems.append(
            f"drafters.{name}.model.init: target_layer needs a dense last layer, and the target has experts"
            f" ({experts}: {sizes.values[experts]}); set model.init: random"
        )
    return problems


def check_against_target(config: Config, sizes: TargetSizes) -> None:
    """Raise EyasError naming every key that cannot be with a target of these sizes."""
    problems = []
    layers = config.extraction.layers
    if layers is None:
        default_layers(sizes.num_hidden_layers)  # raises where there are too few
    if layers and layers[-1] >= sizes.num_hidden_layers:
        problems.append(
            f"extraction.layers: {layers} reaches outside the target, whose layers are"
            f" 0 to {sizes.num_hidden_layers - 1}"
        )
    else:
        chosen = layers or default_layers(sizes.num_hidden_layers)
        for stage, engine in (("extraction", config.extraction.engine), ("evaluation", config.evaluation.engine)):
            model_type = str(sizes.values.get("model_type", ""))
            if engine == "sglang" and (problem := sglang_problem(model_type, sizes.num_hidden_layers, chosen, stage)):
                problems.append(problem)
    for name, drafter in config.drafters.items():
        if drafter.draft_vocab_size > sizes.vocab_size:
            problems.append(
                f"drafters.{name}.draft_vocab_size: {drafter.draft_vocab_size} is larger than the target's"
                f" vocabulary of {sizes.vocab_size}"
            )
        problems += _starts_from_layer(name, drafter, sizes)
    if problems:
        raise EyasError("\n".join(problems))
