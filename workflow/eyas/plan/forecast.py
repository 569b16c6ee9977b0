"""What a run will take on a cluster, before it is started: time and bytes of each stage, and what bounds it.

Products and sums, no simulation. What is not known, speeds above all, is an assumption and can be given.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from eyas.config import Config, Drafter, read_target_sizes

GB = 1e9
_TEXT = 4.5  # bytes a token as text
_TOKEN = 5  # bytes a token in a shard of tokens: id and mask
_MASTERS = 12  # bytes a trained number in trainer_state: float32 master and two moments
# What each token of a run is read with in tokenisation, on one CPU thread.
_TOKENIZED = 100_000


@dataclass(frozen=True)
class Cluster:
    """What the run has at its disposal. Each field is an assumption until it is given."""

    gpus: int = 8
    """GPUs, on all machines together."""
    prefill_tokens_per_second: float = 2850.0
    """Prefill of one replica, hidden states included. The default lies between two runs with a target of 1 T parameters
    on 8 GPUs: 3,165 and 2,565."""
    decode_tokens_per_second: float = 3000.0
    """Answers of one server, many requests at a time."""
    disk_gb_per_second: float = 2.0
    """Writing or reading the results folder, all jobs together."""
    link_gb_per_second: float = 25.0
    """From a replica's GPU (its first rank) to the machine's memory."""
    tflops_per_gpu: float = 160.0
    """Dense bfloat16 arithmetic that training reaches, not the data sheet's figure."""
    supervised_share: float = 0.65
    """Tokens of a row that are the target's answer."""


@dataclass(frozen=True)
class StageForecast:
    """Seconds that each resource of a stage needs by itself; they work at the same time."""

    name: str
    nbytes: float
    """Bytes written."""
    needs: dict[str, float]

    @property
    def seconds(self) -> float:
        return max(self.needs.values(), default=0.0)

    @property
    def bound(self) -> str:
        return max(self.needs, key=lambda name: self.needs[name]) if self.needs else "nothing"


def hidden_state_bytes(tokens: float, hidden_size: int, states: int = 4, itemsize: int = 2) -> float:
    """Bytes of the states alone; Eyas stores four a token (three layers and the last one)."""
    return tokens * states * hidden_size * itemsize


def prefill_seconds(tokens: float, tokens_per_second: float, replicas: int = 1) -> float:
    """Seconds of prefill, shared by replicas."""
    return tokens / (tokens_per_second * replicas)


def saturating_replicas(disk_gb_per_second: float, tokens_per_second: float, bytes_per_token: float) -> int:
    """Replicas that write as fast as the disk takes it: one more than that would wait."""
    return max(math.floor(disk_gb_per_second * GB / (tokens_per_second * bytes_per_token)), 1)


@dataclass(frozen=True)
class _DrafterSize:
    """Numbers in the drafter's matrices: used once a token, once a supervised token and TTT step, and not trained."""

    once: int
    every_step: int
    head: int
    embedding: int

    @property
    def trained(self) -> int:
        return self.once + self.every_step


