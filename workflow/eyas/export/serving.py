"""Command lines that serve a target with an exported drafter."""

from __future__ import annotations

import json
import shlex
from typing import Any

# What SGLang's own arguments are when the evaluation says nothing.
_DEFAULTS = {"draft_steps": 5, "topk": 1, "draft_tokens": None}


def speculation(settings: dict[str, Any]) -> tuple[int, int, int]:
    """Steps, topk and tokens of the verified tree (its root among them), from the evaluation's settings."""
    values = _DEFAULTS | {key: settings[key] for key in _DEFAULTS if settings.get(key) is not None}
    steps, topk = int(values["draft_steps"] or 1), int(values["topk"] or 1)
    return steps, topk, int(values["draft_tokens"] or steps * topk + 1)


def sglang_command(
    target: dict[str, Any], drafter: str, settings: dict[str, Any], quantization: str | None = None
) -> str:
    """The SGLang server. `target`: path, revision, trust_remote_code; `drafter`: the folder of export/sglang;
    `quantization`: SGLang's name of how it computes the target, where the target's config.json does not say it."""
    steps, topk, tokens = speculation(settings)
    lines = [
        f"python -m sglang.launch_server --model-path {shlex.quote(target['path'])}",
        "--speculative-algorithm EAGLE3",
        f"--speculative-draft-model-path {shlex.quote(drafter)}",
        f"--speculative-num-steps {steps}",
        f"--speculative-eagle-topk {topk}",
        f"--speculative-num-draft-tokens {tokens}",
        *_options(target),
    ]
    if quantization:  # without the second, the drafter would be taken for quantised like the target
        lines += [f"--quantization {shlex.quote(quantization)}", "--speculative-draft-model-quantization unquant"]
    return " \\\n  ".join(lines)


def vllm_command(target: dict[str, Any], drafter: str, settings: dict[str, Any]) -> str:
    """The vLLM server, which drafts chains. `drafter`: the folder of export/vllm."""
    steps, _, _ = speculation(settings)
    config = json.dumps({"method": "eagle3", "model": drafter, "num_speculative_tokens": steps})
    lines = [
        f"vllm serve {shlex.quote(target['path'])}",
        f"--speculative-config {shlex.quote(config)}",
        *_options(target),
    ]
    return " \\\n  ".join(lines)


def _options(target: dict[str, Any]) -> list[str]:
    """What both servers call the same."""
    options = [f"--revision {shlex.quote(target['revision'])}"] if target.get("revision") else []
    return [*options, "--trust-remote-code"] if target.get("trust_remote_code") else options
