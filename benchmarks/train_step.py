"""A drafter's training step: supervised tokens per CPU-second and peak memory, beside the peers'.

Every contestant is a process of its own that answers `run` on its standard input with one pass over the
workload (forward of all TTT steps, loss, backward, clipping, AdamW) and a line of JSON. They take turns,
A B C A B C, one at a time, one thread each, so that what else the machine does hits all of them.

    python benchmarks/train_step.py            all four workloads beside specforge and speculators
    python benchmarks/train_step.py --quick    without the peers, beside explicit scores and logits
    python benchmarks/train_step.py --json     the last line of the output is JSON
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import roofline
import workloads
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PEERS = ("specforge", "speculators")


@dataclass
class Contestant:
    """A worker process and what it has measured."""

    name: str
    process: subprocess.Popen[str]
    about: dict[str, Any]
    passes: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start(cls, name: str, python: str, script: Path, workload: Path) -> Contestant:
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(HERE.parent / "workflow") if name in ("eyas", "explicit") else "",
            "THP_MEM_ALLOC_ENABLE": str(int(json.loads(workload.read_text())["keep_freed_memory"])),
        }  # fmt: skip
        process = subprocess.Popen(
            [python, str(script), str(workload)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment, stderr=None if os.environ.get("BENCHMARK_STDERR") else subprocess.DEVNULL,
        )  # fmt: skip
        return cls(name, process, cls._answer(name, process))

    @staticmethod
    def _answer(name: str, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"error: {name} ended with status {process.wait()}; BENCHMARK_STDERR=1 shows why")

    def run(self, count: bool = True) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        result = self._answer(self.name, self.process)
        if count:
            self.passes.append(result)

    def stop(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    @property
    def speed(self) -> float:
        """Supervised tokens per CPU-second: the median of the passes."""
        return statistics.median(p["supervised"] / p["cpu_s"] for p in self.passes)

    @property
    def rss_mb(self) -> float:
        return max(p["peak_rss_mb"] for p in self.passes)


def peer_pythons(wanted: list[str]) -> dict[str, str]:
    """The peers' interpreters, made by `peers/setup.sh` where needed; a peer that cannot be had is left out."""
    found = {}
    for peer in wanted:
        python = HERE / ".venvs" / peer / "bin" / "python"
        done = subprocess.run(["bash", str(HERE / "peers" / "setup.sh"), peer], stdout=sys.stderr)
        if done.returncode == 0 and python.exists():
            found[peer] = str(python)
        else:
            print(f"{peer} cannot be installed here; it is left out.", file=sys.stderr)
    return found


def measure(
    name: str, sizes: dict[str, Any], rows: list[dict[str, int]], rounds: int, pythons: dict[str, str], explicit: bool,
    warm: bool, tuned: bool,
) -> list[Contestant]:  # fmt: skip
    """All contestants on one workload, taking turns."""
    with tempfile.TemporaryDirectory() as folder:
        workload = Path(folder) / f"{name}.json"
        workload.write_text(json.dumps(sizes | {"rows": rows, "keep_freed_memory": tuned}), encoding="utf-8")
        contestants = [Contestant.start("eyas", sys.executable, HERE / "eyas_worker.py", workload)]
        if explicit:
            contestants.append(Contestant.start("explicit", sys.executable, HERE / "explicit_worker.py", workload))
        for peer, python in pythons.items():
            contestants.append(Contestant.start(peer, python, HERE / "peers" / f"{peer}_worker.py", workload))
        for turn in range(rounds + warm):
            for contestant in contestants:
                contestant.run(count=turn >= warm)
                if contestant.passes:
                    print(f"{name}: {contestant.name} {contestant.speed:.1f} tokens/CPU-s", file=sys.stderr)
        for contestant in contestants:
            contestant.stop()
    return contestants


