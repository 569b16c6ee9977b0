"""TTT attention against one explicit softmax over a big mask, in float64; rotary positions against transformers."""

from __future__ import annotations

import pytest
import torch
from eyas.drafter.attention import rotary, rotate, ttt_attention
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

D = 6
# Per row: its length and the positions of its queries.
LAYOUTS = {
    "all": [(5, range(5)), (1, range(1)), (9, range(9))],
    "gathered": [(7, [2, 3, 6]), (4, []), (1, [0]), (12, [0, 1, 5, 6, 7, 11])],
    "one row": [(10, [4, 5, 6, 7])],
    "last row empty": [(6, [1, 5]), (8, [])],
    "long": [(150, range(97, 150)), (70, [*range(10, 20), *range(41, 69)])],  # longer than a kernel's block
}
HEADS = [(4, 4), (4, 2), (6, 1)]  # queries, keys/values


def case(layout: str, steps: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict:
    """Random arguments of ttt_attention; `keys` and `values` hold one entry a step."""
    generator = torch.Generator().manual_seed(seed)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    rows = [(length, list(picked)) for length, picked in LAYOUTS[layout]]
    total, queries = sum(length for length, _ in rows), sum(len(picked) for _, picked in rows)
    spans, start = [], 0
    for length, _ in rows:
        spans.append((start, start + length))
        start += length
    counts = [total] + [queries] * (steps - 1)
    return {
        "query": random(queries, heads, D),
        "keys": [random(n, kv_heads, D) for n in counts],
        "values": [random(n, kv_heads, D) for n in counts],
        "query_index": [torch.tensor(picked, dtype=torch.long) for _, picked in rows],
        "row_spans": spans,
    }


def reference(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    query_index: list[Tensor],
    row_spans: list,
    leak: bool = False,
) -> Tensor:
    """One softmax over [step-0 keys of all T positions | the S keys of each later step], everything else masked.

    `leak` is the known fault of other trainers: later-step columns open to every query.
    """
    total, count = len(keys[0]), len(query)
    row_of_key, place_of_key = torch.empty(total, dtype=torch.long), torch.empty(total, dtype=torch.long)
    row_of_query, place_of_query = [], []
    for row, ((start, end), picked) in enumerate(zip(row_spans, query_index, strict=True)):
        row_of_key[start:end], place_of_key[start:end] = row, torch.arange(end - start)
        row_of_query += [row] * len(picked)
        place_of_query += picked.tolist()
    row_q, place_q = torch.tensor(row_of_query)[:, None], torch.tensor(place_of_query)[:, None]
    causal = (row_q == row_of_key[None]) & (place_of_key[None] <= place_q)
    diagonal = torch.ones(count, count, dtype=torch.bool) if leak else torch.eye(count, dtype=torch.bool)
    mask = torch.cat([causal] + [diagonal] * (len(keys) - 1), 1)
    groups = query.shape[1] // keys[0].shape[1]
    all_keys, all_values = torch.cat(keys), torch.cat(values)
    out = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ all_keys[:, head // groups].T / query.shape[-1] ** 0.5
        out.append(torch.softmax(scores.masked_fill(~mask, -torch.inf), -1) @ all_values[:, head // groups])
    return torch.stack(out, 1)


def with_gradients(function: object, arguments: dict) -> list[Tensor]:
    """Output and the gradients of query, keys and values under a fixed random weighting of the output."""
    tensors = [arguments["query"], *arguments["keys"], *arguments["values"]]
    leaves = [t.clone().requires_grad_() for t in tensors]
    steps = len(arguments["keys"])
    given = arguments | {"query": leaves[0], "keys": leaves[1 : 1 + steps], "values": leaves[1 + steps :]}
    output = function(**given)
    weighting = torch.randn(output.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    gradients = torch.autograd.grad((output * weighting).sum(), leaves, allow_unused=True)
    return [output, *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True))]


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("steps", range(1, 8))
def test_output_and_gradients_equal_the_explicit_mask(layout: str, steps: int, heads: int, kv_heads: int) -> None:
    arguments = case(layout, steps, heads, kv_heads)
    for found, expected in zip(
        with_gradients(ttt_attention, arguments), with_gradients(reference, arguments), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def test_float32_is_as_exact_as_float32_allows() -> None:
    arguments = case("gathered", 4, 4, 2, torch.float32)
    wide = {k: [t.double() for t in v] if k in ("keys", "values") else v for k, v in arguments.items()}
    expected = reference(**(wide | {"query": arguments["query"].double()}))
    found = ttt_attention(**arguments)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-6)


def test_large_scores_do_not_overflow() -> None:
    arguments = case("gathered", 3, 4, 2)
    arguments["query"] = arguments["query"] * 500  # exp of the raw scores is infinite
    torch.testing.assert_close(ttt_attention(**arguments), reference(**arguments), rtol=0, atol=1e-10)


def test_a_wrong_mask_would_be_seen() -> None:
    arguments = case("all", 3, 4, 2)
    assert (reference(**arguments, leak=True) - reference(**arguments)).abs().max() > 0.05


def changed(arguments: dict, step: int, place: int) -> Tensor:
    """Per query, how much the output moves when key and value of `step` at `place` are replaced."""
    before = ttt_attention(**arguments)
    keys, values = [k.clone() for k in arguments["keys"]], [v.clone() for v in arguments["values"]]
    keys[step][place] += 3.0
    values[step][place] -= 5.0
    return (ttt_attention(**(arguments | {"keys": keys, "values": values})) - before).abs().amax((1, 2))


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_later_key_moves_its_own_position_only(step: int) -> None:
    arguments = case("gathered", 4, 4, 2)
    for place in range(len(arguments["query"])):
        moved = changed(arguments, step, place)
        assert moved[place] > 1e-3
        moved[place] = 0
        assert not moved.any()


def test_a_first_step_key_moves_later_positions_of_its_row_only() -> None:
    arguments = case("gathered", 3, 4, 2)
    at = [(row, int(p)) for row, picked in enumerate(arguments["query_index"]) for p in picked]
    for row, (start, end) in enumerate(arguments["row_spans"]):
        for place in range(end - start):
            moved = changed(arguments, 0, start + place)
            for query, (own_row, own_place) in enumerate(at):
                sees = own_row == row and place <= own_place
                assert (moved[query] > 1e-6) == sees, (row, place, query)
                assert sees or moved[query] == 0


def test_no_query_at_all_gives_nothing() -> None:
    arguments = case("gathered", 2, 4, 2)
    arguments["query_index"] = [torch.zeros(0, dtype=torch.long)] * len(arguments["row_spans"])
    for name in ("keys", "values"):
        arguments[name] = [arguments[name][0], arguments[name][1][:0]]
    assert ttt_attention(**(arguments | {"query": arguments["query"][:0]})).shape == (0, 4, D)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotary_equals_transformers(theta: float) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )  # fmt: skip
    positions = torch.tensor([0, 1, 2, 7, 100, 3999])
    cos, sin = rotary(positions, 16, theta)
    assert cos.dtype == sin.dtype == torch.float32
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    # transformers multiplies in float32: at position 3999 an angle is off by some 1e-4
    for found, expected in zip((cos, sin), theirs, strict=True):
        torch.testing.assert_close(found[:5], expected[0, :5], rtol=0, atol=2e-5)
        torch.testing.assert_close(found[5], expected[0, 5], rtol=0, atol=5e-4)
    query, key = torch.randn(2, 6, 4, 16, generator=torch.Generator().manual_seed(1)).unbind()
    turned = apply_rotary_pos_emb(query[None], key[None], cos[None], sin[None], unsqueeze_dim=2)
    torch.testing.assert_close(rotate(query, cos, sin), turned[0][0], rtol=0, atol=1e-6)
    torch.testing.assert_close(rotate(key, cos, sin), turned[1][0], rtol=0, atol=1e-6)


def test_rotated_products_depend_on_the_distance_only() -> None:
    query, key = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64).unbind()

    def product(at: int, of: int) -> float:
        turned = [rotate(x, *rotary(torch.tensor([p]), 8, 50.0)) for x, p in ((query, at), (key, of))]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(25, 20), abs=1e-5)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2
