"""The target's own answers: equal to transformers' generate, independent of batches, resumed after a kill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import eyas.regeneration.generate as generate_module
import pytest
import torch
from drafter_reference import read_json_file, run_killed
from eyas.conversations import Row, read_rows
from eyas.regeneration.generate import Reply, Sampling, _choose, generate
from eyas.regeneration.responses import respond_shard
from eyas.shards import checksum
from eyas.target.model import TargetModel, load_target
from eyas.target.tokenizer import TargetReference
from recorded_rows import write_recorded_rows
from tiny import answer, question
from transformers import AutoModelForCausalLM, AutoTokenizer

SETTINGS: dict[str, Any] = dict(
    engine="transformers", max_new_tokens=24, temperature=0.0, top_p=1.0, truncated="skip", seed=0, max_length=100
)
STARTS = [33, 2, 20, 30, 11]  # the last words have few followers, so answers differ in length


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TargetModel:
    return load_target(TargetReference(str(tiny_target)))


@pytest.fixture(scope="module")
def tokenizer(tiny_target: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_target)


def ask(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """A conversation: user and assistant by turns."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *messages] if system else messages


def prompt(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def ragged(tokenizer: Any) -> list[list[int]]:
    return [prompt(tokenizer, ask(question(s), system="ba " * i if i % 2 else None)) for i, s in enumerate(STARTS)]


class Own:
    """transformers' greedy decoding, one conversation at a time."""

    def __init__(self, folder: Path, tokenizer: Any) -> None:
        self.model, self.tokenizer = AutoModelForCausalLM.from_pretrained(folder), tokenizer

    def ids(self, ids: list[int], count: int) -> list[int]:
        given = torch.tensor([ids])
        made = self.model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=count, eos_token_id=2
        )
        return made[0, len(ids) :].tolist()

    def text(self, messages: list[dict[str, str]], count: int = 24) -> str:
        return self.tokenizer.decode(self.ids(prompt(self.tokenizer, messages), count), skip_special_tokens=True)


@pytest.fixture(scope="module")
def own(tiny_target: Path, tokenizer: Any) -> Own:
    return Own(tiny_target, tokenizer)


@pytest.mark.parametrize("limit", [1, 7, 24])
def test_greedy_rows_of_a_ragged_batch_equal_transformers(
    target: TargetModel, tokenizer: Any, own: Own, limit: int
) -> None:
    prompts, heard = ragged(tokenizer), []
    assert len({len(ids) for ids in prompts}) > 2
    replies = generate(target, prompts, [2], Sampling(limit), list(range(5)), heard.append)
    for ids, reply in zip(prompts, replies, strict=True):
        assert reply.ids == own.ids(ids, limit)
        assert reply.finish == ("stop" if reply.ids[-1] == 2 else "length")
        assert len(reply.ids) == limit or reply.finish == "stop"
        assert 2 not in reply.ids[:-1]
    assert sum(heard) == sum(len(reply.ids) for reply in replies)
    if limit == 7:  # both kinds are there
        assert {reply.finish for reply in replies} == {"stop", "length"}


def test_sampled_rows_do_not_depend_on_their_batch_mates(target: TargetModel, tokenizer: Any) -> None:
    prompts, sampling = ragged(tokenizer), Sampling(16, temperature=1.5, top_p=0.95, seed=4)
    together = generate(target, prompts, [2], sampling, [10, 11, 12, 13, 14])
    for i, ids in enumerate(prompts):
        assert generate(target, [ids], [2], sampling, [10 + i]) == [together[i]]
    backwards = generate(target, prompts[::-1], [2], sampling, [14, 13, 12, 11, 10])
    assert backwards[::-1] == together
    assert generate(target, prompts, [2], sampling, [20, 21, 22, 23, 24]) != together
    assert generate(target, prompts, [2], Sampling(16, 1.5, 0.95, seed=5), [10, 11, 12, 13, 14]) != together
    assert together != generate(target, prompts, [2], Sampling(16), [0] * 5)


LOGITS = [1.0, -0.5, 2.0, 0.3, -4.0, 1.7]


