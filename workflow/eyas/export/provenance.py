"""Where an export comes from: versions, commit, configuration, digests. Without times, so that equal runs agree."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import eyas
from eyas.versions import VERSIONS

FORMAT_VERSION = VERSIONS["card"]


def package_versions() -> dict[str, str | None]:
    """Versions of what computed the drafter; None for a package that is not installed here."""
    versions: dict[str, str | None] = {"eyas": eyas.__version__, "python": platform.python_version()}
    for name in ("torch", "transformers", "snakemake", "safetensors"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def git_state(folder: Path = Path(eyas.__file__).parent) -> dict[str, Any] | None:
    """`commit` and `dirty` (whether tracked files differ from it) of the checkout that the package is in.

    None outside a checkout, also where the package only lies inside somebody else's.
    """

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if git("ls-files", "--error-unmatch", "versions.py") is None or (commit := git("rev-parse", "HEAD")) is None:
        return None
    status = git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if status is None else bool(status)}


def provenance(
    config: dict[str, Any], target: dict[str, Any], manifest_digest: str, checkpoint: dict[str, Any], files: Any
) -> dict[str, Any]:
    """Contents of provenance.json.

    `config`: the settings that may be published (eyas.plan.export.public_config); `target`: the manifest's;
    `checkpoint`: `epoch` and the `checksum` of its model.safetensors; `files`: those of the export's sidecar.
    """
    return {
        "format_version": FORMAT_VERSION,
        "versions": package_versions(),
        "git": git_state(),
        "artefact_versions": VERSIONS,
        "manifest_digest": manifest_digest,
        "checkpoint": checkpoint,
        "files": files,
        "target": target,
        "config": config,
    }
