"""Exports: layer ids by server, exact tensors, shards, what each server's loader does with them; nothing half-written."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from drafter_reference import file_bytes, read_json_file, small_shape
from eyas.config import check_config
from eyas.drafter.checkpoint import Checkpoint, save_checkpoint
from eyas.drafter.initialise import random_weights
from eyas.drafter.shape import tensor_shapes
from eyas.errors import EyasError
from eyas.export import SERVERS, check_tensors, export_drafter, server_config, sglang_layer_ids, vllm_layer_ids
from eyas.export import checkpoint as export_module
from eyas.export.checkpoint import split
from eyas.plan.export import MAX_SHARD_BYTES, fits_one_file, public_config, public_path
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

WIDTHS = {"same width": {}, "other width": {"target_hidden_size": 20}}


@pytest.fixture
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    shape = small_shape(**getattr(request, "param", {}))
    weights = random_weights(shape, 0)
    ids = torch.arange(0, 2 * shape.draft_vocab_size, 2)
    weights["d2t"] = ids - torch.arange(shape.draft_vocab_size)
    weights["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool)
    weights["t2d"][ids] = True
    save_checkpoint(
        Checkpoint(shape, weights, {}, {"epoch": 1, "trained": ["fc.weight"]}), tmp_path / "epoch_1", "mark"
    )
    return tmp_path / "epoch_1"


# ---- layer ids ----


@pytest.mark.parametrize(
    ("layers", "model_type", "expected"),
    [
        # FACTS: SGLang 0.5.23 adds 1 for Llama, Qwen2/3, Gemma3 whatever the ids
        ([1, 14, 26], "llama", [1, 14, 26]),
        ([2, 14, 26], "qwen3", [2, 14, 26]),
        # for DeepSeek and Kimi only to a list that begins with 1
        ([1, 29, 57], "deepseek_v3", [1, 29, 57]),
        ([2, 29, 57], "deepseek_v3", [3, 30, 58]),
        ([2, 29, 57], "kimi_k25", [3, 30, 58]),
    ],
)
def test_sglang_layer_ids(layers: list[int], model_type: str, expected: list[int]) -> None:
    assert sglang_layer_ids(layers, model_type) == expected
    added = (
        [i + 1 for i in expected] if not model_type.startswith(("deepseek", "kimi")) or expected[0] == 1 else expected
    )
    # what SGLang then captures is the input of layer i, the output of layer i - 1
    assert [i - 1 for i in added] == layers


def test_what_sglang_cannot_be_told_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="extraction.layers"):
        sglang_layer_ids([0, 29, 57], "deepseek_v3")
    with pytest.raises(EyasError, match="extraction.layers"):  # the checkpoint's layers are 0, 1, 2
        export_drafter(checkpoint, "sglang", "deepseek_v3", tmp_path / "export" / "sglang")
    assert not (tmp_path / "export").exists() or list((tmp_path / "export").iterdir()) == []
    export_drafter(checkpoint, "vllm", "deepseek_v3", tmp_path / "export" / "vllm")


def test_vllm_layer_ids() -> None:
    """vLLM's id j is the output of layer j - 1."""
    assert vllm_layer_ids([1, 14, 26]) == [2, 15, 27]
    assert vllm_layer_ids([0, 1, 2]) == [1, 2, 3]


# ---- the servers' own reading, written down from their sources (docs/decisions.md) ----


