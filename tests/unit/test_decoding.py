"""Speculative decoding gives the target's own tokens, and drafts as the training path does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import eyas.decoding.chain as chain_module
import numpy as np
import pytest
import torch
from drafter_reference import TRAINING, extracted
from eyas.decoding.chain import Decoded, DrafterCache, greedy, speculate
from eyas.decoding.offline import chained_accuracy
from eyas.drafter.checkpoint import build_drafter, load_drafter
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.initialise import initialise, random_weights
from eyas.drafter.model import Drafter, StepPositions, TTTPositions
from eyas.drafter.processes import Processes
from eyas.drafter.shape import DrafterShape
from eyas.drafter.trainer import train_epoch
from eyas.extraction.engines.transformers import Capture
from eyas.target.model import TargetModel, load_target
from eyas.target.tokenizer import TargetReference
from eyas.vocabulary.mapping import build_map
from tiny import WORDS, answer, question
from transformers import AutoTokenizer

LAYERS = [0, 1, 3]
END = 2
STARTS = [0, 7, 20, 28, 33]


@dataclass
class World:
    """The tiny target, states of its own answers, a drafter trained on them and a random one."""

    target: TargetModel
    prompts: list[list[int]]
    data: HiddenStates
    drafters: dict[str, Drafter]


@pytest.fixture(scope="module")
def world(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    folder, reference = tmp_path_factory.mktemp("run"), TargetReference(str(tiny_target))
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    rows, prompts = [], []
    for start in range(len(WORDS) - 1):
        messages = [{"role": "user", "content": question(start)}, {"role": "assistant", "content": answer(start)}]
        ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
        prompts.append(tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False))
        rows.append((start, ids, (np.arange(len(ids)) >= len(prompts[-1])).astype(np.uint8)))
    manifest = extracted(folder, reference, [rows])
    mapping = build_map(np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=len(tokenizer)), 120, [END])
    sizes = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    initialise(reference, manifest, mapping, sizes | {"init": "target_layer"}, 0, folder / "epoch_0", "mark")
    settings = TRAINING | {"batch_tokens": 120, "learning_rate": 5e-3, "ttt_steps": 3, "schedule_epochs": 6}
    for epoch in range(1, 7):
        train_epoch(
            manifest, folder / "tokens", reference, folder / f"epoch_{epoch - 1}", epoch, settings, 10**6, 0,
            folder / f"epoch_{epoch}", "mark", Processes.alone(torch.device("cpu")),
        )  # fmt: skip
    target = load_target(reference)
    shape = DrafterShape.for_target(target.config, sizes, 120, LAYERS)
    drafters = {"trained": load_drafter(folder / "epoch_6")}
    maps = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    drafters["random"] = build_drafter(shape, random_weights(shape, 1) | maps)
    return World(target, [prompts[s] for s in STARTS], HiddenStates(manifest, folder / "tokens"), drafters)


def check_accounts(decoded: Decoded, steps: int) -> None:
    """Each pass commits its accepted drafts and one token of the target's own, unless the end cuts that one off."""
    assert decoded.forwards == len(decoded.accepted)
    assert all(0 <= accepted <= steps for accepted in decoded.accepted)
    assert sum(decoded.accepted) + decoded.forwards + 1 - len(decoded.ids) in (0, 1)


@pytest.mark.parametrize("steps", [1, 3, 5])
@pytest.mark.parametrize("kind", ["trained", "random"])
def test_speculation_gives_the_greedy_tokens(world: World, kind: str, steps: int) -> None:
    for prompt in world.prompts:
        for limit in (1, 6, 40):
            plain = greedy(world.target, prompt, [END], limit)
            assert (plain.forwards, plain.accepted) == (len(plain.ids) - 1, [0] * (len(plain.ids) - 1))
            found = speculate(world.target, world.drafters[kind], LAYERS, prompt, [END], limit, steps)
            assert found.ids == plain.ids
            check_accounts(found, steps)
    assert plain.ids[-1] == END  # the last prompt's answer is short


