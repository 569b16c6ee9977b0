"""`report.html`: one file that holds everything it shows, and fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eyas import __version__
from eyas.errors import EyasError
from eyas.plan import RunPlan
from eyas.report.acceptance import acceptance_section, ranking
from eyas.report.costs import SERVERS, benchmark_files, costs_section, read_costs
from eyas.report.data import data_section, vocabulary_section
from eyas.report.extraction import extraction_section
from eyas.report.parts import Section
from eyas.report.provenance import provenance_section
from eyas.report.training import drafters_section, read_metrics, training_section
from eyas.shards import read_json, write_lock, write_page

log = logging.getLogger(__name__)

HERE = Path(__file__).parent


def plot_library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, of the version that the plots are written for."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    library: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return re.sub(r"</(?=script)", r"<\\/", library, flags=re.IGNORECASE)  # nothing in it may end its element


def _source(script: str) -> str:
    """How a Content-Security-Policy names a script that may run: by its digest."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def render_page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    """The page as HTML. All text and all plots are escaped: names in data cannot become markup.

    The policy in its head lets two scripts run, which it names by their digests, and forbids any other.
    """
    templates = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    scripts = [plot_library(), (HERE / "page.js").read_text(encoding="utf-8")]
    return templates.get_template("page.html.j2").render(
        title=title, subtitle=subtitle, sections=sections, footer=footer,
        scripts=list(map(Markup, scripts)), sources=Markup(" ".join(map(_source, scripts))),
    )  # fmt: skip


def _of(paths: Sequence[Path], make: Callable[[], Any]) -> Any:
    """`make()`, or one clear error that names the files it works from."""
    try:
        return make()
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        names = ", ".join(map(str, paths[:5])) + (", …" if len(paths) > 5 else "")
        raise EyasError(
            f"{names}: an entry is missing or wrong ({exc!r}), perhaps of another version of Eyas; delete it and run"
            " snakemake again"
        ) from None


class RunFiles:
    """The files of a run that the page is made of, by what they are; see `docs/formats.md`."""

    def __init__(self, plan: RunPlan) -> None:
        run = Path(plan.run_folder)
        drafters = plan.config.drafters
        folders = {name: run / "drafters" / name for name in drafters}
        epochs = {name: drafter.training.epochs for name, drafter in drafters.items()}
        self.statistics = run / "tokens" / "statistics.json"
        self.manifest = run / "hidden_states" / "data_config.json"
        self.shards = [run / "hidden_states" / f"{name}.json" for name in plan.shard_names]
        self.maps = {n: run / "vocab_map" / f"{d.draft_vocab_size}.json" for n, d in drafters.items()}
        self.evaluations = {n: folder / "evaluation.json" for n, folder in folders.items()}
        self.selections = {n: folder / "best" / "selection.json" for n, folder in folders.items()}
        self.states = {n: folder / f"epoch_{epochs[n]}" / "trainer_state.json" for n, folder in folders.items()}
        self.metrics = {
            n: [folder / f"epoch_{epoch}" / "metrics.jsonl" for epoch in range(1, epochs[n] + 1)]
            for n, folder in folders.items()
        }
        # which of them there are is up to the workflow
        self.exports = {n: [folder / "export" / server for server in SERVERS] for n, folder in folders.items()}


def _read_shard(path: Path) -> dict[str, Any]:
    """What the page takes of a shard's sidecar. One of an older Eyas has no `timeline`."""
    facts = read_json(path, "sidecar of hidden states")
    names = ("rows", "tokens", "bytes", "seconds", "tokens_per_second", "skipped", "failed")
    return _of([path], lambda: {n: facts[n] for n in names} | {"name": path.stem, "timeline": facts.get("timeline")})


def _read_all(paths: Mapping[str, Path], what: str) -> dict[str, Any]:
    return {name: read_json(path, what) for name, path in paths.items()}


def write_report(plan: RunPlan, rules: Mapping[str, str], output: Path) -> None:
    """Write the report of a finished run to `output` (HTML); raises EyasError.

    `rules`: rule -> pattern of its benchmark files, with Snakemake's wildcards; those that exist are read.
    """
    files = RunFiles(plan)
    statistics, manifest = read_json(files.statistics, "file of statistics"), read_json(files.manifest, "manifest")
    maps = _read_all(files.maps, "vocabulary sidecar")
    evaluations = _read_all(files.evaluations, "evaluation")
    states, selections = _read_all(files.states, "checkpoint"), _read_all(files.selections, "selection")
    metrics = {name: read_metrics(paths) for name, paths in files.metrics.items()}
    shards = [_read_shard(path) for path in files.shards]
    exports = {
        name: [folder.name for folder in folders if (folder / "config.json").is_file()]
        for name, folders in files.exports.items()
    }
    recorded = {
        f"{name}, {folder.name}": read_json(folder / "provenance.json", "provenance")
        for name, folders in files.exports.items()
        for folder in folders
        if (folder / "provenance.json").is_file()
    }
    trained = [*files.states.values(), *files.selections.values()]
    measured = list(files.evaluations.values())
    # drafters of one size share a map, which is shown once
    by_path = {path: maps[name] for name, path in files.maps.items()}
    sections = [
        _of(measured, lambda: acceptance_section(evaluations)),
        _of([*trained, *measured, *by_path], lambda: drafters_section(states, selections, maps, evaluations, exports)),
        _of([*trained, *measured], lambda: training_section(states, metrics, selections, ranking(evaluations))),
        _of(list(by_path), lambda: vocabulary_section(list(by_path.values()))),
        _of([files.statistics], lambda: data_section(statistics)),
        _of([files.manifest], lambda: extraction_section(shards, manifest["dtype"])),
        costs_section(read_costs(benchmark_files(plan, rules))),
        _of([files.manifest, *trained], lambda: provenance_section(plan.config, manifest, states, recorded)),
    ]
    subtitle = _of(
        [files.manifest],
        lambda: f"Target {manifest['target']['path']}, layers {', '.join(map(str, manifest['layers']))}",
    )
    page = render_page(
        f"Run {plan.config.name}", subtitle, sections, f"Written by Eyas {__version__}. This file fetches nothing."
    )
    with write_lock(output):
        write_page(output, page)
    log.info("Wrote %s.", output)
