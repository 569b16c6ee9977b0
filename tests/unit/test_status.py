"""`eyas status`: every verdict, counts against what was put there, heartbeats of real processes that are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from eyas.cli.main import main
from eyas.extraction.layout import shard_bytes
from eyas.jobs.heartbeat import Heartbeat, run_folder_of, stage_of
from eyas.shards import Shard, shards_of, write_arrays
from eyas.status import Status, collect, find_status_run
from eyas.status.verdict import LOADING_SECONDS, QUIET_SECONDS

WIDTH, TOKENS = 64, 7  # tokens of a row
GONE = 2**22 + 5  # above the largest process number of Linux


def put(path: Path, values: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))


class Run:
    """A run's folder, filled stage by stage."""

    def __init__(self, folder: Path, rows: int = 40, shard_rows: int = 10) -> None:
        self.folder, self.rows, self.shard_rows = folder, rows, shard_rows
        self.shards = shards_of(rows, shard_rows)

    def record(self, pid: int | None = None, outcome: str | None = None, started: float = 0.0, **more: object) -> None:
        values = {
            "run": self.folder.name, "rows": self.rows, "shard_rows": self.shard_rows, "hidden_size": WIDTH,
            "dtype": "bfloat16", "drafters": {"small": {"epochs": 2, "draft_vocab_size": 100}},
            "pid": pid or os.getpid(), "host": socket.gethostname(), "started": started or time.time() - 5000,
            "outcome": outcome,
        }  # fmt: skip
        put(self.folder / "logs" / "jobs" / "run.json", values | more)

    def prompts(self) -> None:
        put(self.folder / "prompts" / "index.json", {"rows": self.rows, "shard_rows": self.shard_rows})

    def tokens(self, shards: list[Shard], arrays: bool = True) -> None:
        for shard in shards:
            put(self.folder / "conversations" / f"{shard.name}.json", {})
            count = len(shard)
            put(
                self.folder / "tokens" / f"{shard.name}.json",
                {"rows": count, "sequences": count, "tokens": TOKENS * count, "skipped": []},
            )
            if arrays:
                offsets, ids = np.arange(count + 1) * TOKENS, np.arange(shard.start, shard.end)
                write_arrays(
                    self.folder / "tokens" / f"{shard.name}.safetensors", {"offsets": offsets, "row_ids": ids}, {}
                )

    def states(self, shards: list[Shard], real: bool = True) -> None:
        for shard in shards:
            tokens = TOKENS * len(shard)
            facts = {"tokens": tokens, "hidden_size": WIDTH, "dtype": "bfloat16", "seconds": 2.0, "tokens_per_second": tokens / 2}  # fmt: skip
            put(self.folder / "hidden_states" / f"{shard.name}.json", facts)
            size = shard_bytes(tokens, len(shard), WIDTH, "bfloat16") if real else 1
            with open(self.folder / "hidden_states" / f"{shard.name}.safetensors", "wb") as file:
                file.truncate(size)

    def journal(self, shard: Shard, sequences: range, torn: str = "") -> Path:
        path = self.folder / "hidden_states" / ".staging" / shard.name / "journal.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [{"fingerprint": "x"}, *({"sequence": i} for i in sequences)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
        return path

    def rest(self) -> None:
        """All that comes after the hidden states."""
        put(self.folder / "hidden_states" / "data_config.json", {})
        put(self.folder / "vocab_map" / "100.json", {})
        for epoch in range(3):
            put(self.folder / "drafters" / "small" / f"epoch_{epoch}" / "trainer_state.json", {})
        put(self.folder / "drafters" / "small" / "evaluation.json", {})
        for server in ("sglang", "vllm"):
            for name in ("export.json", "README.md", "provenance.json"):
                put(self.folder / "drafters" / "small" / "export" / server / name, {})
        for name in ("summary.txt", "report.html"):
            (self.folder / name).write_text("x")

    def beat(
        self, label: str = "hidden_states/rows_10-20", ago: float = 1.0, pid: int | None = None, **more: object
    ) -> None:
        now = time.time() - ago
        log = self.folder / "logs" / f"{label}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("line\n")
        os.utime(log, (more.pop("log_time", now), now) if "log_time" not in more else (more["log_time"],) * 2)
        values = {
            "label": label, "stage": stage_of(label), "log": str(log), "pid": pid or os.getpid(),
            "host": socket.gethostname(), "started": now - 100, "updated": now, "what": "Hidden states", "unit": "tokens",
            "done": 90, "total": 700, "counted": 90, "counting_since": now - 30, "changed": now,
            "samples": [[now - 60, 0], [now - 30, 30], [now, 90]],
        }  # fmt: skip
        put(self.folder / "logs" / "jobs" / f"{label.replace('/', '+')}.json", values | more)

    def failure(self, label: str = "hidden_states/rows_10-20", ago: float = 10.0, line: str = "no room") -> None:
        log = str(self.folder / "logs" / f"{label}.log")
        put(
            self.folder / "logs" / "jobs" / f"{label.replace('/', '+')}.failed.json",
            {"label": label, "stage": stage_of(label), "log": log, "line": line, "time": time.time() - ago},
        )

    def age(self, seconds: float) -> None:
        """Have every file been written that long ago."""
        moment = time.time() - seconds
        for path in self.folder.rglob("*"):
            os.utime(path, (moment, moment))

    @property
    def status(self) -> Status:
        return collect(self.folder)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "results" / "mine")


