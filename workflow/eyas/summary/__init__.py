"""One table of what a run made: rows, tokens, bytes, coverage, loss, acceptance, files."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from rich.table import Table

from eyas.shards import describe_file, read_json, write_lock, write_sealed, write_text
from eyas.summary.acceptance import (
    NOT_MEASURED,
    acceptance_facts,
    acceptance_table,
    as_text,
    definition_lines,
    expected_lengths,
)  # fmt: skip

log = logging.getLogger(__name__)


def _drafter_facts(run: Path, name: str, epochs: int, draft_vocab_size: int) -> dict[str, Any]:
    folder = run / "drafters" / name
    training = read_json(folder / f"epoch_{epochs}" / "trainer_state.json", "checkpoint")
    evaluation = read_json(folder / "evaluation.json", "evaluation")
    selection = read_json(folder / "best" / "selection.json", "selection")
    vocabulary = read_json(run / "vocab_map" / f"{draft_vocab_size}.json", "vocabulary sidecar")
    return {
        "draft_vocab_size": draft_vocab_size,
        "coverage": vocabulary["coverage"],
        "coverage_held_out": vocabulary["coverage_held_out"],
        "epochs": epochs,
        "best_epoch": selection["epoch"],
        "parameters": training["parameters"],
        "loss_by_epoch": [record["loss"] for record in training["history"] if "loss" in record],
        "acceptance": acceptance_facts(evaluation),
        "export": str(folder / "export" / "sglang"),
    }


def collect(run: Path, drafters: dict[str, list[int]]) -> dict[str, Any]:
    """Read the figures of a finished run; `drafters`: name -> [epochs, draft vocabulary size]."""
    manifest = read_json(run / "hidden_states" / "data_config.json", "manifest")
    names = [Path(entry["file"]).stem for entry in manifest["shards"]]
    supervised = sum(
        read_json(run / "tokens" / f"{name}.json", "tokens sidecar")["supervised_tokens"] for name in names
    )
    return {
        "run": run.name,
        "target": manifest["target"]["path"],
        "layers": manifest["layers"],
        "dtype": manifest["dtype"],
        "shards": len(names),
        **manifest["totals"],
        "supervised_tokens": supervised,
        "drafters": {name: _drafter_facts(run, name, *sizes) for name, sizes in drafters.items()},
    }


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{100 * value:.1f}%"


def _measured(figures: dict[str, Any]) -> str:
    """A drafter's acceptance on a prompt set, in a line; the table below has the baselines."""
    trained = figures["trained"]
    if trained["acceptance_length"] is None:
        return "not measured: no prompt"
    told = {True: ", lossless", False: ", NOT LOSSLESS", None: ""}[trained["lossless"]]
    untrained = figures["untrained"] and figures["untrained"]["acceptance_length"]
    beside = "" if untrained is None else f", untrained {untrained:.3f}"
    return f"{trained['acceptance_length']:.3f}{beside} ({figures['prompts']} prompts{told})"


def render(facts: dict[str, Any], run: Path) -> str:
    """The figures as tables for people, with their definitions below."""
    table = Table(title=f"Run {facts['run']}", show_header=False, title_justify="left", min_width=60)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("target", f"{facts['target']} (layers {', '.join(map(str, facts['layers']))})")
    table.add_row("rows", f"{facts['rows']:,} used, {facts['skipped']:,} skipped, in {facts['shards']} shards")
    table.add_row("tokens", f"{facts['tokens']:,}, of which {facts['supervised_tokens']:,} are supervised")
    table.add_row("hidden states", f"{facts['bytes']:,} bytes ({facts['dtype']})")
    for name, drafter in facts["drafters"].items():
        table.add_section()
        table.add_row("drafter", f"{name}: {drafter['parameters'] / 1e6:.1f} M trained parameters")
        table.add_row(
            "draft vocabulary",
            f"{drafter['draft_vocab_size']:,} tokens; coverage {_share(drafter['coverage'])} of the training tokens,"
            f" {_share(drafter['coverage_held_out'])} of the held-out ones",
        )
        table.add_row("loss by epoch", ", ".join(f"{loss:.3f}" for loss in drafter["loss_by_epoch"]))
        table.add_row("best epoch", f"{drafter['best_epoch']}, by the held-out rows; evaluated and exported")
        acceptance = drafter["acceptance"]
        table.add_row("expected acceptance", expected_lengths(acceptance) or "not measured")
        for prompt_set, figures in acceptance["prompt_sets"].items():
            table.add_row(f"acceptance, {prompt_set}", _measured(figures))
        table.add_row("for SGLang", drafter["export"])
        table.add_row("for vLLM", str(Path(drafter["export"]).with_name("vllm")))
    table.add_section()
    table.add_row("files", str(run))
    table.add_row("figures", str(run / "summary.json"))
    parts = [as_text(table)]
    for name, drafter in facts["drafters"].items():
        parts.append(as_text(acceptance_table(name, drafter["acceptance"])))
    definitions = dict.fromkeys(line for d in facts["drafters"].values() for line in definition_lines(d["acceptance"]))
    return "\n".join([*parts, *definitions]) + "\n"


def write_summary(run: Path, drafters: dict[str, list[int]], output: Path) -> None:
    """Write `output` (JSON) and the table beside it (`.txt`)."""
    facts = collect(run, drafters)
    with write_lock(output):
        text = output.with_suffix(".txt")
        write_text(text, render(facts, run))
        write_sealed(output, facts | {"files": {text.name: describe_file(text)}})
    log.info("Wrote %s and %s.", output, output.with_suffix(".txt"))
