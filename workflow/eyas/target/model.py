"""The target's weights in-process: decoder, layers, final norm, head."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eyas.errors import EyasError
from eyas.target.tokenizer import TargetReference, unreadable

log = logging.getLogger(__name__)


def config_hash(target: TargetReference) -> str:
    """Digest of the target's config.json without the lines that saving tools change."""
    import transformers

    try:
        # The file's own values: those that AutoConfig fills in change with transformers' version.
        values, _ = transformers.PretrainedConfig.get_config_dict(target.path, revision=target.revision)
    except Exception as exc:
        raise unreadable(target, "config.json", exc) from None
    for key in ("_name_or_path", "_model_name_or_path", "_commit_hash", "transformers_version"):
        values.pop(key, None)
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), default=str)
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


def target_identity(target: TargetReference) -> dict[str, Any]:
    """What artefacts record of their target, and readers compare."""
    return {"path": target.path, "revision": target.revision, "config_hash": config_hash(target), "dtype": target.dtype}


@dataclass
class TargetModel:
    """A loaded target and the parts that Eyas touches."""

    model: Any
    decoder: nn.Module
    layers: nn.ModuleList
    head: nn.Module
    device: torch.device
    takes_trees: bool = False  # set when `eyas.decoding` has tried it

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    def new_cache(self) -> Any:
        """An empty key/value cache that fits the model."""
        import transformers

        return transformers.DynamicCache(config=self.config)

    def _cached(self, cache: Any) -> dict[str, Any]:
        # transformers 5.24 renamed the argument; the old name warns at every call.
        names = inspect.signature(type(self.model).forward).parameters
        return {"cache" if "cache" in names else "past_key_values": cache, "use_cache": True}

    def next_logits(self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Logits [B, V] after the last of `ids` [B, T], given a cache of what came before."""
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=1, **self._cached(cache)
        )
        return output.logits[:, -1]

    def decode(self, ids: torch.Tensor, cache: Any, **tree: Any) -> torch.Tensor:
        """States after the final norm [1, T, H] of `ids` [1, T], which follow what the cache holds.

        `tree`: attention_mask and position_ids, where they do not follow one another.
        """
        return self.decoder(input_ids=ids, **tree, **self._cached(cache)).last_hidden_state


def _find_decoder(model: nn.Module, depth: int) -> tuple[nn.Module, nn.ModuleList]:
    """The text decoder: the module that directly owns the list of decoder layers."""
    get_decoder: Any = getattr(model, "get_decoder", lambda: model)
    decoder: nn.Module = get_decoder()
    for module in (*decoder.modules(), *model.modules()):  # a vision tower may come before the text decoder
        layers = getattr(module, "layers", None)
        if isinstance(layers, nn.ModuleList) and len(layers) == depth:
            return module, layers
    raise EyasError(
        f"{type(model).__name__} has no list of {depth} decoder layers; this architecture is not supported yet"
    )


def load_target(target: TargetReference, gpus: int = 0) -> TargetModel:
    """Load the target for inference. CPU unless the job holds GPUs; raises EyasError."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # a loaded target is one sentence in the log
    device = torch.device("cuda" if gpus else "cpu")
    placement: dict[str, Any] = {"device_map": "auto"} if gpus > 1 else {}
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            target.path, dtype=getattr(torch, target.dtype), use_safetensors=True, **placement, **target.source
        )
    except Exception as exc:  # transformers raises many kinds for a damaged or missing folder
        raise unreadable(target, "model", exc) from None
    model.eval().requires_grad_(False)
    if gpus == 1:
        model = model.to(device)  # type: ignore[arg-type]
    head = model.get_output_embeddings()
    if head is None:
        raise EyasError(f"target.path: {target.path} ({type(model).__name__}) has no language-model head")
    decoder, layers = _find_decoder(model, int(model.config.get_text_config().num_hidden_layers))
    log.info(
        "Loaded %s (%s, %.0f M parameters, %s) on %s.",
        target.path,
        type(model).__name__,
        model.num_parameters() / 1e6,
        target.dtype,
        device,
    )
    return TargetModel(model, decoder, layers, head, device)
