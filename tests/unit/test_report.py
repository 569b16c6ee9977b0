"""The report: what it says, that nothing in the data becomes markup, and that it fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from eyas.errors import EyasError
from eyas.report import page, plots
from eyas.report.page import plot_library
from eyas.report.parts import Figure, Listing, Plot, Section, Table, size_of, span
from eyas.shards import write_json
from hypothesis import given, settings
from hypothesis import strategies as st
from report_runs import (
    STARTED,
    benchmark,
    evaluation,
    plan_of,
    rules_of,
    shard_facts,
    statistics,
    vocabulary,
    write_run,
)  # fmt: skip

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
EVIL = "</script><script>alert(1)</script><!--\u2028&\"'"
_VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Scripts by type, cells of every table by its title, text of elements that show text, and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str | None, str]] = []
        self.tables: list[list[list[str]]] = []
        self.plot_tables: dict[str, list[list[str]]] = {}
        self.titled: dict[str, list[list[str]]] = {}
        self.attributes: list[tuple[str, str, str | None]] = []
        self.shown: list[str] = []
        self.open: list[str] = []
        self.heading = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        elif tag == "h3":
            self.heading = ""
        elif tag == "table":
            self.tables.append([])
            (self.plot_tables if "details" in self.open else self.titled)[self.heading] = self.tables[-1]
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        within = self.open[-1] if self.open else ""
        if within == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif within in ("th", "td"):
            self.tables[-1][-1][-1] += data
        elif data.strip():
            self.shown.append(data.strip())
            self.heading += data if within == "h3" else ""

    @property
    def specs(self) -> dict[str, dict[str, Any]]:
        """The plots by their titles."""
        titles = [value for tag, name, value in self.attributes if tag == "div" and name == "aria-label"]
        texts = [json.loads(text) for kind, text in self.scripts if kind == "application/json"]
        return {str(title): spec for title, spec in zip(titles, texts, strict=True)}

    def values(self, title: str) -> list[dict[str, Any]]:
        """The data of a plot, of the last layer that has data of its own."""
        spec = self.specs[title]
        own = [spec["data"]] if "data" in spec else [layer["data"] for layer in spec["layer"] if "data" in layer]
        return own[-1]["values"]


@pytest.fixture(autouse=True)
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle takes seconds; one test and the script take the real one."""
    monkeypatch.setattr(page, "plot_library", lambda: "window.vegaEmbed = null;")


def written(folder: Path, source: str = "chat", **sizes: Any) -> Page:
    plan = plan_of(folder / "results", **sizes)
    run = write_run(plan, source)
    page.write_report(plan, rules_of(plan), run / "report.html")
    return Page((run / "report.html").read_text(encoding="utf-8"))


def test_data_and_vocabulary(tmp_path: Path):
    found = written(tmp_path, drafters=2)
    assert found.titled["Rows by source"] == [
        ["source", "rows", "sequences", "tokens", "supervised tokens", "supervised", "skipped rows"],
        ["chat", "1,234", "1,300", "50,000", "30,000", "60.0%", "1"],
        ["empty", "0", "0", "0", "0", "none", "0"],
    ]
    assert ["too long", "1", "row 9 (chat): too long: 99"] in found.titled["Skipped rows"]
    assert found.titled["Coverage by source, draft vocabulary of 32,000"][1] == ["chat", "97.1%", "none", "30,000"]
    assert [title for title in found.specs if "chosen" in title] == ["Coverage by size, 32,000 chosen"]  # shared, once
    assert "exactly 2,867,600,000 bytes in 3 shards (bfloat16), 57,352 bytes a token" in found.shown
    lengths = found.values("Lengths of the sequences")
    assert [(v["length"], v["sequences"]) for v in lengths] == [("8–11", 1000), ("12–15", 0), ("16", 300)]
    assert found.values("Tokens by source")[:2] == [
        {"source": "chat", "kind": "supervised", "tokens": 30_000},
        {"source": "chat", "kind": "not supervised", "tokens": 20_000},
    ]
    mark, lines = found.specs["Coverage by size, 32,000 chosen"]["layer"]
    assert mark["data"]["values"] == [{"size": 32_000, "label": "chosen: 32,000"}]
    assert [(v["size"], v["tokens"], v["coverage"]) for v in lines["data"]["values"]] == [
        (256, "training", 0.5), (32_000, "training", 0.9712), (163_840, "training", 1.0),
    ]  # fmt: skip


