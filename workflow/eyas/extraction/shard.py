"""One shard of hidden states: allocated once, filled row by row, resumed after a kill."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.config import default_layers
from eyas.errors import EyasError
from eyas.extraction.layout import FORMAT_VERSION, shard_layout
from eyas.jobs import Progress
from eyas.shards import (
    Journal,
    TensorFileWriter,
    describe_file,
    ensure_free,
    fingerprint,
    is_complete,
    read_json,
    write_json,
    write_lock,
)
from eyas.shards.files import publish, remove_folder
from eyas.target.tokenizer import TargetReference, text_config
from eyas.tokenization import TokenShard, read_tokens

log = logging.getLogger(__name__)

__all__ = ["FORMAT_VERSION", "LAST_HIDDEN_STATE", "LAYER_CONVENTION", "extract_shard", "shard_layout"]

LAYER_CONVENTION = "output of decoder layer j (0-based); hidden_states[j + 1] of transformers"
LAST_HIDDEN_STATE = "after_final_norm"


@dataclass
class _Writer:
    """Puts captured sequences at their places; refuses states that are not finite."""

    file: TensorFileWriter
    tokens: TokenShard
    dtype: str

    def write(self, index: int, row: Any) -> None:
        import torch

        first = int(self.tokens.offsets[index])
        for name, states in (("aux_hidden_states", row.aux), ("last_hidden_state", row.last)):
            stored = states.to(getattr(torch, self.dtype)).contiguous()
            if not bool(torch.isfinite(stored).all()):
                raise EyasError(
                    f"row {self.tokens.row_ids[index]}: the target's {name} hold NaN or infinity in {self.dtype};"
                    " try extraction.dtype or target.dtype with a larger range"
                )
            raw = stored.view(torch.int32 if self.dtype == "float32" else torch.int16).numpy()
            self.file.write_rows(name, first, raw.reshape(-1).data)
        self.file.write_rows("target_token", first, np.ascontiguousarray(row.target_token).data)

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
) -> None:
    """Write `output` (hidden states) and its `.json` sidecar for one shard of tokens.

    The file is allocated at full size before the target is loaded, so a full disk is an
    error at once. Batches are journalled as they are written; a killed job goes on with the
    batches that are missing, and ends with the same bytes. `layers` None takes the default ones.
    A row may come to several sequences (its id repeats in `row_ids`); each has its own states.
    Raises EyasError.
    """
    from eyas.target.model import target_identity

    config = text_config(target)
    hidden_size = int(config.hidden_size)
    layers = default_layers(int(config.num_hidden_layers)) if layers is None else layers
    sidecar = output.with_suffix(".json")
    token_facts = read_json(tokens_file.with_suffix(".json"), "tokens sidecar")
    identity = target_identity(target)
    source = token_facts["files"][tokens_file.name]["checksum"]
    mark = fingerprint(version=FORMAT_VERSION, target=identity, layers=layers, dtype=dtype, tokens=source)
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        tokens = read_tokens(tokens_file)
        rows = len(np.unique(tokens.row_ids))
        staging = output.parent / ".staging" / output.stem
        staged = staging / output.name
        layout = shard_layout(len(tokens.input_ids), len(tokens), hidden_size, dtype)
        if not staged.exists() or staged.stat().st_size != layout.nbytes:
            # A journal counts only beside the file it is about.
            remove_folder(staging)
        with Journal(staging, fingerprint(job=mark, batch_tokens=batch_tokens, records="sequences")) as journal:
            if not staged.exists():
                ensure_free(staging, layout.nbytes, f"Shard {output.stem}")
            elif journal.records:
                log.info(
                    "Resuming %s: %d of %d sequences are there from before.",
                    output.stem, len(journal.records), len(tokens),
                )  # fmt: skip
            with TensorFileWriter(staged, layout) as file:
                log.info(
                    "%s: %d rows, %d tokens, %d bytes allocated.",
                    output.stem, rows, len(tokens.input_ids), layout.nbytes,
                )  # fmt: skip
                seconds, captured = _fill(
                    _Writer(file, tokens, dtype), target, layers, batch_tokens, gpus, journal, output.stem
                )
        described = describe_file(staged)
        write_json(
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
                "seconds": round(seconds, 3),
                "tokens_per_second": round(captured / seconds, 1) if seconds else None,
                "files": {output.name: described},
            },
        )
        publish({staged: output, staging / sidecar.name: sidecar}, staging)
        log.info("Wrote %s: %d rows, %d tokens, %d bytes.", output, rows, len(tokens.input_ids), layout.nbytes)


def _fill(
    writer: _Writer,
    target: TargetReference,
    layers: list[int],
    batch_tokens: int,
    gpus: int,
    journal: Journal,
    name: str,
) -> tuple[float, int]:
    """Run the batches that the journal does not have; returns the seconds it took, and their tokens.

    The journal names a sequence by its index in the shard: a row's id may stand for several.
    """
    from eyas.extraction.engines.transformers import capture_rows, check_head, plan_batches
    from eyas.target.model import load_target

    tokens = writer.tokens
    finished = {record["sequence"] for record in journal.records}
    batches = plan_batches(tokens.lengths.tolist(), batch_tokens)
    missing = [b for b in batches if not finished.issuperset(b)]
    already = sum(int(tokens.lengths[i]) for b in batches if b not in missing for i in b)
    writer.write_index()
    if not missing:
        return 0.0, 0
    model = load_target(target, gpus)
    check_head(model)
    progress = Progress(f"Hidden states {name}", len(tokens.input_ids), "tokens", already=already)
    sequences = [tokens.input_ids[a:b] for a, b in zip(tokens.offsets[:-1], tokens.offsets[1:], strict=True)]
    for captured in capture_rows(model, layers, sequences, missing):
        for index, row in captured:
            writer.write(index, row)
        writer.file.sync()  # states first, then the record that they are there
        journal.append(*({"sequence": index} for index, _ in captured))
        progress.advance(sum(len(row.target_token) for _, row in captured))
    log.info("%s.", progress.line())
    return progress.seconds, len(tokens.input_ids) - already
