"""Rows of a completed extraction, read from memory-mapped shards, packed whole into batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.extraction.fp8 import dequantise
from eyas.extraction.layout import FP8
from eyas.extraction.manifest import Manifest
from eyas.shards import is_held_out, map_arrays
from eyas.tokenization import TokenShard, read_tokens

Item = TypeVar("Item")
Loaded = TypeVar("Loaded")

_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, FP8: torch.bfloat16}
_SHARD = ("aux_hidden_states", "last_hidden_state", "input_ids", "target_token", "offsets", "row_ids")
# Where the states lie in a shard, and their scales if they are in eight bits.
_STATES = {"aux": ("aux_hidden_states", "aux_scales"), "last": ("last_hidden_state", "last_scale")}


@dataclass
class Batch:
    """Rows packed end to end, without padding.

    `aux` [T, 3·Ht], `last` [T, Ht] as they are stored, bfloat16 where that is fp8; `tokens`, `target_token`,
    `positions` (inside the row) int64 [T]; `mask` bool [T]; `spans`: (start, end) of each row; `row_ids`: whose
    they are.
    """

    aux: Tensor
    last: Tensor
    tokens: Tensor
    target_token: Tensor
    mask: Tensor
    positions: Tensor
    spans: list[tuple[int, int]]
    row_ids: list[int]

    def to(self, device: torch.device) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)}
        return replace(self, **{name: tensor.to(device) for name, tensor in tensors.items()})

    def unsound_rows(self) -> list[int]:
        """Ids of the rows whose states hold NaN or infinity."""
        sound = torch.isfinite(self.aux).all(1) & torch.isfinite(self.last).all(1)
        return [row for row, (start, end) in zip(self.row_ids, self.spans, strict=True) if not sound[start:end].all()]


class HiddenStates:
    """All rows of a manifest, by position in it: row ids, lengths and, on demand, their tensors.

    Loss masks come from the tokens shards beside the states; ids of both must agree.
    """

    def __init__(self, manifest: Manifest, tokens_folder: Path) -> None:
        self.manifest = manifest
        self.dtype = _TORCH[manifest.values["dtype"]]
        self._fp8 = manifest.values["dtype"] == FP8
        names = (*_SHARD, *(scales for _, scales in _STATES.values())) if self._fp8 else _SHARD
        self._states, self._tokens = [], []
        row_ids, failed = [], []
        places: list[tuple[int, int]] = []
        for number, file in enumerate(manifest.shards):
            states = map_arrays(file, names)
            mapped = read_tokens(tokens_folder / file.name)
            tokens = TokenShard(*(np.array(getattr(mapped, f.name)) for f in fields(mapped)))  # small: into memory
            if not (
                np.array_equal(states["row_ids"], tokens.row_ids)
                and np.array_equal(states["offsets"], tokens.offsets)
                and np.array_equal(states["input_ids"], tokens.input_ids)
            ):
                raise EyasError(
                    f"{file}: its rows are not those of {tokens_folder / file.name}; delete the shard of hidden"
                    " states and run snakemake again to rebuild it"
                )
            self._states.append(states)
            self._tokens.append(tokens)
            row_ids.append(np.asarray(tokens.row_ids))
            failed += [len(places) + i for i in manifest.values["shards"][number]["failed"]]
            places += [(number, i) for i in range(len(tokens))]
        self.row_ids = np.concatenate(row_ids)
        self._places = places
        self._failed = frozenset(failed)
        self.lengths = np.array([self._tokens[n].lengths[i] for n, i in places], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def select(self, held_out_every: int, held_out: bool) -> np.ndarray:
        """Positions of the training rows, or of the held-out ones; without those that have no states."""
        chosen = [
            i
            for i, row in enumerate(self.row_ids)
            if is_held_out(int(row), held_out_every) == held_out and i not in self._failed
        ]
        return np.array(chosen, dtype=np.int64)

    def counted(self, draft_ids: np.ndarray, steps: int) -> np.ndarray:
        """Predictions that count in the loss, by row and TTT step: int64 [rows, steps].

        `draft_ids` int64 [V]: -1 where a target id is outside the draft vocabulary. Step i predicts
        the tokens at 2+i and later of a row; they count where they are supervised and the target's
        own argmax for them is in the draft vocabulary.
        """
        found = np.zeros((len(self), steps), dtype=np.int64)
        first = 0
        for states, tokens in zip(self._states, self._tokens, strict=True):
            counts = np.zeros(len(tokens.input_ids) + 1, dtype=np.int64)
            own = np.asarray(states["target_token"])[:-1]  # position p is predicted from p - 1
            np.cumsum(tokens.loss_mask[1:].astype(bool) & (draft_ids[own] >= 0), out=counts[2:])
            starts, ends = tokens.offsets[:-1], tokens.offsets[1:]
            for step in range(steps):
                begin = np.minimum(starts + 2 + step, ends)
                found[first : first + len(tokens), step] = counts[ends] - counts[begin]
            first += len(tokens)
        return found

    def supervised(self) -> np.ndarray:
        """Supervised tokens of each row: int64 [rows]."""
        sums = [np.concatenate([[0], np.cumsum(t.loss_mask, dtype=np.int64)]) for t in self._tokens]
        return np.concatenate([s[t.offsets[1:]] - s[t.offsets[:-1]] for s, t in zip(sums, self._tokens, strict=True)])

    def batch(self, indices: Sequence[int]) -> Batch:
        """Load rows by position and pack them."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("ids", "target", "mask", "at")}
        places, spans, start = [], [], 0
        for index in indices:
            number, place = self._places[index]
            states, tokens = self._states[number], self._tokens[number]
            a, b = int(tokens.offsets[place]), int(tokens.offsets[place + 1])
            places.append((states, a, b))
            parts["ids"].append(tokens.input_ids[a:b])
            parts["target"].append(states["target_token"][a:b])
            parts["mask"].append(tokens.loss_mask[a:b])
            parts["at"].append(np.arange(b - a))
            spans.append((start, start + b - a))
            start += b - a
        joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        return Batch(
            aux=self._load("aux", places),
            last=self._load("last", places),
            tokens=torch.from_numpy(joined["ids"].astype(np.int64)),
            target_token=torch.from_numpy(joined["target"].astype(np.int64)),
            mask=torch.from_numpy(joined["mask"].astype(bool)),
            positions=torch.from_numpy(joined["at"]),
            spans=spans,
            row_ids=[int(self.row_ids[i]) for i in indices],
        )

    def _load(self, which: str, places: list[tuple[dict[str, np.ndarray], int, int]]) -> Tensor:
        """States of tokens a … b-1 of shards, end to end."""
        stored, *scales = (
            torch.from_numpy(np.concatenate([shard[name][a:b] for shard, a, b in places]))
            for name in _STATES[which][: 1 + self._fp8]
        )
        return dequantise(stored, *scales) if self._fp8 else stored.view(self.dtype)


def ahead(load: Callable[[Item], Loaded], items: Iterable[Item]) -> Iterator[Loaded]:
    """`load(item)` for each item, in order; a thread has the next one ready while one is used.

    An exception of `load` comes out here, in its turn.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="reading") as pool:
        waiting: Future[Loaded] | None = None
        for item in items:
            following = pool.submit(load, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