def test_acceptance_stands_beside_its_baselines(tmp_path: Path):
    found = written(tmp_path)
    rows = [dict(zip(found.titled["Acceptance by prompt set"][0], row, strict=True))
            for row in found.titled["Acceptance by prompt set"][1:]]  # fmt: skip
    assert [(row["prompt set"], row["with"], row["acceptance length"], row["without looping"], row["speed"]) for row in rows] == [
        ("held_out", "trained", "2.500", "2.375", "1.25×"), ("held_out", "no drafter", "1.000", "none", "1.00×"),
        ("held_out", "n-gram", "1.250", "1.125", "1.05×"), ("held_out", "untrained", "1.125", "1.000", "0.50×"),
        ("chat", "trained", "2.000", "1.875", "1.25×"), ("chat", "no drafter", "1.000", "none", "1.00×"),
        ("chat", "n-gram", "1.250", "1.125", "1.05×"), ("chat", "untrained", "1.125", "1.000", "0.50×"),
    ]  # fmt: skip
    assert rows[0]["looping"] == "10.0%" and rows[0]["lossless"] == "yes" and rows[1]["lossless"] == "none"
    assert rows[0]["in training"] == "0" and rows[1]["in training"] == "none"
    positions = found.titled["Acceptance by position"]
    assert positions[1] == ["wide", "held_out", "trained", "75.0%", "56.2%", "42.2%", "31.6%", "none"]
    assert [row[2] for row in positions[1:4]] == ["trained", "n-gram", "untrained"]  # nothing is drafted without one
    bars = found.values("Acceptance length by prompt set")
    assert {(v["prompt set"], v["with"]): v["length"] for v in bars} == {
        ("held_out", "wide"): 2.375, ("held_out", "no drafter"): 1.0, ("held_out", "n-gram"): 1.125,
        ("held_out", "untrained"): 1.0, ("chat", "wide"): 1.875, ("chat", "no drafter"): 1.0, ("chat", "n-gram"): 1.125,
        ("chat", "untrained"): 1.0,
    }  # fmt: skip
    steps = [(v["token"], v["accepted"]) for v in found.values("Acceptance by position: chat") if v["with"] == "wide"]
    assert steps == [(1, 0.5), (2, 0.375), (3, 0.2812), (4, 0.2109)]
    chain = found.values("Expected acceptance length by the length of the chain")
    assert [(v["steps"], v["length"]) for v in chain if v["with"] == "wide"] == [
        (1, 1.6),
        (2, 1.9),
        (3, 2.02),
        (4, 2.05),
    ]
    expected = found.titled["Expected acceptance, from the hidden states of held-out rows"]
    assert expected[1][:7] == ["wide", "trained", "30", "1.600", "1.900", "2.020", "2.050"]
    assert "wide: epoch_1 of it, decoded by transformers; draft_steps 5, topk 1, draft_tokens 6, temperature 0.0," in (
        " ".join(found.shown)
    )


def test_every_number_has_its_definition(tmp_path: Path):
    said = " ".join(written(tmp_path).shown)
    for words in (
        "1 + drafted tokens accepted per forward pass", "among those in which all before it were",
        "1 + the sum over the steps of the products", "an output that repeats itself", "token for token",
        "plain seconds over seconds", "share of the supervised tokens",
        "loss_decay^i", "where all earlier steps were right", "in which a shard that was being filled got no finished token",
        "wall-clock time of a job times the GPUs",
    ):  # fmt: skip
        assert words in said, words
    as_measured = written(tmp_path).titled["Prompt sets and definitions of the measurement"]
    assert ["looping", "an output that repeats itself"] in as_measured
    assert ["held_out", "held-out rows of the run"] in as_measured


def test_figures_that_were_not_measured(tmp_path: Path):
    plan = plan_of(tmp_path / "results")
    run = write_run(plan)
    facts = evaluation()
    facts["offline"] = {"trained": None, "untrained": None}
    facts["held_out_rows"] = None
    nothing = {"acceptance_length": None, "acceptance_by_step": None, "without_looping": None, "speedup": None,
               "lossless": None, "looping_share": None, "tokens_per_forward": None, "seconds": None}  # fmt: skip
    facts["prompt_sets"] = {"odd": facts["prompt_sets"]["held_out"] | nothing}
    facts["prompt_sets"]["odd"]["baselines"] = {"none": None, "ngram": None, "untrained": None}
    facts["prompt_sets"]["odd"]["differences"] = [{"prompt": "p", "token": 3}]
    write_json(run / "drafters" / "wide" / "evaluation.json", facts)
    page.write_report(plan, {}, run / "report.html")
    found = Page((run / "report.html").read_text())
    assert not [title for title in found.specs if "cceptance" in title]
    assert found.titled["Acceptance by prompt set"][1][:7] == ["wide", "odd", "trained", *["none"] * 4]
    assert "wide, odd: 1 outputs are NOT the target's own." in found.shown
    assert "There are no benchmark files: the jobs did not run under Snakemake." in found.shown


