"""`eyas plan`: which run is meant, and its space."""

from __future__ import annotations

from pathlib import Path

from eyas.config import read_config
from eyas.errors import EyasError
from eyas.extraction.space import SpacePlan, recorded_space, run_space
from eyas.plan import plan_run

DEFAULT_CONFIG = "config/config.yaml"


def space_for(run: str | None, configfile: str | None, results: str | None) -> SpacePlan:
    """The space of a run named, or described by a configuration, or both, which must agree; raises EyasError."""
    if run is not None and configfile is None:
        for folder in (Path(results or "results") / run, Path(run)):
            if found := recorded_space(folder):
                return found
    source = configfile or DEFAULT_CONFIG
    if configfile is None and not Path(source).is_file():
        raise EyasError(
            f"no run {run!r} in {results or 'results'} that was started with snakemake; name its --configfile"
            if run
            else f"{source} is not there; name a run, or a configuration with --configfile"
        )
    config = read_config(source)
    if run not in (None, config.name):
        raise EyasError(
            f"{source} describes the run {config.name!r}, not {run!r}"
            f"{'' if configfile else ', of which there is no record'}; name its --configfile"
        )
    values = config.model_dump(mode="json", exclude_unset=True)
    return run_space(plan_run(values | ({"results": results} if results else {}), source))
