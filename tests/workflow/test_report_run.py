"""The reports of a finished run: Snakemake's own, and `eyas report`, which builds nothing but the page."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

from workflow_runs import CHECKOUT, Workdir


def eyas_report(work: Workdir, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in the run's folder, with no desktop but what `environment` says."""
    work.write_config()
    cleared = {k: v for k, v in os.environ.items() if k not in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")}
    path = os.pathsep.join([str(CHECKOUT / "workflow"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        [sys.executable, "-m", "eyas.cli.main", "report", "--configfile", "config.yaml", *arguments], cwd=work.path,
        env=cleared | environment | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def test_the_page_is_opened_and_written_again_where_it_is_missing(finished: Workdir) -> None:
    page = finished.run_folder / "report.html"
    content, opened = page.read_bytes(), finished.path / "opened"
    browser = finished.path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf "%s" "$1" > "{opened}"\n')
    browser.chmod(0o755)
    done = eyas_report(finished, BROWSER=f"{browser} %s")
    assert (done.returncode, done.stdout, done.stderr) == (0, "results/tiny/report.html\n", "")
    assert opened.read_text() == page.resolve().as_uri()
    assert page.read_bytes() == content
    before = finished.digests()
    page.unlink()
    done = eyas_report(finished)
    assert done.returncode == 0 and "no desktop" in done.stderr, done.stderr
    assert done.stdout == "results/tiny/report.html\n" and finished.digests() == before
    assert eyas_report(finished, "--no-open").stderr == ""


def test_an_unfinished_run_is_not_trained_for_its_report(finished: Workdir) -> None:
    finished.settings["drafters"]["small"]["training"]["epochs"] = 3
    before = finished.digests()
    done = eyas_report(finished)
    assert done.returncode == 0 and done.stdout == "results/tiny/report.html\n"
    assert "earlier state: the run tiny is not finished" in done.stderr and "train_epoch 1" in done.stderr
    assert "snakemake --cores all --configfile config.yaml" in done.stderr
    (finished.run_folder / "report.html").unlink()
    done = eyas_report(finished)
    assert done.returncode == 2 and done.stderr.startswith("error: the run tiny is not finished"), done.stderr
    assert "Traceback" not in done.stderr and not done.stdout
    assert finished.digests() == {k: v for k, v in before.items() if k != "report.html"}


def test_a_configuration_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "eyas.cli.main", "report"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 2 and done.stderr.startswith("error: config/config.yaml is not there; name")


def test_the_page_shows_the_run(finished: Workdir) -> None:
    page = (finished.run_folder / "report.html").read_text(encoding="utf-8")
    titles = map(html.unescape, re.findall(r"<h3>(.*?)</h3>", page))
    assert {
        "Loss", "Conditional accuracy by draft step: small", "Acceptance length by prompt set",
        "Acceptance by position: held_out", "Lengths of the sequences", "Speed of the extraction", "Bytes of hidden states",
        "Shards", "Costs by rule", "Provenance that the exports recorded", "Versions of this page's job",
    } <= set(titles)  # fmt: skip
    rules = {"respond", "tokenize", "extract", "train_epoch", "evaluate", "export_drafter", "export_cards"}
    assert rules <= set(re.findall(r'<th scope="row"[^>]*>(\w+)</th>', page))
    for server in ("sglang", "vllm"):
        assert f"small, {server}" in page
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page)


def test_snakemakes_own_report(finished: Workdir) -> None:
    file = finished.path / "snakemake.html"
    finished.run("--report", str(file))
    text = file.read_text(encoding="utf-8")
    for name in ("report.html", "summary.txt", "evaluation.json", "selection.json", "100.json", "statistics.json"):
        assert name in text, name
    for caption in ("It works offline and fetches nothing", "The table that a run ends with", "Which epoch of drafter"):
        assert caption in text.replace("\\n", " "), caption
