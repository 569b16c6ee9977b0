"""Hidden states against transformers' own, one row at a time; files that survive a kill; faults that are refused."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import eyas.extraction.engines.transformers as engine
import numpy as np
import pytest
import torch
import transformers
from drafter_reference import random_rows, read_json_file, run_killed, save_llama, write_tokens
from eyas.drafter.dataset import HiddenStates
from eyas.errors import EyasError
from eyas.extraction.engines.base import FailedRow
from eyas.extraction.engines.transformers import Capture, capture_rows, check_head, plan_batches
from eyas.extraction.manifest import read_manifest, write_manifest
from eyas.extraction.shard import FORMAT_VERSION, extract_shard, shard_layout
from eyas.shards import Journal, checksum, fingerprint
from eyas.target.model import load_target
from eyas.target.tokenizer import TargetReference
from safetensors.torch import load_file

LENGTHS = [5, 1, 17, 9, 9, 3, 12]
LAYERS = [0, 1, 3]
COMMON: dict[str, Any] = dict(
    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=4, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=False,
    pad_token_id=0,
)  # fmt: skip
# Gemma 2 scales its embedding and norms twice, Qwen 3 norms its queries, DeepSeek has latent attention and experts.
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON),
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, final_logit_softcapping=None, sliding_window=4),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{k: v for k, v in COMMON.items() if k not in ("num_key_value_heads", "head_dim")}, num_key_value_heads=4,
        moe_intermediate_size=8, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
        n_shared_experts=1,
    ),
}  # fmt: skip


def save_random(folder: Path, config: Any, dtype: torch.dtype = torch.float32) -> TargetReference:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # norms that are not all one
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return TargetReference(str(folder), dtype=str(dtype).removeprefix("torch."))


def expected_rows(target: TargetReference, rows: list[tuple]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """aux, last and argmax of each row, alone in its batch, as transformers itself gives them."""
    dtype = getattr(torch, target.dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype=dtype).eval()
    result = []
    for _, ids, _ in rows:
        with torch.inference_mode():
            output = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False)
        states = [output.hidden_states[layer + 1][0] for layer in LAYERS]
        result.append((torch.cat(states, -1), output.hidden_states[-1][0], output.logits[0].argmax(-1)))
    return result


@pytest.mark.parametrize("architecture", CONFIGS)
def test_states_equal_transformers_one_row_at_a_time(architecture: str, tmp_path: Path) -> None:
    target = save_random(tmp_path / "target", CONFIGS[architecture]())
    rows = random_rows(LENGTHS, first_row=10)
    tokens = write_tokens(tmp_path / "rows_10-18.safetensors", rows, skipped=(17,))
    expected = [torch.cat(parts) for parts in zip(*expected_rows(target, rows), strict=True)]
    for batch_tokens in (1, 40, 4096):  # one row a batch; some padding; all rows in one
        output = tmp_path / f"{batch_tokens}.safetensors"
        extract_shard(tokens, output, target, LAYERS, "float32", batch_tokens)
        found = load_file(output)
        for name, values in zip(("aux_hidden_states", "last_hidden_state"), expected, strict=False):
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], values, rtol=1e-5, atol=1e-5)
        assert torch.equal(found["target_token"].long(), expected[2])
    assert expected[0].std() > 0.1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_stored_precision_is_the_cast_of_the_states(dtype: str, tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    tokens = write_tokens(tmp_path / "rows_0-7.safetensors", random_rows(LENGTHS))
    for name in ("float32", dtype):
        extract_shard(tokens, tmp_path / f"{name}.safetensors", target, LAYERS, name, 40)
    wide, narrow = load_file(tmp_path / "float32.safetensors"), load_file(tmp_path / f"{dtype}.safetensors")
    for name in ("aux_hidden_states", "last_hidden_state"):
        assert narrow[name].dtype == getattr(torch, dtype)
        assert torch.equal(narrow[name], wide[name].to(getattr(torch, dtype)))
        assert not torch.equal(narrow[name].float(), wide[name])
    assert torch.equal(narrow["target_token"], wide["target_token"])  # of the target's states, not of the stored ones


def test_a_bfloat16_target_is_stored_bit_for_bit(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target", dtype=torch.bfloat16)
    rows = random_rows([9, 9])
    tokens = write_tokens(tmp_path / "rows_0-2.safetensors", rows)
    extract_shard(tokens, tmp_path / "out.safetensors", target, LAYERS, "bfloat16", 1)
    aux, last, best = (torch.cat(parts) for parts in zip(*expected_rows(target, rows), strict=True))
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["aux_hidden_states"], aux)
    assert torch.equal(found["last_hidden_state"], last)
    assert torch.equal(found["target_token"].long(), best)


def test_layout_and_sidecar(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    rows = random_rows([5, 1, 17], first_row=10)
    tokens = write_tokens(tmp_path / "rows_10-15.safetensors", rows, skipped=(13, 14))
    output = tmp_path / "states" / "rows_10-15.safetensors"
    extract_shard(tokens, output, target, LAYERS, "bfloat16", 40)
    found = load_file(output)
    kinds = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()}
    assert kinds == {
        "aux_hidden_states": (torch.bfloat16, (23, 48)), "last_hidden_state": (torch.bfloat16, (23, 16)),
        "input_ids": (torch.int32, (23,)), "target_token": (torch.int32, (23,)),
        "offsets": (torch.int64, (4,)), "row_ids": (torch.int64, (3,)),
    }  # fmt: skip
    assert found["offsets"].tolist() == [0, 5, 6, 23]
    assert found["row_ids"].tolist() == [10, 11, 12]
    assert found["input_ids"].tolist() == np.concatenate([ids for _, ids, _ in rows]).tolist()
    assert output.stat().st_size == shard_layout(23, 3, 16, "bfloat16").nbytes
    assert output.stat().st_size < 23 * (8 * 16 + 16) + 1000  # 8·H bytes a token, a few more, and the header
    facts = read_json_file(output.with_suffix(".json"))
    described = {"bytes": output.stat().st_size, "checksum": checksum(output)}
    known = {
        "format_version": FORMAT_VERSION, "rows": 3, "sequences": 3, "tokens": 23, **described, "files": {output.name: described}, "layers": LAYERS,
        "dtype": "bfloat16", "hidden_size": 16, "tokenizer_hash": "tok", "chat_template_hash": "template",
        "skipped": [{"row": 13, "reason": "test"}, {"row": 14, "reason": "test"}], "tokens_checksum": checksum(tokens),
    }  # fmt: skip
    assert {key: facts[key] for key in known} == known
    assert set(facts) - set(known) == {"fingerprint", "target", "seconds", "tokens_per_second", "timeline", "failed"}
    assert facts["target"]["path"] == target.path
    assert facts["seconds"] > 0 and facts["failed"] == []
    assert facts["timeline"]["samples"][-1][1] == 23
    assert not (output.parent / ".staging").exists()


def test_batches_hold_every_row_once_within_their_tokens() -> None:
    lengths = [5, 1, 17, 9, 9, 3, 12, 30]
    for batch_tokens in (1, 18, 40, 1000):
        batches = plan_batches(lengths, batch_tokens)
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= batch_tokens
    assert len(plan_batches(lengths, 1000)) == 1
    assert plan_batches([], 10) == []


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose extraction was killed after two batches; `whole` is the shard of an undisturbed one."""
    folder = tmp_path_factory.mktemp("killed")
    target = save_llama(folder / "target")
    tokens = write_tokens(folder / "tokens" / "rows_0-7.safetensors", random_rows(LENGTHS))
    extract_shard(tokens, folder / "whole" / tokens.name, target, LAYERS, "bfloat16", 18)
    run_killed(f"""
from eyas.extraction.shard import extract_shard
folder = Path({str(folder)!r})
extract_shard(folder / "tokens/rows_0-7.safetensors", folder / "out/rows_0-7.safetensors",
              TargetReference(str(folder / "target")), {LAYERS}, "bfloat16", 18)
""")
    return folder


