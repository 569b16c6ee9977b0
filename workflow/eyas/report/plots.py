"""Plots of the report, as Vega-Lite specifications: data and encodings, without any colour of the page.

Names that come from the data are values in them, never field names or expressions. Their order is the domain of a
scale: of a list to sort by, Vega-Lite makes an expression, and not every name comes through that whole.
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


def _rows(values: list[dict[str, Any]], *fields: str, step: int) -> int:
    """Height for horizontal bars, a row each. A number: with a step, Vega warns that only the width fits its box."""
    return max(len({tuple(value[field] for field in fields) for value in values}), 1) * step


def _one_line(name: str) -> str:
    """A name for the domain of a scale: Vega-Lite writes it into an expression, which U+2028 and U+2029 would break."""
    return name.replace("\u2028", " ").replace("\u2029", " ")


def _named(values: list[dict[str, Any]], *fields: str) -> list[dict[str, Any]]:
    return [value | {field: _one_line(value[field]) for field in fields} for value in values]


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
            x=alt.X("start:O").title("tokens in a sequence, from").axis(labelOverlap=True, labelAngle=0, format=","),
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
        alt.Chart(_data(values), height=_rows(values, "source", step=26))
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


def _top_legend(channel: Any, order: list[Any] | None = None) -> Any:
    """The legend above the plot. Names in `order` have their place and colour in every plot that has this order."""
    import altair as alt

    channel = channel.title(None).legend(alt.Legend(orient="top", labelLimit=150, symbolLimit=12))
    return channel.scale(domain=list(map(_one_line, order))) if order else channel


def loss_curves(values: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """Loss by optimizer step; `values`: drafter (in `order`), rows (training or held out), step, loss."""
    import altair as alt

    values = _named(values, "drafter")
    one = len(order) == 1
    colour = alt.Color("rows:N") if one else alt.Color("drafter:N")
    base = alt.Chart(_data(values), height=_HEIGHT).encode(
        x=alt.X("step:Q").title("optimizer step").axis(format=",d", tickMinStep=1),
        y=alt.Y("loss:Q").title("loss").scale(zero=False),
        color=_top_legend(colour, ["training", "held out"] if one else order),
        tooltip=["drafter:N", "rows:N", alt.Tooltip("step:Q", format=","), alt.Tooltip("loss:Q", format=".4f")],
    )
    training = base.transform_filter(alt.FieldEqualPredicate(field="rows", equal="training")).mark_line(strokeWidth=1.5)
    held_out = base.transform_filter(alt.FieldEqualPredicate(field="rows", equal="held out")).mark_line(
        strokeDash=[5, 3], point={"size": 50, "filled": True}
    )
    return _finished(alt.layer(training, held_out, height=_HEIGHT))


def accuracy_curves(values: list[dict[str, Any]]) -> dict[str, Any]:
    """Conditional accuracy by optimizer step; `values`: rows (training or held out), step, draft step, accuracy."""
    import altair as alt

    named = [value | {"of": f"draft step {value['draft step']}"} for value in values]
    order = [f"draft step {n}" for n in sorted({value["draft step"] for value in values})]
    base = alt.Chart(_data(named), height=_HEIGHT).encode(
        x=alt.X("step:Q").title("optimizer step").axis(format=",d", tickMinStep=1),
        y=alt.Y("accuracy:Q").title("accuracy, given the steps before").axis(format="%"),
        color=_top_legend(alt.Color("of:N"), order),
        tooltip=["of:N", "rows:N", alt.Tooltip("step:Q", format=","), alt.Tooltip("accuracy:Q", format=".1%")],
    )
    training = base.transform_filter(alt.FieldEqualPredicate(field="rows", equal="training")).mark_line(
        strokeWidth=1.2, opacity=0.75
    )
    held_out = base.transform_filter(alt.FieldEqualPredicate(field="rows", equal="held out")).mark_point(
        size=70, filled=True, opacity=1
    )
    return _finished(alt.layer(training, held_out, height=_HEIGHT))


def acceptance_bars(values: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """Acceptance length; `values`: with (what drafted, in `order`), prompt set, length."""
    import altair as alt

    values = _named(values, "with")
    bars = alt.Chart(_data(values)).encode(
        x=alt.X("length:Q").title("acceptance length").scale(zero=True),
        y=alt.Y("prompt set:N").title(None).sort(None).axis(labelLimit=110),
        yOffset=alt.YOffset("with:N").sort(None).scale(domain=list(map(_one_line, order))),
        tooltip=["prompt set:N", "with:N", alt.Tooltip("length:Q", format=".3f")],
    )
    coloured = bars.mark_bar().encode(color=_top_legend(alt.Color("with:N"), order))
    text = bars.mark_text(align="left", dx=3, fontSize=11).encode(text=alt.Text("length:Q", format=".2f"))
    return _finished(alt.layer(coloured, text).properties(height=_rows(values, "prompt set", "with", step=20)))


def position_bars(values: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """Acceptance by position; `values`: with (what drafted, in `order`), token (its place in the draft), accepted."""
    import altair as alt

    values = _named(values, "with")
    return _finished(
        alt.Chart(_data(values), height=_HEIGHT)
        .mark_bar()
        .encode(
            x=alt.X("token:O").title("drafted token").axis(labelAngle=0),
            xOffset=alt.XOffset("with:N").sort(None).scale(domain=list(map(_one_line, order))),
            y=alt.Y("accepted:Q").title("accepted").axis(format="%"),
            color=_top_legend(alt.Color("with:N"), order),
            tooltip=["with:N", "token:O", alt.Tooltip("accepted:Q", format=".1%")],
        )
    )


def chain_lines(values: list[dict[str, Any]], order: list[str]) -> dict[str, Any]:
    """Expected acceptance length; `values`: with (what drafted, in `order`), steps (of the chain), length."""
    import altair as alt

    values = _named(values, "with")
    shown = {value["with"] for value in values}
    return _finished(
        alt.Chart(_data(values), height=_HEIGHT)
        .mark_line(point={"size": 40, "filled": True})
        .encode(
            x=alt.X("steps:O").title("drafted tokens").axis(labelAngle=0),
            y=alt.Y("length:Q").title("expected acceptance length").scale(zero=False),
            color=_top_legend(alt.Color("with:N"), [name for name in order if _one_line(name) in shown]),
            tooltip=["with:N", "steps:O", alt.Tooltip("length:Q", format=".3f")],
        )
    )


def drafter_bars(values: list[dict[str, Any]], ranked: list[str], sets: list[str]) -> dict[str, Any]:
    """Acceptance length; `values`: drafter (in the order `ranked`), prompt set (in the order `sets`), length."""
    import altair as alt

    values = _named(values, "drafter", "prompt set")
    return _finished(
        alt.Chart(_data(values))
        .mark_bar()
        .encode(
            x=alt.X("length:Q").title("acceptance length").scale(zero=True),
            y=alt.Y("drafter:N").title(None).sort(None).scale(domain=list(map(_one_line, ranked))).axis(labelLimit=110),
            yOffset=alt.YOffset("prompt set:N").sort(None).scale(domain=list(map(_one_line, sets))),
            color=_top_legend(alt.Color("prompt set:N"), sets),
            tooltip=["drafter:N", "prompt set:N", alt.Tooltip("length:Q", format=".3f")],
        )
        .properties(height=_rows(values, "drafter", "prompt set", step=18))
    )


def _time_marks(marks: list[dict[str, Any]]) -> Any:
    import altair as alt

    return (
        alt.Chart(_data(marks))
        .mark_rule(strokeDash=[4, 3], size=1.5, color="gray")
        .encode(x="time:Q", tooltip=alt.Tooltip("label:N"))
    )


def _time_bands(bands: list[dict[str, Any]]) -> Any:
    import altair as alt

    return (
        alt.Chart(_data(bands))
        .mark_rect(opacity=0.3, color="#b8560a")  # seen by day and by night
        .encode(x="time:Q", x2="until:Q", tooltip=alt.Tooltip("label:N"))
    )


def speed_over_time(
    values: list[dict[str, Any]], marks: list[dict[str, Any]], bands: list[dict[str, Any]], unit: str
) -> dict[str, Any]:
    """Tokens a second; `values`: time (in `unit`s), speed from then on; `marks`: time, label; `bands`: also until."""
    import altair as alt

    area = (
        alt.Chart(_data(values))
        .mark_area(line=True, opacity=0.35, interpolate="step-after")
        .encode(
            x=alt.X("time:Q").title(unit).scale(nice=False),
            y=alt.Y("speed:Q").title("tokens a second").axis(format="~s"),
            tooltip=["time:Q", alt.Tooltip("speed:Q", format=",.1f")],
        )
    )
    layers = [*([_time_bands(bands)] if bands else []), area, *([_time_marks(marks)] if marks else [])]
    return _finished(alt.layer(*layers, height=_HEIGHT))


def bytes_over_time(values: list[dict[str, Any]], marks: list[dict[str, Any]], unit: str) -> dict[str, Any]:
    """Bytes so far; `values`: time (in `unit`s), bytes; `marks`: time, label."""
    import altair as alt

    area = (
        alt.Chart(_data(values))
        .mark_area(line=True, opacity=0.35)
        .encode(
            x=alt.X("time:Q").title(unit).scale(nice=False),
            y=alt.Y("bytes:Q").title("bytes").axis(format="~s"),
            tooltip=["time:Q", alt.Tooltip("bytes:Q", format=",")],
        )
    )
    return _finished(alt.layer(area, *([_time_marks(marks)] if marks else []), height=_HEIGHT))


def cost_bars(values: list[dict[str, Any]], ranked: list[str], unit: str) -> dict[str, Any]:
    """Time by rule; `values`: rule (in the order `ranked`), kind (CPU or GPU), time (in `unit`s)."""
    import altair as alt

    return _finished(
        alt.Chart(_data(values), height=_rows(values, "rule", step=24))
        .mark_bar()
        .encode(
            x=alt.X("time:Q").title(unit),
            y=alt.Y("rule:N").title(None).sort(None).scale(domain=list(map(_one_line, ranked))).axis(labelLimit=120),
            color=_top_legend(alt.Color("kind:N"), ["CPU", "GPU"]),
            tooltip=["rule:N", "kind:N", alt.Tooltip("time:Q", format=",.2f")],
        )
    )
