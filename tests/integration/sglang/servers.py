"""Real SGLang servers on a CPU for tests: tiny targets, and a configuration that starts a server for them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from drafter_reference import write_tokens
from eyas.config import check_config
from eyas.extraction.engines.sglang.engine import SglangEngine
from eyas.plan.servers import capture_command
from eyas.target.tokenizer import TargetReference

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[2]
VOCABULARY = 512
COMMON: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=1024, initializer_range=0.1, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    # Latent attention and experts; SGLang wants its positions scaled on a CPU.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}, num_key_value_heads=4,
        moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=16, q_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, n_shared_experts=1, moe_layer_freq=1, scoring_func="sigmoid", topk_method="noaux_tc",
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 256,
            "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
        },
    ),
}  # fmt: skip
# How SGLang is run on a CPU without AMX.
ARGUMENTS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192", "--sleep-on-idle",
)  # fmt: skip
ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}


def environment_python() -> str | None:
    """Python of the environment that make_environment.py made; None where it is not there or not up to date."""
    spec = importlib.util.spec_from_file_location("make_environment", HERE / "make_environment.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: str | None = module.up_to_date(CHECKOUT / ".venv-sglang")
    return found


def save_target(folder: Path, architecture: str) -> TargetReference:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture]()).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms that are not all one
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return TargetReference(str(folder))


def sglang_settings(python: str, dump_folder: Path, **changes: Any) -> dict[str, Any]:
    """`extraction.sglang` for a server on this machine."""
    settings = {
        "python": python, "environment": ENVIRONMENT, "mem_fraction": 0.1, "chunked_prefill": 64, "concurrency": 8,
        "dump_folder": str(dump_folder), "extra_args": [*ARGUMENTS, "--skip-tokenizer-init"], "start_minutes": 5.0,
        "timeout_seconds": 120.0,
    }  # fmt: skip
    return settings | changes


def make_engine(
    target: TargetReference, layers: list[int], python: str, folder: Path, dump_folder: Path, **changes: Any
) -> SglangEngine:
    config = check_config(
        {
            "name": "test", "target": {"path": target.path}, "data": {"prompts": ["x.jsonl"]}, "drafters": {"d": {}},
            "extraction": {
                "engine": "sglang", "layers": layers, "sglang": sglang_settings(python, dump_folder, **changes),
            },
        },
        "test",
    )  # fmt: skip
    options = config.extraction.sglang
    command = None if options.url else capture_command(config)
    return SglangEngine(target, layers, options.options(), command, 0, folder / "server.log")


def rows_of(lengths: list[int], seed: int = 0) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Rows of random ids; every third begins as the first one does."""
    random = np.random.default_rng(seed)
    first = random.integers(3, VOCABULARY, max(lengths)).astype(np.int32)
    rows = []
    for i, length in enumerate(lengths):
        ids = random.integers(3, VOCABULARY, length).astype(np.int32)
        if i % 3 == 0:
            shared = length * 2 // 3
            ids[:shared] = first[:shared]
        rows.append((i, ids, np.ones(length, dtype=np.uint8)))
    return rows


def write_rows(folder: Path, lengths: list[int], first_row: int = 0) -> Path:
    rows = [(first_row + i, ids, mask) for i, ids, mask in rows_of(lengths, seed=first_row)]
    return write_tokens(folder / "tokens" / f"rows_{first_row}-{first_row + len(lengths)}.safetensors", rows)


def expected_states(target: TargetReference, layers: list[int], rows: list[Any]) -> list[torch.Tensor]:
    """aux, last and argmax of all rows, one row at a time by transformers itself."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32).eval()
    parts = []
    for _, ids, _ in rows:
        with torch.inference_mode():
            output = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False)
        states = torch.cat([output.hidden_states[layer + 1][0] for layer in layers], -1)
        parts.append((states, output.hidden_states[-1][0], output.logits[0].argmax(-1)))
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]
