"""What the run cost: time of CPUs and GPUs by rule, from the benchmark files that Snakemake writes."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.plan import RunPlan
from eyas.report import plots
from eyas.report.parts import Figure, Plot, Section, Table, number, span, time_unit

SERVERS = ("sglang", "vllm")  # that drafters are exported for
_WILDCARD = re.compile(r"\{(\w+)[^}]*\}")


def _values(plan: RunPlan, drafter: str) -> dict[str, Sequence[str]]:
    """What the wildcards of the rules stand for."""
    config = plan.config
    return {
        "shard": plan.shard_names,
        "drafter": [drafter],
        "epoch": [str(n) for n in range(1, config.drafters[drafter].training.epochs + 1)],
        "draft_vocab_size": sorted({str(d.draft_vocab_size) for d in config.drafters.values()}),
        "packaged": list(config.packages),
        "server": SERVERS,
    }


def _fill(pattern: str, wildcards: Mapping[str, str]) -> str:
    return _WILDCARD.sub(lambda match: wildcards[match[1]], pattern)


def _gpus(plan: RunPlan, rule: str, drafter: str) -> int:
    """GPUs that a job of the rule is given."""
    config = plan.config
    return {
        "respond": config.responses.gpu,
        "extract": config.extraction.gpu,
        "train_epoch": config.drafters[drafter].training.gpu,
        "evaluate": config.evaluation.gpu,
    }.get(rule, 0)


def benchmark_files(plan: RunPlan, rules: Mapping[str, str]) -> dict[str, list[tuple[Path, int]]]:
    """The benchmark files that the jobs of each rule write, with the GPUs of the job; none is looked at.

    `rules`: rule -> pattern of its files. Jobs of several shards are rules of their own, and come from
    the plan. Raises EyasError for a wildcard that nothing is known of.
    """
    found: dict[str, dict[Path, int]] = {}
    for rule, pattern in rules.items():
        names = list(dict.fromkeys(_WILDCARD.findall(pattern)))
        for drafter in plan.config.drafters:
            values = _values(plan, drafter)
            if unknown := [name for name in names if name not in values]:
                raise EyasError(f"rule {rule}: its benchmark has a wildcard {unknown[0]!r} that the report cannot fill")
            for choice in product(*(values[name] for name in names)):
                path = _fill(pattern, dict(zip(names, choice, strict=True)))
                found.setdefault(rule, {})[Path(path)] = _gpus(plan, rule, drafter)
    for stage, jobs in (
        ("responses", plan.response_jobs), ("tokens", plan.token_jobs), ("hidden_states", plan.extraction_jobs),
    ):  # fmt: skip
        if jobs[0].shards and (rule := jobs[0].rule) not in rules:
            folder = Path(plan.run_folder) / "benchmarks" / stage
            gpus = _gpus(plan, rule, next(iter(plan.config.drafters)))
            found[rule] = {folder / f"{job.log_name}.tsv": gpus for job in jobs}
    return {rule: list(files.items()) for rule, files in found.items()}


def _number(text: str | None) -> float | None:
    """A cell of a benchmark file; short jobs have `NA` or `-` where nothing could be sampled."""
    try:
        return float(text or "")
    except ValueError:
        return None


def read_costs(files: Mapping[str, Sequence[tuple[Path, int]]]) -> dict[str, dict[str, float]]:
    """Of the files that exist, by rule: `jobs`, `seconds`, `cpu_seconds`, `gpu_seconds`, `most_memory` (bytes)."""
    costs: dict[str, dict[str, float]] = {}
    for rule, paths in files.items():
        sums = dict.fromkeys(("jobs", "seconds", "cpu_seconds", "gpu_seconds", "most_memory"), 0.0)
        for path, gpus in paths:
            try:
                with open(path, newline="", encoding="utf-8") as file:
                    rows = list(csv.DictReader(file, delimiter="\t"))
            except (OSError, UnicodeDecodeError):
                continue  # not run under Snakemake, or cleared away
            sums["jobs"] += bool(rows)
            for row in rows:
                seconds = _number(row.get("s")) or 0.0
                sums["seconds"] += seconds
                sums["gpu_seconds"] += seconds * gpus
                sums["cpu_seconds"] += _number(row.get("cpu_time")) or 0.0
                sums["most_memory"] = max(sums["most_memory"], 2**20 * (_number(row.get("max_rss")) or 0.0))
        if sums["jobs"]:
            costs[rule] = sums
    return costs


def costs_section(costs: Mapping[str, Mapping[str, Any]]) -> Section:
    """Of `read_costs`."""
    ranked = sorted(costs, key=lambda rule: -costs[rule]["cpu_seconds"] - costs[rule]["gpu_seconds"])
    total = {key: sum(c[key] for c in costs.values()) for key in ("jobs", "seconds", "cpu_seconds", "gpu_seconds")}
    table = Table(
        "Costs by rule",
        ["rule", "jobs", "time", "CPU time", "GPU time", "CPU seconds", "GPU seconds", "most memory"],
        [
            [
                rule, number(c["jobs"]), span(c["seconds"]), span(c["cpu_seconds"]), span(c["gpu_seconds"]),
                number(c["cpu_seconds"], 1), number(c["gpu_seconds"], 1), f"{number(c['most_memory'] / 2**20)} MiB",
            ]
            for rule, c in [(rule, costs[rule]) for rule in ranked]
        ]
        + [
            [
                "all", number(total["jobs"]), span(total["seconds"]), span(total["cpu_seconds"]),
                span(total["gpu_seconds"]), number(total["cpu_seconds"], 1), number(total["gpu_seconds"], 1), "",
            ]
        ],
        [
            ("time", "wall-clock time of the jobs' last attempts, added up; jobs that ran side by side count each"),
            ("CPU time", "of the job and its processes, as Snakemake sampled it; jobs of under a second may show none"),
            ("GPU time", "wall-clock time of a job times the GPUs it was given, whether or not it used them"),
            ("most memory", "the largest resident memory of one job"),
        ],
    )  # fmt: skip
    if not costs:
        return Section("costs", "Costs", notes=["There are no benchmark files: the jobs did not run under Snakemake."])
    unit, length = time_unit(max(max(c["cpu_seconds"], c["gpu_seconds"]) for c in costs.values()))
    values = [
        {"rule": rule, "kind": kind, "time": costs[rule][key] / length}
        for rule in ranked
        for kind, key in (("CPU", "cpu_seconds"), ("GPU", "gpu_seconds"))
        if costs[rule][key] > 0
    ]
    shown = Plot(
        "Time of CPUs and GPUs", plots.cost_bars(values, ranked, unit),
        "CPU time as sampled; GPU time is wall-clock time times the GPUs that the job was given.",
        Table("", ["rule", "CPU time", "GPU time"], [[row[0], row[3], row[4]] for row in table.rows]),
    )  # fmt: skip
    figures = [
        Figure("CPU time", span(total["cpu_seconds"]), "of all jobs that are recorded, without this page's own"),
        Figure("GPU time", span(total["gpu_seconds"]), "wall-clock time times GPUs given"),
        Figure("jobs", number(total["jobs"]), f"{span(total['seconds'])} of wall-clock time when added up"),
    ]
    return Section("costs", "Costs", figures, plots=[shown] if values else [], tables=[table])
