"""Epoch 0 from another drafter: every tensor from where it should be, and whatever does not fit refused."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_reference import random_rows, read_json_file
from drafter_runs import DRAFT_VOCAB, OPEN, Run, make_run
from eyas.drafter.checkpoint import Checkpoint, load_checkpoint
from eyas.drafter.imported import import_drafter, init_checksum
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.drafter.stages import initialise_checkpoint
from eyas.errors import EyasError
from eyas.export import export_drafter
from eyas.shards import describe_file, write_arrays, write_sealed
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

V, H, D = 40, 16, DRAFT_VOCAB


def start(run: Run, output: Path, init: str = "target_layer", **settings: Any) -> Checkpoint:
    return load_checkpoint(run.start(output, init, **settings))


def model_of(run: Run) -> Any:
    return AutoModelForCausalLM.from_pretrained(run.target.path)


def shape_of(run: Run, **sizes: int) -> DrafterShape:
    return DrafterShape.for_target(model_of(run).config, OPEN | sizes, D, run.manifest.layers)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows([9, 7]))


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def drafter_tensors(shape: DrafterShape, ids: np.ndarray, seed: int = 0) -> dict[str, torch.Tensor]:
    """A drafter of random tensors (bf16) that proposes `ids`."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {name: size for name, size in tensor_shapes(shape).items() if name not in ("d2t", "t2d")}
    sizes["lm_head.weight"] = (len(ids), shape.hidden_size)
    tensors = {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    tensors["d2t"] = torch.from_numpy(ids - np.arange(len(ids)))
    tensors["t2d"] = torch.from_numpy(np.isin(np.arange(shape.vocab_size), ids))
    return tensors


def save_drafter(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Other:
    """Another drafter for the run's target, with a draft vocabulary of its own."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    config: dict[str, Any]
    ids: np.ndarray

    def save(self, **changes: Any) -> Path:
        return save_drafter(self.folder, self.tensors, self.config | changes)


@pytest.fixture
def other(run: Run, tmp_path: Path) -> Other:
    shape = shape_of(run)
    ids = np.sort(np.random.default_rng(1).permutation(V)[:23])
    shared = set(ids.tolist()) & set(run.mapping.target_ids.tolist())
    assert 0 < len(shared) < min(len(ids), D)  # some are shared, and each map has some of its own
    config = replace(shape, draft_vocab_size=len(ids)).config_json()
    return Other(tmp_path / "other", drafter_tensors(shape, ids), config, ids)


def check_started_from(other: Other, run: Run, found: dict[str, torch.Tensor]) -> None:
    """All tensors against the other drafter's, the head row by row by the target id that it stands for."""
    model = model_of(run)
    own = {"lm_head.weight", "embed_tokens.weight", "d2t", "t2d"}
    for name in set(found) - own:
        assert found[name].dtype == torch.float32 and torch.equal(found[name], other.tensors[name].float()), name
    theirs = {int(target): other.tensors["lm_head.weight"][row].float() for row, target in enumerate(other.ids)}
    for row, target in enumerate(run.mapping.target_ids.tolist()):
        expected = theirs.get(target, model.lm_head.weight[target])
        assert torch.equal(found["lm_head.weight"][row], expected), (row, target)
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight.bfloat16())
    assert torch.equal(found["d2t"], torch.from_numpy(run.mapping.d2t))
    assert torch.equal(found["t2d"], torch.from_numpy(run.mapping.t2d))


def test_a_drafter_with_another_draft_vocabulary(
    run: Run, other: Other, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        checkpoint = start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(other.save()))
    check_started_from(other, run, checkpoint.weights)
    assert "embed_tokens.weight" not in checkpoint.facts["trained"]
    assert (checkpoint.facts["epoch"], checkpoint.facts["step"], checkpoint.moments) == (0, 0, {})
    shared = len(set(other.ids.tolist()) & set(run.mapping.target_ids.tolist()))
    assert f"{shared} of 30 draft ids have their head row from it, the other {30 - shared} are new" in caplog.text
    assert warnings_of(caplog) == []


FORMS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "layers.0": lambda t: {name.replace("midlayer.", "layers.0."): tensor for name, tensor in t.items()},
    "no embedding": lambda t: {name: tensor for name, tensor in t.items() if name != "embed_tokens.weight"},
    "no t2d": lambda t: {name: tensor for name, tensor in t.items() if name != "t2d"},
    "no d2t": lambda t: {name: tensor for name, tensor in t.items() if name != "d2t"},
    "float32": lambda t: {name: x.float() if x.is_floating_point() else x for name, x in t.items()},
    "t2d of bytes": lambda t: t | {"t2d": t["t2d"].to(torch.uint8)},
    "constants": lambda t: t | {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)},
    "verifier": lambda t: t | {"verifier_norm.weight": torch.ones(H), "verifier_lm_head.weight": torch.ones(23, H)},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_forms_of_published_heads(run: Run, other: Other, form: str, tmp_path: Path) -> None:
    folder = save_drafter(other.folder, FORMS[form](other.tensors), other.config)
    check_started_from(other, run, start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder)).weights)


