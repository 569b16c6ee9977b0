"""Decoding, plain or speculative: one loop for no drafter, chains, trees and prompt lookup."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from eyas.decoding.proposers import Draft, Proposer
from eyas.decoding.sampling import Sampler, Sampling
from eyas.decoding.tree_pass import require_trees
from eyas.decoding.verify import Verifier
from eyas.target.model import TargetModel

# Called with the tokens of a round and how many of them, from the first, were drafted.
OnRound = Callable[[list[int], int], None]


@dataclass(frozen=True)
class Round:
    """One target pass after the prefill.

    `tokens`: how many it added to the output. `accepted`: how many of them were drafted. `depth`: how many
    draft steps were on offer. An output that ends with a drafted token ends before the target's own, so
    that what was drafted behind it was never decided: then `tokens` equals `accepted`.
    """

    tokens: int
    accepted: int
    depth: int

    @property
    def cut(self) -> bool:
        return self.tokens == self.accepted


@dataclass(frozen=True)
class Decoded:
    """Tokens decoded (the end of turn included), and what they cost.

    `seconds`: wall time from the prompt to the last token, prefill included.
    """

    ids: list[int]
    rounds: list[Round]
    seconds: float

    @property
    def forwards(self) -> int:
        """Target passes after the prefill."""
        return len(self.rounds)

    @property
    def accepted(self) -> list[int]:
        """Drafted tokens accepted, by round."""
        return [round.accepted for round in self.rounds]


@torch.inference_mode()
def decode(
    target: TargetModel,
    proposer: Proposer | None,
    prompt: Sequence[int],
    end_ids: Sequence[int],
    max_new_tokens: int,
    sampling: Sampling | None = None,
    on_round: OnRound | None = None,
) -> Decoded:
    """The target's continuation of `prompt` up to one of `end_ids` or `max_new_tokens` (at least 1) tokens.

    `proposer` drafts; None is plain decoding, one token a target pass. Greedy output is the target's own
    argmax at every place (up to ties that a pass of another width rounds differently); sampled output is
    distributed as the target's own. Raises EyasError when the target cannot take back rejected drafts, or
    cannot take a tree.
    """
    if proposer and proposer.trees:
        require_trees(target)
    began = time.perf_counter()
    sampler, ends = Sampler(sampling or Sampling()), set(end_ids)
    rounds: list[Round] = []
    with Verifier(target, proposer.layers if proposer else (), speculative=proposer is not None) as verifier:
        out = [sampler.choose(verifier.prefill(prompt))]
        if on_round:
            on_round(out[:], 0)
        drafting = proposer.begin(prompt, max_new_tokens, sampler) if proposer else None
        new = [*prompt[1:], out[0]]
        while out[-1] not in ends and len(out) < max_new_tokens:
            draft = drafting.draft(verifier.states(), new) if drafting else Draft()
            path, own = sampler.follow(draft, verifier.verify(out[-1], draft))
            verifier.keep(path)
            new = [*(draft.tokens[index] for index in path), own]
            output = new[: max_new_tokens - len(out)]
            end = next((place for place, token in enumerate(output) if token in ends), len(output))
            output = output[: end + 1]  # nothing after the end of turn is output
            out += output
            accepted = min(len(path), len(output))
            rounds.append(Round(len(output), accepted, draft.depth))
            if on_round:
                on_round(output, accepted)
    return Decoded(out, rounds, time.perf_counter() - began)
