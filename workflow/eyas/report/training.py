"""How the drafters were trained: curves of loss and accuracy, epochs, and the drafters of a sweep side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas.errors import EyasError
from eyas.report import plots
from eyas.report.acceptance import MOST_DRAFTERS, honest_length, ranking
from eyas.report.parts import Plot, Section, Table, number, percent

_POINTS = 200  # most points of a curve; more steps are averaged

_LOSS = (
    "the sum over the draft steps i of loss_decay^i times the mean cross-entropy of the counted positions; of training"
    " rows as they were trained on, of held-out rows after each epoch"
)
_ACCURACY = (
    "share of the draft step's tokens that are the target's own choice, among supervised positions where all earlier"
    " steps were right"
)


def read_metrics(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The steps of all epochs, averaged over as many neighbours as it takes to have at most 200.

    `step` is the last one of the average. An accuracy is averaged over the steps that have one, else null.
    """
    steps: list[dict[str, Any]] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as lines:
                for line in lines:
                    record = json.loads(line)
                    steps.append({name: record[name] for name in ("step", "loss", "accuracy_by_step")})
        except OSError as exc:
            raise EyasError(f"{path}: cannot be read ({exc.strerror}); run snakemake again") from None
        except (ValueError, KeyError, TypeError) as exc:
            raise EyasError(f"{path}: damaged ({exc!r}); delete its epoch and run snakemake again") from None
    size = -(-len(steps) // _POINTS) or 1
    groups = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [
        {
            "step": group[-1]["step"],
            "loss": sum(step["loss"] for step in group) / len(group),
            "accuracy_by_step": [_mean(values) for values in zip(*(s["accuracy_by_step"] for s in group), strict=True)],
        }
        for group in groups
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _epochs(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trained epochs, each with `end` (optimizer steps up to its end) and with `held_out`, which may be empty."""
    found, end = [], 0
    for record in state["history"]:
        if "loss" in record:
            end += record["steps"]
            found.append(record | {"end": end, "held_out": record.get("held_out") or {}})
    return found


def _curves(states: Mapping[str, Any], metrics: Mapping[str, Any], names: Sequence[str]) -> list[Plot]:
    losses, shown = [], []
    for name in names:
        losses += [{"drafter": name, "rows": "training", "step": m["step"], "loss": m["loss"]} for m in metrics[name]]
        losses += [
            {"drafter": name, "rows": "held out", "step": record["end"], "loss": record["held_out"]["loss"]}
            for record in _epochs(states[name])
            if record["held_out"]
        ]
    if losses:
        shown.append(
            Plot(
                "Loss", plots.loss_curves(losses, list(names)),
                f"Loss: {_LOSS}. Solid: training rows; dashed: held-out rows. Neighbouring steps are averaged to at"
                f" most {_POINTS} points.",
                Table(
                    "", ["drafter", "rows", "step", "loss"],
                    [[v["drafter"], v["rows"], number(v["step"]), number(v["loss"], 4)] for v in losses],
                    prose=("rows",),
                ),
            )
        )  # fmt: skip
    for name in names:
        curves = [("training", m["step"], m["accuracy_by_step"]) for m in metrics[name]]
        held_out = [(r["end"], r["held_out"]) for r in _epochs(states[name]) if r["held_out"]]
        curves += [("held out", end, figures["accuracy_by_step"]) for end, figures in held_out]
        values = [
            {"rows": rows, "step": step, "draft step": n, "accuracy": accuracy}
            for rows, step, accuracies in curves
            for n, accuracy in enumerate(accuracies, 1)
            if accuracy is not None
        ]
        if values:
            width = max(v["draft step"] for v in values)
            shown.append(
                Plot(
                    f"Conditional accuracy by draft step: {name}", plots.accuracy_curves(values),
                    f"Accuracy: {_ACCURACY}. Solid: training rows as they were trained on; dots: held-out rows after an"
                    " epoch.",
                    Table(
                        "", ["rows", "step", *(f"draft step {n}" for n in range(1, width + 1))],
                        [[rows, number(step), *map(percent, values)] for rows, step, values in curves],
                    ),
                )
            )  # fmt: skip
    return shown


def _epochs_table(states: Mapping[str, Any], selections: Mapping[str, Any]) -> Table:
    return Table(
        "Epochs",
        ["drafter", "epoch", "loss", "held-out loss", "expected length", "held-out expected length", "rows", "tokens",
         "counted", "steps", "learning rate", "chosen"],
        [
            [
                name, number(r["epoch"]), number(r["loss"], 4), number(r["held_out"].get("loss"), 4),
                number(r["acceptance_length"], 3), number(r["held_out"].get("acceptance_length"), 3), number(r["rows"]),
                number(r["tokens"]), number(r["counted"]), number(r["steps"]), f"{r['learning_rate']:.2e}",
                "best" if r["epoch"] == selections[name]["epoch"] else "",
            ]
            for name, state in states.items()
            for r in _epochs(state)
        ],
        [
            ("loss", f"{_LOSS}; here the mean over the epoch's steps"),
            ("expected length", "expected acceptance length over the training steps of the chain: 1 + the sum of the"
             " products of the accuracies up to each step"),
            ("counted", "predictions in the loss, over all draft steps"),
            ("learning rate", "at the epoch's end"),
            ("chosen", f"evaluated and exported: {next(iter(selections.values()))['definition']}"),
        ],
    )  # fmt: skip


def training_section(
    states: Mapping[str, Any], metrics: Mapping[str, Any], selections: Mapping[str, Any], ranked: Sequence[str]
) -> Section:
    """Of each drafter's last `trainer_state.json`, its `metrics.jsonl` of all epochs, and `best/selection.json`.

    `ranked`: the drafters, the best first, as the section on acceptance draws them.
    """
    notes = []
    for name, state in states.items():
        stopped = [record["epoch"] for record in state["history"] if "loss" not in record]
        if stopped:
            notes.append(f"{name}: epochs {min(stopped)} to {max(stopped)} were left out by early stopping.")
    if len(states) > MOST_DRAFTERS:
        notes.append(f"The curves are those of the {MOST_DRAFTERS} best of {len(states)} drafters.")
    shown = _curves(states, metrics, ranked[:MOST_DRAFTERS])
    tables = [_epochs_table(states, selections)]
    return Section("training", "Training", notes=notes, plots=shown, tables=tables)


def drafters_section(
    states: Mapping[str, Any], selections: Mapping[str, Any], maps: Mapping[str, Any], evaluations: Mapping[str, Any],
    exports: Mapping[str, Sequence[str]],
) -> Section:  # fmt: skip
    """The drafters side by side, the best first; `maps`: each drafter's vocabulary sidecar, `exports`: its servers."""
    ranked = ranking(evaluations)
    sets = list(dict.fromkeys(name for e in evaluations.values() for name in e["prompt_sets"]))
    rows, bars = [], []
    for name in ranked:
        state, chosen, e = states[name], selections[name]["epoch"], evaluations[name]
        held_out = [r["held_out"] for r in _epochs(state) if r["epoch"] == chosen]
        of_sets = [e["prompt_sets"].get(prompt_set) or {} for prompt_set in sets]
        bars += [
            {"drafter": name, "prompt set": prompt_set, "length": length}
            for prompt_set, f in zip(sets, of_sets, strict=True)
            if (length := honest_length(f)) is not None
        ]
        rows.append(
            [
                name, *(number(honest_length(f), 3) for f in of_sets),
                *("none" if f.get("speedup") is None else f"{f['speedup']:.2f}×" for f in of_sets),
                number((e["offline"]["trained"] or {}).get("expected_acceptance_length"), 3),
                number(held_out[0].get("loss") if held_out else None, 4), f"{state['parameters']:,}",
                f"{maps[name]['draft_vocab_size']:,}", percent(maps[name]["coverage_held_out"]),
                number(len(state["history"])), number(chosen), ", ".join(exports[name]) or "none",
            ]
        )  # fmt: skip
    table = Table(
        "Drafters, the best first",
        ["drafter", *(f"length: {s}" for s in sets), *(f"speed: {s}" for s in sets), "expected length",
         "held-out loss", "trained parameters", "draft vocabulary", "held-out coverage", "epochs", "best epoch",
         "exported for"],
        rows,
        [
            ("length", "acceptance length on the prompt set, looping outputs left out (1 + drafted tokens accepted per"
             " verifying forward pass of the target); the drafters are sorted by its mean"),
            ("speed", "wall-clock time of plain decoding over that with the drafter"),
            ("expected length", "expected acceptance length of a whole chain, from the held-out rows' hidden states"),
            ("held-out coverage", "share of the held-out rows' supervised tokens that the draft vocabulary holds"),
            ("best epoch", "by the held-out rows; this one is evaluated and exported"),
            ("exported for", "for this server, in the folder drafters/DRAFTER/export/SERVER of the run"),
        ],
        prose=("exported for",),
    )  # fmt: skip
    shown = []
    if len(ranked) > 1 and bars:
        shown = [
            Plot(
                "Acceptance length of the drafters", plots.drafter_bars(bars, ranked, sets),
                "Acceptance length on each prompt set, looping outputs left out; the best drafter is at the top.",
                Table("", table.head[: 1 + len(sets)], [row[: 1 + len(sets)] for row in rows]),
            )
        ]  # fmt: skip
    return Section("drafters", "Drafters", plots=shown, tables=[table])