def test_a_sharded_drafter(run: Run, other: Other, tmp_path: Path) -> None:
    folder, names = other.save(), sorted(other.tensors)
    (folder / "model.safetensors").unlink()
    places = {}
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: other.tensors[name] for name in part}, folder / f"part-{number}.safetensors")
        places |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    settings = {"init": "checkpoint", "init_from": str(folder)}
    check_started_from(other, run, start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder)).weights)
    before = init_checksum(settings)
    changed = {name: other.tensors[name] for name in names[1::2]}
    changed["lm_head.weight"] = changed["lm_head.weight"] + 1
    save_file(changed, folder / "part-1.safetensors")
    assert init_checksum(settings) != before
    (folder / "part-0.safetensors").unlink()
    for call in (
        lambda: start(run, tmp_path / "again", "checkpoint", init_from=str(folder)),
        lambda: init_checksum(settings),
    ):
        with pytest.raises(EyasError, match=r"^model.init_from: .* cannot be read \(.*part-0.* copy the drafter"):
            call()


def test_a_drafter_of_the_whole_vocabulary(run: Run, other: Other, tmp_path: Path) -> None:
    """Without maps the head has a row for every target token."""
    other.ids = np.arange(V)
    other.tensors = drafter_tensors(shape_of(run), other.ids)
    bare = {name: tensor for name, tensor in other.tensors.items() if name not in ("d2t", "t2d")}
    folder = save_drafter(other.folder, bare, other.config | {"draft_vocab_size": None})
    found = start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder)).weights
    check_started_from(other, run, found)
    assert torch.equal(found["lm_head.weight"], other.tensors["lm_head.weight"][run.mapping.target_ids].float())


def test_eyas_own_checkpoints_and_exports(run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = start(run, tmp_path / "first" / "epoch_0").weights
    exports = [tmp_path / "sglang", tmp_path / "vllm", tmp_path / "in several files"]
    export_drafter(tmp_path / "first" / "epoch_0", "sglang", "llama", exports[0])
    export_drafter(tmp_path / "first" / "epoch_0", "vllm", "llama", exports[1])
    export_drafter(tmp_path / "first" / "epoch_0", "vllm", "llama", exports[2], max_shard_bytes=1000)
    for number, folder in enumerate((tmp_path / "first" / "epoch_0", *exports)):
        again = start(run, tmp_path / f"again_{number}", "checkpoint", init_from=str(folder)).weights
        for name, tensor in first.items():
            expected = tensor.bfloat16() if tensor.is_floating_point() else tensor  # what the folder serves
            assert torch.equal(again[name].to(expected.dtype), expected), name
    assert warnings_of(caplog) == []


def speculators_config(shape: DrafterShape, draft_vocab_size: int, **changes: Any) -> dict[str, Any]:
    """config.json as speculators 0.9.0 writes it: sizes nested, layer ids counted as vLLM does."""
    flat = shape.config_json()
    keys = (*OPEN, "vocab_size", "num_hidden_layers", "rms_norm_eps", "model_type")
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {key: flat[key] for key in keys}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta}},
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in shape.layers],
        "norm_before_residual": False,
        "norm_before_fc": False,
        "target_hidden_size": None,
    } | changes


def test_the_form_of_speculators(run: Run, other: Other, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = speculators_config(shape_of(run), len(other.ids))
    folder = save_drafter(other.folder, FORMS["layers.0"](other.tensors), config)
    check_started_from(other, run, start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder)).weights)
    assert warnings_of(caplog) == []
    for key, value, said in (
        ("norm_before_residual", True, "set model.norm_before_residual: true to start from it"),
        ("transformer_layer_config", {"vocab_size": 41}, "vocab_size is 41, the target's is 40"),
        ("transformer_layer_config", {"num_attention_heads": 8}, "set model.head_dim: 2, model.num_attention_heads: 8"),
    ):
        config = speculators_config(shape_of(run), len(other.ids), **{key: value})
        save_drafter(other.folder, FORMS["layers.0"](other.tensors), config)
        with pytest.raises(EyasError, match=said):
            start(run, tmp_path / "again", "checkpoint", init_from=str(folder))


