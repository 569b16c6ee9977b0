"""What this machine has: versions, devices, disk, shared memory; what is missing for which engine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from eyas.devices import visible_devices
from eyas.errors import EyasError
from eyas.shards import write_lock

# What each part of Eyas needs besides Python itself.
NEEDS = {
    "workflow": ["snakemake", "pydantic", "PyYAML", "rich", "xxhash", "numpy"],
    "engine transformers": ["torch", "transformers", "safetensors", "tokenizers"],
    "target.gguf": ["gguf", "accelerate"],
    "profile slurm": ["snakemake-executor-plugin-slurm"],
}
REQUIRED = ("workflow", "engine transformers")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _existing(folder: Path) -> Path:
    folder = folder.absolute()
    while not os.path.exists(folder):  # Path.exists raises where a parent may not be entered
        folder = folder.parent
    return folder


def _disk(folder: Path) -> dict[str, Any]:
    place = _existing(folder)
    usage = shutil.disk_usage(place)
    return {"path": str(folder), "free_bytes": usage.free, "total_bytes": usage.total}


def _file_system(folder: Path) -> dict[str, bool]:
    """Whether the results' file system can do what Eyas relies on."""
    able = {"write": False, "lock": False, "hard_links": False, "preallocate": False}
    try:
        with tempfile.TemporaryDirectory(dir=_existing(folder), prefix=".eyas-doctor-") as name:
            probe = Path(name) / "probe"
            probe.write_bytes(b"x")
            able["write"] = True
            with write_lock(probe):
                able["lock"] = True
            try:
                os.link(probe, probe.with_name("link"))
                able["hard_links"] = True
            except OSError:
                pass
            with open(probe, "r+b") as file:
                try:
                    os.posix_fallocate(file.fileno(), 0, 4096)
                    able["preallocate"] = True
                except OSError:
                    pass
    except (OSError, EyasError):
        pass
    return able


def _gpus() -> list[str]:
    """Names of the visible GPUs."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=index,name,memory.total", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    visible = set(visible_devices())
    lines = [line.strip() for line in listed.stdout.splitlines() if line.strip()]
    return [line for line in lines if line.split(",")[0] in visible] or lines[: len(visible)]


def examine(results: Path) -> dict[str, Any]:
    """Collect everything; imports none of the heavy packages."""
    missing = {part: [p for p in packages if _version(p) is None] for part, packages in NEEDS.items()}
    file_system = _file_system(results)
    problems = [f"{part}: missing {', '.join(missing[part])}" for part in REQUIRED if missing[part]]
    if not file_system["write"]:
        problems.append(f"cannot write in {_existing(results)}")
    elif not file_system["lock"]:
        problems.append(f"cannot lock files in {_existing(results)}")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "ready": not problems,
        "problems": problems,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": memory,
        "gpus": _gpus(),
        "versions": {p: _version(p) for p in ["eyas", *dict.fromkeys(p for ps in NEEDS.values() for p in ps)]},
        "missing": missing,
        "disk": {"results": _disk(results), "temporary": _disk(Path(tempfile.gettempdir()))},
        "shared_memory": _disk(Path("/dev/shm")) if Path("/dev/shm").is_dir() else None,
        "file_system": file_system,
    }


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"


def show(facts: dict[str, Any]) -> None:
    """Print the facts for people."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("machine", f"{facts['platform']}, {facts['cpus']} CPUs, {_gigabytes(facts['memory_bytes'])} memory")
    table.add_row("GPUs", "; ".join(facts["gpus"]) or "none (everything runs on the CPU; leave the stages' gpu at 0)")
    table.add_row("python", facts["python"])
    for name, version in facts["versions"].items():
        table.add_row(name, version or "[yellow]not installed[/]")
    for name, disk in facts["disk"].items():
        table.add_row(
            f"disk, {name}",
            f"{disk['path']}: {_gigabytes(disk['free_bytes'])} free of {_gigabytes(disk['total_bytes'])}",
        )
    if facts["shared_memory"]:
        table.add_row("shared memory", f"/dev/shm: {_gigabytes(facts['shared_memory']['free_bytes'])} free")
    lacking = [name.replace("_", " ") for name, able in facts["file_system"].items() if not able]
    table.add_row("file system", f"cannot: {', '.join(lacking)}" if lacking else "writes, locks, links, preallocates")
    for part, packages in facts["missing"].items():
        table.add_row(part, f"[yellow]missing {', '.join(packages)}[/]" if packages else "[green]ready[/]")
    console = Console()
    console.print(table)
    for problem in facts["problems"]:
        console.print(f"[red]{problem}[/]")
    console.print("Ready." if facts["ready"] else "Not ready.")
