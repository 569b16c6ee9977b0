"""Make the environment of the SGLang tests: SGLang 0.5.23 on a CPU, its stand-ins, and the capture plugin.

    python tests/integration/sglang/make_environment.py [FOLDER]

The folder is `.venv-sglang` in the repository unless it is named. Nothing is done when it is up to date. Takes about
four minutes and 2.6 GB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
STAND_INS, PLUGIN = HERE / "stand_ins", CHECKOUT / "workflow" / "capture"

# In this order: what pins a torch of its own comes without its dependencies.
STEPS = [
    ["torch==2.13.0", "numpy", "setuptools", "wheel"],
    ["--no-deps", "triton==3.9.0", "torchvision==0.28.0", "sglang==0.5.23"],
    [
        "transformers==5.19.0", "aiohttp", "fastapi", "uvicorn", "uvloop", "orjson", "msgspec", "pyzmq", "psutil",
        "pydantic", "python-multipart", "requests", "tqdm", "pillow", "packaging", "setproctitle", "prometheus-client",
        "partial_json_parser", "pybase64", "IPython", "dill", "apache-tvm-ffi==0.1.11", "sentencepiece",
        "compressed-tensors==0.18.0", "gguf", "openai==2.8.0", "einops", "xgrammar==0.2.7", "jsonschema", "soundfile",
        "openai-harmony",
    ],
]  # fmt: skip


def digest(paths: list[Path]) -> str:
    """Of all files that decide what is installed."""
    found = hashlib.sha256()
    for path in paths:
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.suffix in (".py", ".toml"))
        for file in files:
            found.update(str(file.relative_to(CHECKOUT)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def wanted() -> list[str]:
    """Digests of what comes from PyPI, of the stand-ins and of the plugin: each is installed by itself."""
    packages = hashlib.sha256(json.dumps(STEPS).encode()).hexdigest()
    return [packages, digest([STAND_INS]), digest([PLUGIN])]


def installed(folder: Path) -> list[str]:
    """The digests of what lies in the folder, as far as it is complete."""
    stamp = folder / ".eyas"
    return stamp.read_text().split() if stamp.is_file() else []


def up_to_date(folder: Path) -> str | None:
    """Python of the environment when there is nothing to do, else None."""
    python = folder / "bin" / "python"
    return str(python) if installed(folder) == wanted() and python.exists() else None


def install(pip: list[str], source: Path) -> None:
    """Install a package of this repository from a copy: setuptools leaves a build folder where it works."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(source, Path(folder) / source.name)
        subprocess.run([*pip, "--no-deps", "--force-reinstall", str(copy)], check=True)


def make(folder: Path) -> str:
    """Make or complete the environment; returns its python."""
    python = str(folder / "bin" / "python")
    if up_to_date(folder):
        print(f"{folder} is up to date.", flush=True)
        return python
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    stamp, need = folder / ".eyas", wanted()
    if installed(folder)[:1] != need[:1]:
        stamp.unlink(missing_ok=True)
        print(f"Making {folder} (about four minutes) …", flush=True)
        venv.create(folder, with_pip=True, clear=folder.exists())
        for step in STEPS:
            subprocess.run([*pip, *step], check=True)
    stamp.write_text(need[0])
    install(pip, STAND_INS)
    site = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()  # fmt: skip
    (Path(site) / "eyas_sglang_cpu.pth").write_text("import eyas_sglang_cpu; eyas_sglang_cpu.install()\n")
    install(pip, PLUGIN)
    stamp.write_text(" ".join(need))
    return python


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=CHECKOUT / ".venv-sglang", help="where to make it")
    os.environ.pop("PYTHONPATH", None)
    try:
        make(parser.parse_args().folder.absolute())
    except subprocess.CalledProcessError as exc:
        sys.exit(f"error: {' '.join(map(str, exc.cmd[:8]))} … failed with exit code {exc.returncode}")
