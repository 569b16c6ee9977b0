"""The cache with room for tokens to come against transformers' own, which concatenates."""

from __future__ import annotations

import torch
from eyas.target.cache import GrowingLayer, growing_cache
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

_STEP = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 90)),
    st.tuples(st.just("crop"), st.integers(0, 30)),
    st.tuples(st.just("select"), st.integers(1, 2**5 - 1)),
)


@given(st.lists(_STEP, max_size=12), st.integers(1, 5))
def test_it_holds_what_concatenation_holds(steps: list[tuple[str, int]], rows: int) -> None:
    torch.manual_seed(0)
    ours, theirs = GrowingLayer(), DynamicLayer()
    for kind, number in steps:
        if kind == "update":
            keys, values = torch.randn(rows, 2, number, 3), torch.randn(rows, 2, number, 4)
            found, wanted = ours.update(keys, values), theirs.update(keys, values)
            assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
        elif not theirs.get_seq_length():
            continue
        elif kind == "crop":
            removed = -min(number, theirs.get_seq_length() - 1)
            ours.crop(removed)
            theirs.crop(removed)
        else:
            kept = [row for row in range(rows) if number >> row & 1] or [0]
            rows = len(kept)
            ours.batch_select_indices(torch.tensor(kept))
            theirs.batch_select_indices(torch.tensor(kept))
        assert ours.get_seq_length() == theirs.get_seq_length()
        if theirs.get_seq_length():
            assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_tokens_are_added_in_place_until_the_room_is_used_up() -> None:
    layer = GrowingLayer()
    layer.update(torch.zeros(2, 1, 10, 4), torch.zeros(2, 1, 10, 4))
    places = set()
    for _ in range(64):
        layer.update(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4))
        places.add(layer.keys.data_ptr())
    assert len(places) == 1
    layer.update(torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1, 4))
    assert layer.keys.data_ptr() not in places and layer.keys[:, :, 10:].min() == 1


def test_only_layers_of_full_attention_are_replaced() -> None:
    config = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)
    assert [type(layer) for layer in growing_cache(config).layers] == [GrowingLayer, GrowingLayer]
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention"], 4
    assert [type(layer) for layer in growing_cache(config).layers] == [GrowingLayer, DynamicSlidingWindowLayer]