def test_a_head_whose_residual_is_normed(run: Run, other: Other, tmp_path: Path) -> None:
    """As RedHat's speculators are: the run's drafter is one, too, and vLLM is told so."""
    config = speculators_config(shape_of(run), len(other.ids), norm_before_residual=True)
    folder = save_drafter(other.folder, FORMS["layers.0"](other.tensors), config)
    checkpoint = start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder), norm_before_residual=True)
    assert checkpoint.shape.norm_before_residual
    check_started_from(other, run, checkpoint.weights)
    export_drafter(tmp_path / "epoch_0", "vllm", "llama", tmp_path / "vllm")
    assert read_json_file(tmp_path / "vllm" / "config.json")["norm_before_residual"] is True
    again = start(run, tmp_path / "again", "checkpoint", init_from=str(tmp_path / "vllm"), norm_before_residual=True)
    assert again.shape == checkpoint.shape
    with pytest.raises(EyasError, match="has norm_before_residual true, .*; set model.norm_before_residual: true"):
        start(run, tmp_path / "refused", "checkpoint", init_from=str(tmp_path / "vllm"))
    save_drafter(other.folder, FORMS["layers.0"](other.tensors), config | {"norm_before_residual": False})
    with pytest.raises(EyasError, match="has norm_before_residual false, .*; set model.norm_before_residual: false"):
        start(run, tmp_path / "refused", "checkpoint", init_from=str(folder), norm_before_residual=True)