@pytest.mark.parametrize("temperature, top_p", [(1.0, 1.0), (0.7, 0.8), (2.0, 0.5), (0.5, 0.95), (1.0, 0.01)])
def test_choices_follow_the_nucleus_distribution(temperature: float, top_p: float) -> None:
    weights = torch.tensor(LOGITS, dtype=torch.float64).div(temperature).exp()
    share = (weights / weights.sum()).tolist()
    nucleus, mass = [], 0.0
    for token in sorted(range(6), key=lambda i: -share[i]):  # the fewest tokens that reach top_p together
        nucleus.append(token)
        mass += share[token]
        if mass >= top_p:
            break
    count = 20_000
    streams = [torch.Generator().manual_seed(7)] * count
    chosen = _choose(torch.tensor([LOGITS] * count), Sampling(1, temperature, top_p), streams)
    found = torch.bincount(chosen, minlength=6).tolist()
    assert [i for i in range(6) if found[i] == 0] == sorted(set(range(6)) - set(nucleus))
    expected = [count * share[i] / mass for i in nucleus]
    chi_square = sum((found[i] - e) ** 2 / e for i, e in zip(nucleus, expected, strict=True))
    assert chi_square < 30  # five degrees of freedom: once in 70,000 seeds


def test_temperature_zero_takes_the_best() -> None:
    assert _choose(torch.tensor([LOGITS, LOGITS[::-1]]), Sampling(1), []).tolist() == [2, 3]


def respond(folder: Path, target: Path, rows: list[Row], batch_rows: int = 2, **changes: Any) -> tuple[list[Row], dict]:
    """Run one shard; returns its rows and its sidecar."""
    folder.mkdir(parents=True, exist_ok=True)
    write_recorded_rows(folder / "prompts.jsonl", rows, folder / "index.json")
    output = folder / "rows_0-9.jsonl"
    respond_shard(folder / "prompts.jsonl", output, TargetReference(str(target)), SETTINGS | changes, batch_rows)
    facts = read_json_file(output.with_suffix(".json"))
    assert facts["files"][output.name] == {"bytes": output.stat().st_size, "checksum": checksum(output)}
    return read_rows(output), facts


def test_every_assistant_turn_is_the_targets_own(tiny_target: Path, own: Own, tmp_path: Path) -> None:
    rows = [
        Row(3, "a", ask(question(31), "not the target", question(2), "nor this", question(4))),
        Row(4, "b", ask(question(12), "an answer of the data", system="ki")),
        Row(5, "c", skipped="bad record: x"),
        Row(6, "d", ask(question(33))),
    ]
    found, facts = respond(tmp_path, tiny_target, rows)
    first = ask(question(31), own.text(ask(question(31))), question(2))
    second = [*first, {"role": "assistant", "content": own.text(first)}, {"role": "user", "content": question(4)}]
    assert found[0].messages == [*second, {"role": "assistant", "content": own.text(second)}]
    with_system = ask(question(12), system="ki")
    assert found[1].messages == [*with_system, {"role": "assistant", "content": own.text(with_system)}]
    assert found[2] == rows[2]
    assert found[3].messages[-1]["content"] == answer(33) == own.text(ask(question(33)))
    assert [row.row for row in found] == [3, 4, 5, 6]
    assert [row.finish for row in found] == ["stop", "stop", None, "stop"]
    assert found[3].reply_tokens == len(own.ids(prompt(own.tokenizer, ask(question(33))), 24))
    assert (facts["rows"], facts["truncated"]) == (3, 0)
    assert facts["reply_tokens"] == sum(row.reply_tokens for row in found if row.reply_tokens)
    assert facts["skipped"] == [{"row": 5, "reason": "bad record: x"}]


@pytest.mark.parametrize("batch_rows", [1, 3, 32])
def test_batches_change_no_answer(tiny_target: Path, own: Own, tmp_path: Path, batch_rows: int) -> None:
    rows = [Row(i, "a", ask(question(s))) for i, s in enumerate(STARTS)]
    found, _ = respond(tmp_path, tiny_target, rows, batch_rows)
    assert [row.messages[-1]["content"] for row in found] == [own.text(ask(question(s))) for s in STARTS]


def test_keep_takes_the_answers_of_the_data(tmp_path: Path) -> None:
    rows = [
        Row(0, "a", ask("q", "its answer", "q2", "another")),
        Row(1, "b", ask("q")),
        Row(2, "c", ask("q", "  ")),
        Row(3, "d", skipped="bad"),
    ]
    found, facts = respond(tmp_path, tmp_path / "no target is needed", rows, engine="keep")
    assert (found[0], found[3]) == (rows[0], rows[3])
    reason = "no answer in the data (responses.engine: keep)"
    assert [row.skipped for row in found] == [None, reason, reason, "bad"]
    assert [entry["row"] for entry in facts["skipped"]] == [1, 2, 3]


