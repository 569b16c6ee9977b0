"""SGLang: where a server is, or how it is started, for extraction and for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from eyas.config.fields import Number, Strict, runtime

_URL = r"^https?://[^\s@/]+/?$"


class Server(Strict):
    """A server: one that runs already, or one that a job starts."""

    url: str | None = runtime(None, pattern=_URL)
    """Address of a running server; null starts one."""
    api_key_env: str | None = runtime(None, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the environment variable that holds the running server's key; null sends none."""
    python: str = runtime("python", min_length=1)
    """Python of the environment that has SGLang."""
    tp: int | None = runtime(None, ge=1)
    """Processes that share the target (tensor parallel); null takes the job's `gpu`, at least 1."""
    quantization: str | None = Field(None, pattern=r"^[A-Za-z0-9_-]+$")
    """How SGLang computes the target (`--quantization`); null leaves it to the target's config.json."""
    mem_fraction: Number | None = runtime(None, gt=0, lt=1)
    """Share of the memory for weights and cache (`--mem-fraction-static`); null leaves it to SGLang."""
    chunked_prefill: int | None = runtime(None, ge=16)
    """Tokens of a prefill batch (`--chunked-prefill-size`); null leaves it to SGLang."""
    extra_args: list[str] = []
    """More arguments of the server."""
    environment: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], str] = runtime({})
    """More environment variables of the server. No secrets: they are shown with the command."""
    timeout_seconds: Number = runtime(600.0, gt=0)
    """Longest wait for a request."""
    start_minutes: Number = runtime(60.0, gt=0)
    """How long the server may take until it answers."""
    outage_minutes: Number = runtime(10.0, ge=0)
    """How long to wait for a running server (`url`) that does not answer, before the job stops."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.url and (self.extra_args or self.quantization):
            raise ValueError("url is a running server, which extra_args and quantization do not reach; delete them")
        taken = [a for a in self.extra_args if a.split("=")[0] in TAKEN]
        if taken:
            raise ValueError(f"extra_args: {taken[0]} is set by Eyas; delete it")
        return self

    def options(self) -> dict[str, Any]:
        """What reaches or keeps the server, for a job's command line."""
        return self.model_dump(mode="json")


class Sglang(Server):
    """A server with the capture plugin: one that runs already, or one that each extraction job starts."""

    url: str | None = runtime(None, pattern=_URL)
    """Address of a running server on this machine (its EYAS_CAPTURE_DIR is `dump_folder`); null starts one in
    each job."""
    python: str = runtime("python", min_length=1)
    """Python of the environment that has SGLang and the capture plugin."""
    dump_folder: str = runtime("/dev/shm", min_length=1)
    """A folder in memory (tmpfs) through which states come; each job makes its own inside, unless `url` is set."""
    dump_gb: Number = runtime(8.0, gt=0)
    """Most gigabytes of states that wait there; never more than 80% of what is free."""
    concurrency: int = runtime(64, ge=1, le=1024)
    """Rows at the server at once."""
    max_tries: int = runtime(4, ge=1)
    """Tries of a row before it counts as failed."""
    restarts: int = runtime(3, ge=0)
    """How often a job starts its server again when it dies."""


class EvaluationServer(Server):
    """Servers that decode with the exported drafter and without: ones that run already, or ones that the job starts,
    one after the other."""

    url: str | None = runtime(None, pattern=_URL)
    """Address of a running server with the exported drafter (`--speculative-algorithm EAGLE3`); null starts both."""
    plain_url: str | None = runtime(None, pattern=_URL)
    """Address of a running server of the same target without a drafter, beside `url`; null leaves speed-up and
    lossless unmeasured there."""
    concurrency: int = Field(1, ge=1, le=1024)
    """Requests at the server at once. Times are those of a request, so they and the speed-up depend on it."""

    @model_validator(mode="after")
    def _both(self) -> Self:
        if self.plain_url and not self.url:
            raise ValueError("plain_url goes with url, the running server with the drafter; name it too")
        if self.plain_url and self.plain_url.rstrip("/") == str(self.url).rstrip("/"):
            raise ValueError("plain_url and url are the same server; it cannot be with and without the drafter")
        return self


# Arguments that Eyas gives itself: capture and drafting rest on them, or a key of the configuration sets them.
TAKEN = frozenset((
    "--model-path", "--model", "--host", "--port", "--api-key", "--config", "--tp", "--tp-size",
    "--tensor-parallel-size", "--dtype", "--quantization", "--mem-fraction-static", "--chunked-prefill-size",
    "--disable-radix-cache", "--speculative-algorithm", "--speculative-algo", "--enable-return-aux-hidden-states",
    "--return-aux-hidden-state-layer-ids", "--enable-return-hidden-states", "--skip-server-warmup", "--pp",
    "--pp-size", "--pipeline-parallel-size", "--enable-two-batch-overlap", "--revision", "--trust-remote-code",
    "--speculative-draft-model-path", "--speculative-draft-model", "--speculative-num-steps",
    "--speculative-eagle-topk", "--speculative-num-draft-tokens", "--speculative-draft-model-quantization",
))  # fmt: skip

# Architectures whose captured states are wrong in SGLang 0.5.23, and why.
_WRONG = {
    "gemma3": "SGLang captures its layers' outputs without the residual that is still to be added",
    "mimo_v2": "SGLang's model overrides the captured output",
    "step3p5": "SGLang's model overrides the captured output",
}


def wrong_states(model_type: str) -> str | None:
    """Why the hidden states that SGLang 0.5.23 takes of such a target are wrong; None where they are right."""
    return next((why for name, why in _WRONG.items() if model_type.startswith(name)), None)


def sglang_problem(
    model_type: str, num_hidden_layers: int, layers: Sequence[int], stage: str = "extraction"
) -> str | None:
    """Why SGLang cannot give the outputs of `layers` (0-based) of a target to `stage`; None when it can."""
    if why := wrong_states(model_type):
        return (
            f"{stage}.engine: sglang gives wrong hidden states for {model_type} ({why}); set"
            f" {stage}.engine: transformers"
        )
    if layers[-1] == num_hidden_layers - 1:
        return (
            f"extraction.layers: {list(layers)} has the target's last layer, which SGLang cannot capture (it takes a"
            f" layer's output from the next one's input); write layers up to {num_hidden_layers - 2}, or set"
            f" {stage}.engine: transformers"
        )
    return None
