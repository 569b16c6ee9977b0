"""Speculative decoding gives the target's own tokens, and drafts as the training path does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from decoding_world import END, LAYERS, World, build_world
from eyas.decoding.acceptance import StepAcceptance
from eyas.decoding.decode import Decoded, Round, decode
from eyas.decoding.eagle import EagleDrafting, EagleProposer
from eyas.decoding.offline import chained_accuracy
from eyas.decoding.proposers import Draft, Proposer
from eyas.decoding.sampling import Sampler, Sampling
from eyas.drafter.checkpoint import build_drafter
from eyas.drafter.model import Drafter, StepPositions, TTTPositions
from eyas.errors import EyasError
from eyas.extraction.engines.transformers import Capture


@pytest.fixture(scope="module")
def world(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return build_world(tiny_target, tmp_path_factory.mktemp("world"))


def greedy(world: World, prompt: list[int], ends: list[int], limit: int) -> Decoded:
    return decode(world.target, None, prompt, ends, limit)


def drafting(drafter: Drafter, steps: int) -> EagleDrafting:
    return EagleProposer(drafter, LAYERS, steps).begin([], 200, Sampler(Sampling()))


@dataclass
class Scripted:
    """A proposer that drafts what a list says, by how many tokens are known."""

    text: list[int]
    steps: int
    layers: Sequence[int] = ()
    trees: bool = False

    def begin(self, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Scripted:
        self.known = 1
        return self

    def draft(self, states: torch.Tensor | None, tokens: list[int]) -> Draft:
        self.known += len(tokens)
        return Draft.chain(self.text[self.known : self.known + self.steps])


def check_accounts(decoded: Decoded, steps: int) -> None:
    """Each pass commits its accepted drafts and one token of the target's own, unless the end cuts that one off."""
    assert decoded.forwards == len(decoded.accepted) == len(decoded.rounds)
    assert 1 + sum(round.tokens for round in decoded.rounds) == len(decoded.ids)
    for number, round in enumerate(decoded.rounds, 1):
        assert 0 <= round.accepted <= round.depth <= steps
        assert round.tokens == round.accepted + (not round.cut)
        assert not round.cut or number == decoded.forwards
    assert decoded.seconds > 0


@pytest.mark.parametrize("size", [(1, 1, None), (5, 1, None), (1, 3, 3), (3, 2, 7), (5, 4, 16), (3, 8, 60)])
@pytest.mark.parametrize("kind", ["trained", "random"])
def test_speculation_gives_the_greedy_tokens(world: World, kind: str, size: tuple[int, int, int | None]) -> None:
    proposer = EagleProposer(world.drafters[kind], LAYERS, *size)
    for prompt in world.prompts:
        for limit in (1, 6, 40):
            plain = greedy(world, prompt, [END], limit)
            assert plain.rounds == [Round(1, 0, 0)] * (len(plain.ids) - 1)
            found = decode(world.target, proposer, prompt, [END], limit)
            assert found.ids == plain.ids
            check_accounts(found, size[0])
    assert plain.ids[-1] == END  # the last prompt's answer is short


def test_greedy_is_transformers_own(world: World) -> None:
    for prompt in world.prompts:
        given = torch.tensor([prompt])
        made = world.target.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=12, eos_token_id=END
        )
        assert greedy(world, prompt, [END], 12).ids == made[0, len(prompt) :].tolist()


def test_a_trained_drafter_is_accepted_and_its_tree_more_so(world: World) -> None:
    means = {}
    for kind, size in (("trained", (3,)), ("random", (3,)), ("random", (3, 8, 60)), ("trained", (3, 8, 60))):
        proposer = EagleProposer(world.drafters[kind], LAYERS, *size)
        rounds = [r for p in world.prompts for r in decode(world.target, proposer, p, [END], 40).accepted]
        means[kind, len(size)] = np.mean(rounds)
    assert means["trained", 1] > 1.5 > 0.3 > means["random", 1]
    assert means["trained", 3] > means["trained", 1] and means["random", 3] > means["random", 1]


