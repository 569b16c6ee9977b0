"""`logs/jobs/run.json`: what the run at hand consists of and which Snakemake works on it, for `eyas status`."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from eyas.config import read_target_sizes
from eyas.errors import EyasError
from eyas.jobs.processes import this_process
from eyas.plan.run import RunPlan

RECORD = "logs/jobs/run.json"


def target_width(plan: RunPlan) -> int | None:
    """The target's hidden size, as far as it is known without loading anything but JSON."""
    try:
        sizes = read_target_sizes(plan.config)
    except EyasError:
        sizes = None
    if sizes is not None:
        return sizes.hidden_size
    try:  # a target on a hub: the statistics of its tokens know
        facts = json.loads((Path(plan.run_folder) / "tokens" / "statistics.json").read_bytes())
        return int(facts["hidden_states"]["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _describe(plan: RunPlan) -> dict[str, Any]:
    config = plan.config
    return {
        "run": config.name,
        "rows": plan.rows,
        "shard_rows": config.data.shard_rows,
        "hidden_size": target_width(plan),
        "dtype": config.extraction.dtype,
        "dump_folder": config.extraction.sglang.dump_folder if config.extraction.engine == "sglang" else None,
        "drafters": {n: {"epochs": d.training.epochs, "draft_vocab_size": d.draft_vocab_size} for n, d in
                     config.drafters.items()},
        "target": json.loads(plan.target_json),
        "evaluation": json.loads(plan.evaluation_settings),
    }  # fmt: skip


def begin_record(plan: RunPlan) -> None:
    """Write the record as Snakemake starts. A disk that refuses it stops nothing: jobs will say what is wrong."""
    _write(Path(plan.run_folder), _describe(plan) | this_process() | {"started": time.time(), "outcome": None})


def end_record(plan: RunPlan, outcome: str) -> None:
    """Note that Snakemake ended: `succeeded` or `failed`."""
    folder = Path(plan.run_folder)
    if (record := read_record(folder)) and record.get("pid") == os.getpid():
        _write(folder, record | {"ended": time.time(), "outcome": outcome})


def _write(folder: Path, values: dict[str, Any]) -> None:
    path = folder / RECORD
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        pass


def read_record(folder: Path) -> dict[str, Any] | None:
    """The record of a run's folder; None when there is none that can be read."""
    try:
        values = json.loads((folder / RECORD).read_bytes())
        int(values["rows"]), int(values["shard_rows"])
        return dict(values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
