"""One shard of hidden states: allocated once, filled row by row, resumed after a kill."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.config import default_layers
from eyas.errors import EyasError
from eyas.extraction.engines.base import Captured, Engine, FailedRow
from eyas.extraction.layout import FORMAT_VERSION, FP8, shard_layout
from eyas.extraction.recording import Recorder
from eyas.jobs import BatchProgress
from eyas.shards import (
    Journal,
    TensorFileWriter,
    checked,
    describe_file,
    ensure_free,
    fingerprint,
    is_complete,
    read_json,
    write_lock,
    write_sealed,
)
from eyas.shards.files import publish, remove_folder
from eyas.target.tokenizer import TargetReference, text_config
from eyas.tokenization import TokenShard, read_tokens

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

__all__ = ["FORMAT_VERSION", "LAST_HIDDEN_STATE", "LAYER_CONVENTION", "extract_shard", "is_finite", "shard_layout"]

LAYER_CONVENTION = "output of decoder layer j (0-based); hidden_states[j + 1] of transformers"
LAST_HIDDEN_STATE = "after_final_norm"
_LOG_SECONDS = 2.0
_WRITERS = 3  # threads: one checks states and one lets go of a dump while one copies into the file


def layers_of(target: TargetReference, layers: list[int] | None) -> list[int]:
    """The configured layer ids, or the default ones of the target; raises EyasError."""
    return default_layers(int(text_config(target).num_hidden_layers)) if layers is None else layers


def is_finite(states: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    import torch

    if not states.numel():
        return True
    # One fast pass: NaN comes out of it, and so do infinities (isfinite().all() is many times slower).
    return bool(torch.isfinite(torch.stack(torch.aminmax(states))).all())


def as_stored(states: torch.Tensor, dtype: str) -> torch.Tensor:
    """States in the stored precision; those that fp8 will hold stay as they are."""
    import torch

    return states if dtype == FP8 else states.to(getattr(torch, dtype))


def stored_bytes(name: str, states: torch.Tensor, dtype: str) -> dict[str, np.ndarray]:
    """Raw contents (flat) of the tensors that hold the finite states `name`, as :func:`as_stored` gives them."""
    import torch

    if dtype == FP8:
        from eyas.extraction.fp8 import quantise

        scales, vectors = ("aux_scales", 3) if name == "aux_hidden_states" else ("last_scale", 1)
        bits, scale = quantise(states, vectors)
        return {name: bits.view(-1).numpy(), scales: scale.view(-1).numpy()}
    return {name: states.contiguous().view(-1).view(torch.uint8).numpy()}


@dataclass
class _Writer:
    """Puts captured sequences at their places; states that are not finite fail their row."""

    file: TensorFileWriter
    tokens: TokenShard
    dtype: str

    def put(self, index: int, captured: Captured) -> str | None:
        """Write a sequence's states and let go of them; returns why it has none. Called by several threads."""
        try:
            return self.write(index, captured)
        finally:
            captured.release()

    def write(self, index: int, captured: Captured) -> str | None:
        """Write a sequence's states; returns why it has none."""
        if isinstance(captured, FailedRow):
            return captured.reason
        first, stored = int(self.tokens.offsets[index]), dict[str, np.ndarray]()
        for name, states in (("aux_hidden_states", captured.aux), ("last_hidden_state", captured.last)):
            narrow = as_stored(states, self.dtype)
            if not is_finite(narrow):
                return (
                    f"the target's {name} hold NaN or infinity in {str(narrow.dtype).removeprefix('torch.')}; try"
                    " extraction.dtype or target.dtype with a larger range"
                )
            stored |= stored_bytes(name, narrow, self.dtype)
        for name, raw in stored.items():
            self.file.write_rows(name, first, raw.data)
        self.file.write_rows("target_token", first, np.ascontiguousarray(captured.target_token).data)
        return None

    def write_index(self) -> None:
        """The tensors that are known before any state is."""
        for name in ("input_ids", "offsets", "row_ids"):
            values = np.ascontiguousarray(getattr(self.tokens, name))
            if values.size:
                self.file.write_rows(name, 0, values.data)


