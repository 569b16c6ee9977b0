"""The tree that the drafter grows, against a search over all paths with the training path's arithmetic."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from drafter_reference import reference_states, small_drafter, small_shape
from eyas.decoding.eagle import EagleProposer
from eyas.decoding.proposers import Draft
from eyas.decoding.sampling import Sampler, Sampling
from eyas.decoding.tree_pass import tree_places
from hypothesis import given
from hypothesis import strategies as st

VOCAB, DRAFT_VOCAB = 23, 11


class Paths:
    """Log-probabilities of every continuation, each computed anew from DESIGN's arithmetic, in float64."""

    def __init__(self, seed: int, known: int, **shape: Any) -> None:
        self.shape = small_shape(**shape)
        self.drafter = small_drafter(self.shape, seed)
        generator = torch.Generator().manual_seed(seed)
        self.aux = torch.randn(known, 36, generator=generator)
        self.tokens = torch.randint(VOCAB, (known + 1,), generator=generator).tolist()
        self.weights = {name: value.double() for name, value in self.drafter.state_dict().items()}
        self.target_ids = self.drafter.target_ids.tolist()

    def after(self, path: tuple[int, ...]) -> list[float]:
        """Log-probabilities over the draft vocabulary after a path of drafted tokens."""
        text = [*self.tokens, *path]
        aux = torch.cat([self.aux.double(), torch.zeros(len(text) - len(self.aux), 36, dtype=torch.float64)])
        states = reference_states(self.weights, self.shape, aux, text, len(path) + 1)
        state = states[len(path)][len(self.aux) - 1]
        normed = state / torch.sqrt((state * state).mean() + self.shape.rms_norm_eps) * self.weights["norm.weight"]
        return torch.log_softmax(self.weights["lm_head.weight"] @ normed, 0).tolist()

    def tree(self, steps: int, topk: int, nodes: int) -> set[tuple[int, ...]]:
        """The paths of the tree, by SGLang's rules in plain words."""
        front: dict[tuple[int, ...], float] = {(): 0.0}
        candidates: dict[tuple[int, ...], float] = {}
        for _ in range(steps):
            children: dict[tuple[int, ...], float] = {}
            for path, score in front.items():
                odds = self.after(path)
                for place in sorted(range(DRAFT_VOCAB), key=lambda i: -odds[i])[:topk]:
                    children[(*path, self.target_ids[place])] = score + odds[place]
            candidates |= children
            front = dict(sorted(children.items(), key=lambda item: -item[1])[:topk])
        return {path for path, _ in sorted(candidates.items(), key=lambda item: -item[1])[:nodes]}


def paths_of(draft: Draft) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [(1, 3, 4), (2, 2, 6), (3, 2, 5), (3, 3, 12), (4, 3, 31), (2, 15, 60)])
def test_the_tree_is_the_best_of_all_that_was_searched(size: tuple[int, int, int], seed: int) -> None:
    steps, topk, draft_tokens = size
    paths = Paths(seed, known=5, norm_before_residual=seed == 2)
    drafting = EagleProposer(paths.drafter, [0, 1, 2], *size).begin([1] * 5, 20, Sampler(Sampling()))
    with torch.inference_mode():
        drafting.draft(paths.aux[:2], paths.tokens[1:3])  # an earlier round leaves its drafted keys behind
        draft = drafting.draft(paths.aux[2:], paths.tokens[3:])
    found = paths_of(draft)
    assert len(found) == len(set(found)) == min(draft_tokens - 1, topk + (steps - 1) * min(topk, 11) * topk)
    assert set(found) == paths.tree(steps, topk, draft_tokens - 1)
    assert draft.depth == max(map(len, found)) <= steps and draft.odds is None
    for siblings in draft.children().values():  # the more probable are tried first
        parent = found[siblings[0]][:-1]
        odds = dict(zip(paths.target_ids, paths.after(parent), strict=True))
        scores = [odds[draft.tokens[index]] for index in siblings]
        assert scores == sorted(scores, reverse=True)


@given(st.lists(st.integers(0, 10**6), max_size=14))
def test_a_node_sees_its_ancestors(numbers: list[int]) -> None:
    parents = [number % (index + 1) - 1 for index, number in enumerate(numbers)]
    seen, depth = tree_places(parents)
    for node in range(len(parents) + 1):
        chain, at = [node], node
        while at:
            at = parents[at - 1] + 1
            chain.append(at)
        assert seen[node].nonzero().flatten().tolist() == sorted(chain)
        assert depth[node] == len(chain) - 1


def test_chains_are_known_as_such() -> None:
    assert Draft().is_chain and Draft.chain([4, 4, 7]).is_chain
    assert not Draft([1, 2], [-1, -1], 1).is_chain
    for parents in itertools.product([-1], [-1, 0], [-1, 0, 1]):
        assert Draft([1, 2, 3], list(parents), 3).is_chain == (parents == (-1, 0, 1))


def test_steps_without_a_node_are_not_on_offer() -> None:
    """Two drafted tokens of three steps: siblings more often than not, and never three steps deep."""
    depths = set()
    for seed in range(8):
        paths = Paths(seed, known=3)
        drafting = EagleProposer(paths.drafter, [0, 1, 2], 3, 2, 3).begin([1] * 3, 20, Sampler(Sampling()))
        with torch.inference_mode():
            draft = drafting.draft(paths.aux, paths.tokens[1:])
        assert draft.depth == max(map(len, paths_of(draft)))
        depths.add(draft.depth)
    assert 1 in depths and 3 not in depths


def test_equal_scores_keep_the_tree_whole() -> None:
    """A drafter that is certain gives children the very score of their parent."""
    paths = Paths(0, known=3)
    with torch.no_grad():
        paths.drafter.lm_head.weight.mul_(1e4)
    for size in [(4, 3, 3), (4, 3, 5), (3, 2, 4)]:
        drafting = EagleProposer(paths.drafter, [0, 1, 2], *size).begin([1] * 3, 20, Sampler(Sampling()))
        with torch.inference_mode():
            draft: Any = drafting.draft(paths.aux, paths.tokens[1:])
        assert all(parent < index for index, parent in enumerate(draft.parents))
        found = paths_of(draft)
        assert len(set(found)) == len(found) == size[2] - 1
        assert all(path[:-1] == () or path[:-1] in found for path in found)
