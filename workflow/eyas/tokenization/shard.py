"""One shard of tokens: ids and masks without padding, and the rows that were skipped."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.conversations import read_rows
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.shards import (
    checksum,
    describe_file,
    fingerprint,
    is_complete,
    map_arrays,
    write_arrays,
    write_json,
    write_lock,
)
from eyas.shards.files import publish
from eyas.target.tokenizer import TargetReference, TemplateRefusal, end_of_turn_ids, load_tokenizer, tokenizer_hashes
from eyas.tokenization.mask import UnusableRow, encode
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["tokens"]


@dataclass
class TokenShard:
    """Rows end to end: `input_ids` int32 [T], `loss_mask` uint8 [T], `offsets` int64 [R+1], `row_ids` int64 [R]."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    row_ids: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.row_ids)


def read_tokens(path: Path) -> TokenShard:
    """Memory-map a tokens shard; raises EyasError when its parts do not fit together."""
    shard = TokenShard(**map_arrays(path, ("input_ids", "loss_mask", "offsets", "row_ids")))
    lengths = shard.lengths
    if (
        len(shard.offsets) != len(shard.row_ids) + 1
        or shard.offsets[0] != 0
        or (len(lengths) and lengths.min() < 1)
        or shard.offsets[-1] != len(shard.input_ids)
        or len(shard.loss_mask) != len(shard.input_ids)
    ):
        raise EyasError(f"{path}: its offsets do not fit its tokens; delete it and run snakemake again to rebuild it")
    return shard


def _row(tokenizer: Any, row: Any, end_ids: list[int], settings: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    ids, mask = encode(tokenizer, row.messages, end_ids, cut_off=row.finish == "length")
    limit = settings["max_length"]
    if len(ids) > limit:
        if settings["overlong"] == "skip":
            raise UnusableRow(f"too long: {len(ids)} tokens, more than tokenization.max_length = {limit}")
        ids, mask = ids[:limit], mask[:limit]
        if not mask.any():
            raise UnusableRow(f"no supervised token among the first {limit} (tokenization.max_length)")
    if len(ids) < 3:
        raise UnusableRow(f"too short: {len(ids)} tokens; the drafter's first prediction is the third token")
    return ids, mask


def tokenize_shard(conversations: Path, output: Path, target: TargetReference, settings: dict[str, Any]) -> None:
    """Write `output` and its `.json` sidecar for one shard of conversations.

    `settings`: max_length, overlong. Rows that cannot be used are recorded with their reason.
    """
    sidecar = output.with_suffix(".json")
    mark = fingerprint(
        version=FORMAT_VERSION, settings=settings, conversations=checksum(conversations),
        target=[target.path, target.revision],
    )  # fmt: skip
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        tokenizer = load_tokenizer(target)
        end_ids = end_of_turn_ids(target, tokenizer)
        rows = read_rows(conversations)
        progress = Progress(f"Tokens {output.stem}", len(rows), "rows")
        kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        skipped: list[dict[str, Any]] = []
        for row in rows:
            try:
                if row.skipped is not None:
                    raise UnusableRow(row.skipped)
                kept.append((row.row, *_row(tokenizer, row, end_ids, settings)))
            except (UnusableRow, TemplateRefusal) as exc:
                skipped.append({"row": row.row, "reason": str(exc)})
                if row.skipped is None:
                    log.info("Row %d (%s) is skipped: %s.", row.row, row.source, exc)
            progress.advance(1)
        lengths = [len(ids) for _, ids, _ in kept]
        arrays = {
            "input_ids": np.concatenate([ids for _, ids, _ in kept] or [np.zeros(0, np.int32)]),
            "loss_mask": np.concatenate([mask for _, _, mask in kept] or [np.zeros(0, np.uint8)]),
            "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            "row_ids": np.asarray([number for number, _, _ in kept], dtype=np.int64),
        }
        staging = output.parent / ".staging" / output.stem
        staging.mkdir(parents=True, exist_ok=True)
        write_arrays(staging / output.name, arrays, {"format": "eyas.tokens", "version": str(FORMAT_VERSION)})
        write_json(
            staging / sidecar.name,
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": mark,
                **tokenizer_hashes(tokenizer),
                "rows": len(kept),
                "tokens": int(sum(lengths)),
                "supervised_tokens": int(arrays["loss_mask"].sum()),
                "skipped": skipped,
                "files": {output.name: describe_file(staging / output.name)},
            },
        )
        publish({staging / output.name: output, staging / sidecar.name: sidecar}, staging)
        log.info(
            "Wrote %s: %d rows, %d tokens, of which %d are supervised; %d rows skipped.",
            output, len(kept), sum(lengths), int(arrays["loss_mask"].sum()), len(skipped),
        )  # fmt: skip
