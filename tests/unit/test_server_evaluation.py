"""Evaluation on servers, by a stand-in: the table, its figures, what is refused, and that nothing is left behind."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from decoding_world import build_world
from eyas.conversations import Row
from eyas.decoding import evaluate as in_process
from eyas.decoding import loops
from eyas.decoding.acceptance import StepAcceptance
from eyas.decoding.decode import Round
from eyas.decoding.on_server import Commands, evaluate_on_server
from eyas.decoding.run_data import RunFiles
from eyas.decoding.server_client import Answer
from eyas.errors import EyasError
from eyas.plan import RunPlan, plan_run
from eyas.report.acceptance import acceptance_section
from eyas.summary.acceptance import acceptance_facts, render_acceptance
from eyas.target.model import TargetModel
from eyas.target.tokenizer import TargetReference
from fake_decoding_server import FakeDecoder, continuation, rounds_of
from recorded_rows import write_recorded_rows
from tiny import WORDS, answer, question

FAKE = Path(__file__).parents[1] / "fake_decoding_server.py"
STEPS, LIMIT, EVERY, END = 3, 24, 7, 2
PATTERN = [3, 0, 2, 1]


@dataclass
class Run:
    """A run whose drafter reads layers that a server can hand out; `output`: where an evaluation of it goes."""

    folder: Path
    target: str
    plan: RunPlan
    output: Path

    def evaluate(self, commands: Commands | None = None, **options: Any) -> dict[str, Any]:
        drafter = self.folder / "drafters" / "eagle3"
        values = self.plan.config.evaluation.sglang.options() | options
        evaluate_on_server(
            RunFiles(self.folder, len(WORDS) - 1, 100), TargetReference(self.target), drafter / "best",
            drafter / "epoch_0", json.loads(self.plan.evaluation_settings), values, commands, self.output,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(self.output.read_text())
        return found


@pytest.fixture(scope="module")
def run_folder(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    run = build_world(tiny_target, path, [0, 1, 2]).run
    rows = [
        Row(start, "s", [{"role": "user", "content": question(start)}, {"role": "assistant", "content": answer(start)}])
        for start in range(len(WORDS) - 1)
    ]
    (run / "conversations").mkdir()
    write_recorded_rows(run / "conversations" / f"rows_0-{len(rows)}.jsonl", rows)
    lines = [json.dumps({"question": f"say {word} ?"}) + "\n" for word in WORDS[:9]]
    (run / "set.jsonl").write_text("".join([*lines, json.dumps({"question": question(0)}) + "\n"]))
    return run


@pytest.fixture
def run(run_folder: Path, tiny_target: Path, tmp_path: Path) -> Run:
    values = {
        "name": "tiny", "results": str(tmp_path / "results"), "target": {"path": str(tiny_target)},
        "data": {"prompts": [str(run_folder / "set.jsonl")], "rows": len(WORDS) - 1, "held_out_every": EVERY},
        "extraction": {"layers": [0, 1, 2]}, "drafters": {"eagle3": {"draft_vocab_size": 120}},
        "evaluation": {
            "engine": "sglang", "draft_steps": STEPS, "max_new_tokens": LIMIT,
            "prompt_sets": {"held_out": {}, "mine": {"path": str(run_folder / "set.jsonl")}},
            "sglang": {"timeout_seconds": 60.0, "start_minutes": 2.0, "outage_minutes": 0.0},
        },
    }  # fmt: skip
    return Run(run_folder, str(tiny_target), plan_run(values, "here"), tmp_path / "evaluation.json")


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., Commands]]:
    """Commands of stand-ins, whose processes must not outlive the test."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def commands(*drafting: str, plain: tuple[str, ...] = ()) -> Commands:
        base = [sys.executable, str(FAKE), "--notes", str(notes)]
        logs = tmp_path / "plain.log", tmp_path / "drafting.log"
        return Commands([*base, *plain], [*base, "--pattern", json.dumps(PATTERN), *drafting], *logs)

    yield commands
    for facts in starts(tmp_path):
        assert not alive(facts["pid"])
        assert not Path(facts["folder"]).exists()


def starts(place: Path) -> list[dict[str, Any]]:
    found = sorted((place / "notes").glob("*.start"), key=lambda path: path.stat().st_mtime_ns)
    return [json.loads(path.read_text()) for path in found]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def expected(ids: list[list[int]]) -> tuple[StepAcceptance, list[bool]]:
    """Acceptance of the stand-in's rounds as our own decoding counts them, and which outputs loop."""
    found, looping = StepAcceptance(STEPS), []
    for prompt in ids:
        output = continuation(prompt, LIMIT, [END])
        rounds = rounds_of(len(output), PATTERN)
        found.add(
            Round(min(accepted, within) + (accepted == within and n + 1 < len(rounds) or ends_whole(rounds, output)), within, STEPS)
            if n + 1 == len(rounds)
            else Round(accepted + 1, accepted, STEPS)
            for n, (accepted, within) in enumerate(rounds)
        )  # fmt: skip
        looping.append(loops.is_looping(output, [END]))
    return found, looping