def test_cut_off_answers_are_skipped_or_marked(tiny_target: Path, own: Own, tmp_path: Path) -> None:
    rows = [Row(0, "a", ask(question(2))), Row(1, "b", ask(question(33)))]  # a long answer, and a short one
    skipped, facts = respond(tmp_path / "skip", tiny_target, rows, max_new_tokens=6)
    assert skipped[0].skipped == "truncated: no end of turn within 6 tokens (responses.truncated: skip)"
    assert skipped[0].messages == []
    assert skipped[1].messages[-1]["content"] == answer(33)
    assert (facts["rows"], facts["skipped"][0]["row"]) == (1, 0)
    kept, facts = respond(tmp_path / "keep", tiny_target, rows, max_new_tokens=6, truncated="keep")
    assert (kept[0].finish, kept[0].reply_tokens, kept[1].finish) == ("length", 6, "stop")
    assert kept[0].messages[-1]["content"] == own.text(ask(question(2)), 6)
    assert (facts["rows"], facts["truncated"]) == (2, 1)


def test_an_earlier_turn_that_was_cut_off_is_not_taken_as_whole(tiny_target: Path, own: Own, tmp_path: Path) -> None:
    """The template would end that turn with a token that the target never wrote, and the mask would teach it."""
    rows = [Row(0, "a", ask(question(2), "x", question(33)))]
    (found,), facts = respond(tmp_path, tiny_target, rows, max_new_tokens=6, truncated="keep")
    cut = ask(question(2), own.text(ask(question(2)), 6))
    ends_there = found.messages == cut and found.finish == "length" and facts["truncated"] == 1
    assert ends_there or found.skipped is not None, found


def test_prompts_that_are_too_long_are_skipped_with_the_reason(
    tiny_target: Path, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [
        Row(0, "a", ask(question(33))),
        Row(1, "b", ask(question(33) * 9)),
        Row(2, "c", ask(question(33), "x", "ba " * 30)),
    ]
    fits = len(prompt(tokenizer, rows[0].messages)) + 1
    found, _ = respond(tmp_path / "fits", tiny_target, rows, max_length=fits)
    long = len(prompt(tokenizer, rows[1].messages))
    assert found[0].skipped is None
    assert found[1].skipped == f"too long: the prompt of turn 1 has {long} tokens"
    assert found[2].skipped.startswith("too long: the prompt of turn 2 has ")
    found, _ = respond(tmp_path / "one less", tiny_target, rows, max_length=fits - 1)
    assert all(row.skipped.startswith("too long") for row in found)


def test_an_empty_answer_is_skipped(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        generate_module, "generate", lambda model, prompts, *rest: [Reply([2], "stop") for _ in prompts]
    )
    found, _ = respond(tmp_path, tiny_target, [Row(0, "a", ask(question(2)))])
    assert found[0].skipped == "empty: the target answered nothing"


def test_a_killed_job_goes_on_and_ends_with_the_same_bytes(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled = SETTINGS | {"temperature": 1.2, "top_p": 0.9, "seed": 3, "truncated": "keep"}
    rows = [Row(i, "a", ask(question(s), "x", question(s - 1))) for i, s in enumerate(STARTS)]
    respond(tmp_path / "whole", tiny_target, rows, **sampled)
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("prompts.jsonl", "index.json"):
        shutil.copy(tmp_path / "whole" / name, killed)
    run_killed(f"""
from eyas.regeneration.responses import respond_shard
folder, target = Path({str(killed)!r}), TargetReference({str(tiny_target)!r})
respond_shard(folder / "prompts.jsonl", folder / "rows_0-9.jsonl", target, {sampled!r}, 2)
""")
    assert not (killed / "rows_0-9.jsonl").exists()
    keys: list[list[int]] = []

    def spy(model: Any, prompts: Any, ends: Any, sampling: Any, rows_and_turns: list[int], *rest: Any) -> Any:
        keys.append(rows_and_turns)
        return generate(model, prompts, ends, sampling, rows_and_turns, *rest)

    monkeypatch.setattr(generate_module, "generate", spy)
    respond(killed, tiny_target, rows, **sampled)
    assert len(keys) == 4  # of three batches in each of two turns, two were there
    for name in ("rows_0-9.jsonl", "rows_0-9.json"):
        assert (killed / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
