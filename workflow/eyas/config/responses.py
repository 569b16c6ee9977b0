"""Where the answers come from: in-process, over an endpoint, or from the data."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from eyas.config.fields import Asked, Number, Strict, runtime


class EndpointOptions(Strict):
    """How an endpoint is reached and how hard it is used: nothing that changes an answer."""

    urls: list[Annotated[str, StringConstraints(pattern=r"^https?://[^\s@/]+(/\S*)?$")]] = runtime(..., min_length=1)
    """Base addresses, as in `http://127.0.0.1:30000/v1`; several are used in turn."""
    api_key_env: str | None = runtime(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the key; null sends none. The key itself is
    never written anywhere."""
    concurrency: int = runtime(32, ge=1, le=4096)
    """Requests in flight, over all jobs of the run."""
    timeout_seconds: Number = runtime(600.0, gt=0)
    """Longest wait for an answer."""
    max_tries: int = runtime(6, ge=1)
    """Tries of a request (429, 5xx, resets, timeouts) before its row is given up."""
    outage_minutes: Number = runtime(10.0, ge=0)
    """How long to wait for an endpoint that does not answer at all, before the job stops."""
    requests_per_minute: int | None = runtime(None, ge=1)
    """Most requests a minute, over all jobs of the run."""
    tokens_per_minute: int | None = runtime(None, ge=1)
    """Most tokens a minute (prompts and answers), over all jobs of the run."""
    input_price: Number = runtime(0.0, ge=0)
    """Price of a million prompt tokens."""
    output_price: Number = runtime(0.0, ge=0)
    """Price of a million answered tokens."""
    max_spend: Number | None = runtime(None, gt=0)
    """Stop before the run has cost more than this, in the prices' currency."""

    @classmethod
    def from_json(cls, text: str) -> EndpointOptions:
        """From a job's command line."""
        return cls.model_validate_json(text)


class Endpoint(EndpointOptions):
    """An OpenAI-compatible endpoint (`/chat/completions`): SGLang, vLLM, OpenRouter and others."""

    model: str = Field(min_length=1)
    """Name of the target there."""
    extra_body: dict[str, Any] = {}
    """More fields of every request, as in `{top_k: 20, chat_template_kwargs: {enable_thinking: false}}`."""


class Responses(Asked):
    """The answers that the drafter learns from."""

    engine: Literal["transformers", "openai", "keep"] = "transformers"
    """`transformers`: the target answers, in-process. `openai`: it answers over an endpoint.
    `keep`: the answers of the data."""
    endpoint: Endpoint | None = None
    """Where the target is served, for `engine: openai`."""
    max_new_tokens: int = Field(512, ge=1)
    """Longest answer, in tokens."""
    temperature: Number = Field(0.0, ge=0)
    """0 is greedy; above 0 samples, seeded by run seed, row and turn."""
    top_p: Number = Field(1.0, gt=0, le=1)
    """Nucleus of the sampling."""
    truncated: Literal["skip", "keep", "continue"] = "skip"
    """Answers cut off by max_new_tokens: skip the row, keep it without an end of turn, or let the target
    go on (over an endpoint by `continue_final_message`, as SGLang and vLLM know it)."""
    max_continuations: int = Field(3, ge=1)
    """How often an answer is continued, max_new_tokens each, before the row is skipped."""
    batch_rows: int = runtime(32, ge=1)
    """Rows decoded together, in-process."""

    @model_validator(mode="after")
    def _endpoint_for_openai(self) -> Responses:
        if self.engine == "openai" and self.endpoint is None:
            raise ValueError("engine: openai needs endpoint (urls, model)")
        return self
