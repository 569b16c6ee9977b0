"""The figures of an evaluation for people: a row for each prompt set and way of decoding, and what they mean."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

WIDTH = 100
# What of evaluation.json the summary keeps of each way of decoding.
_KEPT = (
    "acceptance_length", "acceptance_by_step", "tokens_per_forward", "tokens_per_second", "speedup", "lossless",
    "looping_share",
)  # fmt: skip
NOT_MEASURED = "–"
_WAYS = {"none": "no drafter", "ngram": "n-grams", "untrained": "untrained"}


def acceptance_facts(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    """The part of summary.json that evaluation.json gives: `offline`, `prompt_sets`, `definitions` and settings."""
    return {
        "engine": evaluation["engine"],
        **evaluation["settings"],
        "held_out_rows": evaluation["held_out_rows"],
        "offline": {
            which: facts and facts["expected_acceptance_length"] for which, facts in evaluation["offline"].items()
        },
        "prompt_sets": {
            name: {
                "prompts": figures["prompts"],
                "overlapping_prompts": figures["overlapping_prompts"],
                **{way: _kept(values) for way, values in _ways(figures)},
            }
            for name, figures in evaluation["prompt_sets"].items()
        },
        "definitions": evaluation["definitions"],
    }


def _ways(figures: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    yield "trained", figures
    yield from figures["baselines"].items()


def _kept(values: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if values is None:
        return None
    without = values.get("without_looping") or {}
    return {key: values.get(key) for key in _KEPT} | {
        "without_looping": {key: without.get(key) for key in ("prompts", "acceptance_length", "speedup")}
    }


def _number(value: float | None, digits: int = 3, unit: str = "") -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}{unit}"


def _share(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{100 * value:.0f}%"


def acceptance_table(name: str, facts: Mapping[str, Any]) -> Table:
    """The figures that :func:`acceptance_facts` gave, with the drafter's name."""
    shape = "chain" if facts["topk"] == 1 else f"tree of topk {facts['topk']}, {facts['draft_tokens']} tokens"
    sampled = "greedy" if facts["temperature"] == 0 else f"temperature {facts['temperature']}"
    table = Table(
        title=f"Acceptance of {name}: {shape}, {facts['draft_steps']} steps, {sampled},"
        f" up to {facts['max_new_tokens']} tokens a prompt",
        title_justify="left", min_width=60, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0),
    )  # fmt: skip
    table.add_column("prompt set", overflow="fold")
    table.add_column("drafter", no_wrap=True)
    for heading in (
        "accept.\nlength", "tokens a\nforward", "tokens\na second", "speed-\nup", "loss-\nless", "loop-\ning",
        "no loops:\nlength", "\nspeed-up",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for prompt_set, figures in facts["prompt_sets"].items():
        label = f"{prompt_set} ({figures['prompts']})"
        for way in ("trained", *_WAYS):
            if (values := figures[way]) is None:
                continue
            lossless = {True: "yes", False: "NO", None: NOT_MEASURED}[values["lossless"]]
            without = values["without_looping"]
            table.add_row(
                label, _WAYS.get(way, way), _number(values["acceptance_length"]), _number(values["tokens_per_forward"]),
                _number(values["tokens_per_second"], 1), _number(values["speedup"], 2), lossless,
                _share(values["looping_share"]), _number(without["acceptance_length"]), _number(without["speedup"], 2),
            )  # fmt: skip
            label = ""
        table.add_section()
    return table


def _has_gaps(values: Mapping[str, Any] | None) -> bool:
    """Whether the table has a place of a way of decoding that nothing stands in."""
    if values is None:
        return False
    shown = [values[key] for key in _KEPT if key != "acceptance_by_step"]
    return None in [*shown, values["without_looping"]["acceptance_length"], values["without_looping"]["speedup"]]


def definition_lines(facts: Mapping[str, Any]) -> list[str]:
    """What the figures mean, and how many prompts were left out."""
    lines = []
    for prompt_set, figures in facts["prompt_sets"].items():
        if figures["overlapping_prompts"]:
            lines.append(
                f"{prompt_set}: {figures['overlapping_prompts']} prompts are asked in training rows, and left out."
            )
    if any(_has_gaps(figures[way]) for figures in facts["prompt_sets"].values() for way in ("trained", *_WAYS)):
        lines.append(f"{NOT_MEASURED}: not measured, or nothing to compare with.")
    lines += [f"{text}." for text in facts["definitions"].values()]
    return [wrapped for line in lines for wrapped in textwrap.wrap(line, WIDTH, subsequent_indent="  ")]


def render_acceptance(name: str, facts: Mapping[str, Any]) -> str:
    """Table and definitions as text."""
    return as_text(acceptance_table(name, facts)) + offline_line(facts) + "\n".join(definition_lines(facts)) + "\n"


def offline_line(facts: Mapping[str, Any]) -> str:
    """The expected acceptance lengths, as a line; empty where they were not measured."""
    told = expected_lengths(facts)
    return f"Expected acceptance length, {told}.\n" if told else ""


def expected_lengths(facts: Mapping[str, Any]) -> str:
    """The expected acceptance lengths and what they are from; empty where they were not measured."""
    known = [f"{which} {length:.3f}" for which, length in facts["offline"].items() if length is not None]
    return f"{', '.join(known)}, from the states of {facts['held_out_rows']} held-out rows" if known else ""


def as_text(table: Table) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