def show(name: str, contestants: list[Contestant], console: Console) -> None:
    table = Table(title=name, title_justify="left")
    for column in ("", "supervised tokens / CPU-s", "passes", "peak RSS, MiB", "variant"):
        table.add_column(column, justify="right" if column not in ("", "variant") else "left")
    for c in contestants:
        each = " ".join(f"{p['supervised'] / p['cpu_s']:.0f}" for p in c.passes)
        version = f" {c.about['version']}" if c.about.get("version") else ""
        table.add_row(c.name + version, f"{c.speed:.1f}", each, f"{c.rss_mb:.0f}", c.about.get("variant", ""))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="without the peers, smaller sizes, under two minutes")
    parser.add_argument("--json", action="store_true", help="end with one JSON line")
    parser.add_argument("--rounds", type=int, default=3, help="timed passes of each contestant (default: 3)")
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=PEERS, help="which peers (default: both)")
    parser.add_argument(
        "--sample",
        type=int,
        default=16,
        help="rows of the chat mix (of 200), half as many of the long-prompt mix (of 40)",
    )
    parser.add_argument(
        "--only", nargs="*", choices=["t512", "t1024", "t2048", "chat", "long_prompt"], help="workloads"
    )
    parser.add_argument(
        "--tuned-peers", action="store_true", help="give SpecForge the memory settings that Eyas's training job uses"
    )
    args = parser.parse_args()
    sizes = workloads.QUICK_SIZES if args.quick else workloads.SIZES
    sample = 4 if args.quick else args.sample
    jobs = {
        "t512": workloads.full_mask(512),
        "t1024": workloads.full_mask(1024),
        "t2048": workloads.full_mask(2048),
        "chat": workloads.chat_mix(sample),
        "long_prompt": workloads.long_prompt_mix(max(sample // 2, 1)),
    }
    pythons = {} if args.quick else peer_pythons(args.peers)
    console = Console(width=140)
    result: dict[str, Any] = {"against": "explicit scores and logits" if args.quick else "the better peer"}
    speeds: dict[str, Any] = {}
    for name, rows in jobs.items():
        if args.only is not None and name not in args.only:
            continue
        before = roofline.matmul_gflops(sizes) if name == "t512" else 0.0
        mixes = name in ("chat", "long_prompt")
        # the plain step is there at the lengths of (1); in the mixes it is only needed where the peers are not
        explicit = not mixes or not pythons
        found = measure(
            name, sizes, rows, 1 if args.quick else args.rounds, pythons if name != "t1024" else {}, explicit,
            warm=not mixes and not (args.quick and name != "t512"), tuned=args.tuned_peers,
        )  # fmt: skip
        show(name, found, console)
        ours = found[0]
        others = [c for c in found[1:] if c.name in pythons] or found[1:]
        best = max(others, key=lambda c: c.speed)
        result[f"ratio_{name}"] = round(ours.speed / best.speed, 3)
        speeds[name] = {c.name: round(c.speed, 1) for c in found}
        result.setdefault("peers", {}).update({c.name: c.about["version"] for c in found[1:] if c.about["version"]})
        if name == "t2048":
            result["rss_ratio_t2048"] = round(ours.rss_mb / best.rss_mb, 3)
        if name == "t512":
            limit = (before + roofline.matmul_gflops(sizes)) / 2
            flops = workloads.dense_flops(sizes)
            result["roofline_gflops"] = round(limit, 1)
            result["mflop_a_token"] = round(flops["asked"] / 1e6, 1)
            result["roofline_share"] = round(flops["asked"] * ours.speed / 1e9 / limit, 3)
            result["roofline_share_performed"] = round(flops["done"] * ours.speed / 1e9 / limit, 3)
            console.print(
                f"Matrix products alone: {limit:.1f} GFLOP/s on one thread. Eyas reaches"
                f" {result['roofline_share']:.0%} of that by the FLOPs that the arithmetic asks for,"
                f" {result['roofline_share_performed']:.0%} by those that it performs."
            )
    result["tokens_per_cpu_s"] = speeds
    for name in (*(f"ratio_{job}" for job in jobs), "rss_ratio_t2048", "roofline_share", "peers"):
        result.setdefault(name, None)
    if args.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