def resume(killed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Run the killed job again in a copy of what it left; returns the batches that it computed."""
    computed: list[list[int]] = []

    def spy(target: Any, layers: Any, rows: Any, batches: Any) -> Any:
        computed.extend(map(list, batches))
        return capture_rows(target, layers, rows, batches)

    monkeypatch.setattr(engine, "capture_rows", spy)
    output = folder / "rows_0-7.safetensors"
    assert not output.exists()
    extract_shard(
        killed / "tokens" / output.name, output, TargetReference(str(killed / "target")), LAYERS, "bfloat16", 18
    )
    assert checksum(output) == checksum(killed / "whole" / output.name)
    return computed


def test_a_killed_job_computes_the_rest_and_ends_with_the_same_bytes(
    killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(killed / "out", tmp_path / "out")
    batches = plan_batches(LENGTHS, 18)
    assert len(batches) >= 4
    assert resume(killed, tmp_path / "out", monkeypatch) == batches[2:]


def test_a_torn_journal_line_counts_as_not_done(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(killed / "out", tmp_path / "out")
    journal = tmp_path / "out" / ".staging" / "rows_0-7" / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-5])
    assert resume(killed, tmp_path / "out", monkeypatch) == plan_batches(LENGTHS, 18)[1:]


@pytest.mark.parametrize("loss", ["deleted", "cut short"])
def test_a_journal_without_its_file_counts_for_nothing(
    loss: str, killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new file is all zeros: rows that the journal calls finished are not in it."""
    shutil.copytree(killed / "out", tmp_path / "out")
    partial = tmp_path / "out" / ".staging" / "rows_0-7" / "rows_0-7.safetensors"
    if loss == "deleted":
        partial.unlink()
    else:
        partial.write_bytes(partial.read_bytes()[:-1])
    assert resume(killed, tmp_path / "out", monkeypatch) == plan_batches(LENGTHS, 18)


def test_a_journal_of_other_settings_counts_for_nothing(killed: Path, tmp_path: Path) -> None:
    shutil.copytree(killed / "out", tmp_path / "out")
    output = tmp_path / "out" / "rows_0-7.safetensors"
    target = TargetReference(str(killed / "target"))
    extract_shard(killed / "tokens" / output.name, output, target, [0, 2, 3], "bfloat16", 18)
    whole, found = load_file(killed / "whole" / output.name), load_file(output)
    same = (whole["aux_hidden_states"] == found["aux_hidden_states"]).view(-1, 3, 16).all(-1)
    assert same[:, [0, 2]].all() and not same[:, 1].any()  # every row has its new middle layer


def test_an_old_journal_is_not_misread(killed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier versions wrote ids of rows into a journal of the same settings."""
    shutil.copytree(killed / "out", tmp_path / "out")
    mark = read_json_file(killed / "whole" / "rows_0-7.json")["fingerprint"]
    staging = tmp_path / "out" / ".staging" / "rows_0-7"
    (staging / "journal.jsonl").write_text(f'{{"fingerprint": "{fingerprint(job=mark, batch_tokens=18)}"}}\n')
    with Journal(staging, fingerprint(job=mark, batch_tokens=18)) as journal:
        journal.append(*({"row": row} for row in range(7)))
    assert resume(killed, tmp_path / "out", monkeypatch) == plan_batches(LENGTHS, 18)


# Of each row that comes to several sequences, one is finished when the job below is stopped, and one is not.
ROW_IDS = [10, 10, 10, 11, 12, 13, 13]


def rows_of_several_sequences() -> list[tuple]:
    return [(row, ids, mask) for row, (_, ids, mask) in zip(ROW_IDS, random_rows(LENGTHS), strict=True)]


def test_rows_of_several_sequences_are_resumed_sequence_by_sequence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_llama(tmp_path / "target")
    tokens = write_tokens(tmp_path / "rows_10-15.safetensors", rows_of_several_sequences(), skipped=(14,))
    whole, output = (tmp_path / folder / tokens.name for folder in ("whole", "out"))
    extract_shard(tokens, whole, target, LAYERS, "bfloat16", 18)
    assert plan_batches(LENGTHS, 18) == [[1, 5, 0], [3, 4], [6], [2]]

    def stopped(target: Any, layers: Any, rows: Any, batches: Any) -> Any:
        yield from capture_rows(target, layers, rows, batches[:2])
        raise RuntimeError("stopped")

    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="stopped"):
        patched.setattr(engine, "capture_rows", stopped)
        extract_shard(tokens, output, target, LAYERS, "bfloat16", 18)
    computed: list[list[int]] = []

    def spy(target: Any, layers: Any, rows: Any, batches: Any) -> Any:
        computed.extend(batches)
        return capture_rows(target, layers, rows, batches)

    monkeypatch.setattr(engine, "capture_rows", spy)
    extract_shard(tokens, output, target, LAYERS, "bfloat16", 18)
    assert computed == [[6], [2]]
    assert output.read_bytes() == whole.read_bytes()


def test_rows_of_several_sequences_are_counted_once(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    rows = rows_of_several_sequences()
    tokens = write_tokens(tmp_path / "rows_10-15.safetensors", rows, skipped=(14,))
    output = tmp_path / "states" / tokens.name
    extract_shard(tokens, output, target, LAYERS, "float32", 4096)
    facts, found = read_json_file(output.with_suffix(".json")), load_file(output)
    assert (facts["rows"], facts["sequences"], facts["tokens"]) == (4, 7, 56)
    assert found["row_ids"].tolist() == ROW_IDS
    assert found["offsets"].tolist() == [0, 5, 6, 23, 32, 41, 44, 56]
    expected = torch.cat([last for _, last, _ in expected_rows(target, rows)])
    torch.testing.assert_close(found["last_hidden_state"], expected, rtol=1e-5, atol=1e-5)
    write_manifest([make_empty(tmp_path / "states", target), output], 15, tmp_path / "states" / "data_config.json")
    totals = read_json_file(tmp_path / "states" / "data_config.json")["totals"]
    assert {key: totals[key] for key in ("rows", "sequences", "tokens", "skipped")} == {
        "rows": 5, "sequences": 8, "tokens": 59, "skipped": 10,
    }  # fmt: skip


def make_empty(folder: Path, target: TargetReference) -> Path:
    """Rows 0 to 9, of which the first alone is used."""
    tokens = write_tokens(folder.parent / "rows_0-10.safetensors", random_rows([3]), skipped=tuple(range(1, 10)))
    extract_shard(tokens, folder / tokens.name, target, LAYERS, "float32", 4096)
    return folder / tokens.name


def test_a_finished_shard_is_left_alone(killed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "capture_rows", lambda *_: pytest.fail("computed again"))
    target, output = TargetReference(str(killed / "target")), killed / "whole" / "rows_0-7.safetensors"
    extract_shard(killed / "tokens" / output.name, output, target, LAYERS, "bfloat16", 18)


@pytest.mark.parametrize(
    "value, dtype, what", [(torch.nan, "float32", "NaN or infinity in float32"), (1e5, "float16", "in float16")]
)
def test_states_that_cannot_be_stored_name_their_row(value: float, dtype: str, what: str, tmp_path: Path) -> None:
    """Token 39 is embedded as NaN, or as more than float16 holds: its row's states are never published."""
    target = save_llama(tmp_path / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path)
    with torch.no_grad():
        model.model.embed_tokens.weight[39] = value
    model.save_pretrained(target.path)
    rows = random_rows([4, 6, 5], vocab_size=39, first_row=20)
    rows[1][1][3] = 39
    tokens = write_tokens(tmp_path / "rows_20-23.safetensors", rows)
    output = tmp_path / "out" / tokens.name
    with pytest.raises(EyasError, match=f"row 21: .*{what}"):
        extract_shard(tokens, output, target, LAYERS, dtype, 6)
    assert not output.exists()
    assert not output.with_suffix(".json").exists()
    if dtype == "float16":
        extract_shard(tokens, output, target, LAYERS, "bfloat16", 6)


@pytest.mark.parametrize("how", ["not enough free", "allocation fails"])
def test_a_full_disk_is_an_error_before_the_target_is_loaded(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_llama(tmp_path / "target")
    tokens = write_tokens(tmp_path / "rows_0-2.safetensors", random_rows([4, 6]))
    output = tmp_path / "out" / tokens.name

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("eyas.target.model.load_target", lambda *_: pytest.fail("loaded before the disk was checked"))
        if how == "allocation fails":
            patched.setattr(os, "posix_fallocate", no_space)
        else:
            patched.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100))
        with pytest.raises(EyasError, match="bytes.* free"):
            extract_shard(tokens, output, target, LAYERS, "float32")
    assert not output.exists()
    extract_shard(tokens, output, target, LAYERS, "float32")  # once there is room
    assert output.exists()


@pytest.mark.parametrize("kind", ["cap", "scale"])
def test_targets_that_change_their_logits_are_refused(kind: str, tmp_path: Path) -> None:
    if kind == "cap":
        config = transformers.Gemma2Config(**COMMON, final_logit_softcapping=1.0)
    else:
        config = transformers.GraniteConfig(**{k: v for k, v in COMMON.items() if k != "head_dim"}, logits_scaling=8.0)
    target = save_random(tmp_path / "target", config)
    with pytest.raises(EyasError, match=r"a cap or a scale"):
        check_head(load_target(target))
    tokens = write_tokens(tmp_path / "rows_0-2.safetensors", random_rows([4, 6]))
    with pytest.raises(EyasError, match=r"a cap or a scale"):
        extract_shard(tokens, tmp_path / "out.safetensors", target, LAYERS, "float32")
    assert not (tmp_path / "out.safetensors").exists()


def test_layers_outside_the_target_are_refused_and_hooks_are_removed(tmp_path: Path) -> None:
    target = load_target(save_llama(tmp_path / "target"))
    with pytest.raises(EyasError, match="layers are 0 to 4"):
        Capture(target, [1, 3, 5])
    with Capture(target, LAYERS) as capture:
        target.decoder(input_ids=torch.tensor([[3, 4]]))
        assert capture.aux().shape == (1, 2, 48)
    assert not any(layer._forward_hooks for layer in target.layers)


class Failing:
    """Gives up on some sequences."""

    journal_seconds = 0.0
    way: dict[str, Any] = {}

    def __init__(self, target: TargetReference, bad: set[int]) -> None:
        self.inner, self.bad = engine.TransformersEngine(target, LAYERS, 1, 0), bad

    def capture(self, name: str, sequences: Any, finished: Any) -> Any:
        for batch in self.inner.capture(name, sequences, finished):
            yield [(i, FailedRow("no luck") if i in self.bad else row) for i, row in batch]

    def begin(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_rows_that_fail_for_good_are_recorded_and_left_out(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    tokens = write_tokens(tmp_path / "tokens" / "rows_10-16.safetensors", rows_of_several_sequences()[:5] + [
        (14, *random_rows([4])[0][1:]), (15, *random_rows([6])[0][1:])])  # fmt: skip
    output = tmp_path / "out" / tokens.name
    with pytest.raises(
        EyasError, match=r"2 row\(s\) have no hidden states, .*max_failed_rows allows 1; row 10: no luck"
    ):
        extract_shard(tokens, output, target, LAYERS, "bfloat16", engine=Failing(target, {1, 2, 5}), max_failed_rows=1)
    assert not output.exists()
    # What failed is tried again: sequence 2 succeeds this time.
    extract_shard(tokens, output, target, LAYERS, "bfloat16", engine=Failing(target, {1, 5}), max_failed_rows=2)
    facts = read_json_file(output.with_suffix(".json"))
    assert facts["failed"] == [{"sequence": i, "row": row, "reason": "no luck"} for i, row in ((1, 10), (5, 14))]
    found, whole = load_file(output), tmp_path / "whole" / tokens.name
    extract_shard(tokens, whole, target, LAYERS, "bfloat16", batch_tokens=1)
    expected, offsets = load_file(whole), found["offsets"].tolist()
    for i, (a, b) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
        same = torch.equal(found["aux_hidden_states"][a:b], expected["aux_hidden_states"][a:b])
        assert same if i not in (1, 5) else not found["aux_hidden_states"][a:b].any()


def test_the_trainer_leaves_failed_rows_out(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target")
    tokens = write_tokens(tmp_path / "tokens" / "rows_0-7.safetensors", random_rows(LENGTHS))
    output = tmp_path / "hidden_states" / tokens.name
    extract_shard(tokens, output, target, LAYERS, "bfloat16", engine=Failing(target, {1, 4}), max_failed_rows=2)
    write_manifest([output], 7, tmp_path / "hidden_states" / "data_config.json")
    manifest = read_manifest(tmp_path / "hidden_states" / "data_config.json")
    assert manifest.values["totals"]["failed"] == 2 and manifest.values["shards"][0]["failed"] == [1, 4]
    data = HiddenStates(manifest, tmp_path / "tokens")
    assert data.select(5, held_out=False).tolist() == [0, 2, 3, 5, 6]
    assert data.select(5, held_out=True).tolist() == []
