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
        self._owners: dict[str, Any] = {}  # the server's request of each open dump

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
        self._forget()
        aux, last = output.hidden_states, getattr(output, "last_hidden_states", None)
        if self.refusal is None and aux is not None and last is not None:
            # Without overlap scheduling they are still on the device, where the next forward may reuse their memory.
            aux, last = aux.detach().to("cpu"), last.detach().to("cpu")
        offset, complete, started = 0, [], time.monotonic()
        for req, start, length in zip(batch.reqs, batch.prefix_lens, lengths, strict=False):
            begin, offset = offset, offset + length
            if not is_ours(req.rid) or req.is_retracted or _is_over(req):
                continue
            if int(start) >= len(req.origin_input_ids):
                continue  # a token of its answer, in a batch that mixes prefills and decodes
            dump = self.open.get(req.rid)
            if dump is not None and self._owners[req.rid] is not req:  # the id of an aborted request, used again
                self._drop(req.rid)
                dump = None
            if dump is None:
                dump = Dump(self.folder, req.rid, list(map(int, req.origin_input_ids)), self.layers, self.wait_seconds)
                self.open[req.rid], self._owners[req.rid] = dump, req
            if self.refusal is not None or aux is None or last is None:
                dump.error = self.refusal or "the server captured no states"
            else:
                self._write(dump, int(start), aux[begin:offset], last[begin:offset])
            if req.inflight_middle_chunks <= 0:
                complete.append(req)
        self._finish(complete, started)

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
            del self._owners[req.rid]
            write = self._writes.pop(req.rid, None)
            left = max(started + self.wait_seconds + 5.0 - time.monotonic(), 0.0)
            if write is not None and wait([write], timeout=left).not_done:
                dump.gone = True
                self.pool.submit(dump.discard)
                info = {"hs_error": ["its states could not be written in time"]}
            else:
                try:
                    info = {"hs_file": [dump.finish()]}
                except (Broken, OSError) as exc:
                    info = {"hs_error": [str(exc)]}
            req.customized_info = {**(req.customized_info or {}), **info}

    def _forget(self) -> None:
        """Drop the dumps of requests that ended before their prompt was whole."""
        limit = time.monotonic() - _FORGET
        for rid in [rid for rid, dump in self.open.items() if dump.touched < limit or _is_over(self._owners[rid])]:
            self._drop(rid)

    def _drop(self, rid: str) -> None:
        dump, write = self.open.pop(rid), self._writes.pop(rid, None)
        del self._owners[rid]
        dump.gone = True  # a write that waits for room gives up
        # Here and now where that works: a later request of this id must find no file in its way.
        if write is None or not wait([write], timeout=1.0).not_done:
            dump.discard()
        else:
            self.pool.submit(dump.discard)

    # ---- layers

    def refuse(self, reason: str) -> None:
        """Every request of ours fails with `reason` from now on; the server goes on serving."""
        self.refusal = reason
        log.error("eyas_capture: %s", reason)

    def set_layers(self, model: Any) -> None:
        """Have the model capture what goes into layer j + 1, whatever numbers its own setter takes.

        Called after the server's own choice of layers, which stays as it is where ours is refused.
        """
        name = type(model).__name__
        why = next((why for start, why in _WRONG.items() if name.startswith(start)), None)
        if why is not None:
            return self.refuse(f"hidden states of {name} are wrong in this SGLang: {why}")
        holders = _holders(model)
        if not holders and hasattr(model, "set_eagle3_layers_to_capture"):
            model.set_eagle3_layers_to_capture(list(self.layers))  # no choice of the server shows where it went
            holders = _holders(model)
        if len(holders) != 1:
            return self.refuse(f"{name} does not say which layers it captures; this model is not supported")
        holder, wanted = holders[0], [layer + 1 for layer in self.layers]
        depth = len(holder.layers)
        if not wanted or wanted != sorted(set(wanted)) or wanted[0] < 1:
            return self.refuse(f"extraction.layers {self.layers} must ascend from 0 on, without repeats")
        if wanted[-1] >= depth:
            return self.refuse(
                f"layer {self.layers[-1]} is {'the last' if wanted[-1] == depth else 'none'} of {depth}: SGLang takes a"
                f" layer's output from the next layer's input; choose extraction.layers up to {depth - 2}"
            )
        try:
            found = _choose_layers(model, holder, wanted)
        except Exception as exc:
            return self.refuse(f"{name} does not take layers {self.layers}: {type(exc).__name__}: {exc}")
        if found != wanted:
            return self.refuse(f"{name} captures the inputs of layers {found}, wanted {wanted}")
        log.info("eyas_capture: capturing the outputs of layers %s of %s.", self.layers, name)


