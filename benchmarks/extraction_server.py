"""Prefill on one real SGLang server on the CPU, with capture and without, taking turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eyas.config import check_config
from eyas.extraction.engines.sglang.client import Client
from eyas.extraction.engines.sglang.collector import Collector, Shape
from eyas.extraction.engines.sglang.dumps import DumpFolder
from eyas.extraction.engines.sglang.head import TargetHead
from eyas.extraction.engines.sglang.server import OwnServer
from eyas.plan.servers import capture_command
from eyas.target.tokenizer import TargetReference

MAKER = Path(__file__).parents[1] / "tests" / "integration" / "sglang" / "make_environment.py"
HIDDEN, LAYERS, VOCABULARY = 512, [1, 3, 6], 32_000
TOKENS, AT_ONCE = 512, 4
# How SGLang is run on a CPU without AMX.
ARGUMENTS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--max-total-tokens", "8192", "--skip-tokenizer-init",
]  # fmt: skip


def environment() -> str | None:
    """Python of the SGLang environment, made where it is missing; None where it cannot be had."""
    folder = MAKER.parents[3] / ".venv-sglang"
    done = subprocess.run([sys.executable, str(MAKER), str(folder)], stdout=sys.stderr)
    return str(folder / "bin" / "python") if done.returncode == 0 else None


def save_target(folder: Path) -> TargetReference:
    """A Llama of 8 layers with random weights."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=1792, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=1024, tie_word_embeddings=False, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).eval().float().save_pretrained(folder)
    return TargetReference(str(folder))


class Prefill:
    """A server and the two ways to send it prompts."""

    def __init__(self, target: TargetReference, python: str, memory: Path, log_file: Path) -> None:
        settings = {
            "python": python, "environment": {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}, "mem_fraction": 0.1,
            "chunked_prefill": 2048, "dump_folder": str(memory), "extra_args": ARGUMENTS, "start_minutes": 10.0,
        }  # fmt: skip
        config = check_config(
            {
                "name": "benchmark", "target": {"path": target.path}, "data": {"prompts": ["x.jsonl"]},
                "drafters": {"d": {}}, "extraction": {"engine": "sglang", "layers": LAYERS, "sglang": settings},
            },
            "benchmark",
        )  # fmt: skip
        options = config.extraction.sglang
        self.dumps = DumpFolder(memory, own=True)
        self.server = OwnServer(
            capture_command(config), options.options(), LAYERS, self.dumps, log_file, self._probe
        )  # fmt: skip
        self.collector = Collector(
            self.server, self.dumps, Shape(LAYERS, HIDDEN, 16 * HIDDEN + 4), TargetHead(target, 0), AT_ONCE,
            options.max_tries, int(options.dump_gb * 1e9),
        )  # fmt: skip
        self._number = 0
        self._numbering = threading.Lock()

    def _probe(self, client: Client) -> None:
        self.collector.probe(client, np.arange(1, 17, dtype=np.int32))

    def captured(self, ids: np.ndarray) -> None:
        """As the collector does it: the dump is checked, and deleted."""
        row, _ = self.collector.take(self.server.client, self.collector.rid(), ids)
        row.release()

    def plain(self, ids: np.ndarray) -> None:
        """The same prompt from somebody else, to whom the plugin does nothing."""
        with self._numbering:
            self._number += 1
            rid = f"plain-{self._number}"
        client = self.server.client
        body = {
            "rid": rid, "input_ids": ids.tolist(), "return_hidden_states": False, "cache_salt": rid,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
        }  # fmt: skip
        # The client's own connection: it has the server's key.
        client._http.post(f"{client.url}/generate", json=body).raise_for_status()

    def close(self) -> None:
        self.server.close()
        self.dumps.close()


def speed(way: Callable[[np.ndarray], None], rows: np.ndarray) -> float:
    """Prefill tokens a second of `rows` [N, T], AT_ONCE at a time."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        started = time.perf_counter()
        list(pool.map(way, rows))
        return rows.size / (time.perf_counter() - started)


def measure(folder: Path, memory: Path, python: str, rounds: int, rows: int) -> dict[str, list[float]]:
    """Tokens a second of each round, with capture and without; raises EyasError when the server does not start."""
    random = np.random.default_rng(1)
    prefill = Prefill(save_target(folder / "target"), python, memory, folder / "server.log")
    ways: dict[str, Callable[[np.ndarray], None]] = {"capture": prefill.captured, "plain": prefill.plain}
    found: dict[str, list[float]] = {name: [] for name in ways}
    try:
        prefill.server.start()
        for turn in range(rounds + 1):
            for name in list(ways) if turn % 2 else list(ways)[::-1]:  # who comes first takes turns, too
                count = rows if turn else AT_ONCE
                ids = random.integers(3, VOCABULARY, (count, TOKENS)).astype(np.int32)
                reached = speed(ways[name], ids)
                if turn:  # the first is to warm up
                    found[name].append(reached)
            if turn:
                both = ", ".join(f"{name} {values[-1]:,.0f}" for name, values in found.items())
                print(f"round {turn} of {rounds}: {both} tokens/s", file=sys.stderr)
    finally:
        prefill.close()
    return found


def result(found: dict[str, list[float]]) -> dict[str, Any]:
    """Medians of the rounds, as the JSON line has them: of each round's ratio, of the speeds."""
    return {
        "capture_ratio": round(float(np.median(np.divide(found["capture"], found["plain"]))), 3),
        "capture_tokens_per_s": round(statistics.median(found["capture"])),
        "plain_tokens_per_s": round(statistics.median(found["plain"])),
    }