def vllm_parameters(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of vLLM's Eagle3LlamaForCausalLM before its projections are stacked, from the config alone."""
    h, q = config.hidden_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    reads = 3 * (config.target_hidden_size if hasattr(config, "target_hidden_size") else h)
    layer = "model.layers.0"
    return {
        "model.embed_tokens.weight": (config.vocab_size, h),
        "model.fc.weight": (h, reads),
        "model.norm.weight": (h,),
        "lm_head.weight": (config.draft_vocab_size, h),
        "draft_id_to_target_id": (config.draft_vocab_size,),
        f"{layer}.hidden_norm.weight": (h,),
        f"{layer}.input_layernorm.weight": (h,),
        f"{layer}.post_attention_layernorm.weight": (h,),
        f"{layer}.self_attn.q_proj.weight": (q, 2 * h),
        f"{layer}.self_attn.k_proj.weight": (kv, 2 * h),
        f"{layer}.self_attn.v_proj.weight": (kv, 2 * h),
        f"{layer}.self_attn.o_proj.weight": (h, q),
        f"{layer}.mlp.gate_proj.weight": (config.intermediate_size, h),
        f"{layer}.mlp.up_proj.weight": (config.intermediate_size, h),
        f"{layer}.mlp.down_proj.weight": (h, config.intermediate_size),
    }


def vllm_load(stored: dict[str, torch.Tensor], config: LlamaConfig) -> dict[str, torch.Tensor]:
    """What vLLM's load_weights makes of stored names; raises KeyError for a name that it does not know."""
    parameters, loaded = vllm_parameters(config), {}
    for name, tensor in stored.items():
        if "t2d" in name:
            continue
        if "d2t" in name:
            name = name.replace("d2t", "draft_id_to_target_id")
        elif "lm_head" not in name:
            name = "model." + name
        name = name.replace("midlayer.", "layers.0.")
        if parameters[name] != tuple(tensor.shape):
            raise ValueError(name)
        loaded[name] = tensor
    return loaded


@pytest.mark.parametrize("checkpoint", WIDTHS.values(), ids=WIDTHS, indirect=True)
def test_vllms_loader_takes_every_tensor(checkpoint: Path, tmp_path: Path) -> None:
    export_drafter(checkpoint, "vllm", "llama", tmp_path / "vllm")
    config = LlamaConfig.from_pretrained(tmp_path / "vllm")
    stored = load_file(tmp_path / "vllm" / "model.safetensors")
    loaded = vllm_load(stored, config)
    assert loaded.keys() == vllm_parameters(config).keys()
    assert loaded["draft_id_to_target_id"].dtype == torch.int64
    assert {t.dtype for name, t in loaded.items() if name != "draft_id_to_target_id"} == {torch.bfloat16}
    with pytest.raises(KeyError):  # the stand-in can refuse
        vllm_load({"midlayer.extra.weight": torch.ones(1)}, config)


@pytest.mark.parametrize("checkpoint", WIDTHS.values(), ids=WIDTHS, indirect=True)
@pytest.mark.parametrize("server", SERVERS)
def test_config_as_servers_read_it(checkpoint: Path, tmp_path: Path, server: str) -> None:
    """Read by transformers' LlamaConfig, from which both servers take attributes."""
    export_drafter(checkpoint, server, "llama", tmp_path / server)
    config = LlamaConfig.from_pretrained(tmp_path / server)
    raw = read_json_file(tmp_path / server / "config.json")
    assert config.architectures == ["LlamaForCausalLMEagle3"] and config.model_type == "llama"
    assert config.num_hidden_layers == 1 and config.tie_word_embeddings is False
    assert (raw["rope_theta"], raw["rope_scaling"]) == (100.0, None)
    assert config.rope_parameters["rope_theta"] == 100.0
    assert (config.vocab_size, config.draft_vocab_size, config.head_dim) == (23, 11, 6)
    assert config.attention_bias is False and config.mlp_bias is False and config.hidden_act == "silu"
    # its presence alone has a meaning
    other_width = small_shape().hidden_size != read_json_file(checkpoint / "config.json").get("target_hidden_size", 12)
    assert hasattr(config, "target_hidden_size") == other_width
    assert not other_width or config.target_hidden_size == 20
    assert config.eagle_config["use_aux_hidden_state"] is True
    ids = {"sglang": [0, 1, 2], "vllm": [1, 2, 3]}[server]
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == ids
    assert not getattr(config, "norm_before_residual", False)
    if server == "vllm":  # earlier versions read only this one
        assert config.eagle_aux_hidden_state_layer_ids == ids
        assert config.norm_before_residual is False
    else:  # SGLang does not know it
        assert "norm_before_residual" not in raw


# ---- what is written ----


@pytest.mark.parametrize("server", SERVERS)
def test_the_export_holds_the_checkpoints_tensors(checkpoint: Path, tmp_path: Path, server: str) -> None:
    output = tmp_path / "export" / server
    export_drafter(checkpoint, server, "llama", output)
    assert sorted(file_bytes(output)) == ["config.json", "export.json", "model.safetensors"]
    ours, theirs = load_file(output / "model.safetensors"), load_file(checkpoint / "model.safetensors")
    assert ours.keys() == theirs.keys() == tensor_shapes(small_shape()).keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert {(output / name).stat().st_mode & 0o777 for name in ("config.json", "model.safetensors")} == {
        (output / "config.json").stat().st_mode & 0o777
    }
    before = file_bytes(output)
    export_drafter(checkpoint, server, "llama", output)
    assert file_bytes(output) == before


def load_sharded(folder: Path) -> dict[str, torch.Tensor]:
    index = read_json_file(folder / "model.safetensors.index.json")
    tensors = {}
    for name, place in index["weight_map"].items():
        with safe_open(folder / place, framework="pt") as file:
            tensors[name] = file.get_tensor(name)
    return tensors


def test_a_large_drafter_comes_in_several_files_with_an_index(checkpoint: Path, tmp_path: Path) -> None:
    stored = load_file(checkpoint / "model.safetensors")
    total = sum(t.nbytes for t in stored.values())
    for limit in (1, 500, 900, total - 1):
        output = tmp_path / str(limit)
        export_drafter(checkpoint, "vllm", "llama", output, max_shard_bytes=limit)
        index = read_json_file(output / "model.safetensors.index.json")
        assert index["metadata"]["total_size"] == total
        shards = sorted(set(index["weight_map"].values()))
        assert len(shards) > 1
        assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        assert sorted(file_bytes(output)) == sorted(
            ["config.json", "export.json", "model.safetensors.index.json", *shards]
        )
        for shard in shards:
            held = load_file(output / shard)
            assert len(held) == 1 or sum(t.nbytes for t in held.values()) <= limit
        loaded = load_sharded(output)
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[name], stored[name]) for name in stored)
        check_tensors(output)
        assert read_json_file(output / "export.json")["files"].keys() == {
            "config.json",
            "model.safetensors.index.json",
            *shards,
        }
    export_drafter(checkpoint, "vllm", "llama", tmp_path / "whole", max_shard_bytes=total)
    assert "model.safetensors" in file_bytes(tmp_path / "whole")