def extract_shard(
    tokens_file: Path,
    output: Path,
    target: TargetReference,
    layers: list[int] | None,
    dtype: str,
    batch_tokens: int = 4096,
    gpus: int = 0,
    engine: Engine | None = None,
    max_failed_rows: int = 0,
    staging_root: Path | None = None,
) -> None:
    """Write `output` (hidden states) and its `.json` sidecar for one shard of tokens.

    The file is allocated at full size before the target is loaded, so a full disk is an
    error at once. Rows are journalled as they are written; a killed job goes on with those
    that are missing, and ends with the same bytes. `layers` None takes the default ones; `engine` None is
    transformers in this process, with `batch_tokens` and `gpus`. `staging_root`: the folder of `.staging`, if not
    that of `output`.
    A row may come to several sequences (its id repeats in `row_ids`); each has its own states. One that
    has none for good stays zero in the file and is recorded under `failed`; more than
    `max_failed_rows` of them are an error. Raises EyasError.
    """
    from eyas.target.model import target_identity

    hidden_size = int(text_config(target).hidden_size)
    layers = layers_of(target, layers)
    if engine is None:
        from eyas.extraction.engines.transformers import TransformersEngine

        engine = TransformersEngine(target, layers, batch_tokens, gpus)
    sidecar = output.with_suffix(".json")
    token_facts = read_json(tokens_file.with_suffix(".json"), "tokens sidecar")
    identity = target_identity(target)
    source = checked(tokens_file, "tokens shard")
    mark = fingerprint(version=FORMAT_VERSION, target=identity, layers=layers, dtype=dtype, tokens=source)
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s is finished already.", output)
            return
        tokens = read_tokens(tokens_file)
        rows = len(np.unique(tokens.row_ids))
        staging = (staging_root or output.parent) / ".staging" / output.stem
        staged = staging / output.name
        layout = shard_layout(len(tokens.input_ids), len(tokens), hidden_size, dtype)
        if not staged.exists() or staged.stat().st_size != layout.nbytes:
            # A journal counts only beside the file it is about.
            remove_folder(staging)
        with Journal(staging, fingerprint(job=mark, records="sequences", **engine.way)) as journal:
            if not staged.exists():
                ensure_free(staging, layout.nbytes, f"Shard {output.stem}")
            elif journal.records:
                log.info(
                    "Resuming %s: %d of %d sequences are there from before.",
                    output.stem, len(_finished(journal)), len(tokens),
                )  # fmt: skip
            with TensorFileWriter(staged, layout) as file:
                log.info(
                    "%s: %d rows, %d tokens, %d bytes allocated.",
                    output.stem, rows, len(tokens.input_ids), layout.nbytes,
                )  # fmt: skip
                described: dict[str, Any] = {}
                seconds, captured, timeline = _fill(
                    _Writer(file, tokens, dtype), engine, journal, output.stem,
                    lambda: described.update(describe_file(staged)),
                )  # fmt: skip
            failed = _failed(tokens, journal)
            _refuse_failures(output, failed, max_failed_rows)
        write_sealed(
            staging / sidecar.name,
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": mark,
                "target": identity,
                "tokenizer_hash": token_facts["tokenizer_hash"],
                "chat_template_hash": token_facts["chat_template_hash"],
                "layers": layers,
                "dtype": dtype,
                "hidden_size": hidden_size,
                "tokens_checksum": source,
                "rows": rows,
                "sequences": len(tokens),
                "tokens": int(len(tokens.input_ids)),
                **described,
                "skipped": token_facts["skipped"],
                "failed": failed,
                "seconds": round(seconds, 3),
                "tokens_per_second": round(captured / seconds, 1) if seconds else None,
                "timeline": timeline,
                "files": {output.name: described},
            },
        )
        publish({staged: output, staging / sidecar.name: sidecar}, staging)
        log.info("Wrote %s: %d rows, %d tokens, %d bytes.", output, rows, len(tokens.input_ids), layout.nbytes)


def _finished(journal: Journal) -> frozenset[int]:
    """Indices of the sequences that are written. Those that failed are tried again by the next job."""
    return frozenset(record["sequence"] for record in journal.records if "failed" not in record)


def _failed(tokens: TokenShard, journal: Journal) -> list[dict[str, Any]]:
    """Sequences without states: their index, row and reason, in order."""
    finished = _finished(journal)
    reasons = {r["sequence"]: r["failed"] for r in journal.records if "failed" in r and r["sequence"] not in finished}
    return [{"sequence": i, "row": int(tokens.row_ids[i]), "reason": reasons[i]} for i in sorted(reasons)]


def _refuse_failures(output: Path, failed: list[dict[str, Any]], allowed: int) -> None:
    rows = {entry["row"]: entry["reason"] for entry in failed}
    for row, reason in list(rows.items())[:10]:
        log.warning("row %d: %s", row, reason)
    if len(rows) > allowed:
        row, reason = next(iter(rows.items()))
        raise EyasError(
            f"{output.stem}: {len(rows)} row(s) have no hidden states, extraction.max_failed_rows allows {allowed};"
            f" row {row}: {reason}"
        )


def _fill(
    writer: _Writer, engine: Engine, journal: Journal, name: str, tail: Callable[[], None]
) -> tuple[float, int, dict[str, Any] | None]:
    """Capture the sequences that the journal does not have; returns the seconds it took, their tokens and times.

    The journal names a sequence by its index in the shard: a row's id may stand for several. `tail` is called when
    everything is written, while the last of it is on its way to the disk.
    """
    tokens = writer.tokens
    lengths = tokens.lengths
    finished = _finished(journal)
    writer.write_index()
    if len(finished) == len(tokens):
        tail()
        return 0.0, 0, None
    already = sum(int(lengths[i]) for i in finished)
    engine.begin()
    progress = BatchProgress(
        f"Hidden states {name}", len(tokens.input_ids), writer.file.layout.nbytes, already, len(finished), _LOG_SECONDS
    )
    recorder = Recorder(writer.file, journal, progress, engine.journal_seconds)
    sequences = [tokens.input_ids[a:b] for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]
    new = 0
    running: dict[Future[str | None], int] = {}

    def take(most: int) -> None:
        """Record what is written, and wait until no more than `most` sequences are being written."""
        nonlocal new
        while running:
            for future in [future for future in running if future.done()]:
                index, reason = running.pop(future), future.result()
                count = None if index in finished else int(lengths[index])
                recorder.add({"sequence": index} if reason is None else {"sequence": index, "failed": reason}, count)
                new += count or 0
            if len(running) <= most:
                return
            wait(running, return_when=FIRST_COMPLETED)

    # The captures are closed at once when something goes wrong here: an engine may have work under way.
    with (
        ThreadPoolExecutor(_WRITERS, thread_name_prefix="writer") as pool,
        closing(engine.capture(name, sequences, finished)) as batches,
    ):
        try:
            for captured in batches:
                for index, row in captured:
                    running[pool.submit(writer.put, index, row)] = index
                    take(_WRITERS)
                if not engine.journal_seconds:  # nothing finished may be lost
                    take(0)
                    recorder.flush()
            take(0)
            tail()
        except BaseException:
            with suppress(Exception):  # what is written is kept, and the first error is the one to tell
                take(0)
            with suppress(Exception):
                recorder.close()
            raise
    recorder.close()
    log.info("%s.", progress.line())
    return progress.seconds, new, recorder.timeline.facts()