def test_training_curves(tmp_path: Path):
    found = written(tmp_path)
    losses = found.values("Loss")
    training = [v for v in losses if v["rows"] == "training"]
    assert [(v["step"], v["loss"]) for v in training] == [(n, 10 / n) for n in range(1, 61)]
    assert [(v["step"], v["loss"]) for v in losses if v["rows"] == "held out"] == [(30, 6.5), (60, 3.25)]
    curves = found.values("Conditional accuracy by draft step: wide")
    assert [v["accuracy"] for v in curves if v["rows"] == "training" and v["draft step"] == 1] == [
        round(n / 100, 3) for n in range(1, 61)
    ]
    assert not [v for v in curves if v["rows"] == "training" and v["draft step"] == 2]  # never reached
    assert {(v["step"], v["draft step"]): v["accuracy"] for v in curves if v["rows"] == "held out"} == {
        (30, 1): 0.18, (30, 2): 0.09, (30, 3): 0.05, (60, 1): 0.36, (60, 2): 0.18, (60, 3): 0.1,
    }  # fmt: skip
    epochs = found.titled["Epochs"]
    assert epochs[1][:6] == ["wide", "1", "6.0000", "6.5000", "1.250", "1.250"] and epochs[1][-1] == "best"
    assert epochs[2][:4] == ["wide", "2", "3.0000", "3.2500"] and epochs[2][-1] == ""


def test_drafters_of_a_sweep_are_compared(tmp_path: Path):
    one, three = written(tmp_path / "a"), written(tmp_path / "b", drafters=3)
    table = three.titled["Drafters, the best first"]
    assert [row[:3] for row in table] == [
        ["drafter", "length: held_out", "length: chat"], ["wide3", "2.875", "2.375"], ["wide2", "2.625", "2.125"],
        ["wide", "2.375", "1.875"],
    ]  # fmt: skip
    assert "Acceptance length of the drafters" not in one.specs
    bars = three.values("Acceptance length of the drafters")
    assert {(v["drafter"], v["prompt set"]): v["length"] for v in bars}["wide3", "chat"] == 2.375 and len(bars) == 6
    names = {v["with"] for v in three.values("Acceptance length by prompt set")}
    assert names == {"wide", "wide2", "wide3", "untrained", "n-gram", "no drafter"}
    assert {v["drafter"] for v in three.values("Loss")} == {"wide", "wide2", "wide3"}

    def order(title: str, channel: str) -> list[str]:
        return three.specs[title]["layer"][0]["encoding"][channel]["scale"]["domain"]

    # a drafter has one colour in all plots, and only what drafts has a place among the drafted tokens
    assert order("Acceptance length by prompt set", "color")[:3] == order("Loss", "color") == ["wide3", "wide2", "wide"]
    drafted = three.specs["Acceptance by position: chat"]["encoding"]["color"]["scale"]["domain"]
    assert drafted == ["wide3", "wide2", "wide", "untrained", "n-gram"]


def test_many_drafters_leave_the_plots_readable(tmp_path: Path):
    found = written(tmp_path, drafters=12)
    names = {v["with"] for v in found.values("Acceptance length by prompt set")}
    assert names == {f"wide{n}" for n in range(5, 13)} | {"untrained", "n-gram", "no drafter"}
    assert len(found.titled["Drafters, the best first"]) == 13
    assert any("The 8 best of 12 drafters are drawn." in text for text in found.shown)


