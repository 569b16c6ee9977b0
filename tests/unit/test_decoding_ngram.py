"""Prompt lookup drafts what transformers' prompt lookup does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from decoding_world import END, World, build_world
from eyas.decoding.decode import Round, decode
from eyas.decoding.ngram import NgramProposer, replayed
from eyas.decoding.sampling import Sampler, Sampling
from eyas.errors import EyasError
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator


@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=40), first=st.integers(1, 40), steps=st.integers(1, 5),
    size=st.integers(1, 4), pieces=st.lists(st.integers(1, 4), max_size=30),
)  # fmt: skip
def test_drafts_equal_transformers_own(
    text: list[int], first: int, steps: int, size: int, pieces: list[int]
) -> None:  # fmt: skip
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=steps, max_matching_ngram_size=size, max_length=10**6
    )  # fmt: skip
    ours = NgramProposer(steps, size).begin(text, 99, Sampler(Sampling()))
    end = 1
    for piece in [first, *pieces]:
        new = text[end : end + piece]
        if not new:
            break
        end += len(new)
        draft = ours.draft(None, new)
        expected, _ = theirs.get_candidates(torch.tensor([text[:end]]))
        assert draft.tokens == expected[0, end:].tolist()
        assert draft.is_chain and draft.depth == len(draft.tokens) and draft.odds is None


def test_long_suffixes_come_first_and_nothing_is_found_in_new_text() -> None:
    begin = NgramProposer(2, 3).begin([1], 9, Sampler(Sampling()))
    assert begin.draft(None, [2, 3]).tokens == []
    assert begin.draft(None, [9, 3, 7, 8, 2, 3]).tokens == [9, 3]  # (2, 3) rather than the later 3
    assert begin.draft(None, [7]).tokens == [8, 2]


@pytest.fixture(scope="module")
def world(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tiny_target, tmp_path_factory.mktemp("world"))


@pytest.mark.parametrize("steps", [1, 3, 5])
def test_a_replay_has_the_rounds_of_decoding(world: World, steps: int) -> None:
    drafted = 0
    for prompt in world.prompts:
        for limit in (1, 2, 7, 40):
            for ends in ([END], []):
                found = decode(world.target, NgramProposer(steps), prompt, ends, limit)
                again = replayed(NgramProposer(steps), prompt, decode(world.target, None, prompt, ends, limit).ids)
                assert (again.ids, again.rounds, again.seconds) == (found.ids, found.rounds, 0.0)
                drafted += sum(round.depth for round in found.rounds)
    assert drafted > 20


def test_a_replay_by_hand() -> None:
    """1 2 3 is the prompt: the answer's 1 2 finds it, then 1 2 3 4 is in the answer; its end cuts a draft off."""
    found = replayed(NgramProposer(3), [1, 2, 3], [4, 1, 2, 3, 4, 1, 2])
    assert found.rounds == [Round(1, 0, 0), Round(4, 3, 3), Round(1, 1, 3)]
    assert replayed(NgramProposer(3), [1, 2, 3], [9]).rounds == []


@pytest.mark.parametrize("steps, size", [(0, 2), (2, 0)])
def test_sizes_that_match_nothing(steps: int, size: int) -> None:
    with pytest.raises(EyasError, match="at least one step and one token"):
        NgramProposer(steps, size)
