"""Whether the drafters speed decoding up: acceptance by prompt set and by position, and what stands beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eyas.report import plots
from eyas.report.parts import Figure, Plot, Section, Table, number, percent

BASELINES = {"none": "no drafter", "ngram": "n-gram", "untrained": "untrained"}
MOST_DRAFTERS = 8  # in one plot; the tables hold all

_LENGTH = (
    "1 + drafted tokens accepted per forward pass of the target that verifies a draft (mean; the pass over the prompt"
    " is not counted)"
)
_POSITION = "share of the rounds in which the draft's n-th token was accepted, among those in which all before it were"
_LOOPING = "an output that repeats itself without an end is accepted too easily; share of the outputs that do"
_NOTHING = "not measured, or nothing to compare with"
_LOSSLESS = (
    "yes: every output equals what the target alone gives in greedy decoding, token for token; none also where it was"
    " sampled"
)
_CHAIN = (
    "expected acceptance length of a chain of n drafted tokens, from the hidden states of the held-out rows: 1 + the"
    " sum over the steps of the products of the accuracies up to each, an accuracy counting only where all earlier"
    " steps were right"
)


def yes_or_no(value: bool | None) -> str:
    return "none" if value is None else "yes" if value else "NO"


def _times(value: float | None) -> str:
    return "none" if value is None else f"{value:.2f}×"


def honest_length(figures: Mapping[str, Any]) -> float | None:
    """Acceptance length without the outputs that loop; with them where all loop, or where it is not known."""
    without = (figures.get("without_looping") or {}).get("acceptance_length")
    return figures.get("acceptance_length") if without is None else without


def ranking(evaluations: Mapping[str, Any]) -> list[str]:
    """Drafters, the best first: by their mean acceptance length over the prompt sets, without looping outputs."""

    def worth(name: str) -> tuple[float, float]:
        lengths = [honest_length(figures) or 0.0 for figures in evaluations[name]["prompt_sets"].values()]
        expected = (evaluations[name]["offline"]["trained"] or {}).get("expected_acceptance_length") or 0.0
        return -sum(lengths) / max(len(lengths), 1), -expected

    return sorted(evaluations, key=worth)


def _measured(evaluations: Mapping[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(drafter, prompt set, decoded with, figures): the drafter first, then the baselines."""
    for drafter, facts in evaluations.items():
        for prompt_set, figures in facts["prompt_sets"].items():
            yield drafter, prompt_set, "trained", figures
            for which, label in BASELINES.items():
                if baseline := figures["baselines"].get(which):
                    yield drafter, prompt_set, label, baseline


def _figures(evaluations: Mapping[str, Any], best: str) -> list[Figure]:
    shown = []
    for prompt_set, f in evaluations[best]["prompt_sets"].items():
        without = f.get("without_looping") or {}
        told = (
            f"tokens per target forward pass with {best}, looping outputs left out"
            if without.get("acceptance_length") is not None
            else f"tokens per target forward pass with {best}"
        )
        shown.append(
            Figure(
                prompt_set, number(honest_length(f), 2),
                f"{told} (acceptance length, defined below; {number(f['acceptance_length'], 2)} with all"
                f" {f['prompts']:,} prompts)",
            )
        )  # fmt: skip
        shown.append(
            Figure(
                f"{prompt_set}: speed", _times(f["speedup"]),
                f"of decoding without a drafter, by wall clock; lossless: {yes_or_no(f['lossless'])};"
                f" {percent(f['looping_share'])} of the outputs loop",
            )
        )  # fmt: skip
    return shown


def _as_measured(evaluations: Mapping[str, Any], what: str) -> str:
    """The definition of `what` that the evaluations hold; each engine measures it its own way."""
    found: dict[str, list[str]] = {}
    for drafter, facts in evaluations.items():
        if text := facts["definitions"].get(what):
            found.setdefault(text, []).append(drafter)
    if len(found) == 1:
        return next(iter(found))
    return "; ".join(f"{', '.join(drafters)}: {text}" for text, drafters in found.items())