def test_stalls_are_shaded_where_they_were(tmp_path: Path):
    """The second shard stood still for 100 s, 20 s after it began; an hour without a job before it is cut out."""
    plan = plan_of(tmp_path / "results")
    run = write_run(plan)
    for place in (1, 2):
        samples = [[10.0, 2000], [20.0, 2500], [120.0, 3000], [150.0, 10_000]]
        pause = [20.0, 100.0] if place == 1 else [0.0, 10.0]
        times = {"started": STARTED + 3700.0 + 150.0 * (place - 1), "samples": samples, "longest_pause": pause}
        file = run / "hidden_states" / f"rows_{place}00-{place + 1}00.json"
        write_json(file, shard_facts(place) | {"seconds": 150.0, "timeline": times})
    page.write_report(plan, {}, run / "report.html")
    found = Page((run / "report.html").read_text())
    speed = found.specs["Speed of the extraction"]
    assert speed["layer"][0]["mark"]["type"] == "rect"
    (band,) = speed["layer"][0]["data"]["values"]
    assert band["label"] == "rows_100-200: 100.0 seconds without a finished token"
    assert (band["time"], band["until"]) == (pytest.approx(120 / 60), pytest.approx(220 / 60, abs=1e-3))  # in minutes
    assert any("Shaded: a shard stalled" in text and "Dashed" in text for text in found.shown)


def test_costs_by_rule(tmp_path: Path):
    found = written(tmp_path)
    # 3 shards of 110 s on 2 GPUs; 2 epochs of 10 s on 4; 10 s on 1; cells without a number count nothing
    assert [row[:7] for row in found.titled["Costs by rule"]] == [
        ["rule", "jobs", "time", "CPU time", "GPU time", "CPU seconds", "GPU seconds"],
        ["extract", "3", "5.5 minutes", "165.0 seconds", "11.0 minutes", "165.0", "660.0"],
        ["train_epoch", "2", "20.0 seconds", "40.0 seconds", "80.0 seconds", "40.0", "80.0"],
        ["evaluate", "1", "10.0 seconds", "20.0 seconds", "10.0 seconds", "20.0", "10.0"],
        ["tokenize", "3", "4.5 seconds", "0.0 seconds", "0.0 seconds", "0.0", "0.0"],
        ["write_manifest", "1", "0.0 seconds", "0.0 seconds", "0.0 seconds", "0.0", "0.0"],
        ["all", "10", "6.1 minutes", "225.0 seconds", "12.5 minutes", "225.0", "750.0"],
    ]
    assert found.titled["Costs by rule"][1][7] == "512 MiB"
    bars = found.values("Time of CPUs and GPUs")
    assert {(v["rule"], v["kind"]): round(v["time"], 3) for v in bars}["extract", "GPU"] == 11.0


def test_costs_of_jobs_of_several_shards(tmp_path: Path):
    plan = plan_of(tmp_path / "results", shards=5)
    plan = type(plan)(
        plan.config.model_copy(update={"extraction": plan.config.extraction.model_copy(update={"shards_per_job": 2})}),
        plan.rows, (),
    )  # fmt: skip
    run = write_run(plan)
    for name in ("rows_0-200", "rows_200-400", "rows_400-500"):
        (run / "benchmarks" / "hidden_states" / f"{name}.tsv").write_text(benchmark("100.0", "7.0"))
    rules = {rule: pattern for rule, pattern in rules_of(plan).items() if rule != "extract"}
    page.write_report(plan, rules, run / "report.html")
    costs = Page((run / "report.html").read_text()).titled["Costs by rule"]
    assert next(row for row in costs if row[0] == "extract")[:7] == [
        "extract", "3", "5.0 minutes", "21.0 seconds", "10.0 minutes", "21.0", "600.0",
    ]  # fmt: skip
    with pytest.raises(EyasError, match="rule odd: its benchmark has a wildcard 'colour'"):
        page.write_report(plan, {"odd": "x/{colour}.tsv"}, run / "report.html")


def test_configuration_and_provenance(tmp_path: Path):
    found = written(tmp_path, source="<b>chat</b>")
    text = next(text for text in found.shown if text.startswith("name: demo"))
    assert "shard_rows: 100" in text and "draft_vocab_size: 32000" in text and "held_out_every" in text
    assert found.titled["Provenance that the exports recorded"] == [
        ["", "value", "export"], ["server", "sglang", "wide, sglang"], ["server", "vllm", "wide, vllm"],
        ["format_version", "1", "all"], ["versions: torch", "9.9", "all"], ["versions: safetensors", "none", "all"],
        ["versions: <b>chat</b>", "<b>chat</b>", "all"], ["git: commit", "0123abc", "all"], ["git: dirty", "yes", "all"],
        ["artefact_versions", "tokens 3, export 2", "all"], ["checkpoint: epoch", "1", "all"],
        ["target: path", "target", "all"], ["target: revision", "none", "all"],
    ]  # fmt: skip
    assert ["manifest of wide", "xxh3_128:abc"] in found.titled["Data"]
    versions = dict(row for row in found.titled["Versions of this page's job"])
    assert versions["python"].startswith("3.") and "evaluation" in versions["formats of the artefacts"]


