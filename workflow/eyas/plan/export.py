"""What the rules of the export need to know before there is a drafter."""

from __future__ import annotations

import os
import re
from typing import Any

from eyas.config import Config, identity, read_target_sizes

# Servers that drafters are exported for: each has its own form.
SERVERS = ("sglang", "vllm")

# As transformers cuts checkpoints (version 4's default).
MAX_SHARD_BYTES = 5_000_000_000

# Settings of the run that somebody may hold for a secret: requests' further fields are free text.
_SECRET = re.compile(r"(^|_|-)(api)?(key|token)$|secret|password|credential|authorization", re.IGNORECASE)


def fits_one_file(config: Config) -> bool:
    """Whether no drafter's weights are known to be larger than a file should be: then the rule names the file.

    It is written as one file then, even if it turns out larger (nothing is known of a hub's model): all
    servers load that. Where it does not fit, export.json alone says which files there are.
    """
    sizes = read_target_sizes(config)
    if sizes is None:
        return True
    target, largest = sizes.values, 0
    for drafter in config.drafters.values():
        model = drafter.model
        hidden = model.hidden_size or sizes.hidden_size
        inner = model.intermediate_size or target.get("intermediate_size") or hidden
        heads = model.num_attention_heads or target.get("num_attention_heads") or 1
        kv_heads = model.num_key_value_heads or target.get("num_key_value_heads") or heads
        head_dim = model.head_dim or target.get("head_dim") or hidden // heads
        # Numbers a column, in matrices that are `hidden` wide: embedding, head, fc, MLP, q, k, v, o, norms.
        rows = sizes.vocab_size + drafter.draft_vocab_size + 3 * sizes.hidden_size + 3 * inner + 4
        rows += (3 * heads + 4 * kv_heads) * head_dim
        largest = max(largest, 2 * hidden * rows + sizes.vocab_size + 8 * drafter.draft_vocab_size)
    return largest <= MAX_SHARD_BYTES


def public_config(config: Config, drafter: str) -> dict[str, Any]:
    """All settings that the drafter depends on, fit to be published: no runtime settings, machine's paths or keys.

    The other drafters of a sweep are left out, so that a new one leaves the cards of the others as they are.
    """
    values: dict[str, Any] = {
        "name": config.name,
        "seed": config.seed,
        "target": identity(config.target, exclude={"expect"}),
        "data": identity(config.data),
        "responses": identity(config.responses),
        "tokenization": identity(config.tokenization),
        "extraction": identity(config.extraction),
        "drafter": identity(config.drafters[drafter]),
        "evaluation": identity(config.evaluation),
    }
    if config.extraction.engine != "sglang":
        del values["extraction"]["sglang"]
    if config.evaluation.engine != "sglang":
        del values["evaluation"]["sglang"]
    published: dict[str, Any] = _published(values)
    return published


def public_path(path: str) -> str:
    """A configured path as it may be published: an absolute one says how a machine is laid out, so only its end."""
    return os.path.basename(os.path.normpath(path)) if os.path.isabs(path) or path.startswith("~") else path


def _published(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {k: "(left out)" if _SECRET.search(k) and v is not None else _published(v, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_published(item, key) for item in value]
    # A word of a template may begin with a slash ("/no_think"): a path has two, or is where paths are written.
    path = isinstance(value, str) and (key in ("path", "gguf", "init_from") or value.count("/") > 1)
    return public_path(value) if path and not re.search(r"\s", value) else value