def _holders(model: Any) -> list[Any]:
    """Modules that a choice of layers went to."""
    return [m for m in model.modules() if getattr(m, "layers_to_capture", None) and hasattr(m, "layers")]


def _choose_layers(model: Any, holder: Any, wanted: list[int]) -> list[int]:
    """Have `holder`, the module with the layers, capture the inputs of layers `wanted`; returns what it captures.

    Most models ask `i in layers_to_capture` in their loop. Others (mixtures of experts of Qwen, LFM2) mark the
    layers, and their setters only ever add marks: those of the server's first choice would stay.
    """
    marked = [layer for layer in holder.layers if hasattr(layer, "_is_layer_to_capture")]
    if marked:
        for layer in marked:
            layer._is_layer_to_capture = False
        for index in wanted:
            holder.layers[index]._is_layer_to_capture = True
    holder.layers_to_capture = type(holder.layers_to_capture)(wanted)
    if marked:
        return [i for i, layer in enumerate(holder.layers) if getattr(layer, "_is_layer_to_capture", False)]
    return sorted(holder.layers_to_capture)


def _is_over(req: Any) -> bool:
    """Whether a request ended or is about to, by an abort."""
    return bool(req.finished() or getattr(req, "to_finish", None) is not None)


def _writes_here() -> bool:
    """Whether this process is the one of its tensor-parallel group that writes."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    return bool(parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0)


def _overlaps_batches() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().overlap.enable_two_batch_overlap)


def _configured(folder: str) -> Capture:
    """What the environment asks for; refuses every request where that is no sense."""
    layers, seconds, refusal = [], 30.0, None
    try:
        layers = [int(layer) for layer in json.loads(os.environ.get("EYAS_CAPTURE_LAYERS", ""))]
        seconds = float(os.environ.get("EYAS_CAPTURE_WAIT", "30"))
    except (ValueError, TypeError):
        refusal = "EYAS_CAPTURE_LAYERS must be a JSON list of layer numbers, EYAS_CAPTURE_WAIT a number of seconds"
    if not os.path.isdir(folder):
        refusal = f"EYAS_CAPTURE_DIR: {folder} is no folder"
    elif os.stat(folder).st_mode & 0o022:
        refusal = f"EYAS_CAPTURE_DIR: others may write to {folder}; chmod 700 it"
    capture = Capture(folder, layers, seconds)
    if refusal is not None:
        capture.refuse(refusal)
    return capture


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`: called once in each of the server's processes."""
    folder = os.environ.get("EYAS_CAPTURE_DIR")
    if not folder or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = _configured(folder)
    here: list[bool] = []

    def writes_here() -> bool:
        if not here:
            here.append(_writes_here())
        return here[0]

    def before_result(processor: Any, batch: Any, result: Any) -> None:
        try:
            if writes_here():
                capture.take(batch, result)
        except Exception as exc:  # the server must not die of it
            log.exception("eyas_capture: states of a batch were lost")
            for req in batch.reqs:
                if is_ours(req.rid) and not (req.customized_info or {}).keys() & {"hs_file", "hs_error"}:
                    req.customized_info = {"hs_error": [f"states were lost: {type(exc).__name__}: {exc}"]}
        for req in batch.reqs:
            # The lists of numbers are never made. A retracted request comes again and needs its states then.
            if is_ours(req.rid) and req.inflight_middle_chunks <= 0 and not req.is_retracted:
                req.return_hidden_states = False

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

    def around_layers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        model = kwargs.get("model")
        if kwargs.get("eagle_use_aux_hidden_state") and not hasattr(model, "set_eagle3_layers_to_capture"):
            # Without this the server would not start.
            capture.refuse(f"{type(model).__name__} cannot capture layers in this SGLang; this model is not supported")
            return original(*args, **(kwargs | {"eagle_use_aux_hidden_state": False}))
        done = original(*args, **kwargs)
        if capture.refusal is None:
            if not kwargs.get("eagle_use_aux_hidden_state"):
                capture.refuse(
                    "the server was started without --enable-return-aux-hidden-states --speculative-algorithm EAGLE3"
                )
            elif _overlaps_batches():
                capture.refuse("two-batch overlap bypasses the capture; start the server without it")
            else:
                capture.set_layers(model)
        return done

    component = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    HookRegistry.register(f"{component}.process_batch_result_prefill", before_result, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.utils.GenerationBatchResult.copy_to_cpu", around_copy, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner_components.attention_backend_setup.configure_aux_hidden_state_capture",
        around_layers,
        HookType.AROUND,
    )