@pytest.fixture
def half(run: Run) -> Run:
    """All tokens, one shard of states, another one half written."""
    run.prompts()
    run.tokens(run.shards)
    run.states(run.shards[:1])
    run.journal(run.shards[1], range(4), torn='{"sequ')
    return run


def counts(status: Status) -> dict[str, tuple[int, int | None]]:
    return {stage.name: (stage.done, stage.total) for stage in status.stages}


def test_counts_and_sums(half: Run) -> None:
    half.record()
    half.beat()
    found = half.status
    assert counts(found) == {
        "prompts": (4, 4), "responses": (4, 4), "tokens": (4, 4), "hidden_states": (1, 4), "manifest": (0, 1),
        "vocabulary": (0, 1), "epochs": (0, 2), "evaluation": (0, 1), "export": (0, 2), "report": (0, 2),
    }  # fmt: skip
    states = found.states
    assert (states.rows, states.rows_done, states.rows_in_unfinished_shards) == (40, 14, 4)
    assert (states.tokens, states.tokens_done, states.exact) == (280, 98, True)
    whole = shard_bytes(70, 10, WIDTH, "bfloat16")
    assert states.bytes_written == whole + 28 * (8 * WIDTH + 8)
    assert states.bytes_written + states.bytes_left == pytest.approx(4 * whole, rel=0.01)
    assert states.tokens_per_second_last_minute == pytest.approx(1.5, rel=0.01)
    assert states.tokens_per_second == pytest.approx((70 + 90) / (2 + 30), rel=0.01)
    assert states.seconds_left == pytest.approx((280 - 98) / 1.5, rel=0.01)


@pytest.mark.parametrize("missing", ["export.json", "README.md", "provenance.json"])
def test_an_export_without_all_its_files_is_not_done(half: Run, missing: str) -> None:
    half.record()
    half.rest()
    assert counts(half.status)["export"] == (2, 2)
    (half.folder / "drafters" / "small" / "export" / "vllm" / missing).unlink()
    assert counts(half.status)["export"] == (1, 2)


def test_a_row_of_several_sequences_is_done_with_the_last(half: Run) -> None:
    ids = np.array([10, 10, 10, 11, 12, 12])
    write_arrays(
        half.folder / "tokens" / "rows_10-20.safetensors",
        {"offsets": np.array([0, 1, 3, 6, 10, 15, 21]), "row_ids": ids}, {},
    )  # fmt: skip
    half.journal(half.shards[1], range(5))
    states = half.status.states
    assert (states.rows_in_unfinished_shards, states.tokens_done) == (2, 70 + 15)


def test_tokens_that_are_not_all_counted_are_scaled(run: Run) -> None:
    run.prompts()
    run.tokens(run.shards[:2])
    states = run.status.states
    assert (states.tokens, states.exact, states.tokens_done) == (280, False, 0)


# ---- verdicts


def verdict(run: Run) -> str:
    return run.status.verdict.word


def test_not_started(run: Run) -> None:
    assert verdict(run) == "not started"
    run.folder.mkdir(parents=True)
    assert verdict(run) == "not started"


def test_running(half: Run) -> None:
    half.beat()
    assert verdict(half) == "running"  # without any record: the scripts were run by hand
    half.record()
    assert verdict(half) == "running" and "rows_10-20" in half.status.verdict.reason


def test_running_between_jobs(half: Run) -> None:
    half.record(pid=os.getpid())
    half.age(7200)
    assert verdict(half) == "running"


