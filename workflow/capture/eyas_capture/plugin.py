"""The hooks: where SGLang has the states of a prefill in hand, and where it says which layers to capture."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from eyas_capture.writer import Broken, Dump, is_ours

log = logging.getLogger("eyas_capture")

_THREADS = 4
_FORGET = 900.0  # seconds after which an unfinished dump belongs to a request that was aborted
# Models whose captured states are wrong in SGLang 0.5.23, and why.
_WRONG = {
    "Gemma3": "their layers' outputs are captured without the residual that is still to be added",
    "MiMoV2": "the model overrides the captured states",
    "Step3p5": "the model overrides the captured states",
}


class Capture:
    """The dumps of this process."""

    def __init__(self, folder: str, layers: list[int], wait_seconds: float) -> None:
        self.folder, self.layers, self.wait_seconds = folder, layers, wait_seconds
        self.open: dict[str, Dump] = {}
        self.refusal: str | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._writes: dict[str, Future[None]] = {}

    @property
    def pool(self) -> ThreadPoolExecutor:
        if self._pool is None:  # not before the process has forked for good
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="eyas-capture")
        return self._pool

    # ---- states of a batch

    def take(self, batch: Any, result: Any) -> None:
        """Write the states of our requests in a prefill batch; those whose prompt is whole get their dump's path."""
        output, lengths = result.logits_output, result.extend_input_len_per_req
        if output is None or lengths is None:
            return
        ours = [req for req in batch.reqs if is_ours(req.rid)]
        if not ours:
            return
        if result.copy_done is not None:
            result.copy_done.synchronize()
        aux, last = output.hidden_states, getattr(output, "last_hidden_states", None)
        offset, complete, started = 0, [], time.monotonic()
        for req, start, length in zip(batch.reqs, batch.prefix_lens, lengths, strict=False):
            begin, offset = offset, offset + length
            if not is_ours(req.rid) or req.is_retracted or req.finished():
                continue
            dump = self.open.get(req.rid)
            if dump is None:
                dump = Dump(self.folder, req.rid, list(map(int, req.origin_input_ids)), self.layers, self.wait_seconds)
                self.open[req.rid] = dump
            if self.refusal is not None or aux is None or last is None:
                dump.error = self.refusal or "the server captured no states"
            else:
                self._write(dump, int(start), aux[begin:offset], last[begin:offset])
            if req.inflight_middle_chunks <= 0:
                complete.append(req)
        self._finish(complete, started)
        self._forget()

    def _write(self, dump: Dump, start: int, aux: Any, last: Any) -> None:
        # One after the other for one request: chunks must not overtake each other.
        earlier = self._writes.get(dump.rid)

        def work() -> None:
            if earlier is not None:
                wait([earlier])
            dump.add(start, aux, last)

        self._writes[dump.rid] = self.pool.submit(work)

    def _finish(self, complete: list[Any], started: float) -> None:
        """The response must not be sent before the dump is there; and no dump may hold the scheduler for long."""
        for req in complete:
            dump = self.open.pop(req.rid)
            write = self._writes.pop(req.rid, None)
            left = max(started + self.wait_seconds + 5.0 - time.monotonic(), 0.0)
            if write is not None and wait([write], timeout=left).not_done:
                self.pool.submit(dump.discard)
                info = {"hs_error": ["its states could not be written in time"]}
            else:
                try:
                    info = {"hs_file": [dump.finish()]}
                except (Broken, OSError) as exc:
                    info = {"hs_error": [str(exc)]}
            req.customized_info = {**(req.customized_info or {}), **info}

    def _forget(self) -> None:
        limit = time.monotonic() - _FORGET
        for rid in [rid for rid, dump in self.open.items() if dump.touched < limit]:
            self._writes.pop(rid, None)
            self.pool.submit(self.open.pop(rid).discard)

    # ---- layers

    def set_layers(self, model: Any) -> None:
        """Have the model capture what goes into layer j + 1, whatever numbers its own setter takes."""
        name = type(model).__name__
        why = next((why for start, why in _WRONG.items() if name.startswith(start)), None)
        if why is not None:
            self.refusal = f"hidden states of {name} are wrong in this SGLang: {why}"
            log.error("eyas_capture: %s", self.refusal)
            return
        wanted = [layer + 1 for layer in self.layers]
        for ids in (self.layers, wanted):
            model.set_eagle3_layers_to_capture(list(ids))
            holders = [m for m in model.modules() if getattr(m, "layers_to_capture", None)]
            if holders and all(sorted(m.layers_to_capture) == wanted for m in holders):
                break
        else:
            if len(holders) != 1 or not isinstance(holders[0].layers_to_capture, list):
                self.refusal = f"{name} does not say which layers it captures; this model is not supported"
                log.error("eyas_capture: %s", self.refusal)
                return
            holders[0].layers_to_capture = wanted
        depth = max((len(getattr(m, "layers", ())) for m in holders), default=0)
        if wanted[-1] >= depth:
            self.refusal = (
                f"layer {self.layers[-1]} is the last of {depth}: SGLang takes a layer's output from the next layer's"
                f" input; choose extraction.layers up to {depth - 2}"
            )
            log.error("eyas_capture: %s", self.refusal)
            return
        log.info("eyas_capture: capturing the outputs of layers %s of %s.", self.layers, name)


def _writes_here() -> bool:
    """Whether this process is the one of its tensor-parallel group that writes."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: called once in each of the server's processes."""
    folder = os.environ.get("EYAS_CAPTURE_DIR")
    if not folder or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    layers = [int(layer) for layer in json.loads(os.environ["EYAS_CAPTURE_LAYERS"])]
    capture = Capture(folder, layers, float(os.environ.get("EYAS_CAPTURE_WAIT", "30")))
    here: list[bool] = []

    def writes_here() -> bool:
        if not here:
            here.append(_writes_here())
        return here[0]

    def before_result(processor: Any, batch: Any, result: Any) -> None:
        try:
            if writes_here():
                capture.take(batch, result)
        except Exception:  # the server must not die of it; the requests have no dump, and their client sees that
            log.exception("eyas_capture: states of a batch were lost")
        for req in batch.reqs:
            if is_ours(req.rid) and req.inflight_middle_chunks <= 0:
                req.return_hidden_states = False  # the lists of numbers are never made

    def around_copy(original: Callable[..., Any], result: Any, *args: Any, **kwargs: Any) -> Any:
        output = result.logits_output
        last = getattr(output, "last_hidden_states", None)
        if last is not None:
            if writes_here():
                from sglang.srt.utils.common import async_d2h

                output.last_hidden_states = async_d2h(last)
            else:
                output.hidden_states = output.last_hidden_states = None
        return original(result, *args, **kwargs)

    def after_layers(result: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("eagle_use_aux_hidden_state"):
            capture.set_layers(kwargs["model"])

    component = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    HookRegistry.register(f"{component}.process_batch_result_prefill", before_result, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", around_copy, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture",
        after_layers,
        HookType.AFTER,
    )
