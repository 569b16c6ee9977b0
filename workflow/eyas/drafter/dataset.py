"""Rows of a completed extraction, read from memory-mapped shards, packed whole into batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest
from eyas.shards import is_held_out, map_arrays
from eyas.tokenization import TokenShard, read_tokens

_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass
class Batch:
    """Rows packed end to end, without padding.

    `aux` [T, 3·Ht], `last` [T, Ht] in float32; `tokens`, `target_token`, `positions` (inside
    the row) int64 [T]; `mask` bool [T]; `spans`: (start, end) of each row; `row_ids`: whose they are.
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


class HiddenStates:
    """All rows of a manifest, by position in it: row ids, lengths and, on demand, their tensors.

    Loss masks come from the tokens shards beside the states; ids of both must agree.
    """

    def __init__(self, manifest: Manifest, tokens_folder: Path) -> None:
        self.manifest = manifest
        self.dtype = _TORCH[manifest.values["dtype"]]
        self._states, self._tokens = [], []
        row_ids, places = [], []
        for number, file in enumerate(manifest.shards):
            states = map_arrays(
                file, ("aux_hidden_states", "last_hidden_state", "input_ids", "target_token", "offsets", "row_ids")
            )
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
            places += [(number, i) for i in range(len(tokens))]
        self.row_ids = np.concatenate(row_ids)
        self._places = places
        self.lengths = np.array([self._tokens[n].lengths[i] for n, i in places], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def select(self, held_out_every: int, held_out: bool) -> np.ndarray:
        """Positions of the training rows, or of the held-out ones."""
        chosen = [i for i, row in enumerate(self.row_ids) if is_held_out(int(row), held_out_every) == held_out]
        return np.array(chosen, dtype=np.int64)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Load rows by position and pack them."""
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("aux", "last", "ids", "target", "mask", "at")}
        spans, start = [], 0
        for index in indices:
            number, place = self._places[index]
            states, tokens = self._states[number], self._tokens[number]
            a, b = int(tokens.offsets[place]), int(tokens.offsets[place + 1])
            parts["aux"].append(states["aux_hidden_states"][a:b])
            parts["last"].append(states["last_hidden_state"][a:b])
            parts["ids"].append(tokens.input_ids[a:b])
            parts["target"].append(states["target_token"][a:b])
            parts["mask"].append(tokens.loss_mask[a:b])
            parts["at"].append(np.arange(b - a))
            spans.append((start, start + b - a))
            start += b - a
        joined = {name: np.concatenate(arrays) for name, arrays in parts.items()}
        return Batch(
            aux=self._floats(joined["aux"]),
            last=self._floats(joined["last"]),
            tokens=torch.from_numpy(joined["ids"].astype(np.int64)),
            target_token=torch.from_numpy(joined["target"].astype(np.int64)),
            mask=torch.from_numpy(joined["mask"].astype(bool)),
            positions=torch.from_numpy(joined["at"]),
            spans=spans,
            row_ids=[int(self.row_ids[i]) for i in indices],
        )

    def _floats(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return (tensor.view(self.dtype) if array.dtype == np.uint16 else tensor).float()


def pack(order: Sequence[int], lengths: np.ndarray, batch_tokens: int) -> Iterator[list[int]]:
    """Cut rows, in the given order, into batches of at most `batch_tokens`.

    Every row is in exactly one batch; one that is longer than a batch goes alone.
    """
    batch: list[int] = []
    filled = 0
    for index in order:
        length = int(lengths[index])
        if batch and filled + length > batch_tokens:
            yield batch
            batch, filled = [], 0
        batch.append(int(index))
        filled += length
    if batch:
        yield batch


def epoch_batches(rows: np.ndarray, lengths: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch: a shuffle that depends on seed and epoch alone, packed whole."""
    order = np.random.default_rng([seed, epoch]).permutation(rows)
    return list(pack(order.tolist(), lengths, batch_tokens))
