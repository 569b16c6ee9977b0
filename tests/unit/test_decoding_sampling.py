"""Sampled output follows the target's distribution, whatever drafts: chi-square tests over whole outputs.

A tiny target and a drafter that knows only a part of its vocabulary. What both say after every text is
computed once; then 10^5 outputs go through the real decoding loop and the real rule of acceptance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import eyas.decoding.decode as decode_module
import numpy as np
import pytest
import torch
from drafter_reference import small_drafter, small_shape
from eyas.decoding.decode import decode
from eyas.decoding.eagle import EagleProposer
from eyas.decoding.ngram import NgramProposer
from eyas.decoding.proposers import Draft
from eyas.decoding.sampling import Odds, Sampler, Sampling
from eyas.errors import EyasError
from eyas.target.model import TargetModel
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, END, LENGTH = 7, 6, 3
PROMPT = [1, 4, 2]
TEMPERATURE = 0.7
LAYERS = [0, 1, 2]


def contexts(longest: int) -> list[tuple[int, ...]]:
    """All outputs up to a length that can go on."""
    return [text for n in range(longest + 1) for text in itertools.product(range(VOCAB), repeat=n) if END not in text]


@dataclass
class World:
    target: TargetModel
    drafter: Any
    odds: dict[tuple[int, ...], Odds]  # the target's own, after every output; no cache, one text at a time

    def distribution(self) -> dict[tuple[int, ...], float]:
        """The chance of every output, a product of the target's own chances."""
        found: dict[tuple[int, ...], float] = {}

        def go(text: tuple[int, ...], chance: float) -> None:
            if len(text) == LENGTH or END in text:
                found[text] = chance
                return
            for token in range(VOCAB):
                go((*text, token), chance * float(self.odds[text][token]))

        go((), 1.0)
        return found


@pytest.fixture(scope="module")
def world() -> World:
    torch.manual_seed(2)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=12, intermediate_size=10, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, head_dim=6, initializer_range=0.5, tie_word_embeddings=False,
        bos_token_id=0, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    target = TargetModel(model, model.model, model.model.layers, model.lm_head, torch.device("cpu"))
    drafter = small_drafter(small_shape(vocab_size=VOCAB, draft_vocab_size=5), seed=1).eval()
    odds = {}
    with torch.inference_mode():
        for text in contexts(LENGTH - 1):
            logits = model(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0, -1].double().numpy()
            weights = np.exp((logits - logits.max()) / TEMPERATURE)
            odds[text] = weights / weights.sum()
    return World(target, drafter, odds)


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The chance of counts at least as far off; outcomes expected fewer than 8 times are taken together."""
    total = sum(counts.values())
    assert not set(counts) - set(expected)
    bins: list[tuple[float, int]] = [(total * chance, counts[text]) for text, chance in expected.items()]
    rare = [one for one in bins if one[0] < 8]
    bins = [one for one in bins if one[0] >= 8]
    if rare:
        bins.append((sum(e for e, _ in rare), sum(c for _, c in rare)))
    statistic = sum((count - mean) ** 2 / mean for mean, count in bins if mean)
    half = torch.tensor([(len(bins) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


# ---- 10^5 outputs, with tables in place of the models


@dataclass
class Tables:
    """The target's and the drafter's distributions after every text, as the real loop asks for them."""

    world: World
    drafts: Callable[[tuple[int, ...], Sampler], Draft]
    sampler: type[Sampler] = Sampler

    layers: Sequence[int] = ()
    trees: bool = False

    def outputs(self, count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[int, ...]]:
        tables = self

        class Verifier:
            """Its `logits` are the texts themselves; the sampler looks their distributions up."""

            def __init__(self, *given: Any, **named: Any) -> None:
                self.text: tuple[int, ...] = ()

            def __enter__(self) -> Verifier:
                return self

            def __exit__(self, *given: Any) -> None: ...

            def prefill(self, prompt: Any) -> tuple[int, ...]:
                return ()

            def verify(self, token: int, draft: Draft) -> list[tuple[int, ...]]:
                texts = [(*self.text, token)]
                for drafted, parent in zip(draft.tokens, draft.parents, strict=True):
                    texts.append((*texts[parent + 1], drafted))
                self.texts = texts
                return texts

            def keep(self, path: list[int]) -> None:
                self.text = self.texts[path[-1] + 1 if path else 0]

            def states(self) -> None: ...

        class Looking(self.sampler):  # type: ignore[name-defined,misc]
            def odds(self, logits: Any) -> Odds:
                # what drafts behind an end of turn or the longest output come to is cut off
                return tables.world.odds.get(logits, tables.world.odds[()])

        monkeypatch.setattr(decode_module, "Verifier", Verifier)
        monkeypatch.setattr(decode_module, "Sampler", Looking)
        found: Counter[tuple[int, ...]] = Counter()
        for seed in range(count):
            made = decode(None, self, PROMPT, [END], LENGTH, Sampling(TEMPERATURE, seed))  # type: ignore[arg-type]
            found[tuple(made.ids)] += 1
        return found

    def begin(self, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Tables:
        self.text: tuple[int, ...] = ()
        self.sampling = sampler
        return self

    def draft(self, states: None, tokens: list[int]) -> Draft:
        self.text += tuple(tokens[len(PROMPT) - 1 :] if not self.text else tokens)
        return self.drafts(self.text, self.sampling)


def cached(function: Callable[[tuple[int, ...]], Any]) -> Callable[[tuple[int, ...]], Any]:
    known: dict[tuple[int, ...], Any] = {}
    return lambda text: known[text] if text in known else known.setdefault(text, function(text))


def drafting_after(world: World, text: tuple[int, ...], *size: Any) -> tuple[Any, torch.Tensor, list[int]]:
    """The real drafter's cache as it is when `text` is known, and what is to be confirmed."""
    from eyas.extraction.engines.transformers import Capture

    known = [*PROMPT, *text]
    with torch.inference_mode(), Capture(world.target, LAYERS) as capture:
        world.target.decoder(input_ids=torch.tensor([known[:-1]]))
        states = capture.aux()[0].clone()
    drafting = EagleProposer(world.drafter, LAYERS, *size).begin(PROMPT, 9, Sampler(Sampling()))
    return drafting, states, known[1:]


