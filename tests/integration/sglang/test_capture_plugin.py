"""The capture plugin in real servers: every token's states, strangers' requests, full memory, refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plugin_server import PluginServer, plugin_server
from safetensors import safe_open
from servers import COMMON, CONFIGS, VOCABULARY

pytestmark = pytest.mark.timeout(900)
LENGTHS = [1, 2, 3, 63, 64, 65, 127, 128, 129, 200, 300, 300, 17, 90, 150, 31]
MODELS: dict[str, Any] = CONFIGS | {
    # Its setter only ever adds marks: those of the server's default layers must go.
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1,
        norm_topk_prob=True,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, query_pre_attn_scalar=16, sliding_window=512),
}  # fmt: skip


def save_model(folder: Path, architecture: str) -> Path:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[architecture]()).eval().float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    """Random ids; every second prompt begins as the longest one does."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda n: torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()  # noqa: E731
    shared = draw(max(lengths))
    return [shared[: n * 2 // 3] + draw(n - n * 2 // 3) if i % 2 else draw(n) for i, n in enumerate(lengths)]


def check_dumps(server: PluginServer, model: Path, layers: list[int], rows: dict[str, list[int]]) -> None:
    """Every dump against transformers, token by token."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for rid, ids in rows.items():
        path = server.dumps / f"{rid}.safetensors"
        with torch.inference_mode():
            states = reference(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        with safe_open(path, "pt") as file:
            assert file.get_tensor("input_ids").tolist() == ids
            aux, last, facts = (
                file.get_tensor("aux_hidden_states"),
                file.get_tensor("last_hidden_state"),
                file.metadata(),
            )
        expected = torch.cat([states[layer + 1][0] for layer in layers], -1)
        torch.testing.assert_close(aux, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(last, states[-1][0], rtol=1e-4, atol=1e-4)
        assert facts["rid"] == rid and facts["prefix"] == "0" and json.loads(facts["layers"]) == layers
        assert facts["dtype"] == "float32" and facts["tokens"] == str(len(ids))
        path.unlink()


@pytest.fixture
def dumps() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eyas-plugin-test-") as folder:
        yield Path(folder)


@pytest.mark.parametrize(
    ("architecture", "layers"),
    [("llama", [1, 2, 3]), ("qwen3_moe", [0, 1, 3]), ("deepseek_v3", [2, 3, 4]), ("deepseek_v3", [0, 1, 2])],
)
def test_every_token_and_strangers(
    architecture: str, layers: list[int], python: str, tmp_path: Path, dumps: Path
) -> None:
    """Eight at once in chunks of 64, with strangers' requests in the same batches."""
    model = save_model(tmp_path / "model", architecture)
    rows = {f"eyas-0a-{i:x}": ids for i, ids in enumerate(prompts(LENGTHS))}
    strangers = {f"cmpl-{i}": ids for i, ids in enumerate(prompts([5, 40, 9, 70], seed=1))}
    everything = [*rows.items(), *strangers.items()]
    everything = everything[::3] + everything[1::3] + everything[2::3]
    with plugin_server(python, model, layers, dumps, tmp_path / "server") as server, ThreadPoolExecutor(8) as pool:
        answers = dict(
            zip([r for r, _ in everything], pool.map(lambda r: server.generate(*r), everything), strict=True)
        )
        for rid in rows:
            assert answers[rid]["hs_file"] == [str(dumps / f"{rid}.safetensors")], answers[rid]
            assert not answers[rid].get("hidden_states") and not any(answers[rid].get("hs_error", []))
        for rid, ids in strangers.items():
            # Whole where its last chunk holds all of it; SGLang itself gives no more of longer ones.
            # (It fills the columns of a batch with None.)
            assert not any(answers[rid].get("hs_file", [])) and not any(answers[rid].get("hs_error", []))
            assert len(answers[rid]["hidden_states"][0]) in range(1, len(ids) + 1)
            assert len(answers[rid]["hidden_states"][0][0]) == 3 * 64
        assert sorted(os.listdir(dumps)) == sorted(f"{rid}.safetensors" for rid in rows)
        check_dumps(server, model, layers, rows)
        if architecture == "llama":
            check_aborts_and_longer_answers(server, dumps)


def check_aborts_and_longer_answers(server: PluginServer, dumps: Path) -> None:
    ids = prompts([4000 % 900])[0]
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(server.generate, f"eyas-0b-{i}", ids) for i in range(4)]
        time.sleep(0.15)
        server.post("/abort_request", {"rid": "", "abort_all": True})
        for future in waiting:
            future.exception(timeout=60)  # an error or an answer: the server must live
    longer = server.generate("eyas-0c-1", ids[:70], sampling_params={"max_new_tokens": 5, "temperature": 0})
    assert longer["completion_tokens"] >= 1 and longer["hs_file"][0]
    deadline = time.monotonic() + 10
    while [n for n in os.listdir(dumps) if n.endswith(".part")] and time.monotonic() < deadline:
        server.generate("eyas-0d-1", ids[:3])  # what was aborted goes with the next prefill
        time.sleep(0.2)
    assert not [n for n in os.listdir(dumps) if n.endswith(".part")]


def test_full_memory(python: str, tmp_path: Path) -> None:
    """The request fails, the server lives; the next one finds room again."""
    dumps = tmp_path / "memory"
    dumps.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k,mode=700", "tmpfs", str(dumps)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    model, rows = save_model(tmp_path / "model", "qwen3"), prompts([300, 300, 200])
    try:
        with plugin_server(python, model, [0, 2, 4], dumps, tmp_path / "server", wait=2.0) as server:
            assert server.generate("eyas-1", rows[0])["hs_file"]
            began = time.monotonic()
            failed = server.generate("eyas-2", rows[1])
            assert "no room for" in failed["hs_error"][0] and "hs_file" not in failed
            assert time.monotonic() - began < 10 and server.up()
            assert os.listdir(dumps) == ["eyas-1.safetensors"]
            (dumps / "eyas-1.safetensors").unlink()
            assert server.generate("eyas-3", rows[2])["hs_file"]
            check_dumps(server, model, [0, 2, 4], {"eyas-3": rows[2]})
    finally:
        subprocess.run(["umount", "--lazy", str(dumps)], check=True)


@pytest.mark.parametrize(
    ("architecture", "layers", "reason"),
    [("gemma3", [0, 2, 4], "residual"), ("llama", [0, 2, 5], "up to 4")],
)
def test_refused_models_and_layers(
    architecture: str, layers: list[int], reason: str, python: str, tmp_path: Path, dumps: Path
) -> None:
    """The server serves, its log says why in one line, every request of ours fails with the reason."""
    model = save_model(tmp_path / "model", architecture)
    with plugin_server(python, model, layers, dumps, tmp_path / "server") as server:
        for rid in ("eyas-1", "eyas-2"):
            answer = server.generate(rid, [5, 6, 7, 8])
            assert reason in answer["hs_error"][0] and "hs_file" not in answer
        assert "hs_error" not in server.generate("cmpl-1", [5, 6, 7], states=False) and server.up()
        assert server.log.read_text(errors="replace").count("eyas_capture: ") == 1
    assert os.listdir(dumps) == []
