"""One shard of tokens: ids and masks without padding, and the rows that were skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from eyas.conversations import Row, read_rows
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.shards import (
    checked,
    describe_file,
    fingerprint,
    is_complete,
    map_arrays,
    write_arrays,
    write_lock,
    write_sealed,
)
from eyas.shards.files import publish
from eyas.target.tokenizer import TargetReference, TemplateRefusal, end_of_turn_ids, load_tokenizer, tokenizer_hashes
from eyas.tokenization.mask import Encoded, Encoder, Layout, UnusableRow
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["tokens"]
_TOGETHER = 64  # rows that are rendered before they are encoded


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


@dataclass
class _Rows:
    """What becomes of the rows of a shard."""

    encoder: Encoder
    settings: dict[str, Any]
    numbers: list[int] = field(default_factory=list)
    sequences: list[Encoded] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    source_of_sequence: list[int] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    truncated: list[dict[str, int]] = field(default_factory=list)
    cut_off: int = 0

    def take(self, rows: Sequence[Row]) -> None:
        """Encode rows, or record why they cannot be used; all are rendered before any is encoded."""
        for row, laid in [(row, self._lay_out(row)) for row in rows]:
            self._finish(row, laid)

    def _lay_out(self, row: Row) -> list[Layout] | Exception:
        """How a row is rendered (nothing for ready text), or why it cannot be."""
        try:
            if row.skipped is not None:
                raise UnusableRow(row.skipped)
            if row.text is not None:
                return []
            return self.encoder.lay_out(row.messages, row.tools, cut_off=row.finish == "length")
        except (UnusableRow, TemplateRefusal) as exc:
            return exc

    def _finish(self, row: Row, laid: list[Layout] | Exception) -> None:
        try:
            if isinstance(laid, Exception):
                raise laid
            sequences, full = self._encode(row, laid)
        except (UnusableRow, TemplateRefusal) as exc:
            self.skipped.append({"row": row.row, "reason": str(exc), "source": row.source})
            if row.skipped is None:
                log.info("Row %d (%s) is skipped: %s.", row.row, row.place or row.source, exc)
            return
        if full:
            self.truncated.append({"row": row.row, "tokens": full})
        self.cut_off += row.finish == "length"
        source = self.sources.setdefault(row.source, len(self.sources))
        self.numbers += [row.row] * len(sequences)
        self.source_of_sequence += [source] * len(sequences)
        self.sequences += sequences

    def _encode(self, row: Row, laid: list[Layout]) -> tuple[list[Encoded], int]:
        """Sequences of a row within max_length; the longest one's full length when any was cut, else 0."""
        found = self.encoder.tokens_of(laid) if row.text is None else self.encoder.encode_text(row.text)
        limit, longest = self.settings["max_length"], max(len(ids) for ids, _ in found)
        if longest > limit:
            if self.settings["overlong"] == "skip":
                raise UnusableRow(f"too long: {longest} tokens, more than tokenization.max_length = {limit}")
            left = self.settings["truncation_side"] == "left"
            part = slice(-limit, None) if left else slice(limit)
            found = [(ids[part], mask[part]) for ids, mask in found]
            found = [(ids, mask) for ids, mask in found if mask.any()]
            if not found:
                which = "last" if left else "first"
                raise UnusableRow(f"no supervised token among the {which} {limit} (tokenization.max_length)")
        if all(len(ids) < 3 for ids, _ in found):
            raise UnusableRow(f"too short: {longest} tokens; the drafter's first prediction is the third token")
        return [pair for pair in found if len(pair[0]) >= 3], longest if longest > limit else 0

    def arrays(self) -> dict[str, np.ndarray]:
        lengths = [len(ids) for ids, _ in self.sequences]
        return {
            "input_ids": np.concatenate([ids for ids, _ in self.sequences] or [np.zeros(0, np.int32)]),
            "loss_mask": np.concatenate([mask for _, mask in self.sequences] or [np.zeros(0, np.uint8)]),
            "offsets": np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64),
            "row_ids": np.asarray(self.numbers, dtype=np.int64),
        }


def tokenize_shard(
    conversations: Path,
    output: Path,
    target: TargetReference,
    settings: dict[str, Any],
    load: Callable[[], Any] | None = None,
) -> None:
    """Write `output` and its `.json` sidecar for one shard of conversations.

    `settings`: max_length, overlong, truncation_side, train_on, reasoning, template_options. A row comes to
    one sequence, or to one for each answer (see :class:`Encoder`); then its id repeats in `row_ids`. Rows
    that cannot be used are recorded with their reason. `load` gives the target's tokenizer, when several shards
    share it.
    """
    sidecar = output.with_suffix(".json")
    mark = fingerprint(
        version=FORMAT_VERSION, settings=settings, conversations=checked(conversations, "shard of conversations"),
        target=[target.path, target.revision],
    )  # fmt: skip
    with write_lock(output):
        if is_complete(sidecar, mark):
            log.info("%s is finished already.", output)
            return
        tokenizer = load() if load else load_tokenizer(target)
        end_ids = end_of_turn_ids(target, tokenizer)
        encoder = Encoder(tokenizer, end_ids, settings["train_on"], settings["reasoning"], settings["template_options"])
        rows = read_rows(conversations)
        progress = Progress(f"Tokens {output.stem}", len(rows), "rows")
        result = _Rows(encoder, settings)
        for start in range(0, len(rows), _TOGETHER):
            block = rows[start : start + _TOGETHER]
            result.take(block)
            progress.advance(len(block))
        arrays = result.arrays()
        used, tokens, supervised = len(set(result.numbers)), len(arrays["input_ids"]), int(arrays["loss_mask"].sum())
        staging = output.parent / ".staging" / output.stem
        staging.mkdir(parents=True, exist_ok=True)
        write_arrays(staging / output.name, arrays, {"format": "eyas.tokens", "version": str(FORMAT_VERSION)})
        write_sealed(
            staging / sidecar.name,
            {
                "format_version": FORMAT_VERSION,
                "fingerprint": mark,
                **tokenizer_hashes(tokenizer),
                "target": {
                    "path": target.path, "revision": target.revision, "trust_remote_code": target.trust_remote_code,
                },
                "rows": used,
                "sequences": len(result.sequences),
                "tokens": tokens,
                "supervised_tokens": supervised,
                "sources": list(result.sources),
                "source_of_sequence": result.source_of_sequence,
                "skipped": result.skipped,
                "truncated": result.truncated,
                "cut_off": result.cut_off,
                "files": {output.name: describe_file(staging / output.name)},
            },
        )  # fmt: skip
        publish({staging / output.name: output, staging / sidecar.name: sidecar}, staging)
        log.info(
            "Wrote %s: %d rows, %d tokens, of which %d are supervised; %d rows skipped.",
            output, used, tokens, supervised, len(result.skipped),
        )  # fmt: skip