def test_complete(half: Run) -> None:
    half.record(outcome="succeeded")
    half.states(half.shards)
    half.rest()
    assert verdict(half) == "complete"
    (half.folder / "hidden_states" / "rows_20-30.safetensors").unlink()  # a deleted shard is noticed
    assert verdict(half) == "stalled"
    half.states(half.shards)
    half.record(outcome="succeeded", drafters={"small": {"epochs": 3, "draft_vocab_size": 100}})
    assert verdict(half) == "stalled"  # more epochs are wanted


def test_complete_without_a_record(half: Run) -> None:
    half.states(half.shards)
    half.rest()
    assert verdict(half) == "complete"


def test_failed(half: Run) -> None:
    half.record(outcome="failed")
    half.failure()
    found = half.status.verdict
    assert (found.word, found.job, found.line) == ("failed", "hidden_states/rows_10-20", "no room")
    assert found.log and found.log.endswith("logs/hidden_states/rows_10-20.log")
    assert "no room" in found.text and found.log in found.text


def test_failed_while_others_run(half: Run) -> None:
    half.record()
    half.failure()
    half.beat("hidden_states/rows_20-30")
    assert verdict(half) == "failed" and "1 other job(s) still run" in half.status.verdict.reason


def test_a_failure_counts_until_the_job_runs_again_or_the_run_does(half: Run) -> None:
    half.record()
    half.failure(ago=200)
    half.beat()  # started 101 seconds ago
    assert verdict(half) == "running" and half.status.failures == []
    half.failure(ago=50)  # and failed since
    assert verdict(half) == "failed"
    half.record(started=time.time() - 20)
    assert verdict(half) == "running"


def test_killed_jobs_stalled_since_their_last_beat(half: Run) -> None:
    half.record(pid=GONE)
    half.age(500)
    half.beat(ago=20, pid=GONE, log_time=time.time() - 20)
    found = half.status.verdict
    assert found.word == "stalled" and found.since == pytest.approx(time.time() - 20, abs=5)
    assert "heartbeat of hidden_states/rows_10-20" in found.text and f"Snakemake (process {GONE} is gone)" in found.text
    assert time.strftime("%Y-%m-%d %H:%M", time.localtime(found.since)) in found.text


def test_a_job_that_was_killed_under_a_living_snakemake_has_failed(half: Run) -> None:
    half.beat(ago=20, pid=GONE)
    half.record(outcome="failed", ended=time.time())
    found = half.status.verdict
    assert (found.word, found.job, found.line) == ("failed", "hidden_states/rows_10-20", "line")
    assert "killed" in found.text


def test_frozen_job_stalled(half: Run) -> None:
    """Its process is there, and its heartbeat has stopped: SIGSTOP, or a file system that hangs."""
    half.record()
    half.beat(ago=300)
    found = half.status.verdict
    assert found.word == "stalled" and found.since == pytest.approx(time.time() - 300, abs=5)


@pytest.mark.parametrize("worked, limit", [(True, QUIET_SECONDS), (False, LOADING_SECONDS)])
def test_a_job_that_beats_and_does_nothing_stalled(half: Run, worked: bool, limit: float) -> None:
    half.record()
    half.age(10 * limit)
    for quiet, word in ((limit - 60, "running"), (limit + 60, "stalled")):
        moment = time.time() - quiet
        half.beat(changed=moment, counted=90 if worked else 0, log_time=moment)
        found = half.status.verdict
        assert found.word == word
    assert found.since == pytest.approx(moment, abs=5) and "work counted" in found.text


@pytest.mark.parametrize("sign", ["log", "journal"])
def test_any_other_sign_of_work_is_enough(half: Run, sign: str) -> None:
    half.record()
    half.age(7200)
    old = time.time() - 7000
    half.beat(changed=old, log_time=time.time() if sign == "log" else old)
    if sign == "journal":
        half.journal(half.shards[1], range(5))
    assert verdict(half) == "running"


def test_snakemake_ended_early(half: Run) -> None:
    half.record(outcome="failed", ended=time.time() - 50)
    assert half.status.verdict.text.startswith("stalled since") and "Snakemake has ended" in half.status.verdict.text


def test_a_run_on_another_host(half: Run) -> None:
    half.record(host="elsewhere", started=time.time() - 9000)
    assert verdict(half) == "running"  # its files are new
    half.age(7200)
    half.record(host="elsewhere", started=time.time() - 9000)
    assert verdict(half) == "stalled"
    half.beat(host="elsewhere", pid=GONE)
    assert verdict(half) == "running"  # a beat is a beat


# ---- the command