def ends_whole(rounds: list[tuple[int, int]], output: list[int]) -> bool:
    """Whether the output ends with the last round's own token, not in the middle of its draft."""
    return sum(accepted + 1 for accepted, _ in rounds) == len(output) - 1


def test_the_table_of_own_servers(run: Run, own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> TargetModel:
        raise AssertionError("the target is not to be loaded")

    monkeypatch.setattr("eyas.target.model.load_target", never)
    monkeypatch.setattr(in_process, "load_target", never)
    result = run.evaluate(own())
    drafting, plain = starts(tmp_path)
    assert (drafting["drafts"], plain["drafts"]) == (True, False)
    for facts in (drafting, plain):
        assert (facts["host"], facts["mode"]) == ("127.0.0.1", "0o600") and len(facts["key"]) >= 32
    assert drafting["key"] != plain["key"]
    for name, facts in (("drafting.log", drafting), ("plain.log", plain)):
        text = (tmp_path / name).read_text()
        assert "api_key='***', other=1" in text and facts["key"] not in text
    assert result["engine"] == "sglang" and result["checkpoint"] == "best"
    assert result["settings"] == {
        "draft_steps": STEPS, "topk": 1, "draft_tokens": 4, "temperature": 0.0, "max_new_tokens": LIMIT,
        "concurrency": 1,
    }  # fmt: skip
    assert result["offline"]["trained"]["expected_acceptance_length"] > 1.2
    assert result["held_out_rows"] == 5
    mine = result["prompt_sets"]["mine"]
    assert (mine["prompts"], mine["overlapping_prompts"]) == (9, 1)
    for figures in result["prompt_sets"].values():
        assert figures["lossless"] is True and figures["differences"] == [] and figures["speedup"] > 0
        assert figures["tokens_per_second"] > 0
        none = figures["baselines"]["none"]
        assert (none["acceptance_length"], none["tokens_per_forward"], none["speedup"]) == (1.0, 1.0, 1.0)
        assert none["tokens"] == figures["tokens"] == none["target_forwards"]
        assert figures["baselines"]["untrained"] is None
        ngram = figures["baselines"]["ngram"]  # counted, not decoded
        assert (ngram["tokens"], ngram["looping_share"]) == (figures["tokens"], figures["looping_share"])
        assert ngram["target_forwards"] <= ngram["tokens"] and ngram["acceptance_length"] >= 1
        assert {ngram[key] for key in ("speedup", "lossless", "seconds", "tokens_per_second")} == {None}
    # The report and the summary read it as they read any other.
    text = render_acceptance("eagle3", acceptance_facts(result))
    assert "no drafter" in text and "n-grams" in text
    section = acceptance_section({"eagle3": result})
    assert section.plots and ("speed", result["definitions"]["speedup"]) in section.tables[0].meanings
    assert "on a server without the drafter" in result["definitions"]["speedup"]


def test_the_figures_are_those_of_the_rounds(run: Run) -> None:
    with FakeDecoder(PATTERN) as drafting, FakeDecoder() as plain:
        result = run.evaluate(url=drafting.url, plain_url=plain.url)
    by_set = iter(drafting.bodies[1:])
    assert [body["input_ids"] for body in drafting.bodies] == [body["input_ids"] for body in plain.bodies]
    for figures in result["prompt_sets"].values():
        ids = [next(by_set)["input_ids"] for _ in range(figures["prompts"])]
        acceptance, looping = expected(ids)
        assert figures["acceptance_length"] == pytest.approx(acceptance.length)
        assert figures["looping_share"] == pytest.approx(sum(looping) / len(looping))
        assert figures["without_looping"]["prompts"] == looping.count(False)
        outputs = [continuation(prompt, LIMIT, [END]) for prompt in ids]
        assert figures["tokens"] == sum(len(output) - 1 for output in outputs)
        assert figures["target_forwards"] == sum(len(rounds_of(len(output), PATTERN)) for output in outputs)
        assert len(figures["acceptance_by_step"]) == STEPS and figures["acceptance_by_step"][0] < 1
    for body in drafting.bodies[1:]:
        sampling = body["sampling_params"]
        assert (sampling["temperature"], sampling["max_new_tokens"], sampling["stop_token_ids"]) == (0.0, LIMIT, [END])


def test_our_own_definition_of_a_last_round() -> None:
    """The histogram, and an output that ends one token into the last round's draft of three."""
    decoded, known = Answer(list(range(8)), 1.0, 3, 6, [1, 0, 0, 2]).decoded(3)
    assert known and decoded.rounds == [Round(1, 0, 3), Round(4, 3, 3), Round(2, 2, 3)]
    whole, _ = Answer(list(range(10)), 1.0, 3, 6, [1, 0, 0, 2]).decoded(3)
    assert whole.rounds[-1] == Round(4, 3, 3) and sum(r.tokens for r in whole.rounds) == 9
    sums, known = Answer(list(range(8)), 1.0, 3, 6, None).decoded(3)
    assert not known and sum(r.accepted for r in sums.rounds) == 5 and len(sums.rounds) == 3
    untold, known = Answer(list(range(8)), 1.0, 3, None, None).decoded(3)
    assert not known and sum(r.accepted for r in untold.rounds) == 4
    plain, _ = Answer(list(range(8)), 1.0, 0, None, None).decoded(0)
    assert plain.rounds == [Round(1, 0, 0)] * 7
    one, _ = Answer([2], 1.0, 0, None, None).decoded(3)
    assert one.rounds == []


def test_a_server_that_tells_only_sums(run: Run) -> None:
    with FakeDecoder(PATTERN) as drafting:
        whole = run.evaluate(url=drafting.url)
    with FakeDecoder(PATTERN, tells="sums") as drafting:
        sums = run.evaluate(url=drafting.url)
    for name, figures in sums["prompt_sets"].items():
        assert figures["acceptance_by_step"] is None and figures["without_looping"]["acceptance_by_step"] is None
        assert figures["acceptance_length"] == pytest.approx(whole["prompt_sets"][name]["acceptance_length"])
    assert "acceptance_by_step is null where" in sums["definitions"]["decoding"]
    assert acceptance_section({"eagle3": sums}).plots


def test_without_a_plain_server_nothing_is_compared(run: Run) -> None:
    with FakeDecoder(PATTERN) as drafting:
        result = run.evaluate(url=drafting.url)
    for figures in result["prompt_sets"].values():
        assert figures["speedup"] is None and figures["lossless"] is None and figures["acceptance_length"] > 1
        assert figures["baselines"]["none"] is None and figures["baselines"]["ngram"] is None
    assert "evaluation.sglang.plain_url names none" in result["definitions"]["baselines"]
    assert "no drafter" not in render_acceptance("eagle3", acceptance_facts(result))


def test_another_output_is_not_lossless(run: Run) -> None:
    with FakeDecoder(PATTERN, faults={2: "other"}) as drafting, FakeDecoder() as plain:
        result = run.evaluate(url=drafting.url, plain_url=plain.url)
    held_out = result["prompt_sets"]["held_out"]
    assert held_out["lossless"] is False and [d["token"] for d in held_out["differences"]] == [1]
    assert result["prompt_sets"]["mine"]["lossless"] is True


def test_so_many_requests_at_once(run: Run) -> None:
    with FakeDecoder(PATTERN, delay=0.2) as drafting:
        result = run.evaluate(url=drafting.url, concurrency=3)
    assert drafting.most_at_once == 3 and result["settings"]["concurrency"] == 3


def test_requests_that_fail_are_asked_again(run: Run) -> None:
    with FakeDecoder(PATTERN) as drafting:
        undisturbed = run.evaluate(url=drafting.url)
    with FakeDecoder(PATTERN, faults={1: "500", 2: "drop", 5: "503"}) as drafting:
        result = run.evaluate(url=drafting.url)
    lengths = [
        {name: f["acceptance_length"] for name, f in found["prompt_sets"].items()} for found in (undisturbed, result)
    ]
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({1: "500", 2: "500", 3: "500"}, r"gave no answer to row \d+ in 3 tries: the server answers 500: fault 500"),
        ({1: "400"}, r"refuses row \d+: the server answers 400: fault 400"),
    ],
)
def test_requests_that_go_on_failing(run: Run, faults: dict[int, str], said: str) -> None:
    with FakeDecoder(PATTERN, faults=faults) as drafting, pytest.raises(EyasError, match=said):
        run.evaluate(url=drafting.url)
    assert not run.output.exists()


