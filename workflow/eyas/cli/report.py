"""`eyas report`: bring a finished run's report.html up to date, and open it. Nothing else of the run is built."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import webbrowser
from pathlib import Path

from eyas.config import read_config
from eyas.errors import EyasError
from eyas.plan import plan_run

CHECKOUT = Path(__file__).resolve().parents[3]
DEFAULT_CONFIG = "config/config.yaml"
# What may be made on the way to a report: the page, and cards of exports that are there. Seconds each.
QUICK_RULES = {"write_report", "export_cards"}


def _snakemake(configfile: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile")]
    # in its profile stand the triggers that decide what is up to date
    command += ["--workflow-profile", str(CHECKOUT / "profiles" / "default"), "--configfile", configfile]
    return subprocess.run([*command, "--cores", "1", *arguments], capture_output=True, text=True)


def _last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-15:])


def missing_jobs(configfile: str, page: str) -> dict[str, int]:
    """Jobs by rule that Snakemake would run for the page; raises EyasError."""
    done = _snakemake(configfile, "--dry-run", page)
    said = done.stdout + done.stderr
    if done.returncode:
        raise EyasError(f"snakemake cannot plan {page}:\n{_last_lines(said)}")
    table = re.search(r"^Job stats:\n.*?^total +\d+$", said, re.DOTALL | re.MULTILINE)
    if table is None:
        if "Nothing to be done" in said:
            return {}
        raise EyasError(f"snakemake told no plan for {page}:\n{_last_lines(said)}")
    found = {name: int(count) for name, count in re.findall(r"^(\w+) +(\d+)$", table[0], re.MULTILINE)}
    del found["total"]
    return found


def _unfinished(name: str, jobs: dict[str, int], configfile: str) -> str:
    before = {rule: count for rule, count in jobs.items() if rule != "write_report"}
    listed = ", ".join(f"{rule} {count}" for rule, count in before.items())
    option = "" if configfile == DEFAULT_CONFIG else f" --configfile {shlex.quote(configfile)}"
    return (
        f"the run {name} is not finished: its report needs {sum(before.values())} more jobs ({listed});"
        f" `snakemake --cores all{option}` goes on with it"
    )


def build_page(configfile: str | None) -> tuple[Path, str | None]:
    """The page of the run that a configuration describes, and why it is of an earlier state, if it is.

    Raises EyasError when the configuration cannot be used, or the run is not finished and has no page yet.
    """
    source = configfile or DEFAULT_CONFIG
    if configfile is None and not Path(source).is_file():
        raise EyasError(f"{source} is not there; name a configuration with --configfile")
    config = read_config(source)
    plan = plan_run(config.model_dump(mode="json", exclude_unset=True), source)
    target = f"{plan.run_folder}/report.html"  # as the rule has it: Path would make another string of ./results
    page = Path(target)
    jobs = missing_jobs(source, target)
    if set(jobs) <= QUICK_RULES:
        if not jobs:
            return page, None
        done = _snakemake(source, target)
        if done.returncode == 0:
            return page, None
        reason = f"the report could not be written:\n{_last_lines(done.stdout + done.stderr)}"
    else:
        reason = _unfinished(config.name, jobs, source)
    if not page.is_file():
        raise EyasError(reason)
    return page, reason


def has_desktop() -> bool:
    """Whether a browser's window can come up; without one, Python would take a text browser or wait for one."""
    return sys.platform in ("darwin", "win32") or any(
        os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    )


def show(page: Path, reason: str | None, open_it: bool) -> int:
    """Print the page's path, and open it if there is a desktop. `reason`: why it is of an earlier state."""
    if reason is not None:
        print(f"This report is of an earlier state: {reason}", file=sys.stderr)
    print(page)
    if open_it and not has_desktop():
        print("There is no desktop here: open that file in a browser; it works offline.", file=sys.stderr)
    elif open_it and not webbrowser.open(page.resolve().as_uri()):
        print("No browser could be started: open that file in one.", file=sys.stderr)
    return 0
