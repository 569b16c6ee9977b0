"""`eyas evaluate`: any drafter folder, measured on a run's target, hidden states and prompt sets."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.cli.verify import find_run
from eyas.config import read_config
from eyas.errors import EyasError
from eyas.plan import plan_run, read_record
from eyas.shards import read_json

OVERRIDES = ("draft_steps", "topk", "draft_tokens", "temperature", "max_new_tokens", "prompts")


def run_settings(folder: Path, configfile: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The run's evaluation settings and target: from its record, or from a configuration; raises EyasError."""
    if configfile is None:
        record = read_record(folder) or {}
        evaluation, target = record.get("evaluation"), record.get("target")
        if not isinstance(evaluation, dict) or not isinstance(target, dict):
            raise EyasError(
                f"{folder}: there is no record of its evaluation settings (logs/jobs/run.json, written when snakemake"
                " starts); name its configuration with --configfile"
            )
        return evaluation, target
    config = read_config(configfile)
    if config.name != folder.name:
        raise EyasError(f"{configfile} describes the run {config.name!r}, not {folder.name!r}; name its --configfile")
    plan = plan_run(config.model_dump(mode="json", exclude_unset=True), configfile)
    return json.loads(plan.evaluation_settings), json.loads(plan.target_json)


def with_overrides(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with those of `changes` (see OVERRIDES) that are not None; raises EyasError for impossible ones."""
    from eyas.decoding.tree import TreeSize

    given = {key: value for key, value in changes.items() if value is not None}
    prompts = given.pop("prompts", None)
    found = {**settings, **given}
    if "draft_tokens" not in given and ("topk" in given or "draft_steps" in given):
        found["draft_tokens"] = None  # the configured tree is of another size
    size = TreeSize.of(found["draft_steps"], found["topk"], found["draft_tokens"])
    found["draft_tokens"] = size.nodes + 1
    if prompts is not None:
        found["prompt_sets"] = {name: entry | {"prompts": prompts} for name, entry in found["prompt_sets"].items()}
    return found


def evaluate_folder(
    run: str,
    drafter_folder: Path,
    results: Path = Path("results"),
    configfile: str | None = None,
    changes: Mapping[str, Any] | None = None,
    decoding_only: bool = False,
    threads: int = 2,
    gpus: int = 0,
) -> dict[str, Any]:
    """The contents of an evaluation.json for the drafter in a folder; raises EyasError where it does not fit.

    `decoding_only`: without the run's hidden states, so that the drafter may read other layers than they are of.
    """
    folder = find_run(run, results)
    settings, target = run_settings(folder, configfile)
    settings = with_overrides(settings, changes or {})
    index = read_json(folder / "prompts" / "index.json", "index of the prompts")

    import torch

    from eyas.decoding.evaluate import Measurement, RunFiles
    from eyas.devices import lease_gpus
    from eyas.drafter.published import load_any_drafter
    from eyas.target.tokenizer import TargetReference

    torch.set_num_threads(threads)
    files = RunFiles(folder, int(index["rows"]), int(index["shard_rows"]))
    with lease_gpus(gpus, gpus), torch.inference_mode():
        measurement = Measurement(files, TargetReference.from_json(json.dumps(target)), settings, gpus)
        drafter = load_any_drafter(drafter_folder, measurement.target)
        layers, stored = list(drafter.shape.layers), list(measurement.manifest.layers)
        if layers != stored and not decoding_only:
            raise EyasError(
                f"{drafter_folder}: reads the outputs of layers {layers}, and {folder} has the states of layers"
                f" {stored} (both counted from 0); add --decoding-only to measure it in decoding alone,"
                " which can take any layers"
            )
        return measurement.evaluate(drafter, str(drafter_folder), states=not decoding_only)


def show(result: Mapping[str, Any]) -> None:
    """Print the table and the definitions."""
    from eyas.summary.acceptance import acceptance_facts, render_acceptance

    print(render_acceptance(result["checkpoint"], acceptance_facts(result)), end="")


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show progress and warnings while standard output stays clean."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("eyas")
    before = logger.level, logger.propagate
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