def test_a_server_that_dies_ends_the_evaluation(run: Run, own: Any, tmp_path: Path) -> None:
    said = (
        r"the server ended while it was answering with exit code 7: Error: out of memory \*\*\* \(log: .*drafting.log\)"
    )
    with pytest.raises(EyasError, match=said):
        run.evaluate(own("--faults", json.dumps({4: "die"})))
    assert len(starts(tmp_path)) == 1 and not run.output.exists()


def test_a_server_that_does_not_start(run: Run, own: Any) -> None:
    with pytest.raises(
        EyasError, match=r"the server ended while it was starting with exit code 2: .*error: .*--absent"
    ):
        run.evaluate(own("--absent"))
    assert not run.output.exists()


@pytest.mark.parametrize(
    ("drafting", "plain", "said"),
    [
        (FakeDecoder(), FakeDecoder(), "evaluation.sglang.url: .* decodes without a drafter"),
        (FakeDecoder(PATTERN), FakeDecoder(PATTERN), "evaluation.sglang.plain_url: .* decodes with a drafter"),
        (FakeDecoder(PATTERN, tells="nothing"), FakeDecoder(), "without a drafter .its answer has no spec_verify_ct"),
        (
            FakeDecoder(PATTERN, info={"speculative_num_steps": 5}), FakeDecoder(),
            "runs with --speculative-num-steps 5, and evaluation.draft_steps is 3",
        ),
        (
            FakeDecoder(PATTERN, info={"speculative_eagle_topk": 4, "speculative_num_steps": 3}), FakeDecoder(),
            "runs with --speculative-eagle-topk 4, and evaluation.topk is 1",
        ),
        (FakeDecoder(PATTERN, key="secret"), FakeDecoder(), "the key is refused"),
    ],
)  # fmt: skip
def test_running_servers_that_are_not_what_they_should_be(
    run: Run, drafting: FakeDecoder, plain: FakeDecoder, said: str
) -> None:
    with drafting, plain, pytest.raises(EyasError, match=said):
        run.evaluate(url=drafting.url, plain_url=plain.url)
    assert not run.output.exists()


