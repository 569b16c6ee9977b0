"""The report: what it says, that nothing in the data becomes markup, and that it fetches nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from eyas.errors import EyasError
from eyas.report import page, plots, sections
from eyas.report.page import plot_library
from eyas.report.sections import Figure, Section, Table, size_of
from eyas.shards import write_json
from hypothesis import given, settings
from hypothesis import strategies as st

SCRIPTS = Path(__file__).parents[2] / "workflow" / "scripts"
EVIL = "</script><script>alert(1)</script><!--\u2028&\"'"
_VOID = {"meta", "link", "br"}


class Page(HTMLParser):
    """Scripts by type, cells of every table, text of elements that show text, and attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[str | None, str]] = []
        self.tables: list[list[list[str]]] = []
        self.plot_tables: list[list[list[str]]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.shown: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in _VOID:
            self.open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        elif tag == "table":
            self.tables.append([])
            if "details" in self.open:
                self.plot_tables.append(self.tables[-1])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self.open and self.open[-1] in ("th", "td"):
            self.tables[-1][-1][-1] += data
        elif data.strip():
            self.shown.append(data.strip())

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]


@pytest.fixture(autouse=True)
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle takes seconds; one test and the script take the real one."""
    monkeypatch.setattr(page, "plot_library", lambda: "window.vegaEmbed = null;")


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


def summary(name: str = "wide") -> dict[str, Any]:
    return {
        "run": "demo", "target": "models/target", "layers": [1, 14, 26],
        "drafters": {
            name: {
                "draft_vocab_size": 32_000, "epochs": 2, "best_epoch": 1, "parameters": 12_345_678,
                "loss_by_epoch": [5.25, 4.125], "draft_steps": 7, "prompts": 20, "held_out_rows": 100,
                "acceptance": {
                    "trained": {"offline": 2.5, "decoding": 2.4, "lossless": True},
                    "untrained": {"offline": None, "decoding": 1.0, "lossless": False},
                },
                "export": "results/demo/drafters/wide/export/sglang",
            }
        },
    }  # fmt: skip


def files(folder: Path, source: str = "chat", sizes: tuple[int, ...] = (32_000,)) -> dict[str, Any]:
    """Arguments of write_report, with the files they name."""
    write_json(folder / "summary.json", summary(source))
    write_json(folder / "tokens" / "statistics.json", statistics(source))
    for size in sizes:
        write_json(folder / "vocab_map" / f"{size}.json", vocabulary(size, source))
    return {
        "summary": folder / "summary.json",
        "statistics": folder / "tokens" / "statistics.json",
        "vocabularies": [folder / "vocab_map" / f"{size}.json" for size in sizes],
        "output": folder / "report.html",
    }


def written(folder: Path, source: str = "chat", sizes: tuple[int, ...] = (32_000,)) -> Page:
    arguments = files(folder, source, sizes)
    page.write_report(**arguments)
    return Page(arguments["output"].read_text(encoding="utf-8"))


def test_page_shows_the_numbers(tmp_path: Path):
    found = written(tmp_path, sizes=(32_000, 8000, 32_000))
    tables = [t for t in found.tables if not any(t is other for other in found.plot_tables)]
    assert tables[0] == [
        ["source", "rows", "sequences", "tokens", "supervised tokens", "supervised", "skipped rows"],
        ["chat", "1,234", "1,300", "50,000", "30,000", "60.0%", "1"],
        ["empty", "0", "0", "0", "0", "none", "0"],
    ]
    assert ["too long", "1", "row 9 (chat): too long: 99"] in tables[1]
    by_source = [t for t in tables if t[0] == ["source", "training", "held out", "supervised tokens"]]
    assert [t[1] for t in by_source] == [["chat", "97.1%", "none", "30,000"]] * 2
    curve = [t for t in found.plot_tables if t[0] == ["size", "training", "held out"]]
    assert [t[2][0] for t in curve] == ["32,000", "8,000"]  # both sizes, each once, in the order given
    acceptance = next(t for t in tables if t[0][1] == "which")
    assert acceptance[1] == ["chat", "trained", "2.400", "yes", "2.500", "20", "100", "7"]
    assert acceptance[2] == ["chat", "untrained", "1.000", "NO", "none", "20", "100", "7"]
    assert next(t for t in tables if t[0][2] == "loss")[1:] == [["chat", "1", "5.2500"], ["chat", "2", "4.1250"]]
    assert next(t for t in tables if t[0][0] == "drafter")[1][1] == "12,345,678"
    for text in ("Run demo", "Target models/target, layers 1, 14, 26", "1,234", "2.87 GB", "9", "Data", "Drafters"):
        assert text in found.shown, text
    assert "exactly 2,867,600,000 bytes in 3 shards (bfloat16), 57,352 bytes a token" in found.shown
    assert sorted(t for t in found.shown if t.startswith("draft vocabulary of")) == [
        "draft vocabulary of 32,000", "draft vocabulary of 8,000",
    ]  # fmt: skip


def test_every_column_that_needs_it_is_defined(tmp_path: Path):
    said = " ".join(written(tmp_path).shown)
    for words in ("1 + the sum over the steps of the products", "share of the supervised tokens", "loss_decay^i"):
        assert words in said


def test_plots_hold_the_numbers(tmp_path: Path):
    lengths, sources, curve = written(tmp_path).specs
    assert [(v["length"], v["sequences"]) for v in lengths["data"]["values"]] == [
        ("8–11", 1000), ("12–15", 0), ("16", 300),
    ]  # fmt: skip
    assert sources["data"]["values"][:2] == [
        {"source": "chat", "kind": "supervised", "tokens": 30_000},
        {"source": "chat", "kind": "not supervised", "tokens": 20_000},
    ]
    mark, lines = curve["layer"]
    assert mark["data"]["values"] == [{"size": 32_000, "label": "chosen: 32,000"}]
    assert [(v["size"], v["tokens"], v["coverage"]) for v in lines["data"]["values"]] == [
        (256, "training", 0.5), (32_000, "training", 0.9712), (163_840, "training", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize("source", ["<script>alert(1)</script>", EVIL, "{{ 7 * 7 }}", "<img src=x onerror=alert(1)>"])
def test_names_do_not_become_markup(tmp_path: Path, source: str):
    found, plain = written(tmp_path / "a", source), written(tmp_path / "b")
    assert [kind for kind, _ in found.scripts] == [kind for kind, _ in plain.scripts]
    assert [(tag, name) for tag, name, _ in found.attributes] == [(tag, name) for tag, name, _ in plain.attributes]
    code = [text for kind, text in found.scripts if kind is None]
    assert code == [text for kind, text in plain.scripts if kind is None]
    assert source in [cell for table in found.tables for row in table for cell in row]
    assert source in [value["source"] for value in found.specs[1]["data"]["values"]]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12) | st.just(EVIL))
def test_any_text_comes_through_whole(text: str):
    spec = {"data": {"values": [{"name": text}]}}
    table = Table("t", [text], [[text]], [(text, text)])
    plot = sections.Plot(text, spec, text, table)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "plot_library", lambda: "")
        html = page.render_page(text, text, [Section("a", text, [Figure(text, text, text)], [plot], [table])], text)
    found = Page(html)
    assert found.specs == [spec] and found.tables == [[[text], [text]]] * 2
    assert len([a for a in found.attributes if a[0] == "script"]) == 1


def test_nothing_is_fetched(tmp_path: Path):
    found = written(tmp_path)
    links = [(tag, name, value) for tag, name, value in found.attributes if name in ("src", "href", "action", "srcset")]
    assert {value for _, _, value in links} == {"data:,", "#data", "#vocabulary", "#drafters"}
    policy = next(v for _, name, v in found.attributes if name == "content" and v and "default-src" in v)
    assert policy.startswith("default-src 'none';") and "http" not in policy
    text = (tmp_path / "report.html").read_text()
    assert "http:" not in text and "https:" not in text and "@import" not in text and "url(" not in text


def test_light_dark_and_narrow(tmp_path: Path):
    written(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "prefers-color-scheme: dark" in text and "width=device-width" in text
    assert text.count('<div class="scroll"') == text.count("<table>")


def test_library_is_one_script_without_an_end_tag(monkeypatch: pytest.MonkeyPatch):
    library = plot_library()
    assert library == plot_library()
    assert "window.vegaEmbed" in library and "</script" not in library.lower() and "<!--" not in library
    import vl_convert

    monkeypatch.setattr(vl_convert, "javascript_bundle", lambda snippet, vl_version: 'a = "</SCRIPT>" < b')
    assert plot_library() == 'a = "<\\/SCRIPT>" < b'


def test_specifications_can_be_drawn():
    import altair
    import vl_convert

    curve = [[256, 0.5, 0.4], [1000, 0.7, None]]
    for spec in (
        plots.length_histogram(statistics()["lengths"]["histogram"]),
        plots.tokens_by_source(statistics(EVIL)["sources"]),
        plots.coverage_curve(curve, 256),
        plots.coverage_curve([[12, 1.0, None]], 12),
    ):
        assert spec["width"] == "container" and "$schema" not in spec
        drawn = vl_convert.vegalite_to_svg(
            spec | {"width": 300}, vl_version=altair.SCHEMA_VERSION[1:].rsplit(".", 1)[0]
        )
        assert drawn.count("<path") > 3 and "NaN" not in drawn


def test_more_sources_than_a_plot_shows():
    one = {"rows": 1, "sequences": 1, "supervised_tokens": 1, "skipped": 0}
    spec = plots.tokens_by_source({f"s{n}": one | {"tokens": n + 1} for n in range(50)})
    assert [v["source"] for v in spec["data"]["values"][::2]] == [f"s{n}" for n in range(49, 29, -1)]


def test_run_without_usable_rows(tmp_path: Path):
    arguments = files(tmp_path)
    facts = statistics() | {"sequences": 0, "sources": {}, "skipped": {}, "supervised_share": None}
    facts["lengths"] = {"histogram": [[1, 8, 0]], **dict.fromkeys(("min", "mean", "median", "p95", "max"))}
    write_json(arguments["statistics"], facts)
    page.write_report(**arguments)
    found = Page(arguments["output"].read_text())
    assert len(found.specs) == 1 and found.tables[0][1:] == [["none"]]


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("statistics", {}, r"statistics\.json: an entry is missing or wrong \(KeyError"),
        ("statistics", [], r"statistics\.json: an entry is missing or wrong"),
        ("summary", {"run": "x", "drafters": {"a": {}}}, r"summary\.json: an entry is missing or wrong"),
        ("summary", {"drafters": {}}, r"summary\.json: an entry is missing or wrong \(KeyError\('run'\)"),
        ("vocabularies", {"draft_vocab_size": 3}, r"32000\.json: an entry is missing or wrong"),
        ("vocabularies", vocabulary() | {"coverage_curve": []}, r"32000\.json: an entry is missing or wrong"),
        ("vocabularies", None, r"32000\.json: this vocabulary sidecar is missing"),
        ("statistics", None, r"statistics\.json: this file of statistics is missing"),
    ],
)
def test_files_that_cannot_be_shown_are_one_clear_error(tmp_path: Path, name: str, wrong: Any, message: str):
    arguments = files(tmp_path)
    path = arguments[name][0] if name == "vocabularies" else arguments[name]
    if wrong is None:
        path.unlink()
    else:
        write_json(path, wrong)
    with pytest.raises(EyasError, match=message):
        page.write_report(**arguments)
    assert not arguments["output"].exists()


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (827_900_000_000, "828 GB"), (3_500_000_000_000, "3.5 TB"),
     (999_999, "1000 kB"), (5 * 10**18, "5000 PB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str):
    assert size_of(nbytes) == text


def test_script_writes_the_same_bytes_again(tmp_path: Path):
    arguments = files(tmp_path, sizes=(32_000, 8000))

    def run() -> subprocess.CompletedProcess[str]:
        options = [f"--{name}" for name in arguments]
        values = [v if isinstance(v, list) else [v] for v in arguments.values()]
        command = [sys.executable, SCRIPTS / "write_report.py"]
        for option, value in zip(options, values, strict=True):
            command += [option, *value]
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)

    done = run()
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "report.html").read_bytes()
    assert len(Page(first.decode()).specs) == 4 and b"window.vegaEmbed=" in first
    assert run().returncode == 0 and (tmp_path / "report.html").read_bytes() == first
    arguments["statistics"].unlink()
    failed = run()
    assert failed.returncode == 1 and "Traceback" not in failed.stderr and "is missing" in failed.stderr
