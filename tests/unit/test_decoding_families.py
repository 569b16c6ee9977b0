"""Speculation gives the target's own greedy tokens, for targets of several families: chains, trees, n-grams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from eyas.decoding.decode import decode
from eyas.decoding.eagle import EagleProposer
from eyas.decoding.ngram import NgramProposer
from eyas.decoding.proposers import Draft
from eyas.decoding.sampling import Sampler
from eyas.decoding.tree_pass import require_trees
from eyas.drafter.checkpoint import build_drafter
from eyas.drafter.initialise import random_weights
from eyas.drafter.shape import DrafterShape
from eyas.errors import EyasError
from eyas.extraction.engines.transformers import Capture
from eyas.target.model import TargetModel

VOCAB = 61
COUNT = 24  # tokens of each output
SIZES: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=False,
    initializer_range=0.4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
MLA: dict[str, Any] = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, head_dim=4,
    num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2,
    topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
)  # fmt: skip
# Windows are shorter than the prompts, so that layers forget while drafts come and go.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3_sliding": ("Qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}),
    "deepseek_v3": ("DeepseekV3", MLA),
    "mistral_sliding": ("Mistral", {"sliding_window": 6}),
    "mistral_window_of_3": ("Mistral", {"sliding_window": 3}),
    "gemma3": ("Gemma3Text", {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gpt_oss": ("GptOss", {"sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2}),
}
RECURRENT: dict[str, Any] = dict(
    layer_types=["linear_attention", "full_attention"] * 2, linear_num_value_heads=2, linear_num_key_heads=2,
    linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)  # fmt: skip


def make(kind: str, changes: dict[str, Any], seed: int = 3) -> TargetModel:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    return TargetModel(model, model.model, model.model.layers, model.lm_head, torch.device("cpu"))


def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(3, VOCAB) for _ in range(length)] for length in (1, 4, 23)]


def alone(target: TargetModel, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation without any cache: the whole text anew for each token."""
    ids = list(prompt)
    with torch.inference_mode():
        while len(ids) < len(prompt) + count:
            ids.append(int(target.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


@dataclass
class Knowing:
    """A proposer that knows the truth, and hides it among random branches; it checks the states that it is given."""

    truth: list[int]
    states: torch.Tensor
    layers: Sequence[int]
    seed: int
    trees: bool = True
    sizes: list[int] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler) -> Knowing:
        self.known, self.random, self.text = 0, random.Random(self.seed), [*prompt, *self.truth]
        return self

    def draft(self, states: torch.Tensor | None, tokens: list[int]) -> Draft:
        assert states is not None
        new = slice(self.known, self.known + len(tokens))
        assert tokens == self.text[self.known + 1 : self.known + 1 + len(tokens)]
        torch.testing.assert_close(states, self.states[new], rtol=1e-3, atol=1e-3)
        self.known += len(tokens)
        following = self.text[self.known + 1 :]
        drafted: list[int] = []
        parents: list[int] = []
        taken: set[tuple[int, int]] = set()

        def add(token: int, parent: int) -> None:
            if (parent, token) not in taken:
                taken.add((parent, token))
                drafted.append(token)
                parents.append(parent)

        right, at = self.random.randrange(5), -1
        for step in range(min(right, len(following))):
            for _ in range(self.random.randrange(3)):  # branches beside and below the true path
                add(self.random.randrange(3, VOCAB), self.random.choice([at, *range(len(drafted))]))
            if (at, following[step]) in taken:
                break
            add(following[step], at)
            at = len(drafted) - 1
        if not drafted or self.random.random() < 0.5:
            add((following[0] if following else 3) % (VOCAB - 1) + 1, -1)
        self.sizes.append(len(drafted))
        return Draft(drafted, parents, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_output_is_the_targets_own(family: str) -> None:
    target = make(*FAMILIES[family])
    layers = [0, 1, 3]
    shape = DrafterShape.for_target(target.config, dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    ) | {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}, 40, layers)  # fmt: skip
    ids = torch.arange(5, 45)
    maps = {"d2t": ids - torch.arange(40), "t2d": torch.isin(torch.arange(VOCAB), ids)}
    drafter = build_drafter(shape, random_weights(shape, 1) | maps).eval()
    proposers = {
        "chain": EagleProposer(drafter, layers, 4),
        "tree": EagleProposer(drafter, layers, 3, 3, 9),
        "wide tree": EagleProposer(drafter, layers, 2, 30, 60),
        "n-gram": NgramProposer(4),
    }
    for number, prompt in enumerate(prompts()):
        truth = alone(target, prompt, COUNT)
        assert decode(target, None, prompt, [], COUNT).ids == truth
        for name, proposer in proposers.items():
            assert decode(target, proposer, prompt, [], COUNT).ids == truth, name
        with torch.inference_mode(), Capture(target, layers) as capture:
            target.decoder(input_ids=torch.tensor([prompt + truth]))
            states = capture.aux()[0].clone()
        for seed in range(2):
            knowing = Knowing(truth, states, layers, seed + 10 * number)
            found = decode(target, knowing, prompt, [], COUNT)
            assert found.ids == truth
            assert found.forwards < 0.9 * COUNT and max(knowing.sizes) > 5  # trees with branches, and accepted ones


def test_a_recurrent_target_is_refused_in_one_line() -> None:
    target = make("Qwen3Next", RECURRENT)
    prompt = prompts()[1]
    assert len(decode(target, None, prompt, [], 5).ids) == 5
    with pytest.raises(EyasError, match="Qwen3NextForCausalLM keeps a recurrent state"):
        decode(target, NgramProposer(3), prompt, [], 5)
    with pytest.raises(EyasError, match="topk: Qwen3NextForCausalLM .* use topk: 1"):
        require_trees(target)


class DeafToMasks(torch.nn.Module):
    """A decoder that takes a mask and does not use it."""

    def __init__(self, decoder: torch.nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, attention_mask: Any = None, **given: Any) -> Any:
        return self.decoder(**given)


def test_a_target_that_ignores_the_mask_is_refused_for_trees_alone() -> None:
    target = make("Llama", {})
    target.decoder = DeafToMasks(target.decoder)
    with pytest.raises(EyasError, match="does not keep the paths of a tree .* use topk: 1"):
        require_trees(target)
    prompt = prompts()[2]
    assert decode(target, NgramProposer(3), prompt, [], 9).ids == alone(target, prompt, 9)


def test_a_target_that_takes_no_mask_is_refused_for_trees() -> None:
    target = make("Llama", {})

    class NoMask(torch.nn.Module):
        def forward(self, input_ids: torch.Tensor, past_key_values: Any = None, use_cache: bool = True) -> Any:
            return inner(input_ids=input_ids, past_key_values=past_key_values, use_cache=use_cache)

    inner = target.decoder
    target.decoder = NoMask()
    with pytest.raises(EyasError, match="topk: LlamaForCausalLM cannot take a tree"):
        require_trees(target)