def test_a_key_from_the_environment(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    right = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4, "model": "m"}
    with FakeDecoder(PATTERN, key="secret", info=right) as drafting:
        with pytest.raises(EyasError, match="evaluation.sglang.api_key_env: the environment variable EYAS_TEST_KEY"):
            run.evaluate(url=drafting.url, api_key_env="EYAS_TEST_KEY")
        monkeypatch.setenv("EYAS_TEST_KEY", "secret")
        assert run.evaluate(url=drafting.url, api_key_env="EYAS_TEST_KEY")["engine"] == "sglang"


def test_nobody_there(run: Run) -> None:
    with FakeDecoder(PATTERN) as drafting:
        url = drafting.url
    with pytest.raises(EyasError, match="evaluation.sglang.url: .* does not answer since .* begins anew"):
        run.evaluate(url=url)


def test_a_target_whose_states_are_not_handed_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = run.folder / "hidden_states" / "data_config.json"
    values = facts.read_text()
    try:
        facts.write_text(json.dumps(json.loads(values) | {"layers": [0, 1, 3]}))
        with pytest.raises(EyasError, match="which SGLang cannot capture.*evaluation.engine: transformers"):
            run.evaluate(url="http://127.0.0.1:1")
    finally:
        facts.write_text(values)


def test_a_killed_job_leaves_no_server(run: Run, own: Any, tmp_path: Path) -> None:
    """By the rule's script, killed while the first server answers."""
    commands, drafter = own("--delay", "100"), run.folder / "drafters" / "eagle3"
    script = FAKE.parents[1] / "workflow" / "scripts" / "evaluate_drafter.py"
    job = subprocess.Popen([
        sys.executable, str(script), "--manifest", str(run.folder / "hidden_states" / "data_config.json"), "--rows", "35",
        "--shard-rows", "100", "--trained", str(drafter / "best" / "model.safetensors"), "--untrained",
        str(drafter / "epoch_0" / "model.safetensors"), "--target", json.dumps({"path": run.target}), "--settings",
        run.plan.evaluation_settings, "--sglang", run.plan.evaluation_options, "--server", shlex.join(commands.drafting),
        "--plain-server", shlex.join(commands.plain), "--output", str(run.output), "--log", str(tmp_path / "job.log"),
    ])  # fmt: skip
    try:
        while not starts(tmp_path):
            assert job.poll() is None
            time.sleep(0.02)
        assert (tmp_path / "job.server.log").is_file()
    finally:
        job.kill()
        job.wait()
    (facts,) = starts(tmp_path)
    deadline = time.monotonic() + 60
    while alive(facts["pid"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while list(Path(facts["folder"]).iterdir()):  # the guard deletes the key when all are gone
        assert time.monotonic() < deadline
        time.sleep(0.05)
    shutil.rmtree(facts["folder"])  # what a SIGKILL leaves: an empty folder
    assert not run.output.exists()
