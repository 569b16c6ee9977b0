"""The capture plugin without SGLang: dumps written chunk by chunk, batches as the scheduler hands them over, layers."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from eyas.extraction.engines.sglang.dumps import open_dump
from eyas.shards import read_header
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow" / "capture"))

from eyas_capture.plugin import Capture
from eyas_capture.writer import Broken, Dump, is_ours

WIDTH = 6
LAYERS = [0, 2, 4]
RID = "eyas-0123456789abcdef-1"


def random_states(count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, 4 * WIDTH, generator=generator).to(dtype)
    return values[:, : 3 * WIDTH].contiguous(), values[:, 3 * WIDTH :].contiguous()


def new_dump(folder: Path, count: int, wait: float = 1.0) -> Dump:
    return Dump(str(folder), RID, list(range(3, 3 + count)), LAYERS, wait)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_whose_requests_are_taken() -> None:
    assert is_ours(RID)
    for rid in ("other", "eyas-../../x", "eyas-", "Eyas-1", "eyas-1\n", "eyas-1/2", None, 7, [RID]):
        assert not is_ours(rid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cuts", [[0, 9], [0, 4, 9], [0, 1, 2, 8, 9]])
def test_a_prompt_in_chunks(cuts: list[int], dtype: torch.dtype, tmp_path: Path) -> None:
    aux, last = random_states(9, dtype)
    dump = new_dump(tmp_path, 9)
    for begin, end in zip(cuts, cuts[1:], strict=False):
        dump.add(begin, aux[begin:end], last[begin:end])
        assert left(tmp_path) == [f".{RID}.part"]  # nothing at the final place before it is whole
    path = Path(dump.finish())
    assert left(tmp_path) == [f"{RID}.safetensors"] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o600
    found = load_file(path)
    assert torch.equal(found["aux_hidden_states"], aux) and found["aux_hidden_states"].dtype == dtype
    assert torch.equal(found["last_hidden_state"], last)
    assert found["input_ids"].tolist() == list(range(3, 12)) and found["input_ids"].dtype == torch.int32
    specs, metadata = read_header(path)
    assert set(specs) == set(found)
    assert (metadata["format"], metadata["version"], metadata["rid"]) == ("eyas.capture", "1", RID)
    assert (metadata["prefix"], metadata["tokens"], json.loads(metadata["layers"])) == ("0", "9", LAYERS)
    taken = open_dump(path, RID, np.arange(3, 12, dtype=np.int32), LAYERS, WIDTH)  # the collector agrees
    assert torch.equal(taken.aux, aux) and torch.equal(taken.last, last)
    taken.close()
    assert left(tmp_path) == []


def test_states_that_are_a_view_of_a_larger_batch(tmp_path: Path) -> None:
    values = torch.randn(4 * WIDTH, 20).T  # not contiguous
    dump = new_dump(tmp_path, 9)
    dump.add(0, values[5:14, : 3 * WIDTH], values[5:14, 3 * WIDTH :])
    found = load_file(dump.finish())
    assert torch.equal(found["aux_hidden_states"], values[5:14, : 3 * WIDTH])
    assert torch.equal(found["last_hidden_state"], values[5:14, 3 * WIDTH :])


def test_a_retracted_request_starts_over(tmp_path: Path) -> None:
    first, second = random_states(9, seed=1), random_states(9, seed=2)
    dump = new_dump(tmp_path, 9)
    dump.add(0, first[0][:4], first[1][:4])
    dump.add(0, second[0][:6], second[1][:6])
    dump.add(6, second[0][6:], second[1][6:])
    found = load_file(dump.finish())
    assert torch.equal(found["aux_hidden_states"], second[0])
    assert torch.equal(found["last_hidden_state"], second[1])


def test_a_request_that_failed_starts_over_too(tmp_path: Path) -> None:
    aux, last = random_states(9)
    dump = new_dump(tmp_path, 9)
    dump.add(5, aux[5:], last[5:])
    dump.add(0, aux, last)
    assert torch.equal(load_file(dump.finish())["last_hidden_state"], last)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([(5, 9)], "first 5 tokens came from the prefix cache; start the server with --disable-radix-cache"),
        ([(0, 4), (5, 9)], "a chunk begins at token 5, and 4 are there"),
        ([(0, 4), (3, 9)], "a chunk begins at token 3, and 4 are there"),
        ([(0, 4)], "4 of 9 tokens were captured"),
        ([], "0 of 9 tokens were captured"),
        ([(0, 10)], "10 aux and 10 last states from token 0 of 9"),
    ],
)
def test_a_prompt_that_is_not_whole_has_no_dump(chunks: list, message: str, tmp_path: Path) -> None:
    aux, last = random_states(10)
    dump = new_dump(tmp_path, 9)
    for begin, end in chunks:
        dump.add(begin, aux[begin:end], last[begin:end])
    with pytest.raises(Broken, match=message):
        dump.finish()
    assert left(tmp_path) == []


def test_states_of_other_shapes(tmp_path: Path) -> None:
    aux, last = random_states(9)
    for wrong, message in (
        ((aux[:, :-1], last), "aux states of width 17 for 3 layers of 6"),
        ((aux.double(), last.double()), "states in torch.float64"),
        ((aux.half(), last), "states in torch.float16 and torch.float32"),
        ((aux, last[:-1]), "9 aux and 8 last states"),
    ):
        dump = new_dump(tmp_path, 9)
        dump.add(0, *wrong)
        with pytest.raises(Broken, match=message):
            dump.finish()
        assert left(tmp_path) == []


def full_disk(monkeypatch: pytest.MonkeyPatch, times: int, number: int = errno.ENOSPC) -> list[int]:
    calls: list[int] = []
    real = os.posix_fallocate

    def allocate(fd: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) <= times:
            raise OSError(number, os.strerror(number))
        real(fd, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    return calls


def test_a_write_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = full_disk(monkeypatch, 3)
    dump = new_dump(tmp_path, 9, wait=30.0)
    dump.add(0, *random_states(9))
    path = dump.finish()
    assert len(calls) == 4
    assert os.path.getsize(path) == calls[-1]


@pytest.mark.parametrize(
    ("number", "message"), [(errno.ENOSPC, r"no room for [\d,]+ bytes within 0.2 s"), (errno.EIO, "Input/output error")]
)
def test_no_room_fails_the_request(number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, 10**6, number)
    dump = new_dump(tmp_path, 9, wait=0.2)
    started = time.monotonic()
    dump.add(0, *random_states(9))
    dump.add(4, *random_states(5))  # what comes later of it is passed over
    assert time.monotonic() - started < 2
    with pytest.raises(Broken, match=message):
        dump.finish()
    assert left(tmp_path) == []


def test_discard_and_a_folder_that_is_gone(tmp_path: Path) -> None:
    dump = new_dump(tmp_path, 9)
    dump.add(0, *random_states(4))
    dump.discard()
    assert left(tmp_path) == []
    dump = new_dump(tmp_path / "gone", 9)
    dump.add(0, *random_states(9))
    with pytest.raises(Broken, match="No such file"):
        dump.finish()


# ---- batches


def request(rid: str, count: int, first: int = 3, **changes: Any) -> SimpleNamespace:
    values: dict[str, Any] = dict(
        rid=rid, origin_input_ids=list(range(first, first + count)), is_retracted=False, inflight_middle_chunks=0,
        customized_info=None, finished=lambda: False,
    )  # fmt: skip
    return SimpleNamespace(**(values | changes))


def run(capture: Capture, requests: list[Any], prefixes: list[int], lengths: list[int], seed: int = 0, **changes: Any):
    """Hand over one batch; returns its states."""
    aux, last = random_states(sum(lengths), seed=seed)
    output = SimpleNamespace(**({"hidden_states": aux, "last_hidden_states": last} | changes))
    result = SimpleNamespace(logits_output=output, extend_input_len_per_req=lengths, copy_done=None)
    capture.take(SimpleNamespace(reqs=requests, prefix_lens=prefixes), result)
    return aux, last


def rid(number: int) -> str:
    return f"eyas-0123456789abcdef-{number:x}"


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    return Capture(str(tmp_path), LAYERS, 1.0)


def test_a_batch_of_ours_and_others(capture: Capture, tmp_path: Path) -> None:
    requests = [request("theirs", 4), request(rid(1), 3), request("eyas-../x", 2), request(rid(2), 5, first=50)]
    aux, last = run(capture, requests, [0] * 4, [4, 3, 2, 5])
    assert left(tmp_path) == [f"{rid(1)}.safetensors", f"{rid(2)}.safetensors"]
    for number, begin, end in ((1, 4, 7), (2, 9, 14)):
        found = load_file(tmp_path / f"{rid(number)}.safetensors")
        assert torch.equal(found["aux_hidden_states"], aux[begin:end])
        assert torch.equal(found["last_hidden_state"], last[begin:end])
    assert requests[1].customized_info == {"hs_file": [str(tmp_path / f"{rid(1)}.safetensors")]}
    assert requests[0].customized_info is None and requests[2].customized_info is None
    assert not capture.open and not capture._writes


def test_chunked_prompts_beside_others(capture: Capture, tmp_path: Path) -> None:
    """A prompt of 9 in chunks of 4, 3 and 2, each beside another request."""
    long = request(rid(1), 9, inflight_middle_chunks=2, customized_info={"more": [1]})
    parts = []
    for number, (start, length) in enumerate([(0, 4), (4, 3), (7, 2)]):
        long.inflight_middle_chunks = 2 - number
        other = request(rid(10 + number), 2)
        states = run(capture, [other, long], [0, start], [2, length], seed=number)
        parts.append([values[2:] for values in states])
        done = (tmp_path / f"{rid(1)}.safetensors").exists()
        assert done == (number == 2)
        assert "hs_file" in other.customized_info
    aux, last = (torch.cat(values) for values in zip(*parts, strict=True))
    found = load_file(tmp_path / f"{rid(1)}.safetensors")
    assert torch.equal(found["aux_hidden_states"], aux) and torch.equal(found["last_hidden_state"], last)
    assert set(long.customized_info) == {"more", "hs_file"}


def test_retracted_and_finished_requests_are_passed_over(capture: Capture, tmp_path: Path) -> None:
    """A retracted request comes again from its beginning."""
    retracted, ended = request(rid(1), 4, is_retracted=True), request(rid(2), 3, finished=lambda: True)
    kept = request(rid(3), 2)
    _, last = run(capture, [retracted, ended, kept], [0] * 3, [4, 3, 2])
    assert left(tmp_path) == [f"{rid(3)}.safetensors"]
    assert torch.equal(load_file(tmp_path / f"{rid(3)}.safetensors")["last_hidden_state"], last[7:])
    retracted.is_retracted = False
    _, last = run(capture, [retracted], [0], [4], seed=5)
    assert torch.equal(load_file(tmp_path / f"{rid(1)}.safetensors")["last_hidden_state"], last)


@pytest.mark.parametrize(
    ("prefix", "changes", "message"),
    [
        (2, {}, "first 2 tokens came from the prefix cache"),
        (0, {"hidden_states": None}, "the server captured no states"),
        (0, {"last_hidden_states": None}, "the server captured no states"),
    ],
)
def test_what_cannot_be_written_fails_as_a_request(
    prefix: int, changes: dict, message: str, capture: Capture, tmp_path: Path
) -> None:
    req = request(rid(1), 4 + prefix)
    run(capture, [req], [prefix], [4], **changes)
    assert message in req.customized_info["hs_error"][0]
    assert left(tmp_path) == [] and not capture.open


def test_no_room_holds_the_scheduler_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk(monkeypatch, 10**6)
    capture = Capture(str(tmp_path), LAYERS, 0.3)
    requests = [request(rid(number), 4) for number in range(12)]
    started = time.monotonic()
    run(capture, requests, [0] * 12, [4] * 12)
    assert time.monotonic() - started < 5
    assert all("no room" in req.customized_info["hs_error"][0] for req in requests)
    assert left(tmp_path) == []


def test_an_aborted_request_is_forgotten(capture: Capture, tmp_path: Path) -> None:
    run(capture, [request(rid(1), 9, inflight_middle_chunks=1)], [0], [4])
    capture.pool.submit(lambda: None).result()
    capture._writes[rid(1)].result()
    assert left(tmp_path) == [f".{rid(1)}.part"]
    capture.open[rid(1)].touched -= 10_000
    run(capture, [request(rid(2), 2)], [0], [2])
    capture._pool.shutdown(wait=True)
    assert left(tmp_path) == [f"{rid(2)}.safetensors"] and not capture.open and not capture._writes


# ---- layers


class Inner(torch.nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(depth))
        self.layers_to_capture: Any = []


class LlamaForCausalLM(torch.nn.Module):
    """Adds one to the ids that it is given, as most of SGLang's models do."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.model = Inner(depth)

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [i + 1 for i in ids]


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    """Adds one only where the first id is 1."""

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [i + 1 for i in ids] if ids[0] == 1 else list(ids)


