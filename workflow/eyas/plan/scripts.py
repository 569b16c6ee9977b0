"""How the rules' shell commands find Python, this checkout's package and its scripts."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def prepare_environment(checkout: Path) -> None:
    """Set the environment that jobs inherit.

    Rules say `python "$EYAS_SCRIPTS"/x.py`: the Python that runs Snakemake, the scripts of
    `checkout`. Neither path is part of a rule's text or params, so that a checkout in another
    place re-runs nothing.
    """
    environment = os.environ
    environment["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), environment.get("PATH", os.defpath)])
    package = str(checkout / "workflow")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [package, environment.get("PYTHONPATH")]))
    environment["EYAS_SCRIPTS"] = str(checkout / "workflow" / "scripts")