def test_one_proposer_serves_sequences_one_after_another(world: World) -> None:
    proposer = EagleProposer(world.drafters["trained"], LAYERS, 4, 2, 8)
    first = decode(world.target, proposer, world.prompts[0], [END], 30)
    decode(world.target, proposer, world.prompts[1], [END], 30)
    again = decode(world.target, proposer, world.prompts[0], [END], 30)
    assert (again.ids, again.rounds) == (first.ids, first.rounds)


def hear(told: list[tuple[list[int], int]], tokens: list[int], drafted: int) -> None:
    told.append((tokens, drafted))


def test_every_round_is_told_as_it_comes(world: World) -> None:
    for proposer in (None, EagleProposer(world.drafters["trained"], LAYERS, 3)):
        told: list[tuple[list[int], int]] = []
        made = decode(world.target, proposer, world.prompts[0], [END], 20, on_round=partial(hear, told))
        assert [token for tokens, _ in told for token in tokens] == made.ids
        assert [(len(tokens), drafted) for tokens, drafted in told] == [(1, 0)] + [
            (round.tokens, round.accepted) for round in made.rounds
        ]
    assert max(drafted for _, drafted in told) > 0


@pytest.mark.parametrize(
    "size, message",
    [
        ((0, 1, None), "at least 1 each, not 0 and 1"),
        ((2, 0, None), "at least 1 each, not 2 and 0"),
        ((3, 1, 3), r"a chain \(topk 1\) of 3 steps has 4, not 3"),
        ((3, 4, None), "must be given for topk 4, between 2 and 37"),
        ((3, 4, 38), "3 steps with topk 4 make 2 to 37"),
        ((3, 4, 1), "3 steps with topk 4 make 2 to 37"),
    ],
)
def test_sizes_that_make_no_tree(world: World, size: tuple[int, int, int | None], message: str) -> None:
    with pytest.raises(EyasError, match=message):
        EagleProposer(world.drafters["random"], LAYERS, *size)