class AsTheyAre(LlamaForCausalLM):
    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = list(ids)


class Silent(LlamaForCausalLM):
    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.elsewhere = ids


class Gemma3ForConditionalGeneration(LlamaForCausalLM):
    pass


@pytest.mark.parametrize("model", [LlamaForCausalLM, DeepseekV3ForCausalLM, AsTheyAre])
@pytest.mark.parametrize("layers", [[0, 1, 3], [0, 2, 4], [1, 2, 4], [2, 3, 4]])
def test_the_outputs_of_the_layers_are_captured(model: type, layers: list[int], capture: Capture) -> None:
    capture.layers = layers
    instance = model()
    capture.set_layers(instance)
    assert capture.refusal is None
    assert instance.model.layers_to_capture == [layer + 1 for layer in layers]


@pytest.mark.parametrize(
    ("model", "layers", "message"),
    [
        (Silent, [0, 2, 4], "Silent does not say which layers it captures"),
        (Gemma3ForConditionalGeneration, [0, 2, 4], "wrong in this SGLang: .*without the residual"),
        (LlamaForCausalLM, [0, 2, 5], "layer 5 is the last of 6.*choose extraction.layers up to 4"),
    ],
)
def test_models_that_are_not_captured_fail_their_requests(
    model: type, layers: list[int], message: str, capture: Capture, tmp_path: Path
) -> None:
    capture.layers = layers
    capture.set_layers(model())
    req = request(rid(1), 4)
    run(capture, [req], [0], [4])
    (said,) = req.customized_info["hs_error"]
    assert re.search(message, said)
    assert left(tmp_path) == []
