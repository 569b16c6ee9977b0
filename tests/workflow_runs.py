"""Running real Snakemake on a tiny configuration, killing it, and comparing what it leaves."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHECKOUT = Path(__file__).parents[1]
ROWS = 40


def tiny_settings(target: Path) -> dict:
    """Two shards of 20 rows; batches so small that every stage can be killed in the middle."""
    return {
        "name": "tiny",
        "target": {"path": str(target)},
        "data": {"prompts": ["prompts.jsonl"], "rows": ROWS, "shard_rows": 20, "held_out_every": 5, "duplicates": "keep"},
        "responses": {"max_new_tokens": 24, "batch_rows": 4},
        "tokenization": {"max_length": 128},
        "extraction": {"batch_tokens": 64},
        "drafters": {
            "small": {
                "draft_vocab_size": 100,
                "training": {
                    "epochs": 2, "schedule_epochs": 2, "ttt_steps": 3, "batch_tokens": 64, "learning_rate": 0.01,
                    "warmup_steps": 4, "threads": 1, "checkpoint_minutes": 0,
                },
            }
        },
        "evaluation": {"prompts": 4, "max_new_tokens": 16, "draft_steps": 3, "threads": 1},
    }  # fmt: skip


@dataclass
class Result:
    code: int
    text: str

    @property
    def jobs(self) -> dict[str, int]:
        """Jobs of a dry run by rule, from Snakemake's own table."""
        table = re.findall(r"^([\w-]+) +(\d+)$", self.text.split("Reasons:")[0], re.M)
        return {name: int(count) for name, count in table if name not in ("all", "total")}

    @property
    def nothing_to_do(self) -> bool:
        return self.code == 0 and "Nothing to be done" in self.text


@dataclass
class Workdir:
    """A folder in which Snakemake runs, with its own configuration and results."""

    path: Path
    settings: dict
    checkout: Path = CHECKOUT

    def write_config(self) -> Path:
        file = self.path / "config.yaml"
        file.write_text(yaml.safe_dump(self.settings, sort_keys=False), encoding="utf-8")
        return file

    def command(self, *arguments: str) -> list[str]:
        self.write_config()
        command = [sys.executable, "-m", "snakemake", "--snakefile", str(self.checkout / "Snakefile")]
        command += ["--workflow-profile", str(self.checkout / "profiles" / "default"), "--configfile", "config.yaml"]
        return [*command, "--cores", "2", *arguments]

    def snakemake(self, *arguments: str, **options) -> Result:
        done = subprocess.run(
            self.command(*arguments), cwd=self.path, capture_output=True, text=True, timeout=600, **options
        )
        return Result(done.returncode, done.stdout + done.stderr)

    def dry_run(self, *arguments: str) -> Result:
        return self.snakemake("--dry-run", *arguments)

    def run(self, *arguments: str) -> Result:
        result = self.snakemake(*arguments)
        assert result.code == 0, result.text[-6000:]
        return result

    def kill_during(self, condition: Callable[[], bool], *arguments: str, only_snakemake: bool = False) -> None:
        """Start Snakemake and SIGKILL it, with all its jobs, as soon as `condition` holds."""
        process = subprocess.Popen(
            self.command(*arguments), cwd=self.path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        deadline = time.monotonic() + 300
        try:
            while not condition():
                assert process.poll() is None, process.stdout.read().decode()[-4000:]
                assert time.monotonic() < deadline, "the moment to kill never came"
                time.sleep(0.002)
            assert process.poll() is None, "Snakemake had finished before it could be killed"
        finally:
            if only_snakemake:
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
        if not only_snakemake:
            wait_until_gone(process.pid)

    @property
    def run_folder(self) -> Path:
        return self.path / "results" / "tiny"

    def digests(self, *patterns: str) -> dict[str, str]:
        """Checksums of the run's artefacts, wall-clock times in them left aside; hidden-state sidecars hold little else."""
        found = {}
        for pattern in patterns or ("*",):
            for file in sorted(self.run_folder.rglob(pattern)):
                name = file.relative_to(self.run_folder).as_posix()
                timed = name.startswith(("logs/", "benchmarks/")) or re.match(r"hidden_states/rows_.*\.json$", name)
                if file.is_file() and not timed:
                    found[name] = hashlib.sha256(without_times(name, file.read_bytes())).hexdigest()
        return found

    def leftovers(self) -> list[str]:
        """Locks, staging folders and partial files that should be gone."""
        return [str(p) for p in (self.path / "results").rglob(".*")]


def without_times(name: str, content: bytes) -> bytes:
    """A file's contents without wall-clock times, and digests of them: two runs never agree on those."""
    if name in ("summary.txt", "report.html") or name.endswith("/README.md"):
        return b""  # they show the figures that summary.json and evaluation.json hold
    timed = ("seconds", "tokens_per_second", "speedup", "digest", "summary.txt", "README.md")

    def stripped(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: stripped(entry) for key, entry in value.items() if key not in timed}
        return value

    if name == "summary.json" or name.endswith(("/evaluation.json", "/provenance.json")):
        return json.dumps(stripped(json.loads(content))).encode()
    return content


def wait_until_gone(group: int) -> None:
    """Wait until no process of a killed process group is left."""
    for _ in range(500):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)


def new_workdir(path: Path, target: Path) -> Workdir:
    from tiny import write_prompts_file

    path.mkdir(parents=True, exist_ok=True)
    write_prompts_file(path / "prompts.jsonl", ROWS)
    return Workdir(path, tiny_settings(target))
