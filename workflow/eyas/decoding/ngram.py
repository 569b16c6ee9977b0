"""Prompt-lookup decoding: what followed the same few tokens earlier in the prompt or the answer."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eyas.decoding.decode import Decoded, Round
from eyas.decoding.proposers import Draft
from eyas.decoding.sampling import Sampler, Sampling
from eyas.errors import EyasError


class NgramProposer:
    """Drafts up to `steps` tokens that followed the first earlier place with the longest matching suffix.

    The suffix has at most `max_ngram` tokens. The same choice as transformers' `prompt_lookup_num_tokens`
    (with `max_matching_ngram_size`); the idea is Apoorv Saxena's.
    """

    layers: Sequence[int] = ()
    trees = False

    def __init__(self, steps: int, max_ngram: int = 3) -> None:
        if steps < 1 or max_ngram < 1:
            raise EyasError(f"prompt lookup needs at least one step and one token to match, not {steps}, {max_ngram}")
        self.steps, self.max_ngram = steps, max_ngram

    def begin(self, prompt: Sequence[int], max_new_tokens: int, sampler: Sampler) -> NgramDrafting:
        return NgramDrafting(self, prompt[0])


class NgramDrafting:
    """One sequence, with what follows each of its n-grams where it first occurs."""

    def __init__(self, proposer: NgramProposer, first: int) -> None:
        self.steps, self.max_ngram = proposer.steps, proposer.max_ngram
        self.known = [first]
        self.follows: dict[tuple[int, ...], int] = {}  # n-gram: the place right after its first occurrence

    def draft(self, states: Tensor | None, tokens: list[int]) -> Draft:
        for token in tokens:
            # an n-gram is entered when something follows it, so the suffix never finds itself
            end = len(self.known)
            for size in range(1, min(self.max_ngram, end) + 1):
                self.follows.setdefault(tuple(self.known[end - size : end]), end)
            self.known.append(token)
        for size in range(min(self.max_ngram, len(self.known) - 1), 0, -1):
            place = self.follows.get(tuple(self.known[-size:]))
            if place is not None:
                return Draft.chain(self.known[place : place + self.steps])
        return Draft()


def replayed(proposer: NgramProposer, prompt: Sequence[int], output: Sequence[int]) -> Decoded:
    """What greedy decoding with prompt lookup would have come to, from the target's own greedy `output` [n] alone.

    The rounds are those of `decode`, which accepts what equals the target's own tokens: no target is needed to know
    which. `seconds` is 0, as nothing was decoded.
    """
    drafting = proposer.begin(prompt, len(output), Sampler(Sampling()))
    rounds: list[Round] = []
    new, done = [*prompt[1:], *output[:1]], 1
    while done < len(output):
        draft = drafting.draft(None, new)
        left, matched = list(output[done:]), 0
        while matched < min(len(draft.tokens), len(left)) and draft.tokens[matched] == left[matched]:
            matched += 1
        new = left[: matched + 1]
        rounds.append(Round(len(new), matched, draft.depth))
        done += len(new)
    return Decoded(list(output), rounds, 0.0)