@pytest.mark.parametrize("source", ["<script>alert(1)</script>", EVIL, "{{ 7 * 7 }}", "<img src=x onerror=alert(1)>"])
def test_names_do_not_become_markup(tmp_path: Path, source: str):
    found, plain = written(tmp_path / "a", source), written(tmp_path / "b")
    assert [kind for kind, _ in found.scripts] == [kind for kind, _ in plain.scripts]
    styled = (("td", "class"), ("th", "class"))  # by the length of a cell
    assert [(tag, name) for tag, name, _ in found.attributes if (tag, name) not in styled] == [
        (tag, name) for tag, name, _ in plain.attributes if (tag, name) not in styled
    ]
    code = [text for kind, text in found.scripts if kind is None]
    assert code == [text for kind, text in plain.scripts if kind is None]
    assert source in [cell for table in found.tables for row in table for cell in row]
    assert source in [value["source"] for value in found.values("Tokens by source")]
    assert source in [value["prompt set"] for value in found.values("Acceptance length by prompt set")]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12) | st.just(EVIL))
def test_any_text_comes_through_whole(text: str):
    spec = {"data": {"values": [{"name": text}]}}
    table = Table("t", [text], [[text]], [(text, text)])
    plot = Plot(text, spec, text, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "plot_library", lambda: "")
        parts = Section("a", text, [Figure(text, text, text)], [text], [plot], [table], [Listing(text, text)])
        html = page.render_page(text, text, [parts], text)
    found = Page(html)
    assert list(found.specs.values()) == [spec] and found.tables == [[[text], [text]]] * 2
    assert len([a for a in found.attributes if a[0] == "script"]) == 1
    if text.strip():
        assert found.shown.count(text.strip()) >= 11


def test_nothing_is_fetched_and_only_known_scripts_run(tmp_path: Path):
    found = written(tmp_path)
    links = [(tag, name, value) for tag, name, value in found.attributes if name in ("src", "href", "action", "srcset")]
    anchors = {value for tag, name, value in found.attributes if (tag, name) == ("section", "id")}
    assert {value for _, _, value in links} == {"data:,"} | {f"#{anchor}" for anchor in anchors}
    assert {
        "acceptance",
        "drafters",
        "training",
        "vocabulary",
        "data",
        "extraction",
        "costs",
        "configuration",
    } == anchors
    policy = next(v for _, name, v in found.attributes if name == "content" and v and "default-src" in v)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'" and "http" not in policy and "eval" not in policy
    codes = [text for kind, text in found.scripts if kind is None]
    digests = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in codes]
    assert rules["script-src"].split() == [f"'sha256-{digest}'" for digest in digests] and len(codes) == 2
    text = (tmp_path / "results" / "demo" / "report.html").read_text()
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def test_light_dark_and_narrow(tmp_path: Path):
    written(tmp_path)
    text = (tmp_path / "results" / "demo" / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert text.count('<div class="scroll"') == text.count("<table>")


def test_library_is_one_script_without_an_end_tag(monkeypatch: pytest.MonkeyPatch):
    library = plot_library()
    assert library == plot_library()
    assert "window.vegaEmbed" in library and "</script" not in library.lower() and "<!--" not in library
    import vl_convert

    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet, vl_version: 'a = "</SCRIPT>" < b')
    assert plot_library() == 'a = "<\\/SCRIPT>" < b'


def test_specifications_can_be_drawn(tmp_path: Path):
    import altair
    import vl_convert

    specs = written(tmp_path, source=EVIL, drafters=2).specs
    specs |= {
        "short": plots.coverage_curve([[12, 1.0, None]], 12),
        "dips": plots.coverage_curve([[256, 0.5, 0.4]], 256),
    }
    assert len(specs) == 16
    for title, spec in specs.items():
        assert spec["width"] == "container" and "$schema" not in spec
        drawn = vl_convert.vegalite_to_svg(
            spec | {"width": 300}, vl_version=altair.SCHEMA_VERSION[1:].rsplit(".", 1)[0]
        )
        assert drawn.count("<path") > 3 and "NaN" not in drawn, title