def _lengths_table(evaluations: Mapping[str, Any]) -> Table:
    rows = []
    for drafter, prompt_set, which, f in _measured(evaluations):
        without = f.get("without_looping") or {}
        rows.append(
            [
                drafter, prompt_set, which, number(f.get("acceptance_length"), 3),
                number(without.get("acceptance_length"), 3), _times(f.get("speedup")),
                percent(f.get("looping_share")), yes_or_no(f.get("lossless")), number(f.get("tokens_per_forward"), 3),
                number(f.get("tokens_per_second"), 1), _times(without.get("speedup")), number(f.get("prompts")),
                number(f.get("overlapping_prompts")),
                number(f.get("tokens")), number(f.get("target_forwards")), number(f.get("seconds"), 1),
            ]
        )  # fmt: skip
    return Table(
        "Acceptance by prompt set",
        [
            "drafter", "prompt set", "with", "acceptance length", "without looping", "speed", "looping", "lossless",
            "tokens a forward", "tokens a second", "speed without looping", "prompts", "in training", "tokens",
            "forwards", "seconds",
        ],
        rows,
        [
            ("with", "trained: the drafter's best epoch; no drafter: the target alone; n-gram: prompt lookup, which"
             " drafts what followed the last tokens before; untrained: the drafter as it was before training"),
            ("acceptance length", _LENGTH),
            ("without looping", "the same over the outputs that did not fall into a loop"),
            ("tokens a forward", "all new tokens over all forward passes of the target"),
            ("speed", _as_measured(evaluations, "speedup")),
            ("looping", _LOOPING),
            ("lossless", _LOSSLESS),
            ("in training", "prompts of the set that are also in a training row; they are not measured"),
            ("none", _NOTHING),
        ],
        prose=("prompt set", "with"),
    )  # fmt: skip


def _positions_table(evaluations: Mapping[str, Any]) -> Table:
    measured = [([d, p, w], f.get("acceptance_by_step") or []) for d, p, w, f in _measured(evaluations)]
    steps = max((len(shares) for _, shares in measured), default=0)
    return Table(
        "Acceptance by position",
        ["drafter", "prompt set", "with", *(f"token {n}" for n in range(1, steps + 1))],
        [
            [*names, *(percent(share) for share in [*shares, *[None] * (steps - len(shares))])]
            for names, shares in measured
            if shares
        ],
        [("token n", _POSITION), ("none", "no round got there, or nothing was drafted")],
        prose=("prompt set", "with"),
    )


def _offline_table(evaluations: Mapping[str, Any]) -> Table:
    entries = [(drafter, which, f) for drafter, e in evaluations.items() for which, f in e["offline"].items() if f]
    steps = max((len(f["accuracy_by_step"]) for *_, f in entries), default=0)

    def padded(values: list[Any]) -> list[Any]:
        return [*values, *[None] * (steps - len(values))]

    return Table(
        "Expected acceptance, from the hidden states of held-out rows",
        ["drafter", "which", "rows", *(f"chain of {n}" for n in range(1, steps + 1)),
         *(f"accuracy {n}" for n in range(1, steps + 1))],
        [
            [
                drafter, which, number(evaluations[drafter]["held_out_rows"]),
                *(number(v, 3) for v in padded(f["expected_acceptance_lengths"])),
                *(percent(v) for v in padded(f["accuracy_by_step"])),
            ]
            for drafter, which, f in entries
        ],
        [
            ("chain of n", _CHAIN),
            ("accuracy n", "share of the n-th drafted tokens that are the target's own choice, where all before were;"
             " tokens outside the draft vocabulary count as wrong"),
        ],
        prose=("which",),
    )  # fmt: skip


def _columns(table: Table, *names: str, where: Any = lambda row: True) -> Table:
    places = [table.head.index(name) for name in names]
    return Table("", list(names), [[row[p] for p in places] for row in table.rows if where(row)])


def _series(ranked: list[str]) -> tuple[list[str], dict[tuple[str, str], str]]:
    """Order of the bars, and the bar that (drafter, decoded with) is: baselines once, those of the best drafter."""
    bars = {(drafter, "trained"): drafter for drafter in ranked[:MOST_DRAFTERS]}
    for which in ("untrained", "n-gram", "no drafter"):
        bars[ranked[0], which] = f"{which} (baseline)" if which in ranked else which
    return list(bars.values()), bars