def test_command(half: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    half.record(dump_folder=str(half.folder / "dumps"))
    put(half.folder / "dumps" / "eyas-1.safetensors", "four")
    half.beat()
    path = half.folder / "drafters" / "small" / ".staging" / "epoch_2" / "metrics.jsonl"
    put(path, 0)
    path.write_text('{"step": 6, "loss": 9}\n{"step": 7, "loss": 2.5, "acceptance_length": 1.25}\n{"st')
    before = {p: p.stat().st_mtime_ns for p in half.folder.rglob("*")}
    assert main(["status", "mine", "--results", str(half.folder.parent), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["verdict"], facts["run"]) == ("running", "mine")
    assert facts["hidden_states"]["rows_done"] == 14 and facts["jobs"][0]["pid"] == os.getpid()
    assert (facts["dumps"]["files"], facts["dumps"]["nbytes"]) == (1, 6)
    assert facts["training"][0]["step"] == 7 and facts["snakemake"]["alive"] is True
    monkeypatch.setenv("COLUMNS", "120")
    half.failure(line="[red]no markup[/red]")
    assert main(["status", "--results", str(half.folder.parent)]) == 1  # the only run
    text = capsys.readouterr().out
    for words in (
        "failed: hidden_states/rows_10-20: [red]no markup",
        "14 of 40 rows (4 of them",
        "98 of 280 (35.0%)",
        "step 7, loss 2.500, acceptance length 1.250",
        "1 waiting, 6 bytes",
        "tok/s over the last minute",
    ):
        assert words in re.sub(r"\s+", " ", text)
    assert len(text.splitlines()) < 40
    (half.folder / "logs" / "jobs" / "hidden_states+rows_10-20.failed.json").unlink()
    assert {p: p.stat().st_mtime_ns for p in half.folder.rglob("*") if p.is_file()} == {
        p: at for p, at in before.items() if p.is_file()
    }


def test_command_of_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "nothing", "--results", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "not started"
    assert main(["status", "--results", str(tmp_path)]) == 2
    assert "no run in" in capsys.readouterr().err


def test_the_run_that_was_started_last(tmp_path: Path) -> None:
    for age, name in ((10, "a"), (5, "c"), (20, "b")):
        run = Run(tmp_path / name)
        run.record()
        run.age(age)
    assert find_status_run(None, tmp_path) == tmp_path / "c"


def test_watch_ends_with_the_run(half: Run, capsys: pytest.CaptureFixture[str]) -> None:
    half.record()
    half.failure()
    assert main(["status", "mine", "--results", str(half.folder.parent), "--json", "--watch", "0.1"]) == 1
    assert [json.loads(line)["verdict"] for line in capsys.readouterr().out.splitlines()] == ["failed"]


def test_damaged_files_are_passed_over(half: Run) -> None:
    half.record()
    half.beat()
    for name in ("x.json", "y.failed.json"):
        (half.folder / "logs" / "jobs" / name).write_text('{"label": 3')
    (half.folder / "hidden_states" / "rows_20-30.json").write_text("[1")
    (half.folder / "tokens" / "rows_20-30.json").write_text("")
    (half.folder / "tokens" / "rows_10-20.safetensors").write_bytes(b"")
    found = half.status
    assert found.verdict.word == "running" and found.states.shards_done == 1 and not found.states.exact
    (half.folder / "logs" / "jobs" / "run.json").write_text("{}")
    assert half.status.states.shards == 4  # from the index of the prompts


@pytest.mark.parametrize("shard_rows", [500, 10])
def test_a_hundred_thousand_rows_in_under_a_second(
    tmp_path: Path, shard_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "large", 100_000, shard_rows)
    run.prompts()
    run.tokens(run.shards, arrays=False)
    run.states(run.shards[: len(run.shards) // 2], real=False)
    run.record()
    run.beat()
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(Path(path).name) or scandir(path))
    monkeypatch.setattr(os, "listdir", None)
    best = float("inf")
    for _ in range(3):
        started = time.process_time()
        found = run.status
        best = min(best, time.process_time() - started)
    assert best < 1.0
    assert found.states.shards_done == len(run.shards) // 2 and found.states.rows_done == 50_000
    assert set(listed) <= {"jobs", "drafters", "small"}


# ---- heartbeats of real processes

JOB = """
import sys, time, pathlib
from eyas.errors import EyasError
from eyas.jobs import Progress, heartbeat, job_parser, run_job
heartbeat.Heartbeat.__init__.__defaults__ = (0.1,)
parser = job_parser("A job")
parser.add_argument("--do")
def work(args):
    progress = Progress("Work", 1000, "tokens", already=100)
    print("begun", flush=True)
    if args.do == "fail":
        raise EyasError("first line\\nthere is no room")
    if args.do == "break":
        raise ValueError("a fault")
    if args.do == "stop":
        raise KeyboardInterrupt
    if args.do == "exit":
        raise SystemExit(1)
    while args.do == "loop":
        progress.advance(2)
        time.sleep(0.01)
run_job(parser, work)
"""


def start(run: Path, do: str) -> subprocess.Popen:
    log = run / "logs" / "hidden_states" / "rows_0-10.log"
    return subprocess.Popen(
        [sys.executable, "-c", JOB, "--log", str(log), "--label", "hidden_states/rows_0-10", "--do", do],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def files(run: Path) -> list[str]:
    return sorted(p.name for p in (run / "logs" / "jobs").iterdir())


def test_heartbeat_of_a_job_that_is_killed(half: Run) -> None:
    run = half.folder
    half.record(pid=GONE)
    half.age(500)
    job = start(run, "loop")
    try:
        assert job.stdout.readline() == "begun\n"
        time.sleep(1.5)
        (found,) = half.status.jobs
        assert found.alive and found.pid == job.pid and found.age < 1 and found.total == 1000
        assert found.done == found.counted + 100 and found.rate and 20 < found.rate < 210
        assert verdict(half) == "running"
        first = found.updated
        time.sleep(0.5)
        assert half.status.jobs[0].updated > first
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    (found,) = half.status.jobs  # left behind
    assert not found.alive and found.killed
    assert files(run) == ["hidden_states+rows_0-10.json", "run.json"]
    told = half.status.verdict
    assert told.word == "stalled" and told.since == pytest.approx(time.time(), abs=10)
    assert start(run, "nothing").wait() == 0  # the same job, run again
    assert files(run) == ["run.json"]


@pytest.mark.parametrize(
    "do, code, line",
    [("fail", 1, "there is no room"), ("break", 1, "ValueError: a fault"), ("exit", 1, "a process of this job failed")],
)
def test_a_failure_is_recorded_until_the_job_ends_well(run: Run, do: str, code: int, line: str) -> None:
    assert start(run.folder, do).wait() == code
    assert files(run.folder) == ["hidden_states+rows_0-10.failed.json"]
    (failure,) = run.status.failures
    assert (failure.label, failure.line) == ("hidden_states/rows_0-10", line)
    assert Path(failure.log).is_file() and failure.time == pytest.approx(time.time(), abs=20)
    assert start(run.folder, "stop").wait() == 130
    assert files(run.folder) == ["hidden_states+rows_0-10.failed.json"]
    assert start(run.folder, "nothing").wait() == 0
    assert files(run.folder) == []


def test_a_heartbeat_that_cannot_be_written_harms_nothing(run: Run) -> None:
    (run.folder / "logs").mkdir(parents=True)
    (run.folder / "logs" / "jobs").write_text("a file where the folder should be")
    job = start(run.folder, "nothing")
    _, errors = job.communicate()
    assert job.returncode == 0 and "Done in" in errors and "Traceback" not in errors
    job = start(run.folder, "fail")
    _, errors = job.communicate()
    assert job.returncode == 1 and "there is no room" in errors and "Traceback" not in errors


@pytest.mark.parametrize(
    "log, folder",
    [
        ("results/a/logs/tokens/rows_0-10.log", "results/a"),
        ("/var/logs/results/a/logs/prompts.log", "/var/logs/results/a"),
        ("results/a/logs/logs/epoch_1.log", "results/a"),  # a drafter named logs
        ("elsewhere/x.log", None),
        ("logs/x.log", "."),
        (None, None),
    ],
)
def test_run_of_a_log(log: str | None, folder: str | None) -> None:
    assert run_folder_of(Path(log) if log else None) == (Path(folder) if folder else None)


@pytest.mark.parametrize(
    "label, stage",
    [
        ("hidden_states/rows_0-10", "hidden_states"), ("tokens/rows_0-10", "tokens"), ("small/epoch_12", "epochs"),
        ("tokens/epoch_1", "epochs"), ("small/export", "export"), ("manifest", "manifest"), ("", ""),
    ],
)  # fmt: skip
def test_stage_of_a_label(label: str, stage: str) -> None:
    assert stage_of(label) == stage


def test_names_of_jobs_do_not_meet(tmp_path: Path) -> None:
    logs = [tmp_path / "logs" / name for name in ("a/b.log", "a.b.log", "fetch/x/b.log", "fetch/y/b.log")]
    assert len({Heartbeat(tmp_path, log, "same").path for log in logs}) == 4