@pytest.mark.parametrize("right, steps", [(0, 3), (1, 3), (2, 3), (3, 3), (5, 5)])
def test_rounds_and_states_with_a_drafter_that_is_right_so_often(world: World, right: int, steps: int) -> None:
    """A stub knows the truth and drafts `right` true tokens, then false ones; it checks what it is given."""
    prompt = world.prompts[0]
    truth = greedy(world, prompt, [], 30).ids
    with torch.inference_mode(), Capture(world.target, LAYERS) as capture:
        world.target.decoder(input_ids=torch.tensor([prompt + truth]))
        states = capture.aux()[0].clone()
    following = [*prompt[1:], *truth]

    class Stub:
        layers, trees = LAYERS, False

        def begin(self, given: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Stub:
            assert (list(given), max_new_tokens) == (prompt, 21)
            self.seen = 0
            return self

        def draft(self, aux: torch.Tensor | None, tokens: list[int]) -> Draft:
            assert aux is not None
            new = slice(self.seen, self.seen + len(aux))
            assert tokens == following[new]
            torch.testing.assert_close(aux, states[new], rtol=1e-4, atol=1e-4)
            self.seen += len(aux)
            ahead = following[self.seen : self.seen + steps]
            return Draft.chain([token if i < right else (token + 1) % 100 for i, token in enumerate(ahead)])

    length = 21
    found = decode(world.target, Stub(), prompt, [], length)
    assert found.ids == truth[:length]
    full, rest = divmod(length - 1, right + 1)
    assert found.accepted == [right] * full + ([rest] if rest else [])
    assert found.forwards == full + bool(rest)
    assert found.rounds[-1].cut == bool(rest)


def test_nothing_follows_an_end_of_turn_that_was_accepted(world: World) -> None:
    prompt = world.prompts[4]
    truth = greedy(world, prompt, [], 20).ids
    end = truth.index(END)
    proposer: Proposer = Scripted([*prompt, *truth], end + 3)
    found = decode(world.target, proposer, prompt, [END], 40)
    assert found.ids == truth[: end + 1]
    assert found.rounds == [Round(end, end, end + 3)] and found.rounds[0].cut


def test_steps_that_were_not_decided_do_not_count() -> None:
    counts = StepAcceptance(4)
    assert (counts.by_step, counts.length) == ([None] * 4, None)
    counts.add([Round(3, 2, 4), Round(5, 4, 4), Round(1, 0, 4)])  # two accepted; all; none
    assert counts.by_step == [2 / 3, 1.0, 1 / 2, 1.0]
    counts.add([Round(2, 2, 4)])  # cut behind the second: nothing is known of the third
    assert counts.by_step == [3 / 4, 1.0, 1 / 2, 1.0]
    counts.add([Round(1, 0, 0), Round(2, 1, 1)])  # nothing was on offer; one was, and was accepted
    assert counts.by_step == [4 / 5, 1.0, 1 / 2, 1.0]
    assert counts.length == 1 + (2 + 4 + 0 + 2 + 0 + 1) / 6


@pytest.mark.parametrize("kind", ["trained", "random", "normed residual"])
@pytest.mark.parametrize("pieces", [[12], [1, 4, 7], [5, 5, 1, 1]])
def test_drafting_equals_the_training_path_step_by_step(world: World, kind: str, pieces: list[int]) -> None:
    steps = 5
    if kind == "normed residual":
        shape = replace(world.drafters["trained"].shape, norm_before_residual=True)
        drafter = build_drafter(shape, dict(world.drafters["trained"].state_dict()))
    else:
        drafter = world.drafters[kind]
    batch = world.data.batch([6])
    logits: list[torch.Tensor] = []
    draft, first = drafting(drafter, steps), 0
    handle = drafter.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    with torch.inference_mode():
        for count in pieces:  # positions that the target confirms, a few at a time
            logits.clear()
            known = batch.tokens[first + 1 : first + 1 + count].tolist()
            drafted = draft.draft(batch.aux[first : first + count], known).tokens
            first += count
            assert draft.cache.length == first  # what was drafted is not confirmed
    handle.remove()
    # The same in training: a row whose next tokens are the drafted ones, one query at its last confirmed position.
    tokens = torch.cat([batch.tokens[: first + 1], torch.tensor(drafted)])
    aux = torch.cat(
        [batch.aux[:first], torch.randn(len(tokens) - first, batch.aux.shape[1])]
    )  # later states have no say
    at = torch.tensor([first - 1])
    where = TTTPositions([StepPositions(at, None, [at])] * steps, [(0, len(tokens))])
    with torch.no_grad():
        states = drafter.ttt_states(aux, tokens, torch.arange(len(tokens)), where)
    assert len(logits) == len(states) == steps
    for step, state in enumerate(states):
        expected = drafter.logits(state).detach()
        torch.testing.assert_close(logits[step], expected, rtol=1e-4, atol=1e-4)
        assert drafted[step] == int((drafter.d2t + torch.arange(120))[expected.argmax(-1)])


def test_offline_accuracy_counts_what_the_drafter_really_drafts(world: World) -> None:
    drafter, steps, rows = world.drafters["trained"], 4, [3, 20, 31]
    reached, right = [0] * steps, [0] * steps
    for row in rows:
        batch = world.data.batch([row])
        length = len(batch.tokens)
        for t in range(length - 2):
            with torch.inference_mode():
                drafted = drafting(drafter, steps).draft(batch.aux[: t + 1], batch.tokens[1 : t + 2].tolist()).tokens
            for step, token in enumerate(drafted):
                predicted = t + 2 + step
                if predicted >= length or not batch.mask[predicted]:
                    break
                own = int(batch.target_token[predicted - 1])
                reached[step] += 1
                if token != own:
                    break
                right[step] += 1
                if own != int(batch.tokens[predicted]):
                    break
    for batch_tokens in (1, 10_000):
        counts = chained_accuracy(drafter, world.data, rows, steps, batch_tokens)
        assert (counts.reached.tolist(), counts.right.tolist()) == (reached, right)
    assert 0 < right[1] < reached[0]