def chain_odds(world: World, steps: int) -> Callable[[tuple[int, ...], tuple[int, ...]], Odds]:
    """The drafter's distribution over the target's vocabulary after (text, drafted path)."""

    @torch.inference_mode()
    def find(key: tuple[int, ...]) -> Odds:
        text, path = key[1 : 1 + key[0]], key[1 + key[0] :]
        drafting, states, known = drafting_after(world, text, steps)
        state = drafting.cache.confirm(states, known)
        for step, token in enumerate(path, 1):
            state = drafting.cache.step(torch.tensor([token]), state, step)
        whole = np.zeros(VOCAB)
        logits = world.drafter.logits(state)[0].double().numpy() / TEMPERATURE
        weights = np.exp(logits - logits.max())
        whole[world.drafter.target_ids.numpy()] = weights / weights.sum()
        return whole

    look = cached(find)
    return lambda text, path: look((len(text), *text, *path))


def drawn_chain(world: World, steps: int) -> Callable[[tuple[int, ...], Sampler], Draft]:
    odds_after = chain_odds(world, steps)

    def draft(text: tuple[int, ...], sampler: Sampler) -> Draft:
        path: tuple[int, ...] = ()
        odds = []
        for _ in range(steps):
            odds.append(odds_after(text, path))
            path += (sampler.draw(odds[-1]),)
        return Draft.chain(list(path), odds)

    return draft


def drawn_tree(world: World) -> Callable[[tuple[int, ...], Sampler], Draft]:
    """Two candidates drawn without replacement, and two more behind each of them."""
    odds_after = chain_odds(world, 2)

    def draft(text: tuple[int, ...], sampler: Sampler) -> Draft:
        tokens: list[int] = []
        parents: list[int] = []
        odds: list[Odds] = []
        for parent, path in [(-1, ()), (0, (0,)), (1, (1,))]:
            before = tuple(tokens[index] for index in path)
            left = odds_after(text, before).copy()
            for _ in range(2):
                odds.append(left / left.sum())
                tokens.append(sampler.draw(left))
                parents.append(parent)
                left[tokens[-1]] = 0.0
        return Draft(tokens, parents, 2, odds)

    return draft


def given_tree(world: World) -> Callable[[tuple[int, ...], Sampler], Draft]:
    """The tree that the real proposer makes."""

    @torch.inference_mode()
    def find(text: tuple[int, ...]) -> Draft:
        drafting, states, known = drafting_after(world, text, 2, 3, 9)
        draft: Draft = drafting.draft(states, known)
        assert not draft.is_chain and draft.odds is None
        return draft

    look = cached(find)
    return lambda text, sampler: look(text)


def looked_up(world: World) -> Callable[[tuple[int, ...], Sampler], Draft]:
    def find(text: tuple[int, ...]) -> Draft:
        drafting = NgramProposer(2, 2).begin(PROMPT, 9, Sampler(Sampling()))
        return drafting.draft(None, [*PROMPT[1:], *text])

    look = cached(find)
    return lambda text, sampler: look(text)


WAYS: dict[str, Callable[[World], Callable[[tuple[int, ...], Sampler], Draft]]] = {
    "no drafts": lambda world: lambda text, sampler: Draft(),
    "drawn chain": lambda world: drawn_chain(world, 2),
    "drawn tree": drawn_tree,
    "given tree": given_tree,
    "prompt lookup": looked_up,
}


