"""The files of a finished run that its report is made of, with made-up numbers; no model, no Snakemake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas.config import check_config
from eyas.plan import RunPlan
from eyas.shards import write_json

STARTED = 1_796_028_400.0
DEFINITIONS = {
    "offline": "accuracy given that all earlier steps were right", "decoding": "1 + drafted tokens accepted",
    "looping": "an output that repeats itself", "speedup": "plain seconds over seconds", "baselines": "none, n-gram",
}  # fmt: skip
RULES = {
    "tokenize": "results/{run}/benchmarks/tokens/{shard}.tsv",
    "extract": "results/{run}/benchmarks/hidden_states/{shard}.tsv",
    "train_epoch": "results/{run}/benchmarks/{drafter}/epoch_{epoch}.tsv",
    "evaluate": "results/{run}/benchmarks/{drafter}/evaluation.tsv",
    "write_manifest": "results/{run}/benchmarks/manifest.tsv",
    "never_ran": "results/{run}/benchmarks/never.tsv",
}


def plan_of(results: Path, drafters: int = 1, shards: int = 3, name: str = "demo", **data: Any) -> RunPlan:
    """A plan of `shards` shards of 100 rows, and drafters `wide`, `wide2`, … of two epochs."""
    names = ["wide", *(f"wide{n}" for n in range(2, drafters + 1))]
    settings = {"draft_vocab_size": 32_000, "training": {"epochs": 2, "gpu": 4, "threads": 1}}
    config = check_config(
        {
            "name": name, "results": str(results), "target": {"path": "models/target"},
            "data": {"prompts": ["prompts.jsonl"], "rows": 100 * shards, "shard_rows": 100} | data,
            "extraction": {"gpu": 2}, "evaluation": {"gpu": 1},
            "drafters": {drafter: settings for drafter in names},
        },
        "config",
    )  # fmt: skip
    return RunPlan(config, 100 * shards, ())


def rules_of(plan: RunPlan) -> dict[str, str]:
    return {rule: pattern.replace("results/{run}", plan.run_folder) for rule, pattern in RULES.items()}


def statistics(source: str = "chat") -> dict[str, Any]:
    return {
        "rows": 1234, "sequences": 1300, "skipped_rows": 1, "tokens": 50_000, "supervised_tokens": 30_000,
        "supervised_share": 0.6,
        "truncated": {"max_length": {"rows": 7, "share": 7 / 1234}, "answer_limit": {"rows": 0, "share": 0.0}},
        "skipped": {"too long": {"rows": 1, "examples": [{"row": 9, "source": source, "reason": "too long: 99"}]}},
        "sources": {
            source: {"rows": 1234, "sequences": 1300, "tokens": 50_000, "supervised_tokens": 30_000, "skipped": 1},
            "empty": {"rows": 0, "sequences": 0, "tokens": 0, "supervised_tokens": 0, "skipped": 0},
        },
        "lengths": {
            "histogram": [[1, 8, 0], [8, 12, 1000], [12, 16, 0], [16, None, 300]],
            "min": 8, "mean": 38.46, "median": 9.0, "p95": 200, "max": 4000,
        },
        "hidden_states": {
            "hidden_size": 7168, "dtype": "bfloat16", "shards": 3, "bytes": 2_867_600_000, "bytes_per_token": 57352.0
        },
    }  # fmt: skip


def vocabulary(size: int = 32_000, source: str = "chat") -> dict[str, Any]:
    return {
        "vocab_size": 163_840, "draft_vocab_size": size, "distinct_tokens": 41_000, "coverage": 0.9712,
        "coverage_held_out": None,
        "coverage_by_source": {source: {"training": 0.9712, "held_out": None, "supervised_tokens": 30_000}},
        "coverage_curve": [[256, 0.5, None], [size, 0.9712, None], [163_840, 1.0, None]],
    }  # fmt: skip


def decoded(length: float | None, **changes: Any) -> dict[str, Any]:
    """Figures of one prompt set with one way of decoding (evaluation.json, format 3)."""
    shares = None if length is None else [round((length - 1) * 0.5 * 0.75**i, 4) for i in range(4)] + [None]
    looping = None if length is None else {
        "prompts": 9, "acceptance_length": length - 0.125, "acceptance_by_step": shares, "tokens_per_forward": length - 0.2,
        "speedup": 1.1,
    }  # fmt: skip
    return {
        "prompts": 10, "acceptance_length": length, "acceptance_by_step": shares, "tokens_per_forward": length, "tokens": 480,
        "target_forwards": 350, "seconds": 12.3, "tokens_per_second": 40.0, "speedup": 1.25, "lossless": True, "differences": [], "looping_share": 0.1,
        "without_looping": looping,
    } | changes  # fmt: skip


def prompt_set(length: float | None = 2.5, source: str = "held-out rows of the run", **changes: Any) -> dict[str, Any]:
    nothing = {"acceptance_by_step": None, "without_looping": None, "lossless": None}
    return decoded(length) | {
        "source": source, "overlapping_prompts": 0,
        "baselines": {
            "none": decoded(1.0, speedup=1.0, **nothing), "ngram": decoded(1.25, speedup=1.05),
            "untrained": decoded(1.125, speedup=0.5),
        },
    } | changes  # fmt: skip


def evaluation(length: float = 2.5, sets: tuple[str, ...] = ("held_out", "mt_bench")) -> dict[str, Any]:
    offline = {"positions_by_step": [100, 40, 10, 1, 0], "expected_acceptance_length": length}
    return {
        "format_version": 3, "definitions": DEFINITIONS, "engine": "transformers",
        "settings": {"draft_steps": 5, "topk": 1, "draft_tokens": 6, "temperature": 0.0, "max_new_tokens": 48},
        "checkpoint": "epoch_1", "held_out_rows": 30,
        "offline": {
            "trained": offline | {
                "accuracy_by_step": [0.6, 0.5, 0.4, 0.25, None],
                "expected_acceptance_lengths": [1.6, 1.9, 2.02, 2.05, None],
            },
            "untrained": offline | {
                "accuracy_by_step": [0.01, None, None, None, None], "expected_acceptance_length": None,
                "expected_acceptance_lengths": [1.01, None, None, None, None],
            },
        },
        "prompt_sets": {name: prompt_set(length - 0.5 * n) for n, name in enumerate(sets)},
    }  # fmt: skip


def trainer_state(epochs: int = 2, steps: int = 30) -> dict[str, Any]:
    history = [
        {
            "epoch": n, "rows": 270, "tokens": 9000, "counted": 20_000, "steps": steps, "loss": 6.0 / n,
            "accuracy_by_step": [0.2 * n, 0.1 * n, None], "acceptance_length": 1.0 + 0.25 * n, "learning_rate": 1e-3 / n,
            "held_out": {
                "rows": 30, "loss": 6.5 / n, "accuracy_by_step": [0.18 * n, 0.09 * n, 0.05 * n], "acceptance_length": 1.25,
            },
        }
        for n in range(1, epochs + 1)
    ]  # fmt: skip
    return {"parameters": 12_345_678, "manifest_digest": "xxh3_128:abc", "history": history, "step": epochs * steps}


def metrics_lines(epoch: int, steps: int = 30) -> str:
    import json

    lines = []
    for step in range((epoch - 1) * steps + 1, epoch * steps + 1):
        accuracies = [round(step / 100, 3), None, round(step / 200, 3)]
        lines.append(json.dumps({"epoch": epoch, "step": step, "loss": 10 / step, "accuracy_by_step": accuracies}))
    return "\n".join(lines) + "\n"


def shard_facts(place: int, timeline: bool = True) -> dict[str, Any]:
    """100 tokens a second for 100 s, one shard after the other with 10 s between."""
    facts = {
        "rows": 100, "tokens": 10_000, "bytes": 1_000_000, "seconds": 100.0, "tokens_per_second": 100.0, "skipped": [],
        "failed": [],
    }  # fmt: skip
    if timeline:
        samples = [[10.0 * n, 1000 * n] for n in range(1, 11)]
        facts["timeline"] = {"started": STARTED + 110.0 * place, "samples": samples, "longest_pause": [0.0, 10.0]}
    return facts


def manifest() -> dict[str, Any]:
    return {
        "target": {"path": "models/target", "revision": None, "config_hash": "sha256:11", "dtype": "bfloat16"},
        "tokenizer_hash": "xxh3_128:tok", "chat_template_hash": "xxh3_128:chat", "layers": [1, 14, 26], "dtype": "bfloat16",
        "layer_convention": "output of decoder layer j", "last_hidden_state": "after_final_norm",
    }  # fmt: skip


def provenance(server: str, source: str) -> dict[str, Any]:
    return {
        "server": server, "format_version": 1, "versions": {"torch": "9.9", "safetensors": None, source: source},
        "git": {"commit": "0123abc", "dirty": True}, "artefact_versions": {"tokens": 3, "export": 2},
        "checkpoint": {"epoch": 1}, "target": {"path": "target", "revision": None}, "config": {"left": "out"},
    }  # fmt: skip


def benchmark(seconds: str = "10.0", cpu: str = "20.0") -> str:
    head = "s\th:m:s\tmax_rss\tmax_vms\tmax_uss\tmax_pss\tio_in\tio_out\tmean_load\tcpu_time"
    return f"{head}\n{seconds}\t0:00:10\t512.00\t1\t1\t1\t0\t0\t100\t{cpu}\n"


def write_run(plan: RunPlan, source: str = "chat", timeline: bool = True) -> Path:
    """Write all files; `source` is the name of the data set, of a prompt set, and stands in other free texts.

    Returns the run's folder.
    """
    run = Path(plan.run_folder)
    write_json(run / "tokens" / "statistics.json", statistics(source))
    write_json(run / "hidden_states" / "data_config.json", manifest())
    for place, name in enumerate(plan.shard_names):
        write_json(run / "hidden_states" / f"{name}.json", shard_facts(place, timeline))
    for n, (name, drafter) in enumerate(plan.config.drafters.items()):
        folder = run / "drafters" / name
        size = drafter.draft_vocab_size
        write_json(run / "vocab_map" / f"{size}.json", vocabulary(size, source))
        facts = evaluation(2.5 + 0.25 * n, ("held_out", source))
        facts["definitions"] = DEFINITIONS | {"free": source}
        write_json(folder / "evaluation.json", facts)
        write_json(
            folder / "best" / "selection.json", {"epoch": 1, "definition": f"the best of the held-out rows ({source})"}
        )
        epochs = drafter.training.epochs
        write_json(folder / f"epoch_{epochs}" / "trainer_state.json", trainer_state(epochs))
        for epoch in range(1, epochs + 1):
            (folder / f"epoch_{epoch}").mkdir(exist_ok=True)
            (folder / f"epoch_{epoch}" / "metrics.jsonl").write_text(metrics_lines(epoch))
        for server in ("sglang", "vllm"):
            write_json(folder / "export" / server / "config.json", {})
            write_json(folder / "export" / server / "provenance.json", provenance(server, source))
        for file in [f"{name}/epoch_{epoch}" for epoch in range(1, epochs + 1)] + [f"{name}/evaluation"]:
            _write(run / "benchmarks" / f"{file}.tsv", benchmark())
    for name in plan.shard_names:
        _write(run / "benchmarks" / "tokens" / f"{name}.tsv", benchmark("1.5", "NA"))
        _write(run / "benchmarks" / "hidden_states" / f"{name}.tsv", benchmark("110.0", "55.0"))
    _write(run / "benchmarks" / "manifest.tsv", benchmark("-", "-"))
    return run


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
