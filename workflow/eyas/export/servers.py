"""What SGLang and vLLM expect of a drafter's config.json, and how each counts the target's layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas.config.sglang import wrong_states
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.plan.export import SERVERS

# SGLang 0.5.23 adds 1 to the ids for these; for DeepSeek-like targets only when the first id is 1.
_DEEPSEEK_LIKE = ("deepseek", "kimi")


def sglang_layer_ids(layers: list[int], target_model_type: str) -> list[int]:
    """Eyas's layer ids (outputs of layers, 0-based) as SGLang 0.5.23 counts them for this kind of target.

    SGLang captures the *input* of layer i, which is the output of layer i - 1. For Llama-like
    targets it adds 1 to the ids itself, so they stay as they are; for DeepSeek-like ones it adds
    1 only to lists that begin with 1.
    """
    if target_model_type.lower().startswith(_DEEPSEEK_LIKE) and layers[0] != 1:
        shifted = [layer + 1 for layer in layers]
        if shifted[0] == 1:
            raise EyasError(
                f"layers {layers}: SGLang cannot be told to capture the output of layer 0 of a {target_model_type}"
                " target; choose a higher first layer in extraction.layers"
            )
        return shifted
    return list(layers)


def sglang_serving_problem(
    model_type: str, num_hidden_layers: int, layers: Sequence[int], norm_before_residual: bool = False
) -> str | None:
    """Why a drafter that reads `layers` (0-based) drafts badly or not at all on SGLang 0.5.23; None where it can."""
    if why := wrong_states(model_type):
        return f"SGLang 0.5.23 takes wrong hidden states of {model_type} targets ({why}): few drafts will be accepted"
    if layers[-1] == num_hidden_layers - 1:
        return "the drafter reads the output of the target's last layer, which SGLang 0.5.23 cannot capture"
    if norm_before_residual:
        return (
            "SGLang 0.5.23 does not know norm_before_residual and computes something else: few drafts will be accepted"
        )
    return None


def vllm_layer_ids(layers: list[int]) -> list[int]:
    """Eyas's layer ids as vLLM counts them: its id j is the output of layer j - 1."""
    return [layer + 1 for layer in layers]


def server_config(shape: DrafterShape, server: str, target_model_type: str) -> dict[str, Any]:
    """Contents of config.json for `server` (of SERVERS); `target_model_type` is that of the target's (text) config.

    For vLLM the ids stand in two places: its earlier versions read only the one at the top, others also
    `eagle_config`. `norm_before_residual` is written out because vLLM's other form (speculators) takes it for true
    where it is missing. `target_hidden_size` is left out where it is the drafter's own width: both servers take its
    presence, even as null, for another width.
    """
    if server == "sglang":
        return shape.config_json(sglang_layer_ids(list(shape.layers), target_model_type))
    if server == "vllm":
        ids = vllm_layer_ids(list(shape.layers))
        return shape.config_json(ids) | {
            "eagle_aux_hidden_state_layer_ids": ids, "norm_before_residual": shape.norm_before_residual,
        }  # fmt: skip
    raise ValueError(f"{server} is none of {', '.join(SERVERS)}")
