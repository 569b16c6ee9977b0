"""Extraction through SGLang: what capture costs the server, how fast the collector writes, whether the plan is right.

- `capture_ratio`: prefill tokens/s of one SGLang server on the CPU, with capture over without. `null` where the
  SGLang environment (`.venv-sglang`, made when it is missing) cannot be had; standard error says why.
- `collector_ratio`: bytes/s of the collector, fed dumps of a 7168-wide bfloat16 target that lie ready in memory, over
  plain sequential writing of the same bytes to an allocated file on the same disk; fsync in both.
- `plan_error`: what `eyas plan`'s bytes and `du` of those shards differ by, as a share.

All pairs take turns, and who begins takes turns; ratios are medians of each round's ratio.

    python benchmarks/extraction.py            4 GB of states
    python benchmarks/extraction.py --quick    1 GB, fewer rounds
    python benchmarks/extraction.py --json     the last line of the output is JSON
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import extraction_collector as collector
import extraction_server as server
import numpy as np
from eyas.errors import EyasError
from rich.console import Console
from rich.table import Table


def capture(python: str | None, memory: Path, quick: bool) -> dict[str, list[float]] | None:
    """Tokens a second of each round; None where there is no server to be had."""
    python = python or server.environment()
    if python is None:
        print("capture_ratio is null: the SGLang environment cannot be made here (see above).", file=sys.stderr)
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            return server.measure(Path(folder), memory, python, rounds=3 if quick else 7, rows=8 if quick else 16)
        except EyasError as exc:
            print(f"capture_ratio is null: {exc}", file=sys.stderr)
            log_file = Path(folder) / "server.log"
            if log_file.exists():
                print("\n".join(log_file.read_text(errors="replace").splitlines()[-20:]), file=sys.stderr)
            return None


def show(title: str, unit: str, found: dict[str, list[float]], scale: float, console: Console) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("", f"{unit}, median", "rounds"):
        table.add_column(column, justify="left" if not column else "right")
    for name, values in found.items():
        each = " ".join(f"{value / scale:,.0f}" for value in values)
        table.add_row(name, f"{np.median(values) / scale:,.0f}", each)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 GB of states, fewer rounds")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--gb", type=float, help="gigabytes of states (default: 4, with --quick 1)")
    parser.add_argument("--python", help="python of an SGLang environment with the plugin (default: .venv-sglang's)")
    parser.add_argument("--no-server", action="store_true", help="without the server: capture_ratio is null")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="folder in memory for the dumps")
    args = parser.parse_args()
    rounds = 4 if args.quick else 8
    wanted = int((args.gb or (1 if args.quick else 4)) * 1e9)
    console = Console(width=140)
    result: dict[str, Any] = {"capture_ratio": None, "collector_ratio": None, "plan_error": None}
    # On the disk of the results, which may be a link to another one.
    place = Path("results").resolve() if Path("results").is_dir() else Path.cwd()
    with (
        tempfile.TemporaryDirectory(dir=place, prefix=".benchmark-") as folder,
        tempfile.TemporaryDirectory(dir=args.memory, prefix="eyas-benchmark-") as memory,
    ):
        nbytes = collector.room(Path(folder), Path(memory), wanted, rounds)
        if nbytes < wanted:
            print(f"There is room for {nbytes / 1e9:.1f} GB of states only.", file=sys.stderr)
        written = collector.measure(Path(folder), Path(memory), nbytes, rounds)
        result |= collector.result(written)
        sides = {"collector": written.collector, "plain writing": written.plain}
        show(f"{rounds} shards of {written.shard_bytes / 1e6:,.0f} MB", "MB/s", sides, 1e6, console)
        shutil.rmtree(Path(folder) / "run")
        if not args.no_server:
            prefilled = capture(args.python, Path(memory), args.quick)
            if prefilled is not None:
                result |= server.result(prefilled)
                title = f"Prefill of {server.TOKENS}-token rows, width {server.HIDDEN}, 8 layers"
                show(title, "tokens/s", prefilled, 1, console)
    result |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "versions": {"torch": version("torch")}}
    console.print(
        f"Capture {result['capture_ratio']}, collector {result['collector_ratio']}, plan off by"
        f" {result['plan_error']:.2e}."
    )
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
