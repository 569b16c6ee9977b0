"""Twenty SIGKILLs while an endpoint delays, errs, drops and answers out of order: no row lost, doubled or asked twice."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from eyas.conversations import Row, read_rows
from fake_endpoint import FakeEndpoint, ask, journal_of, replay, respond, respond_command, write_prompts

ROWS, KILLS, CONCURRENCY, NAME = 500, 20, 16, "rows_0-500"
SETTINGS = {"temperature": 0.0, "max_new_tokens": 24}
WILD: dict[str, Any] = dict(
    share=0.15, faults=("429", "429bare", "500", "502", "503", "drop", "reset", "cut", "nojson", "emptychoices", "stale"),
    times=2, delay=0.05, retry_after=0.05,
)  # fmt: skip

Turn = tuple[int, int]


def prompts() -> list[Row]:
    """Rows of one turn and of two, some with reasoning, some cut off, some refused."""
    marks = ["", "", "", "[[think:inline]]", "", "[[think:reasoning]]", "", "[[words:40]]", "", "[[fault:400*inf]]"]
    chance, rows = random.Random(7), []
    for number in range(ROWS):
        first = f"row {number} turn 0 {chance.choice(marks)}"
        second = [f"row {number} turn 1 {chance.choice(marks)}"] if number % 5 == 0 else []
        rows.append(ask(number, first, *second))
    return rows


def turn_of(entry: dict[str, Any]) -> Turn:
    words = [m["content"] for m in entry["body"]["messages"] if m["role"] == "user"][-1].split()
    return int(words[1]), int(words[3])


@dataclass
class Storm:
    """What was seen: per kill, the turns that were journalled then and the number of requests."""

    folder: Path
    rows: list[Row]
    requests: list[dict[str, Any]] = field(default_factory=list)
    kills: list[tuple[set[Turn], int]] = field(default_factory=list)
    answered_at_kills: list[set[Turn]] = field(default_factory=list)

    def lines(self, fake: FakeEndpoint) -> int:
        return fake.log.read_bytes().count(b"\n") if fake.log.exists() else 0

    def kill_at_a_random_moment(self, fake: FakeEndpoint, chance: random.Random) -> None:
        """Start the job, let it do some of its work, and kill it."""
        job = subprocess.Popen(**respond_command(self.folder, [fake.url], SETTINGS, NAME, concurrency=CONCURRENCY))
        try:
            # Lines come two a request. Now and then the job dies before it has asked anything.
            goal = self.lines(fake) + chance.choice([0, *[chance.randint(5, 60)] * 6])
            give_up = time.monotonic() + 30
            while self.lines(fake) < goal and time.monotonic() < give_up:
                assert job.poll() is None, "the job ended before it was killed"
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 0.03))
        finally:
            job.send_signal(signal.SIGKILL)
        assert job.wait(10) == -signal.SIGKILL
        time.sleep(0.1)  # what is in the server's sockets comes in
        journalled = [(entry["row"], entry["turn"]) for entry in journal_of(self.folder, NAME)]
        assert len(journalled) == len(set(journalled)), "journalled twice"
        found = fake.requests()
        self.kills.append((set(journalled), len(found)))
        self.answered_at_kills.append({turn_of(entry) for entry in found if entry["answered"]})


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Storm:
    """A shard after twenty kills and a last run, and its undisturbed twin in `calm`."""
    folder = tmp_path_factory.mktemp("storm")
    seen, chance = Storm(folder / "run", prompts()), random.Random(20)
    write_prompts(seen.folder, seen.rows, NAME)
    with FakeEndpoint(folder / "storm.log", seed=3, **WILD) as fake:
        for _ in range(KILLS):
            seen.kill_at_a_random_moment(fake, chance)
        command = respond_command(seen.folder, [fake.url], SETTINGS, NAME, concurrency=CONCURRENCY)
        subprocess.run(**command, check=True, timeout=120)
    seen.requests = fake.requests()
    with FakeEndpoint(folder / "calm.log") as calm:
        respond(folder / "calm", seen.rows, [calm.url], SETTINGS, NAME, concurrency=64)
    return seen


def test_kills_hit_the_work(storm: Storm) -> None:
    """Otherwise the rest proves nothing."""
    sizes = [len(journalled) for journalled, _ in storm.kills]
    assert len(sizes) == KILLS and sizes == sorted(sizes)
    assert sizes[-1] > 100 and len(set(sizes)) >= 12
    faults = Counter(entry["fault"] for entry in storm.requests)
    assert set(WILD["faults"]) | {"400", None} == set(faults)


def test_no_journalled_turn_is_asked_again(storm: Storm) -> None:
    for journalled, count in storm.kills:
        again = [turn_of(entry) for entry in storm.requests[count:] if turn_of(entry) in journalled]
        assert again == []


def test_only_what_was_in_flight_is_answered_twice(storm: Storm) -> None:
    answered = Counter(turn_of(entry) for entry in storm.requests if entry["answered"])
    doubles = sum(count - 1 for count in answered.values())
    assert doubles <= CONCURRENCY * KILLS
    for (journalled, _), had in zip(storm.kills, storm.answered_at_kills, strict=True):
        assert len(had - journalled) <= CONCURRENCY  # an answer is journalled as it comes
    lost = sum(len(had - journalled) for (journalled, _), had in zip(storm.kills, storm.answered_at_kills, strict=True))
    assert doubles <= lost


def test_refused_rows_are_not_asked_again_either(storm: Storm) -> None:
    refused = Counter(turn_of(entry) for entry in storm.requests if entry["fault"] == "400")
    assert len(refused) > 10
    assert sum(count - 1 for count in refused.values()) <= CONCURRENCY * 5  # most kills find none of them in flight


def expected(row: Row) -> tuple[str, Any]:
    """What becomes of a row, written from the rules: its messages, or why it is skipped."""
    for message in row.messages:
        if "[[words:40]]" in message["content"]:
            return "truncated: ", None
        if "[[fault:400*inf]]" in message["content"]:
            return "refused: ", None
    return "", replay(row, 24)[0]


def test_every_row_is_there_once_with_the_right_text(storm: Storm) -> None:
    found = read_rows(storm.folder / "conversations" / f"{NAME}.jsonl")
    assert [row.row for row in found] == list(range(ROWS))
    kinds: Counter[str] = Counter()
    for row, made in zip(storm.rows, found, strict=True):
        reason, messages = expected(row)
        kinds[reason] += 1
        assert (made.skipped or "").startswith(reason) and (made.skipped is None) == (reason == "")
        assert made.messages == (messages or [])
    assert min(kinds[reason] for reason in ("", "truncated: ", "refused: ")) > 10


def test_the_bytes_are_those_of_an_undisturbed_run(storm: Storm) -> None:
    for suffix in (".jsonl", ".json"):
        made = [folder / "conversations" / f"{NAME}{suffix}" for folder in (storm.folder, storm.folder.parent / "calm")]
        assert made[0].read_bytes() == made[1].read_bytes()
    assert not (storm.folder / "conversations" / ".staging" / NAME).exists()
