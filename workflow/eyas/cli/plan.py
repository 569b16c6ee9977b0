"""`eyas plan`: which run is meant, its space, and what it will take on a cluster."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from eyas.config import read_config
from eyas.errors import EyasError
from eyas.extraction.space import SpacePlan, amount, bytes_a_token, recorded_space, run_space
from eyas.plan import plan_run
from eyas.plan.forecast import Cluster, Forecast, forecast
from eyas.plan.run import RunPlan

DEFAULT_CONFIG = "config/config.yaml"
_TOKENS_A_ROW = 2000  # the two runs behind the defaults had 1,700 and 2,350
_OPTIONS = {
    "gpus": "GPUs, on all machines together",
    "prefill_tokens_per_second": "prefill of one replica",
    "decode_tokens_per_second": "answers of one server, many requests at a time",
    "disk_gb_per_second": "the results folder's disk, all jobs together",
    "link_gb_per_second": "from a replica's GPU to memory (PCIe)",
    "tflops_per_gpu": "dense bfloat16 arithmetic that training reaches",
    "supervised_share": "share of the tokens that are answers",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the forecast can be told. Everything has a default, which is an assumption."""
    group = parser.add_argument_group("forecast", "what the run is to have; defaults are assumptions, and named so")
    group.add_argument("--rows", type=_positive(int), metavar="N", help="rows (default: as the configuration says)")
    group.add_argument("--tokens", type=_positive(float), metavar="N", help="tokens (default: counted, or 2000 a row)")
    for field in dataclasses.fields(Cluster):
        kind: type = int if field.name == "gpus" else float
        option = f"--{field.name.replace('_', '-')}"
        group.add_argument(
            option, type=_positive(kind), metavar="X", help=f"{_OPTIONS[field.name]} (default: {field.default:g})"
        )


def _positive(kind: type) -> Any:
    def number(text: str) -> Any:
        value = kind(float(text)) if kind is int and "e" in text.lower() else kind(text)
        if not 0 < value < 1e18:
            raise ValueError(text)
        return value

    number.__name__ = "number above 0"  # argparse's word for it
    return number


@dataclasses.dataclass(frozen=True)
class RunForecast:
    """A run's space, and its forecast where the configuration is known and speaks of GPUs."""

    space: SpacePlan
    forecast: Forecast | None


def plan_for(args: argparse.Namespace) -> RunForecast:
    """Space and forecast of the run that the arguments name; raises EyasError."""
    space, plan = _space_for(args.run, args.configfile, args.results)
    given = {name: value for name in _OPTIONS if (value := getattr(args, name)) is not None}
    if args.supervised_share is not None and args.supervised_share > 1:
        raise EyasError(f"--supervised-share {args.supervised_share:g}: is a share, write at most 1")
    asked = bool(given) or args.rows is not None or args.tokens is not None
    if plan is None or not (asked or plan.config.extraction.gpu):
        if asked and plan is None:
            raise EyasError("a forecast needs the configuration; name it with --configfile")
        return RunForecast(space, None)
    return RunForecast(space, _forecast(space, plan, args, given))


def _forecast(space: SpacePlan, plan: RunPlan, args: argparse.Namespace, given: dict[str, Any]) -> Forecast:
    if space.hidden_size is None:
        raise EyasError(
            "the target's width is not known, and with it no bytes; write target.expect (vocab_size, num_hidden_layers,"
            " hidden_size) in the configuration"
        )
    config = plan.config
    rows, exact = args.rows or plan.rows, None
    known = args.tokens is not None
    if known:
        tokens = args.tokens
    elif space.tokens is not None:
        tokens, known = space.tokens * rows / plan.rows, space.exact and rows == plan.rows
        exact = space.total_bytes if known else None
    else:
        tokens = rows * min(_TOKENS_A_ROW, config.tokenization.max_length / 2)
    cluster = dataclasses.replace(Cluster(), **given)
    width = bytes_a_token(space.hidden_size, config.extraction.dtype)
    return forecast(config, rows, tokens, known, width, cluster, frozenset(given), exact)


def _space_for(run: str | None, configfile: str | None, results: str | None) -> tuple[SpacePlan, RunPlan | None]:
    """The space of a run named, or described by a configuration, or both, which must agree; raises EyasError."""
    if run is not None and configfile is None:
        for folder in (Path(results or "results") / run, Path(run)):
            if found := recorded_space(folder):
                return found, None
    source = configfile or DEFAULT_CONFIG
    if configfile is None and not Path(source).is_file():
        raise EyasError(
            f"no run {run!r} in {results or 'results'} that was started with snakemake; name its --configfile"
            if run
            else f"{source} is not there; name a run, or a configuration with --configfile"
        )
    config = read_config(source)
    if run not in (None, config.name):
        raise EyasError(
            f"{source} describes the run {config.name!r}, not {run!r}"
            f"{'' if configfile else ', of which there is no record'}; name its --configfile"
        )
    values = config.model_dump(mode="json", exclude_unset=True)
    plan = plan_run(values | ({"results": results} if results else {}), source)
    return run_space(plan), plan


def duration(seconds: float) -> str:
    """Seconds for people: two digits or so."""
    for unit, length in (("days", 172_800), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / (86_400 if unit == 'days' else length):,.1f} {unit}"
    return f"{seconds:.0f} s"


def describe_forecast(found: Forecast) -> list[str]:
    """The forecast in a few lines for people."""
    tokens = f"{found.tokens:,.0f} tokens"
    if not found.tokens_known:
        tokens += f" (assumed: {found.tokens / found.rows:,.0f} a row, until they are counted)"
    lines = ["", f"Forecast for {found.rows:,} rows, {tokens}, {found.replicas} replica(s) in extraction:"]
    width = max(len(stage.name) for stage in found.stages)
    for stage in found.stages:
        needs = ", ".join(f"{name} {duration(seconds)}" for name, seconds in stage.needs.items())
        lines.append(
            f"  {stage.name:<{width}}  {duration(stage.seconds):>9}  {amount(stage.nbytes):>9}  ({needs or 'no wait'})"
        )
    total = sum(stage.seconds for stage in found.stages)
    lines.append(f"In all {duration(total)}, longest in {found.longest.name}, which {found.longest.bound} bounds.")
    lines.append(f"The disk takes what {found.saturating_replicas} replica(s) write; more of them would wait for it.")
    lines += [f"Change first: {text}." for text in found.advice[:1]]
    lines += [f"Then: {text}." for text in found.advice[1:]]
    values = dataclasses.asdict(found.cluster)
    assumed = [f"{name} {values[name]:,g}" for name in values if name not in found.given]
    if assumed:
        lines.append(f"Assumed, not measured: {', '.join(assumed)}. Each is an option (--help).")
    lines.append("Not in it: the queue of a cluster, loading the target, evaluation and export.")
    return lines