def test_a_drafter_of_another_width_brings_its_embedding(run: Run, tmp_path: Path) -> None:
    sizes = dict(hidden_size=12, head_dim=6, intermediate_size=10)
    shape = shape_of(run, **sizes)
    ids = np.arange(3, 25)
    tensors = drafter_tensors(shape, ids)
    folder = save_drafter(tmp_path / "other", tensors, replace(shape, draft_vocab_size=len(ids)).config_json())
    checkpoint = start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder), **sizes)
    found = checkpoint.weights
    assert torch.equal(found["embed_tokens.weight"], tensors["embed_tokens.weight"].float())
    assert "embed_tokens.weight" in checkpoint.facts["trained"]
    theirs = dict(zip(ids.tolist(), tensors["lm_head.weight"].float(), strict=True))
    new = []
    for row, target in enumerate(run.mapping.target_ids.tolist()):
        if target in theirs:
            assert torch.equal(found["lm_head.weight"][row], theirs[target])
        else:
            new.append(found["lm_head.weight"][row])
    assert 0.01 < torch.stack(new).std() < 0.03  # the target's head has another width: small random rows
    advice = "set model.head_dim: 6, model.hidden_size: 12, model.intermediate_size: 10 to start from it"
    with pytest.raises(EyasError, match=rf"not .*\(and \d+ more\); {advice}$"):
        start(run, tmp_path / "again", "checkpoint", init_from=str(folder))
    del tensors["embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EyasError, match="lacks embed_tokens.weight; a drafter of another width .* its own embedding"):
        start(run, tmp_path / "again", "checkpoint", init_from=str(folder), **sizes)


@pytest.mark.parametrize("changes, said", [
    ({"rope_theta": 77.0}, "rope_theta 77.0, here 10000.0"),
    ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling llama3, here none"),
    ({"rope_scaling": {"type": "yarn", "factor": 8.0}}, "rope_scaling yarn, here none"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, "layers [1, 2, 3], here [0, 1, 3]"),
    ({"eagle_config": None}, "layers [1, 1, 1], here [0, 1, 3]"),  # what servers take for 5 layers
])  # fmt: skip
def test_what_training_has_to_adapt_is_a_warning(
    run: Run, other: Other, changes: dict, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(other.save(**changes)))
    (warning,) = warnings_of(caplog)
    assert said in warning and str(other.folder) in warning


@pytest.mark.parametrize("model_type, ids, same", [
    ("llama", [0, 1, 3], True), ("llama", [1, 2, 4], False), ("deepseek_v3", [2, 3, 4], True),
    ("deepseek_v3", [1, 3, 4], False), ("kimi_k2", [0, 2, 3], False),
])  # fmt: skip
def test_layer_ids_are_compared_as_the_server_counts_them(
    run: Run, other: Other, model_type: str, ids: list[int], same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A head from SGLang's side, for a drafter that reads layers 0, 1 and 3, or 1, 2 and 3 where 0 cannot be told."""
    layers = (1, 2, 3) if ids[0] == 2 else (0, 1, 3)
    other.save(eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    import_drafter(other.folder, replace(shape_of(run), layers=layers), 5, model_type)
    assert (warnings_of(caplog) == []) == same


Change = Callable[[Other], None]


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda other: other.tensors.__setitem__(name, tensor)


def without(name: str) -> Change:
    return lambda other: other.tensors.__delitem__(name)


def configured(**changes: Any) -> Change:
    return lambda other: other.config.update(changes)


def zeros(*size: int) -> torch.Tensor:
    return torch.zeros(size)


def both(*changes: Change) -> Change:
    def change(other: Other) -> None:
        for one in changes:
            one(other)

    return change


@pytest.mark.parametrize("change, said", [
    # sizes
    (both(*(put(f"midlayer.mlp.{part}_proj.weight", zeros(20, H)) for part in ("gate", "up")),
          put("midlayer.mlp.down_proj.weight", zeros(H, 20))),
     r"midlayer.mlp.down_proj.weight is \(16, 20\), not \(16, 24\);.*; set model.intermediate_size: 20 to start from it"),
    (both(configured(num_attention_heads=8, head_dim=4), put("midlayer.self_attn.q_proj.weight", zeros(32, 2 * H)),
          put("midlayer.self_attn.o_proj.weight", zeros(H, 32))),
     r"q_proj.weight is \(32, 32\), not \(16, 32\); .*set model.num_attention_heads: 8 to start"),
    (configured(num_attention_heads=8, num_key_value_heads=4, head_dim=2),
     "num_attention_heads is 8, not 4; .* set model.head_dim: 2, model.num_attention_heads: 8, model.num_key_value"),
    (both(lambda other: [other.config.pop(key) for key in ("head_dim", "num_key_value_heads")],
          configured(num_attention_heads=8)),
     "set model.head_dim: 2, model.num_attention_heads: 8, model.num_key_value_heads: 4 to start"),
    (both(lambda other: [other.config.pop(key) for key in OPEN], put("midlayer.self_attn.k_proj.weight", zeros(4, 32))),
     "k_proj.weight is .* set model.num_attention_heads, model.num_key_value_heads, model.head_dim to its own"),
    (put("fc.weight", zeros(H, 60)), r"fc.weight is \(16, 60\), not \(16, 48\); it reads 60 numbers .*, not 48"),
    (put("embed_tokens.weight", zeros(41, H)), r"embed_tokens.weight is \(41, 16\), not \(40, 16\); take a dr"),
    (put("t2d", torch.zeros(41, dtype=torch.bool)), r"t2d is \(41,\), not \(40,\)"),
    (put("d2t", torch.zeros(22, dtype=torch.int64)), r"d2t is \(22,\), not \(23,\)"),
    (configured(vocab_size=41), "vocab_size is 41, the target's is 40: it drafts for another vocabulary"),
    # names
    (without("midlayer.hidden_norm.weight"), "lacks midlayer.hidden_norm.weight; take a one-layer"),
    (without("lm_head.weight"), "lacks lm_head.weight"),
    (put("midlayer.self_attn.q_proj.bias", zeros(H)), "has no place for: midlayer.self_attn.q_proj.bias; take"),
    (put("layers.1.mlp.up_proj.weight", zeros(24, H)), "has no place for: layers.1.mlp.up_proj.weight"),
    (put("midlayer.self_attn.q_norm.weight", zeros(4)), "has no place for: midlayer.self_attn.q_norm.weight"),
    (put("layers.0.hidden_norm.weight", zeros(H)), "holds both .*, which are the same"),
    # maps
    (both(without("d2t"), without("t2d")), "lm_head.weight has 23 rows for 40 draft ids .*whole vocabulary of 40"),
    (put("d2t", torch.full((23,), 30)), "target ids outside 0 to 39"),
    (put("d2t", -torch.arange(23)), "the same twice"),
    (put("t2d", torch.zeros(V, dtype=torch.bool)), "d2t and t2d contradict each other"),
    # meaning
    (configured(hidden_act="gelu"), "hidden_act is gelu"),
    (configured(norm_before_residual=True), "has norm_before_residual true, .* something else than here"),
    (configured(eagle_config={"norm_before_fc": True}), "switches on norm_before_fc"),
    (configured(speculators_model_type="dflash"), "speculators_model_type is dflash"),
    (configured(rope_scaling="linear"), "config.json is not one of an EAGLE-3 drafter"),
    # values
    (put("norm.weight", torch.full((H,), float("nan"))), "norm.weight holds NaN"),
    (lambda other: other.tensors["lm_head.weight"].fill_(float("inf")), "lm_head.weight holds NaN or infinity"),
    (put("fc.weight", zeros(H, 48).to(torch.float8_e4m3fn)), r"fc.weight is quantised \(dtype F8_E4M3\)"),
])  # fmt: skip
def test_drafters_that_do_not_fit_are_refused(
    run: Run, other: Other, change: Change, said: str, tmp_path: Path
) -> None:
    change(other)
    with pytest.raises(EyasError, match=rf"^model.init_from: {other.folder}: .*{said}") as caught:
        start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(other.save()))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "epoch_0").exists()


def test_folders_without_a_readable_drafter_are_refused(run: Run, other: Other, tmp_path: Path) -> None:
    folder = other.folder
    settings = {"init": "checkpoint", "init_from": str(folder)}

    def refused(said: str, checksum: bool = True) -> None:
        with pytest.raises(EyasError, match=rf"^model.init_from: {folder}: {said}"):
            start(run, tmp_path / "epoch_0", "checkpoint", init_from=str(folder))
        if checksum:
            with pytest.raises(EyasError, match=rf"^model.init_from: {folder}: {said}"):
                init_checksum(settings)
        assert not (tmp_path / "epoch_0").exists()

    refused("no such folder; .*download it first")
    folder.mkdir()
    refused("has no config.json")
    (folder / "config.json").write_text("{}")
    refused("has no model.safetensors; put")
    (folder / "pytorch_model.bin").write_bytes(b"code")
    refused("has no model.safetensors, only pytorch_model.bin: such files can run code .* as safetensors")
    other.save()
    (folder / "config.json").write_text("{")
    refused("config.json cannot be read as JSON", checksum=False)
    (folder / "config.json").write_text("[]")
    refused("config.json is no JSON object", checksum=False)
    other.save()
    whole = (folder / "model.safetensors").read_bytes()
    for size in (0, 5, 200, len(whole) - 1):
        (folder / "model.safetensors").write_bytes(whole[:size])
        refused("its safetensors weights cannot be read .* copy the drafter there again, whole")
    (folder / "model.safetensors.index.json").write_text("{}")
    refused("its safetensors weights cannot be read")


# ---- its mark ----


def test_the_checksum_follows_the_contents_of_what_it_starts_from(other: Other, tmp_path: Path) -> None:
    settings = {"init": "checkpoint", "init_from": str(other.save())}
    first = init_checksum(settings)
    assert (
        init_checksum({"init": "checkpoint", "init_from": str(shutil.copytree(other.folder, tmp_path / "copy"))})
        == first
    )
    (other.folder / "README.md").write_text("not part of it")
    assert init_checksum(settings) == first
    other.save(rope_theta=5.0)
    second = init_checksum(settings)
    other.tensors["norm.weight"][0] += 1
    other.save(rope_theta=5.0)
    assert len({first, second, init_checksum(settings)}) == 3
    for init in ("random", "target_layer"):
        assert init_checksum({"init": init, "init_from": None}) is None


def test_epoch_0_is_written_again_when_what_it_starts_from_changed(run: Run, other: Other, tmp_path: Path) -> None:
    vocabulary = tmp_path / "map.safetensors"
    write_arrays(vocabulary, {"d2t": run.mapping.d2t, "t2d": run.mapping.t2d}, {})
    write_sealed(tmp_path / "map.json", {"files": {vocabulary.name: describe_file(vocabulary)}})
    settings = OPEN | {"init": "checkpoint", "init_layer": None, "seed": 3}
    settings["init_from"] = str(other.save())
    folder = tmp_path / "epoch_0"

    def written() -> tuple[str, float]:
        initialise_checkpoint(run.manifest.path, vocabulary, run.target, settings, folder)
        facts = folder / "trainer_state.json"
        return read_json_file(facts)["fingerprint"], facts.stat().st_mtime_ns

    first = written()
    assert written() == first  # complete: not written twice
    other.tensors["norm.weight"][0] += 1
    other.save()
    assert written()[0] != first[0]
    assert torch.equal(load_checkpoint(folder).weights["norm.weight"], other.tensors["norm.weight"].float())