def _drafter_size(drafter: Drafter, config: Config) -> _DrafterSize | None:
    sizes = read_target_sizes(config)
    if sizes is None:
        return None
    model, target = drafter.model, sizes.values
    hidden = model.hidden_size or sizes.hidden_size
    inner = model.intermediate_size or target.get("intermediate_size") or 4 * hidden
    heads = model.num_attention_heads or target.get("num_attention_heads") or max(hidden // 128, 1)
    kv_heads = model.num_key_value_heads or target.get("num_key_value_heads") or heads
    head_dim = model.head_dim or target.get("head_dim") or max(hidden // heads, 1)
    head = drafter.draft_vocab_size * hidden
    # fc, and the keys and values of all positions; q and o, later keys and values, MLP and head where it counts.
    return _DrafterSize(
        once=3 * sizes.hidden_size * hidden,
        every_step=hidden * head_dim * (3 * heads + 4 * kv_heads) + 3 * hidden * inner + head,
        head=head,
        embedding=sizes.vocab_size * hidden,
    )


@dataclass(frozen=True)
class Forecast:
    """The stages of a run, and what to change first."""

    rows: int
    tokens: float
    tokens_known: bool
    bytes_per_token: int
    replicas: int
    saturating_replicas: int
    cluster: Cluster
    given: frozenset[str]
    """Fields of `cluster` that somebody gave; the others are assumptions."""
    stages: tuple[StageForecast, ...]
    advice: tuple[str, ...]

    @property
    def longest(self) -> StageForecast:
        return max(self.stages, key=lambda stage: stage.seconds)

    def as_json(self) -> dict[str, Any]:
        stages = {
            stage.name: {
                "seconds": round(stage.seconds, 1), "bytes": round(stage.nbytes), "bound": stage.bound,
                "needs": {name: round(seconds, 1) for name, seconds in stage.needs.items()},
            }
            for stage in self.stages
        }  # fmt: skip
        cluster = asdict(self.cluster)
        return {
            "rows": self.rows, "tokens": round(self.tokens), "tokens_known": self.tokens_known,
            "bytes_per_token": self.bytes_per_token, "replicas": self.replicas,
            "saturating_replicas": self.saturating_replicas, "cluster": cluster,
            "assumed": sorted(cluster.keys() - self.given), "stages": stages,
            "seconds": round(sum(stage.seconds for stage in self.stages), 1),
            "bytes": round(sum(stage.nbytes for stage in self.stages)),
            "longest_stage": self.longest.name, "bound": self.longest.bound, "advice": list(self.advice),
        }  # fmt: skip


def forecast(
    config: Config, rows: int, tokens: float, tokens_known: bool, bytes_per_token: int, cluster: Cluster,
    given: frozenset[str] = frozenset(), state_bytes: float | None = None,
) -> Forecast:  # fmt: skip
    """Expected time and bytes of a run of `tokens` tokens.

    `bytes_per_token`: of the stored hidden states. `state_bytes`: the exact bytes of all, where they are known.
    """
    per_replica = max(config.extraction.gpu, 1)
    possible = max(cluster.gpus // per_replica, 1)
    wanted = config.extraction.replicas if config.extraction.engine == "sglang" else possible
    replicas = min(wanted, possible)
    disk = cluster.disk_gb_per_second * GB
    states = state_bytes if state_bytes is not None else tokens * bytes_per_token
    sizes = read_target_sizes(config)
    moved = tokens * 8 * (sizes.hidden_size if sizes else bytes_per_token // 8)  # they leave the GPU as 16-bit numbers
    stages = [_responses(config, tokens, cluster)]
    stages.append(StageForecast("tokens", tokens * _TOKEN, {"CPU": tokens / _TOKENIZED}))
    stages.append(
        StageForecast(
            "hidden_states",
            states,
            {
                "prefill": prefill_seconds(tokens, cluster.prefill_tokens_per_second, replicas),
                "PCIe": moved / (cluster.link_gb_per_second * GB * replicas),
                "disk": states / disk,
            },
        )
    )
    for name, drafter in config.drafters.items():
        if stage := _training(name, drafter, config, tokens, states, cluster):
            stages.append(stage)
    saturating = saturating_replicas(cluster.disk_gb_per_second, cluster.prefill_tokens_per_second, bytes_per_token)
    return Forecast(
        rows, tokens, tokens_known, bytes_per_token, replicas, saturating, cluster, given, tuple(stages),
        tuple(_advice(config, stages, replicas, possible, saturating, per_replica)),
    )  # fmt: skip


def _responses(config: Config, tokens: float, cluster: Cluster) -> StageForecast:
    if config.responses.engine == "keep":
        return StageForecast("responses", tokens * _TEXT, {})
    endpoint = config.responses.endpoint
    servers = len(endpoint.urls) if endpoint and config.responses.engine == "openai" else 1
    if config.responses.engine == "transformers":
        servers = max(cluster.gpus // max(config.responses.gpu, 1), 1)
    answered = tokens * cluster.supervised_share
    return StageForecast(
        "responses", tokens * _TEXT, {"decoding": answered / (cluster.decode_tokens_per_second * servers)}
    )


def _training(
    name: str, drafter: Drafter, config: Config, tokens: float, states: float, cluster: Cluster
) -> StageForecast | None:
    size, training = _drafter_size(drafter, config), drafter.training
    if size is None:
        return None
    supervised = cluster.supervised_share
    # Forward and backward: six operations a number. The teacher's head is multiplied forward only.
    operations = 6 * (size.once + supervised * training.ttt_steps * size.every_step) + 2 * supervised * size.head
    rate = max(training.gpu, 1) * cluster.tflops_per_gpu * 1e12
    checkpoint = 2 * (size.trained + size.embedding) + _MASTERS * size.trained
    return StageForecast(
        f"training {name}",
        float(checkpoint * (training.epochs + 1)),
        {
            "training": training.epochs * tokens * operations / rate,
            # Read once to compare the checksums, and once each epoch.
            "disk": (training.epochs + 1) * states / (cluster.disk_gb_per_second * GB),
        },
    )


def _advice(
    config: Config, stages: list[StageForecast], replicas: int, possible: int, saturating: int, per_replica: int
) -> list[str]:
    """What to change first, for the stages that take longest."""
    longest = sorted((stage for stage in stages if stage.needs), key=lambda stage: stage.seconds, reverse=True)
    smaller = "" if config.extraction.dtype.startswith("fp8") else ", or extraction.dtype: fp8_e4m3 (half the bytes)"
    found = []
    for stage in longest[:2]:
        if stage.name == "hidden_states":
            if stage.bound == "prefill" and replicas < min(possible, saturating):
                change = f"extraction.replicas: {min(possible, saturating)} ({replicas} now, {possible} fit the GPUs)"
            elif stage.bound == "prefill":
                change = f"more GPUs: each {per_replica} are another replica; the disk keeps up with {saturating}"
            elif stage.bound == "PCIe":
                change = "more replicas, each with a link of its own"
            else:
                change = f"a faster disk for `results`{smaller}"
        elif stage.name == "responses":
            change = "more servers in responses.endpoint.urls, or answers that are there (responses.engine: keep)"
        elif stage.bound == "disk":
            change = f"a faster disk for `results`{smaller}; training reads all states once an epoch and once before"
        else:
            change = "more GPUs (training.gpu), or fewer ttt_steps or epochs"
        found.append(f"{stage.name} is bound by {stage.bound}: {change}")
    return found
