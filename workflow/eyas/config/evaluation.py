"""How acceptance is measured: what drafts how far, on which prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from eyas.config.fields import Asked, Name, Number, PromptFormat, Strict, runtime
from eyas.config.sglang import EvaluationServer

HELD_OUT = "held_out"


class PromptSet(Strict):
    """Prompts that are decoded for real; the first user turn of each."""

    path: str | None = Field(None, min_length=1)
    """A file as in `data.prompts` (.jsonl, .json, .parquet); the set `held_out` has none: its prompts are the
    first user turns of the run's held-out rows."""
    format: PromptFormat = "auto"
    """What the records look like, as `data.format`."""
    prompts: int | None = Field(None, ge=1)
    """Prompts of this set (as many as there are, if fewer); null takes `evaluation.prompts`."""


def _open_section(value: Any) -> Any:
    return {} if value is None else value  # `held_out:` with nothing behind it


def largest_tree(draft_steps: int, topk: int) -> int:
    """Most tokens that a static tree can have, its root included: topk at depth 1, topk² at each later one."""
    return topk + (draft_steps - 1) * topk**2 + 1


class Evaluation(Asked):
    """Acceptance of the drafter: from the states of held-out rows, and in real speculative decoding of the prompt
    sets, beside plain decoding, prompt lookup (n-grams) and the untrained drafter."""

    engine: Literal["transformers", "sglang"] = "transformers"
    """What decodes: this process, or an SGLang server with the exported drafter (and then one without)."""
    draft_steps: int = Field(5, ge=1, le=32)
    """Steps of drafting in a round (SGLang: `speculative_num_steps`)."""
    topk: int = Field(1, ge=1, le=64)
    """Branches that a drafted token has (SGLang: `speculative_eagle_topk`); 1 drafts a chain."""
    draft_tokens: int | None = Field(None, ge=2)
    """Tokens that the target checks in a round, the root of the tree included (SGLang:
    `speculative_num_draft_tokens`); null takes `draft_steps + 1`, for chains."""
    temperature: Number = Field(0.0, ge=0)
    """0 is greedy; above 0 samples, seeded, so that the output follows the target's distribution."""
    prompts: int = Field(16, ge=1)
    """Prompts of each set (as many as there are, if fewer)."""
    max_new_tokens: int = Field(64, ge=1)
    """Tokens decoded for each prompt."""
    prompt_sets: dict[Name, Annotated[PromptSet, BeforeValidator(_open_section)]] = Field(
        {HELD_OUT: PromptSet()}, min_length=1
    )
    """The prompt sets, by name. A prompt that a training row asks too is left out and counted."""
    sglang: EvaluationServer = EvaluationServer()
    threads: int = runtime(2, ge=1)
    """CPU threads of the job."""

    @model_validator(mode="after")
    def _possible(self) -> Evaluation:
        tp = self.sglang.tp
        if self.engine == "sglang" and tp and self.gpu and self.gpu % tp:
            raise ValueError(f"gpu {self.gpu} is no multiple of sglang.tp {tp}")
        if self.topk == 1:
            if self.draft_tokens not in (None, self.draft_steps + 1):
                raise ValueError(
                    f"draft_tokens {self.draft_tokens} does not go with topk 1: a chain of draft_steps"
                    f" {self.draft_steps} has {self.draft_steps + 1}, its root included; write that, or delete it"
                )
        elif self.draft_tokens is None:
            raise ValueError(f"topk {self.topk} drafts a tree, which needs draft_tokens: how many of it are checked")
        elif self.draft_tokens > (largest := largest_tree(self.draft_steps, self.topk)):
            raise ValueError(
                f"draft_tokens {self.draft_tokens} is more than a tree of draft_steps {self.draft_steps} and topk"
                f" {self.topk} has: topk + (draft_steps - 1) * topk^2 + 1 = {largest}"
            )
        for name, prompt_set in self.prompt_sets.items():
            if name == HELD_OUT and prompt_set.path is not None:
                raise ValueError(
                    f"prompt_sets.{HELD_OUT} is the run's held-out rows and has no path; choose another name"
                )
            if name != HELD_OUT and prompt_set.path is None:
                raise ValueError(f"prompt_sets.{name} needs a path; only {HELD_OUT} has none")
        return self

    @property
    def verified_tokens(self) -> int:
        """`draft_tokens`, where it was left open too."""
        return self.draft_tokens or self.draft_steps + 1

    @property
    def prompt_files(self) -> list[str]:
        """Files of the prompt sets."""
        return [prompt_set.path for prompt_set in self.prompt_sets.values() if prompt_set.path is not None]
