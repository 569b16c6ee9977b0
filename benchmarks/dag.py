"""What planning costs: `snakemake -n` and a rerun with nothing to do, for runs of 1,000 to 20,000 shards.

CPU seconds (user and system) of the snakemake process, start included, beside those of `dag_bare.smk`: the same
rules, jobs and files without Eyas's code, with the same profile. The two take turns; the figures are medians of the
rounds. No model is needed: the run folders are made of small files.

    python benchmarks/dag.py             three rounds, about five CPU minutes
    python benchmarks/dag.py --quick     one round, 1,000 shards only
    python benchmarks/dag.py --json      the last line of the output is JSON
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import yaml
from eyas.plan import plan_run
from rich.console import Console
from rich.table import Table

CHECKOUT = Path(__file__).resolve().parents[1]
SHARD_ROWS, EPOCHS, VOCABULARY = 10, 3, 100
TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 1000, "num_hidden_layers": 12,
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@dataclass
class Cost:
    cpu_s: float
    peak_mib: float
    output: str


def settings_of(shards: int) -> dict:
    return {
        "name": f"run_{shards}",
        "target": {"path": "target"},
        "data": {"prompts": ["prompts.jsonl"], "rows": shards * SHARD_ROWS, "shard_rows": SHARD_ROWS,
                 "held_out_every": 10},
        "drafters": {"eagle3": {"draft_vocab_size": VOCABULARY, "training": {"epochs": EPOCHS}}},
    }  # fmt: skip


def write_inputs(folder: Path, shards: int) -> None:
    (folder / "target").mkdir(exist_ok=True)
    (folder / "target" / "config.json").write_text(json.dumps(TARGET))
    (folder / "target" / "tokenizer.json").write_text("{}")
    (folder / "prompts.jsonl").write_text('{"prompt": "x"}\n')
    (folder / f"eyas_{shards}.yaml").write_text(yaml.safe_dump(settings_of(shards)))
    jobs = plan_in(folder, shards).token_jobs
    bare = {
        "shards": shards, "shard_rows": SHARD_ROWS, "step": len(jobs[0].shards), "run": f"results/run_{shards}",
        "target": "target/config.json", "epochs": EPOCHS, "vocabulary": VOCABULARY,
    }  # fmt: skip
    (folder / f"bare_{shards}.yaml").write_text(yaml.safe_dump(bare))


def plan_in(folder: Path, shards: int):
    before = os.getcwd()
    os.chdir(folder)
    try:
        return plan_run(settings_of(shards), "benchmark")
    finally:
        os.chdir(before)


def snakemake(folder: Path, which: str, shards: int, *arguments: str) -> Cost:
    """Run Snakemake on one of the two and take its cost from the kernel."""
    file = CHECKOUT / "Snakefile" if which == "eyas" else CHECKOUT / "benchmarks" / "dag_bare.smk"
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(file), "--configfile", f"{which}_{shards}.yaml"]
    command += ["--workflow-profile", str(CHECKOUT / "profiles" / "default"), "--cores", "2", *arguments]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{text[-3000:]}")
    return Cost(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text)


def jobs_in(output: str) -> dict[str, list[set[str]]]:
    """The jobs of a dry run by their first output: rule, inputs and outputs."""
    found = {}
    for block in re.split(r"\n(?=(?:local)?rule \w+[^\n]*:\n)", output)[1:]:
        rule = re.match(r"(?:local)?rule ([^:]+):", block)
        files = {
            key: set(line.split(", ")) if (line := "".join(re.findall(rf"^    {key}: (.*)$", block, re.M))) else set()
            for key in ("input", "output")
        }
        found[min(files["output"], default="")] = [{rule[1]}, files["input"], files["output"]]
    return found


def finish(folder: Path, shards: int, jobs: dict[str, list[set[str]]]) -> None:
    """Make a finished run: every output of every job, and every shard, all of the same age."""
    run = folder / "results" / f"run_{shards}"
    facts = json.dumps({"rows": 10, "sequences": 10, "tokens": 1000, "skipped": []})
    files = {folder / name: "" for _, _, outputs in jobs.values() for name in outputs if name}
    plan = plan_in(folder, shards)
    for stage in (plan.prompt_files, plan.response_files, plan.token_files, plan.state_files):
        for suffix in stage.suffixes.values():
            content = facts if suffix == ".json" else ""
            files |= {folder / stage.folder / f"{shard.name}{suffix}": content for shard in plan.shards}
    for path in {path.parent for path in files}:
        path.mkdir(parents=True, exist_ok=True)
    for path, content in files.items():
        path.write_text(content)
        os.utime(path, (1_700_000_000, 1_700_000_000))
    for path in (folder / "prompts.jsonl", folder / "target" / "config.json"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    assert run.is_dir()


def same_jobs(folder: Path, shards: int) -> dict[str, list[set[str]]]:
    """The jobs that both plan for a run that has nothing yet; SystemExit where they differ."""
    shown = {which: jobs_in(snakemake(folder, which, shards, "--dry-run").output) for which in ("eyas", "bare")}
    assert len(shown["eyas"]) > 3 * len(plan_in(folder, shards).token_jobs), "the dry run could not be read"
    if shown["eyas"] != shown["bare"]:
        differ = {k for k in shown["eyas"] | shown["bare"] if shown["eyas"].get(k) != shown["bare"].get(k)}
        raise SystemExit(f"dag_bare.smk has another DAG than Eyas, at {sorted(differ)[:5]}; bring it up to date")
    return shown["eyas"]


def measure(folder: Path, shards: int, rounds: int) -> dict[str, dict[str, float]]:
    """CPU seconds and MiB of both, planning everything and finding nothing to do."""
    write_inputs(folder, shards)
    jobs = same_jobs(folder, shards)
    result = {}
    for kind, arguments in (("dry_run", ("--dry-run", "--quiet")), ("no_op", ("--quiet",))):
        if kind == "no_op":
            finish(folder, shards, jobs)
        costs: dict[str, list[Cost]] = {"eyas": [], "bare": []}
        for _ in range(rounds):
            for which, taken in costs.items():
                taken.append(snakemake(folder, which, shards, *arguments))
        eyas, bare = (statistics.median(cost.cpu_s for cost in costs[which]) for which in ("eyas", "bare"))
        result[kind] = {
            "cpu_s": round(eyas, 2),
            "bare_cpu_s": round(bare, 2),
            "ratio_to_bare": round(eyas / bare, 3),
            "peak_mib": round(max(cost.peak_mib for cost in costs["eyas"])),
            "bare_peak_mib": round(max(cost.peak_mib for cost in costs["bare"])),
        }
    return result


def default_config(folder: Path) -> float:
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile"), "--dry-run", "--quiet"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, "the dry run of the default configuration failed"
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=None, help="default: 1000 5000 20000")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round with 1,000 shards")
    parser.add_argument("--json", action="store_true", help="end with a line of JSON")
    args = parser.parse_args()
    sizes = args.shards or ([1000] if args.quick else [1000, 5000, 20000])
    rounds = 1 if args.quick else args.rounds
    console = Console(stderr=args.json)
    table = Table("shards", "", "CPU-s", "bare", "ratio", "MiB", "bare")
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        default = statistics.median(default_config(Path(scratch)) for _ in range(rounds))
        for shards in sizes:
            found[shards] = measure(Path(scratch), shards, rounds)
            for kind, row in found[shards].items():
                table.add_row(f"{shards:,}", kind.replace("_", " "), *(str(value) for value in row.values()))
    console.print(table)
    console.print(f"Dry run of the default configuration: {default:.2f} CPU-s")
    if args.json:
        result = {
            "dry_run_cpu_s": {str(n): kinds["dry_run"]["cpu_s"] for n, kinds in found.items()},
            "ratio_to_bare": {str(n): kinds["dry_run"]["ratio_to_bare"] for n, kinds in found.items()},
            "no_op_cpu_s": {str(n): kinds["no_op"]["cpu_s"] for n, kinds in found.items()},
            "no_op_ratio_to_bare": {str(n): kinds["no_op"]["ratio_to_bare"] for n, kinds in found.items()},
            "peak_mib": {str(n): kinds["dry_run"]["peak_mib"] for n, kinds in found.items()},
            "default_config_cpu_s": round(default, 2),
            "rounds": rounds,
            "details": {str(n): kinds for n, kinds in found.items()},
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
