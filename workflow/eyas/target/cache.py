"""A key/value cache that does not copy itself at every token."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_STEPS = 64  # tokens of room that a full buffer grows by, at least; a quarter of its length beyond that


class _Room:
    """A buffer [B, H, capacity, D], of which the first tokens are in use."""

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def append(self, held: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
        """`held` [B, H, T, D] (None or empty, this buffer's beginning or another tensor), then `new` [B, H, n, D]."""
        if held is None or not held.numel():
            held = new[..., :0, :]
        length = held.shape[-2]
        total = length + new.shape[-2]
        buffer = self.buffer
        is_beginning = buffer is not None and held.data_ptr() == buffer.data_ptr() and held.stride() == buffer.stride()
        if buffer is None or not is_beginning or held.shape[0] != buffer.shape[0] or total > buffer.shape[-2]:
            shape = list(new.shape)
            shape[-2] = total + max(_STEPS, total // 4)
            self.buffer = buffer = new.new_empty(shape)
            if length:
                buffer[..., :length, :] = held
        buffer[..., length:total, :] = new
        return buffer[..., :total, :]


class GrowingLayer(DynamicLayer):
    """transformers' `DynamicLayer`, with room for the tokens to come.

    `DynamicLayer` concatenates: each step copies all keys and values of the batch, which took a third of the time of
    decoding 100 rows. What `update` returned before is overwritten once the cache was cropped and updated again.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rooms = (_Room(), _Room())

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._rooms[0].append(self.keys, key_states)
        self.values = self._rooms[1].append(self.values, value_states)
        return self.keys, self.values


def growing_cache(config: Any) -> DynamicCache:
    """An empty cache that fits a model of this config; layers of other kinds (sliding, recurrent) are transformers'."""
    cache = DynamicCache(config=config)
    cache.layers = [GrowingLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