def test_greedy_is_transformers_own(world: World) -> None:
    for prompt in world.prompts:
        given = torch.tensor([prompt])
        made = world.target.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=12, eos_token_id=END
        )
        assert greedy(world.target, prompt, [END], 12).ids == made[0, len(prompt) :].tolist()


def test_a_trained_drafter_is_accepted(world: World) -> None:
    rounds = {kind: [] for kind in world.drafters}
    for kind, drafter in world.drafters.items():
        for prompt in world.prompts:
            rounds[kind] += speculate(world.target, drafter, LAYERS, prompt, [END], 40, 3).accepted
    assert np.mean(rounds["trained"]) > 1.5
    assert np.mean(rounds["random"]) < 0.3
    assert len(rounds["trained"]) < len(rounds["random"])


@pytest.mark.parametrize("right, steps", [(0, 3), (1, 3), (2, 3), (3, 3), (5, 5)])
def test_rounds_and_states_with_a_drafter_that_is_right_so_often(
    world: World, right: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stub knows the truth and drafts `right` true tokens, then false ones; it checks what it is given."""
    prompt = world.prompts[0]
    truth = greedy(world.target, prompt, [], 30).ids
    with torch.inference_mode(), Capture(world.target, LAYERS) as capture:
        world.target.decoder(input_ids=torch.tensor([prompt + truth]))
        states = capture.aux()[0].clone()
    following = [*prompt[1:], *truth]

    class Stub:
        device = torch.device("cpu")

        def __init__(self, drafter: Any) -> None:
            self.seen = 0

        def draft(self, aux: torch.Tensor, next_tokens: torch.Tensor, count: int) -> list[int]:
            new = slice(self.seen, self.seen + len(aux))
            assert next_tokens.tolist() == following[new]
            torch.testing.assert_close(aux, states[new], rtol=1e-4, atol=1e-4)
            self.seen += len(aux)
            ahead = following[self.seen : self.seen + count]
            return [token if i < right else (token + 1) % 100 for i, token in enumerate(ahead)]

    monkeypatch.setattr(chain_module, "DrafterCache", Stub)
    length = 21
    found = speculate(world.target, world.drafters["random"], LAYERS, prompt, [], length, steps)
    assert found.ids == truth[:length]
    full, rest = divmod(length - 1, right + 1)
    assert found.accepted == [right] * full + ([rest] if rest else [])
    assert found.forwards == full + bool(rest)


def test_nothing_follows_an_end_of_turn_that_was_accepted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = world.prompts[4]
    truth = greedy(world.target, prompt, [], 20).ids
    end = truth.index(END)

    class Stub(DrafterCache):
        def draft(self, aux: torch.Tensor, next_tokens: torch.Tensor, count: int) -> list[int]:
            return truth[1 : 1 + count]

    monkeypatch.setattr(chain_module, "DrafterCache", Stub)
    found = speculate(world.target, world.drafters["random"], LAYERS, prompt, [END], 40, end + 3)
    assert found.ids == truth[: end + 1]
    assert (found.forwards, found.accepted) == (1, [end])


@pytest.mark.parametrize("kind", ["trained", "random"])
@pytest.mark.parametrize("pieces", [[12], [1, 4, 7], [5, 5, 1, 1]])
def test_drafting_equals_the_training_path_step_by_step(world: World, kind: str, pieces: list[int]) -> None:
    drafter, steps = world.drafters[kind], 5
    batch = world.data.batch([6])
    logits: list[torch.Tensor] = []
    cache, first = DrafterCache(drafter), 0
    handle = drafter.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output))
    with torch.inference_mode():
        for count in pieces:  # positions that the target confirms, a few at a time
            logits.clear()
            drafted = cache.draft(batch.aux[first : first + count], batch.tokens[first + 1 : first + 1 + count], steps)
            first += count
            assert len(cache.keys) == len(cache.values) == first  # keys of drafted steps are gone
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
                drafted = DrafterCache(drafter).draft(batch.aux[: t + 1], batch.tokens[1 : t + 2], steps)
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
