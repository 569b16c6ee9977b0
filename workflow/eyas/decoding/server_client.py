"""Requests to an SGLang server that decodes, and what it says of its rounds."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.decoding.decode import Decoded, Round
from eyas.errors import EyasError
from eyas.jobs.server_client import Failed, Refused, ServerClient

SECTION = "evaluation.sglang"


@dataclass(frozen=True)
class Answer:
    """A generation: its tokens (end of turn included), the seconds that the request took, and the server's counts.

    `rounds`: forwards that verified a draft; 0 for a server without a drafter. `correct`: drafted tokens that it
    accepted in them, also behind the end of the output; `histogram[n]`: rounds that accepted n. None where it does
    not tell.
    """

    ids: list[int]
    seconds: float
    rounds: int
    correct: int | None
    histogram: list[int] | None

    def decoded(self, steps: int) -> tuple[Decoded, bool]:
        """As our own decoding counts it, for drafts of `steps` steps; and whether each round's tokens are known.

        What a last round accepted behind the end of the output is no output and is left out. Which of the rounds
        was the last is not told: it is taken for one that accepted the most.
        """
        if not self.rounds:  # a token each
            return Decoded(self.ids, [Round(1, 0, 0)] * (len(self.ids) - 1), self.seconds), True
        known = self.histogram is not None and sum(self.histogram) == self.rounds
        accepted = self._each_round() if known else self._spread(steps)
        accepted.sort()
        found = [Round(count + 1, count, steps) for count in accepted]
        behind = sum(round.tokens for round in found) - (len(self.ids) - 1)
        if found and 0 < behind <= found[-1].accepted:
            left = found[-1].tokens - behind
            found[-1] = Round(left, left, steps)
        return Decoded(self.ids, found, self.seconds), known

    def _each_round(self) -> list[int]:
        assert self.histogram is not None
        return [count for count, rounds in enumerate(self.histogram) for _ in range(rounds)]

    def _spread(self, steps: int) -> list[int]:
        """Some rounds with the right sum."""
        left = len(self.ids) - 1 - self.rounds if self.correct is None else self.correct
        accepted = []
        for _ in range(self.rounds):
            accepted.append(max(min(steps, left), 0))
            left -= accepted[-1]
        return accepted


class DecodingClient(ServerClient):
    """Generates with one server. Used by many threads at once."""

    def __init__(self, url: str, key: str | None, timeout_seconds: float) -> None:
        super().__init__(url, key, timeout_seconds, SECTION)

    def generate(
        self, ids: Sequence[int], max_new_tokens: int, temperature: float, seed: int, end_ids: Sequence[int],
        ignore_end: bool = False,
    ) -> Answer:  # fmt: skip
        """The continuation of `ids` up to one of `end_ids`; raises Unreachable, Refused or Failed."""
        sampling: dict[str, Any] = {
            "max_new_tokens": max_new_tokens, "temperature": temperature, "stop_token_ids": list(end_ids),
            "ignore_eos": ignore_end, "no_stop_trim": True, "skip_special_tokens": False,
            # Whatever the target's generation_config.json recommends: the distribution is the target's own.
            "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        }  # fmt: skip
        if temperature > 0:
            sampling["sampling_seed"] = seed
        began = time.perf_counter()
        values = self.request("POST", "/generate", {"input_ids": list(ids), "sampling_params": sampling})
        seconds = time.perf_counter() - began
        try:
            facts = values["meta_info"]
            output = [int(token) for token in values["output_ids"]]
            finish = facts.get("finish_reason") or {}
            rounds = int(facts.get("spec_verify_ct") or 0)
            correct, histogram = facts.get("spec_num_correct_drafts"), facts.get("spec_correct_drafts_histogram")
            answer = Answer(
                output, seconds, rounds, None if correct is None else int(correct),
                None if not histogram else [int(count) for count in histogram],
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, AttributeError):
            raise Failed("the server's answer is no generation") from None
        if isinstance(finish, dict) and finish.get("type") == "abort":
            raise Failed(f"the server gave up: {self.said(str(finish.get('message')))}")
        if not output:
            raise Failed("the server's answer has no tokens")
        return answer

    def require_speculation(self, settings: Mapping[str, Any]) -> None:
        """Raise EyasError unless a running server drafts as `settings` say, as far as it tells."""
        try:
            found = self.request("GET", "/server_info")
        except (Refused, Failed):
            return  # the probe says whether it drafts at all
        if not isinstance(found, dict):
            return
        names = {
            "draft_steps": "speculative_num_steps", "topk": "speculative_eagle_topk",
            "draft_tokens": "speculative_num_draft_tokens",
        }  # fmt: skip
        for ours, theirs in names.items():
            if theirs in found and found[theirs] != settings[ours]:
                option = f"--{theirs.replace('_', '-')}"
                raise EyasError(
                    f"{SECTION}.url: {self.url} runs with {option} {found[theirs]}, and evaluation.{ours} is"
                    f" {settings[ours]}; start it with {option} {settings[ours]}, or change evaluation.{ours}"
                )