def test_shards_of_another_cut_do_not_stay_behind(checkpoint: Path, tmp_path: Path) -> None:
    """A loader that finds both would take the old ones."""
    output = tmp_path / "export" / "sglang"
    for limit in (900, MAX_SHARD_BYTES, 500, 900):
        export_drafter(checkpoint, "sglang", "llama", output, max_shard_bytes=limit)
        listed = {*read_json_file(output / "export.json")["files"], "export.json"}
        assert set(file_bytes(output)) == listed
    (output / "README.md").write_text("kept")
    export_drafter(checkpoint, "sglang", "llama", output)
    assert (output / "README.md").read_text() == "kept"


def test_split_keeps_the_order_and_the_limit() -> None:
    tensors = {name: torch.zeros(n, dtype=torch.uint8) for name, n in zip("abcdef", (3, 3, 4, 20, 1, 9), strict=True)}
    assert [list(shard) for shard in split(tensors, 10)] == [["a", "b", "c"], ["d"], ["e", "f"]]
    assert [list(shard) for shard in split(tensors, 9)] == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert [list(shard) for shard in split(tensors, 40)] == [list("abcdef")]


# ---- what is refused ----

FAULTS = {
    "missing": "lm_head.weight",
    "unexpected": "midlayer.extra.weight",
    "shape": "fc.weight is BF16",
    "float dtype": "norm.weight is F32",
    "int dtype": "d2t is I32",
    "nan": "norm.weight",
    "maps": "contradict",
    "outside": "contradict",
    "truncated": "truncated or damaged",
}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_tensor_is_refused_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, fault: str, server: str
) -> None:
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    match fault:
        case "missing":
            del tensors["lm_head.weight"]
        case "unexpected":
            tensors["midlayer.extra.weight"] = torch.ones(2)
        case "shape":
            tensors["fc.weight"] = tensors["fc.weight"][:, :-1].contiguous()
        case "float dtype":
            tensors["norm.weight"] = tensors["norm.weight"].float()
        case "int dtype":
            tensors["d2t"] = tensors["d2t"].int()
        case "nan":
            tensors["norm.weight"][0] = float("nan")
        case "maps":
            tensors["t2d"] = ~tensors["t2d"]
        case "outside":
            tensors["d2t"][-1] = 99
    save_file(tensors, file)
    if fault == "truncated":
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(EyasError, match=re.escape(FAULTS[fault])) as caught:
        export_drafter(checkpoint, server, "llama", tmp_path / "export" / server)
    assert "\n" not in str(caught.value)
    assert [path for path in (tmp_path / "export").rglob("*") if not path.name.endswith(".lock")] == []