def test_more_sources_than_a_plot_shows():
    one = {"rows": 1, "sequences": 1, "supervised_tokens": 1, "skipped": 0}
    spec = plots.tokens_by_source({f"s{n}": one | {"tokens": n + 1} for n in range(50)})
    assert [v["source"] for v in spec["data"]["values"][::2]] == [f"s{n}" for n in range(49, 29, -1)]


def test_run_without_usable_rows(tmp_path: Path):
    plan = plan_of(tmp_path / "results")
    run = write_run(plan)
    facts = statistics() | {"sequences": 0, "sources": {}, "skipped": {}, "supervised_share": None}
    facts["lengths"] = {"histogram": [[1, 8, 0]], **dict.fromkeys(("min", "mean", "median", "p95", "max"))}
    write_json(run / "tokens" / "statistics.json", facts)
    page.write_report(plan, {}, run / "report.html")
    found = Page((run / "report.html").read_text())
    assert "Tokens by source" not in found.specs and found.titled["Rows by source"][1:] == [["none"]]


@pytest.mark.parametrize(
    ("file", "wrong", "message"),
    [
        ("tokens/statistics.json", {}, r"statistics\.json: an entry is missing or wrong \(KeyError"),
        ("tokens/statistics.json", [], r"statistics\.json: an entry is missing or wrong"),
        ("tokens/statistics.json", None, r"statistics\.json: this file of statistics is missing"),
        ("vocab_map/32000.json", {"draft_vocab_size": 3}, r"32000\.json.*: an entry is missing or wrong"),
        ("vocab_map/32000.json", [], r"32000\.json.*: an entry is missing or wrong"),
        ("vocab_map/32000.json", vocabulary() | {"coverage_curve": []}, r"32000\.json.*: an entry is missing or wrong"),
        ("vocab_map/32000.json", None, r"32000\.json: this vocabulary sidecar is missing"),
        ("drafters/wide/evaluation.json", {"format_version": 2}, r"evaluation\.json: an entry is missing or wrong"),
        ("drafters/wide/best/selection.json", {}, r"an entry is missing or wrong \(KeyError\('epoch'\)"),
        ("drafters/wide/epoch_2/trainer_state.json", {}, r"an entry is missing or wrong \(KeyError\('history'\)"),
        ("drafters/wide/epoch_2/metrics.jsonl", "{}", r"metrics\.jsonl: damaged \(KeyError\('step'\)"),
        ("drafters/wide/epoch_1/metrics.jsonl", None, r"metrics\.jsonl: cannot be read"),
        ("hidden_states/rows_100-200.json", {"rows": 1}, r"rows_100-200\.json: an entry is missing or wrong"),
        ("hidden_states/data_config.json", {}, r"data_config\.json: an entry is missing or wrong"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_shown_are_one_clear_error(tmp_path: Path, file: str, wrong: Any, message: str):
    plan = plan_of(tmp_path / "results")
    run = write_run(plan)
    if wrong is None:
        (run / file).unlink()
    elif isinstance(wrong, str):
        (run / file).write_text(wrong)
    else:
        write_json(run / file, wrong)
    with pytest.raises(EyasError, match=message):
        page.write_report(plan, rules_of(plan), run / "report.html")
    assert not (run / "report.html").exists()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (827_900_000_000, "828 GB"), (3_500_000_000_000, "3.5 TB"),
     (999_999, "1000 kB"), (5 * 10**18, "5000 PB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str):
    assert size_of(nbytes) == text


def test_spans():
    spans = [span(None), span(0), span(299.94), span(300), span(10_799), span(36_000)]
    assert spans == ["none", "0.0 seconds", "299.9 seconds", "5.0 minutes", "180.0 minutes", "10.0 hours"]


def test_script_writes_the_same_bytes_again(tmp_path: Path):
    plan = plan_of(tmp_path / "results", drafters=2)
    output = write_run(plan) / "report.html"
    config = json.dumps(plan.config.model_dump(mode="json", exclude_defaults=True))
    command = [sys.executable, SCRIPTS / "write_report.py", "--config", config, "--rows", "300"]
    command += ["--benchmarks", json.dumps(rules_of(plan)), "--output", output]

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)

    done = run()
    assert done.returncode == 0, done.stderr
    first = output.read_bytes()
    assert "Loss" in Page(first.decode()).specs and b"window.vegaEmbed=" in first
    assert run().returncode == 0 and output.read_bytes() == first
    (output.parent / "tokens" / "statistics.json").unlink()
    failed = run()
    assert failed.returncode == 1 and "Traceback" not in failed.stderr and "is missing" in failed.stderr
