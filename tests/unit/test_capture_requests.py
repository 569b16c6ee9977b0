"""The capture plugin without a server: dumps, requests of all kinds, and the choice of layers."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

sys.path.insert(0, str(Path(__file__).parents[2] / "workflow" / "capture"))

import eyas_capture
from eyas_capture.plugin import Capture, _configured
from eyas_capture.writer import Broken, Dump, is_ours

HIDDEN, LAYERS = 8, [1, 2, 4]


class Request:
    """What the hooks see of the server's request."""

    def __init__(self, rid: str, tokens: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rid, self.tokens = rid, tokens
        self.origin_input_ids = torch.randint(3, 500, (tokens,), generator=generator).tolist()
        self.aux = torch.randn(tokens, 3 * HIDDEN, generator=generator)
        self.last = torch.randn(tokens, HIDDEN, generator=generator)
        self.inflight_middle_chunks, self.is_retracted = 0, False
        self.customized_info: dict[str, Any] | None = None
        self.to_finish: object = None
        self.over = False

    def finished(self) -> bool:
        return self.over


def forward(capture: Capture, chunks: list[tuple[Request, int, int]]) -> None:
    """One prefill batch: rows [start, end) of each request, as the server hands them over."""
    for request, _, end in chunks:
        request.inflight_middle_chunks = int(end < request.tokens)
    output = SimpleNamespace(
        hidden_states=torch.cat([r.aux[a:b] for r, a, b in chunks]),
        last_hidden_states=torch.cat([r.last[a:b] for r, a, b in chunks]),
    )
    batch = SimpleNamespace(reqs=[r for r, _, _ in chunks], prefix_lens=[a for _, a, _ in chunks])
    capture.take(
        batch,
        SimpleNamespace(
            logits_output=output, copy_done=None, extend_input_len_per_req=[b - a for _, a, b in chunks]
        ),
    )  # fmt: skip


def check_dump(folder: Path, request: Request) -> None:
    path = folder / f"{request.rid}.safetensors"
    assert request.customized_info == {"hs_file": [str(path)]}
    assert path.stat().st_mode & 0o777 == 0o600
    with safe_open(path, "pt") as file:
        assert torch.equal(file.get_tensor("aux_hidden_states"), request.aux)
        assert torch.equal(file.get_tensor("last_hidden_state"), request.last)
        ids = file.get_tensor("input_ids")
        assert ids.dtype == torch.int32 and ids.tolist() == request.origin_input_ids
        metadata = file.metadata()
    assert json.loads(metadata.pop("layers")) == LAYERS
    assert metadata == {
        "format": eyas_capture.FORMAT, "version": eyas_capture.VERSION, "rid": request.rid, "dtype": "float32", "prefix": "0", "tokens": str(request.tokens),
    }  # fmt: skip


def error_of(request: Request) -> str:
    assert request.customized_info is not None and set(request.customized_info) == {"hs_error"}
    (text,) = request.customized_info["hs_error"]
    return text


@pytest.fixture
def capture(tmp_path: Path) -> Capture:
    return Capture(str(tmp_path), LAYERS, 5.0)


def test_chunks_of_several_requests(capture: Capture, tmp_path: Path) -> None:
    a, b, other = Request("eyas-a", 10, 1), Request("eyas-b", 7, 2), Request("cmpl-1", 4, 3)
    forward(capture, [(a, 0, 3), (other, 0, 4), (b, 0, 7)])
    assert a.customized_info is None and sorted(os.listdir(tmp_path)) == [".eyas-a.part", "eyas-b.safetensors"]
    forward(capture, [(a, 3, 9)])
    forward(capture, [(a, 9, 10)])
    check_dump(tmp_path, a)
    check_dump(tmp_path, b)
    assert other.customized_info is None and not capture.open and not capture._owners


def test_a_retracted_request_comes_again(capture: Capture, tmp_path: Path) -> None:
    request = Request("eyas-1", 10)
    forward(capture, [(request, 0, 6)])
    request.is_retracted = True
    forward(capture, [(request, 6, 10)])
    assert request.customized_info is None
    request.is_retracted = False
    forward(capture, [(request, 0, 10)])
    check_dump(tmp_path, request)


@pytest.mark.parametrize("how", ["over", "to_finish"])
def test_an_aborted_request_leaves_nothing(capture: Capture, tmp_path: Path, how: str) -> None:
    request, other = Request("eyas-1", 10), Request("cmpl-1", 3)
    forward(capture, [(request, 0, 6)])
    setattr(request, how, True)
    forward(capture, [(request, 6, 10), (other, 0, 3)])
    forward(capture, [(Request("eyas-2", 3), 0, 3)])
    assert os.listdir(tmp_path) == ["eyas-2.safetensors"]


def test_an_id_used_again_gets_the_new_prompt(capture: Capture, tmp_path: Path) -> None:
    forward(capture, [(Request("eyas-1", 10, 1), 0, 6)])
    again = Request("eyas-1", 10, 2)
    forward(capture, [(again, 0, 10)])
    check_dump(tmp_path, again)


def test_cached_prefix_is_no_whole_dump(capture: Capture, tmp_path: Path) -> None:
    request = Request("eyas-1", 10)
    forward(capture, [(request, 4, 10)])
    assert "--disable-radix-cache" in error_of(request) and os.listdir(tmp_path) == []


def test_gap_and_short_prompt(capture: Capture, tmp_path: Path) -> None:
    gap = Request("eyas-1", 10)
    forward(capture, [(gap, 0, 4)])
    forward(capture, [(gap, 6, 10)])
    assert "begins at token 6" in error_of(gap)
    dump = Dump(str(tmp_path), "eyas-2", list(range(10)), LAYERS, 1.0)
    dump.add(0, torch.zeros(4, 3 * HIDDEN), torch.zeros(4, HIDDEN))
    with pytest.raises(Broken, match="4 of 10 tokens"):
        dump.finish()
    assert os.listdir(tmp_path) == []


def test_tokens_of_an_answer_are_no_prompt(capture: Capture, tmp_path: Path) -> None:
    request = Request("eyas-1", 5)
    forward(capture, [(request, 0, 5)])
    request.aux, request.last = torch.zeros(6, 3 * HIDDEN), torch.zeros(6, HIDDEN)
    forward(capture, [(request, 5, 6)])
    assert "hs_file" in (request.customized_info or {}) and not capture.open


def test_wrong_width_and_missing_states(capture: Capture, tmp_path: Path) -> None:
    request = Request("eyas-1", 5)
    request.aux = request.aux[:, : 2 * HIDDEN]
    forward(capture, [(request, 0, 5)])
    assert "width 16 for 3 layers of 8" in error_of(request) and os.listdir(tmp_path) == []


@pytest.fixture
def small_memory(tmp_path: Path) -> Any:
    """A file system in memory of 64 KiB."""
    import subprocess

    folder = tmp_path / "small"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_full_memory_fails_the_request_alone(small_memory: Path) -> None:
    capture = Capture(str(small_memory), LAYERS, 0.3)
    first, second, third = Request("eyas-1", 400), Request("eyas-2", 300), Request("eyas-3", 300)
    forward(capture, [(first, 0, 400)])
    check_dump(small_memory, first)
    began = time.monotonic()
    forward(capture, [(second, 0, 300)])
    assert "no room for" in error_of(second) and 0.3 <= time.monotonic() - began < 3
    assert os.listdir(small_memory) == ["eyas-1.safetensors"]
    (small_memory / "eyas-1.safetensors").unlink()
    forward(capture, [(third, 0, 300)])
    check_dump(small_memory, third)


def test_a_write_waits_for_room(small_memory: Path) -> None:
    capture = Capture(str(small_memory), LAYERS, 20.0)
    first, second = Request("eyas-1", 400), Request("eyas-2", 300)
    forward(capture, [(first, 0, 400)])
    timer = threading.Timer(0.3, (small_memory / "eyas-1.safetensors").unlink)
    timer.start()
    forward(capture, [(second, 0, 300)])
    timer.join()
    check_dump(small_memory, second)


def test_an_abort_ends_the_wait_for_room(small_memory: Path) -> None:
    capture = Capture(str(small_memory), LAYERS, 60.0)
    first, second, third = Request("eyas-1", 400), Request("eyas-2", 300), Request("cmpl-1", 3)
    forward(capture, [(first, 0, 400)])
    forward(capture, [(second, 0, 100)])  # waits in its thread
    second.over = True
    began = time.monotonic()
    forward(capture, [(Request("eyas-3", 3), 0, 3), (third, 0, 3)])
    assert time.monotonic() - began < 5 and not capture.open
    assert sorted(os.listdir(small_memory)) == ["eyas-1.safetensors", "eyas-3.safetensors"]


@pytest.mark.parametrize("rid", ["eyas-", "eyas-../x", "eyas-a/b", "eyas-G", "cmpl-1", "eyas-1\n", None, 7, ["eyas-1"]])
def test_other_requests_are_not_ours(rid: object) -> None:
    assert not is_ours(rid)


def test_links_are_not_followed(capture: Capture, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / ".eyas-1.part").symlink_to(tmp_path / "elsewhere")
    request = Request("eyas-1", 5)
    forward(capture, [(request, 0, 5)])
    assert error_of(request) and (tmp_path / "elsewhere").read_bytes() == b"precious"


# ---- layers


class Inner(torch.nn.Module):
    """Captures as most models do (`marks` false), or as mixtures of experts do."""

    def __init__(self, depth: int, marks: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Identity() for _ in range(depth))
        self.layers_to_capture: list[int] = []
        self.marks = marks

    def choose(self, ids: list[int]) -> None:
        self.layers_to_capture = ids
        if self.marks:
            for i in ids:
                self.layers[i]._is_layer_to_capture = True  # marks are only ever added

    def captured(self) -> list[int]:
        if self.marks:
            return [i for i, layer in enumerate(self.layers) if getattr(layer, "_is_layer_to_capture", False)]
        return [i for i in range(len(self.layers)) if i in self.layers_to_capture]


class LlamaForCausalLM(torch.nn.Module):
    def __init__(self, depth: int = 8, marks: bool = False) -> None:
        super().__init__()
        self.model = Inner(depth, marks)
        self.model.choose([2, depth // 2, depth - 3])  # the server's first choice


class Gemma3ForCausalLM(LlamaForCausalLM):
    pass


class KimiForConditionalGeneration(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.language_model = LlamaForCausalLM()


@pytest.mark.parametrize("layers", [[0, 1, 2], [1, 2, 6], [2, 4, 5], [1, 3, 4]])
@pytest.mark.parametrize("marks", [False, True])
def test_inputs_of_the_next_layers_are_captured(tmp_path: Path, layers: list[int], marks: bool) -> None:
    capture, model = Capture(str(tmp_path), layers, 1.0), LlamaForCausalLM(marks=marks)
    capture.set_layers(model)
    assert capture.refusal is None and model.model.captured() == [i + 1 for i in layers]


def test_layers_of_an_inner_language_model(tmp_path: Path) -> None:
    capture, model = Capture(str(tmp_path), [0, 3, 5], 1.0), KimiForConditionalGeneration()
    capture.set_layers(model)
    assert capture.refusal is None and model.language_model.model.captured() == [1, 4, 6]


@pytest.mark.parametrize(
    ("layers", "model", "reason"),
    [
        ([1, 2, 7], LlamaForCausalLM(), "up to 6"),
        ([1, 2, 9], LlamaForCausalLM(marks=True), "up to 6"),
        ([2, 1, 3], LlamaForCausalLM(), "ascend"),
        ([-1, 1, 3], LlamaForCausalLM(), "ascend"),
        ([1, 2, 4], Gemma3ForCausalLM(), "residual"),
        ([1, 2, 4], torch.nn.Linear(1, 1), "not supported"),
    ],
)
def test_refusals(tmp_path: Path, layers: list[int], model: Any, reason: str) -> None:
    """The model is left as the server had it, and every request says why."""
    before = model.model.captured() if hasattr(model, "model") else None
    capture, request = Capture(str(tmp_path), layers, 1.0), Request("eyas-1", 5)
    capture.set_layers(model)
    assert before is None or model.model.captured() == before
    forward(capture, [(request, 0, 5)])
    assert reason in error_of(request) and os.listdir(tmp_path) == []


@pytest.mark.parametrize(("layers", "wait"), [("", "30"), ("[1,", "30"), ("7", "30"), ("[1, 2, 4]", "soon")])
def test_senseless_settings_refuse_every_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layers: str, wait: str
) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("EYAS_CAPTURE_LAYERS", layers)
    monkeypatch.setenv("EYAS_CAPTURE_WAIT", wait)
    assert "EYAS_CAPTURE_LAYERS" in str(_configured(str(tmp_path)).refusal)


def test_folder_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_CAPTURE_LAYERS", "[1, 2, 4]")
    tmp_path.chmod(0o777)
    assert "chmod 700" in str(_configured(str(tmp_path)).refusal)
    assert "no folder" in str(_configured(str(tmp_path / "none")).refusal)
    tmp_path.chmod(0o700)
    assert _configured(str(tmp_path)).refusal is None
