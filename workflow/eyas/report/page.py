"""`report.html`: one file that holds everything it shows, and fetches nothing."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eyas import __version__
from eyas.errors import EyasError
from eyas.report.sections import Section, data_section, drafters_section, vocabulary_section
from eyas.shards import read_json, write_lock, write_text

log = logging.getLogger(__name__)


def plot_library() -> str:
    """Vega, Vega-Lite and vega-embed as one script, of the version that the plots are written for."""
    import altair
    import vl_convert

    version = ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    library: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=version)
    return re.sub(r"</(?=script)", r"<\\/", library, flags=re.IGNORECASE)  # nothing in it may end its element


def render_page(title: str, subtitle: str, sections: Sequence[Section], footer: str) -> str:
    """The page as HTML. All text and all plots are escaped: names in data cannot become markup."""
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return templates.get_template("page.html.j2").render(
        title=title, subtitle=subtitle, sections=sections, footer=footer, library=Markup(plot_library())
    )


def _of(paths: Sequence[Path], facts: Any, make: Callable[[Any], Any]) -> Any:
    """`make(facts)`, or one clear error that names the files they were read from."""
    try:
        return make(facts)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as exc:
        names = ", ".join(map(str, paths))
        raise EyasError(
            f"{names}: an entry is missing or wrong ({exc!r}), perhaps of another version of Eyas; delete it and run"
            " snakemake again"
        ) from None


def write_report(summary: Path, statistics: Path, vocabularies: Sequence[Path], output: Path) -> None:
    """Write the report of a finished run to `output` (HTML); raises EyasError.

    `summary`: `summary.json`; `statistics`: `tokens/statistics.json`; `vocabularies`: the sidecars of the
    vocabulary maps, in the order to show them in (one that is named twice is shown once).
    """
    facts = read_json(summary, "summary")
    maps = list(dict.fromkeys(vocabularies))
    sections = [
        _of([statistics], read_json(statistics, "file of statistics"), data_section),
        _of(maps, [read_json(path, "vocabulary sidecar") for path in maps], vocabulary_section),
        _of([summary], facts, drafters_section),
    ]
    title, subtitle = _of(
        [summary],
        facts,
        lambda f: (f"Run {f['run']}", f"Target {f['target']}, layers {', '.join(map(str, f['layers']))}"),
    )
    page = render_page(title, subtitle, sections, f"Written by Eyas {__version__}. This file fetches nothing.")
    with write_lock(output):
        write_text(output, page)
    log.info("Wrote %s.", output)