@pytest.mark.parametrize("way", WAYS)
def test_outputs_follow_the_targets_distribution(world: World, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = world.distribution()
    assert sum(expected.values()) == pytest.approx(1.0)
    count = 100_000 if way in ("drawn chain", "given tree") else 20_000  # 10^5 of what proposers do
    counts = Tables(world, WAYS[way](world)).outputs(count, monkeypatch)
    assert chi_square(counts, expected) > 1e-3


class DrawsAgain(Sampler):
    """After a rejection it draws from the target's whole distribution."""

    def accept(self, target: Odds, candidates: Sequence[int], drawn_from: Odds | None) -> tuple[int | None, int]:
        place, token = super().accept(target, candidates, drawn_from)
        return (place, token) if place is not None else (None, self.draw(target))


class KeepsTheRejected(Sampler):
    """Further candidates are tried against the distribution that the rejected ones are still in."""

    def accept(self, target: Odds, candidates: Sequence[int], drawn_from: Odds | None) -> tuple[int | None, int]:
        for place, token in enumerate(candidates):
            if super().accept(target, [token], drawn_from)[0] is not None:
                return place, token
        return super().accept(target, candidates[-1:], drawn_from)


class TakesOutTheTokenAlone(Sampler):
    """After a rejection the drawn token is ruled out, and not what its distribution has in excess."""

    def accept(self, target: Odds, candidates: Sequence[int], drawn_from: Odds | None) -> tuple[int | None, int]:
        place, token = super().accept(target, candidates[:1], drawn_from)
        if place is not None or drawn_from is None:
            return place, token
        rest = target.copy()
        rest[candidates[0]] = 0.0
        return None, self.draw(rest)


class ForgetsWhatWasDrawn(Sampler):
    """The second of the candidates counts as drawn with replacement."""

    def accept(self, target: Odds, candidates: Sequence[int], drawn_from: Odds | None) -> tuple[int | None, int]:
        if drawn_from is None or len(candidates) < 2:
            return super().accept(target, candidates, drawn_from)
        place, token = super().accept(target, candidates[:1], drawn_from)
        if place is not None:
            return place, token
        rest = np.maximum(target - drawn_from, 0)
        place, token = super().accept(rest / rest.sum(), candidates[1:], drawn_from)
        return (None if place is None else 1), token


@pytest.mark.parametrize(
    "way, rule",
    [
        ("drawn chain", DrawsAgain),
        ("given tree", DrawsAgain),
        ("drawn tree", KeepsTheRejected),
        ("given tree", KeepsTheRejected),
        ("drawn chain", TakesOutTheTokenAlone),
        ("drawn tree", ForgetsWhatWasDrawn),
    ],
)
def test_a_wrong_rule_is_found(
    world: World, way: str, rule: type[Sampler], monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    counts = Tables(world, WAYS[way](world), rule).outputs(10_000, monkeypatch)
    assert chi_square(counts, world.distribution()) < 1e-9


# ---- fewer outputs, with the models themselves


@pytest.mark.parametrize("size", [(2, 1, None), (2, 3, 9)])
def test_the_models_own_outputs_follow_the_distribution(world: World, size: tuple[int, int, int | None]) -> None:
    proposer = EagleProposer(world.drafter, LAYERS, *size)
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    for seed in range(400):
        made = decode(world.target, proposer, PROMPT, [END], LENGTH, Sampling(TEMPERATURE, seed))
        counts[tuple(made.ids)] += 1
        accepted += sum(made.accepted)
    assert chi_square(counts, world.distribution()) > 1e-3
    assert accepted > 60


def test_a_seed_makes_the_same_output_again(world: World) -> None:
    proposer = EagleProposer(world.drafter, LAYERS, 2)
    first, again, other = (
        [decode(world.target, proposer, PROMPT, [], 20, Sampling(1.0, seed)).ids for seed in seeds]
        for seeds in (range(3), range(3), range(3, 6))
    )
    assert first == again != other


@given(
    weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=9).filter(lambda weights: sum(weights) > 0),
    chance=st.floats(0.0, 1.0, exclude_max=True),
)  # fmt: skip
def test_a_draw_never_takes_what_cannot_be(weights: list[float], chance: float) -> None:
    sampler = Sampler(Sampling(1.0))
    sampler.random.random = lambda: chance  # type: ignore[method-assign]
    index = sampler.draw(np.array(weights))
    assert weights[index] > 0
    assert sum(weights[:index]) <= chance * sum(weights) * (1 + 1e-9)


def test_a_certain_token_is_never_rejected() -> None:
    """Rounding may make the chance of the only possible token a little less than one."""
    sampler = Sampler(Sampling(1.0))
    sampler.random.random = lambda: 1 - 2**-53  # type: ignore[method-assign]
    certain = np.array([0.0, 1.0 - 1e-15, 0.0])
    assert sampler.accept(certain, [1], None) == (0, 1)
    assert sampler.accept(certain, [1], np.array([0.0, 1.0, 0.0])) == (0, 1)


@pytest.mark.parametrize("temperature", [-1.0, 1e-9, 101.0, float("nan"), float("inf")])
def test_temperatures_that_make_no_sense(temperature: float) -> None:
    with pytest.raises(EyasError, match=r"temperature: .* is neither 0 \(greedy\) nor between 0.001 and 100"):
        Sampling(temperature)