def test_a_failure_leaves_the_export_that_was_there(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "export" / "vllm"
    export_drafter(checkpoint, "vllm", "llama", output)
    before = file_bytes(output)

    def no_room(*_: object) -> None:
        raise EyasError("no room")

    monkeypatch.setattr(export_module, "ensure_free", no_room)
    with pytest.raises(EyasError, match="no room"):
        export_drafter(checkpoint, "vllm", "llama", output, max_shard_bytes=500)
    assert file_bytes(output) == before
    assert not (tmp_path / "export" / ".staging").exists()


@pytest.mark.parametrize("fault", ["place", "absent"])
def test_an_index_that_lies_is_refused(checkpoint: Path, tmp_path: Path, fault: str) -> None:
    output = tmp_path / "vllm"
    export_drafter(checkpoint, "vllm", "llama", output, max_shard_bytes=500)
    index = read_json_file(output / "model.safetensors.index.json")
    if fault == "place":
        index["weight_map"]["d2t"] = index["weight_map"]["t2d"]
    else:
        del index["weight_map"]["t2d"]
    (output / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(EyasError, match="does not hold the tensors"):
        check_tensors(output)


def test_an_unknown_server_is_no_server() -> None:
    with pytest.raises(ValueError, match="sglang, vllm"):
        server_config(small_shape(), "tgi", "llama")


# ---- what the plan knows ----


def settings(**changes: object) -> dict:
    return {
        "name": "run", "target": {"path": "owner/model"}, "data": {"prompts": ["p.jsonl"], "rows": 100},
        "drafters": {"one": {}, "two": {"draft_vocab_size": 5}},
    } | changes  # fmt: skip


def test_whether_a_file_is_enough_is_known_beforehand(tmp_path: Path) -> None:
    """The same as the real tensors say, and one file where nothing is known."""

    def fits(**values: int) -> bool:
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 9} | values))
        return fits_one_file(check_config(settings(target={"path": str(tmp_path)}), "x"))

    assert fits_one_file(check_config(settings(), "x"))
    assert fits(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_attention_heads=9)
    assert fits(vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32, head_dim=128)
    # Kimi-K2.5's sizes
    assert fits(vocab_size=163840, hidden_size=7168, intermediate_size=18432, num_attention_heads=64)
    assert not fits(vocab_size=300000, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    judged = set()
    for vocab in range(200_000, 400_000, 1000):
        sizes = dict(hidden_size=6144, vocab_size=vocab, intermediate_size=16384, num_attention_heads=64)
        shape = small_shape(
            **sizes, target_hidden_size=6144, draft_vocab_size=32000, num_key_value_heads=8, head_dim=128
        )
        real = sum(math.prod(size) * {"t2d": 1, "d2t": 8}.get(name, 2) for name, size in tensor_shapes(shape).items())
        judged.add((fits(**sizes, head_dim=128, num_key_value_heads=8), real <= MAX_SHARD_BYTES))
    assert judged == {(True, True), (False, False)}  # both happen, and it is never wrong


def test_what_is_published_of_the_configuration() -> None:
    config = check_config(
        settings(
            target={"path": "/models/here/Big-7B"},
            data={"prompts": ["/data/private/chat.jsonl", "prompts/*.jsonl"], "rows": 100},
            responses={
                "engine": "openai", "temperature": 0.5,
                "endpoint": {
                    "urls": ["http://secret-host:1/v1"], "model": "m", "api_key_env": "MY_KEY",
                    "extra_body": {"api_key": "sk-123", "top_k": 20, "auth": {"token": "t-9", "max_tokens": 7}},
                },
            },
            tokenization={"template_options": {"system": "/no_think and /that/is it"}},
        ),
        "x",
    )  # fmt: skip
    text = json.dumps(public_config(config, "one"))
    for hidden in ("/models", "/data", "secret-host", "MY_KEY", "sk-123", "t-9", 'draft_vocab_size": 5'):
        assert hidden not in text
    for shown in ("Big-7B", "chat.jsonl", "prompts/*.jsonl", '"top_k": 20', '"max_tokens": 7', "/no_think and /that"):
        assert shown in text
    assert public_config(config, "two")["drafter"]["draft_vocab_size"] == 5
    assert "batch_rows" not in text and "threads" not in text  # runtime settings change no card
    assert json.loads(text)["drafter"]["model"].keys() >= {"num_key_value_heads"}
    assert public_path("a/b") == "a/b" and public_path("/a/b/") == "b" and public_path("~/x/y") == "y"