def _plots(evaluations: Mapping[str, Any], tables: tuple[Table, Table, Table]) -> list[Plot]:
    ranked = ranking(evaluations)
    order, bar = _series(ranked)
    drafting = [name for name in order if name != bar[ranked[0], "no drafter"]]
    only = "" if len(ranked) <= MOST_DRAFTERS else f" The {MOST_DRAFTERS} best of {len(ranked)} drafters are drawn."
    beside = f"Baselines are those measured with {ranked[0]}.{only}" if len(ranked) > 1 else ""
    measured = [
        (bar[drafter, which], prompt_set, figures)
        for drafter, prompt_set, which, figures in _measured(evaluations)
        if (drafter, which) in bar
    ]
    lengths = [
        {"with": name, "prompt set": prompt_set, "length": length}
        for name, prompt_set, figures in measured
        if (length := honest_length(figures)) is not None
    ]
    shown = []
    if lengths:
        shown.append(
            Plot(
                "Acceptance length by prompt set", plots.acceptance_bars(lengths, order),
                f"Acceptance length: {_LENGTH}. Outputs that fell into a loop are left out, unless all did. {beside}",
                _columns(tables[0], "drafter", "prompt set", "with", "acceptance length", "without looping"),
            )
        )  # fmt: skip
    for prompt_set in dict.fromkeys(name for e in evaluations.values() for name in e["prompt_sets"]):
        shares = [
            {"with": name, "token": n, "accepted": share}
            for name, of, figures in measured
            if of == prompt_set
            for n, share in enumerate(figures.get("acceptance_by_step") or [], 1)
            if share is not None
        ]
        if shares:
            shown.append(
                Plot(
                    f"Acceptance by position: {prompt_set}", plots.position_bars(shares, drafting),
                    f"For the n-th drafted token: {_POSITION}. {beside}",
                    _columns(
                        tables[1], *[c for c in tables[1].head if c != "prompt set"],
                        where=lambda row, of=prompt_set: row[1] == of,
                    ),
                )
            )  # fmt: skip
    chains = [
        {"with": bar[drafter, which], "steps": n, "length": length}
        for drafter in ranked
        for which, f in evaluations[drafter]["offline"].items()
        if f and (drafter, which) in bar
        for n, length in enumerate(f["expected_acceptance_lengths"], 1)
        if length is not None
    ]
    if chains:
        shown.append(
            Plot(
                "Expected acceptance length by the length of the chain", plots.chain_lines(chains, order),
                f"{_CHAIN[0].upper()}{_CHAIN[1:]}. {beside}",
                _columns(tables[2], *[c for c in tables[2].head if not c.startswith("accuracy")]),
            )
        )  # fmt: skip
    return shown


def acceptance_section(evaluations: Mapping[str, Any]) -> Section:
    """Of the drafters' `evaluation.json`, by the drafters' names."""
    best = ranking(evaluations)[0]
    tables = (_lengths_table(evaluations), _positions_table(evaluations), _offline_table(evaluations))
    notes: list[str] = []
    meanings: dict[str, str] = {}
    for drafter, facts in evaluations.items():
        settings = ", ".join(f"{name} {value}" for name, value in facts["settings"].items() if value is not None)
        notes.append(f"{drafter}: {facts['checkpoint']} of it, decoded by {facts['engine']}; {settings}.")
        meanings |= facts["definitions"]
        for prompt_set, figures in facts["prompt_sets"].items():
            if figures["differences"]:
                notes.append(
                    f"{drafter}, {prompt_set}: {len(figures['differences'])} outputs are NOT the target's own."
                )
    sources = {name: f["source"] for facts in evaluations.values() for name, f in facts["prompt_sets"].items()}
    about = Table(
        "Prompt sets and definitions of the measurement", ["", "as it was measured"],
        [[name, source] for name, source in sources.items()] + [[name, text] for name, text in meanings.items()],
        prose=("as it was measured",),
    )  # fmt: skip
    shown = _plots(evaluations, tables)
    return Section("acceptance", "Acceptance", _figures(evaluations, best), notes, shown, [*tables, about])
