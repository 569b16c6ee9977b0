"""Plots of the report, as Vega-Lite specifications: data and encodings, without any colour of the page.

Names that come from the data are values in them, never field names or expressions.
"""

from __future__ import annotations

from typing import Any

_HEIGHT = 240
_SOURCES_SHOWN = 20


def _finished(chart: Any) -> dict[str, Any]:
    """The specification of a chart, as wide as its box. The page brings the library, so no schema is looked up."""
    spec: dict[str, Any] = chart.properties(width="container").to_dict()
    spec.pop("$schema")
    spec["config"] = {}  # the page's own, in the reader's colours
    return spec


def _data(values: list[dict[str, Any]]) -> Any:
    import altair

    return altair.Data(values=values)


def length_histogram(histogram: list[list[Any]]) -> dict[str, Any]:
    """Sequences by length; `histogram`: [[from, below or null, sequences], …]. Empty bins at the ends are left out."""
    import altair as alt

    filled = [index for index, (_, _, count) in enumerate(histogram) if count]
    shown = histogram[filled[0] : filled[-1] + 1] if filled else []
    values = [
        {"length": f"{start:,}" if below is None else f"{start:,}–{below - 1:,}", "start": start, "sequences": count}
        for start, below, count in shown
    ]
    return _finished(
        alt.Chart(_data(values), height=_HEIGHT)
        .mark_bar()
        .encode(
            x=alt.X("start:O").title("tokens in a sequence, from").axis(labelOverlap=True, format=","),
            y=alt.Y("sequences:Q").title("sequences"),
            tooltip=[alt.Tooltip("length:N"), alt.Tooltip("sequences:Q", format=",")],
        )
    )


def tokens_by_source(sources: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Supervised and other tokens of the largest data sets; `sources`: as in the statistics."""
    import altair as alt

    largest = sorted(sources, key=lambda name: -sources[name]["tokens"])[:_SOURCES_SHOWN]
    values = []
    for name in largest:
        supervised = sources[name]["supervised_tokens"]
        values.append({"source": name, "kind": "supervised", "tokens": supervised})
        values.append({"source": name, "kind": "not supervised", "tokens": sources[name]["tokens"] - supervised})
    return _finished(
        alt.Chart(_data(values), height={"step": 26})
        .mark_bar()
        .encode(
            x=alt.X("tokens:Q").title("tokens").axis(format="~s", tickCount=5),
            y=alt.Y("source:N").title(None).sort(None).axis(labelLimit=120),
            color=alt.Color("kind:N").title(None).sort(["supervised", "not supervised"]).legend(orient="top"),
            order=alt.Order("kind:N", sort="descending"),
            tooltip=["source:N", "kind:N", alt.Tooltip("tokens:Q", format=",")],
        )
    )


def coverage_curve(curve: list[list[Any]], chosen: int) -> dict[str, Any]:
    """Coverage against the size of the draft vocabulary, with the `chosen` size marked.

    `curve`: [[size, share of the training tokens or null, share of the held-out ones or null], …].
    """
    import altair as alt

    values = [
        {"size": size, "tokens": side, "coverage": share}
        for size, *shares in curve
        for side, share in zip(("training", "held out"), shares, strict=True)
        if share is not None
    ]
    low, high = curve[0][0], curve[-1][0]
    size = (
        alt.X("size:Q")
        .title("size of the draft vocabulary")
        .scale(type="log", domain=[low, high], nice=False)
        .axis(format="~s", tickCount=6)
    )
    lines = (
        alt.Chart(_data(values))
        .mark_line(point={"size": 18})
        .encode(
            x=size,
            y=alt.Y("coverage:Q").title("coverage").axis(format="%").scale(zero=False),
            color=alt.Color("tokens:N").title(None).sort(["training", "held out"]).legend(orient="top"),
            tooltip=[
                alt.Tooltip("size:Q", format=","),
                alt.Tooltip("tokens:N"),
                alt.Tooltip("coverage:Q", format=".2%"),
            ],
        )
    )
    mark = (
        alt.Chart(_data([{"size": chosen, "label": f"chosen: {chosen:,}"}]))
        .mark_rule(strokeDash=[4, 3], size=1.5, color="gray")
        .encode(x=size, tooltip=alt.Tooltip("label:N"))
    )
    return _finished(alt.layer(mark, lines, height=_HEIGHT))
