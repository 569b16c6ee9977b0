"""The figures of decoded prompts, against sums by hand, and the order in which prompts are decoded."""

from __future__ import annotations

from typing import Any

import pytest
from eyas.decoding import measure
from eyas.decoding.decode import Decoded, Round
from eyas.decoding.measure import Output, decode_all, figures, first_difference, measure_set
from eyas.decoding.prompt_sets import Prompt, PromptSet

STRAIGHT = list(range(40))
LOOP = [7, 8] * 20


def plain(ids: list[int], seconds: float, looping: bool = False) -> Output:
    return Output(Decoded(ids, [Round(1, 0, 0)] * (len(ids) - 1), seconds), looping)


def drafted(
    ids: list[int], seconds: float, accepted: list[int], looping: bool = False, place: int | None = None
) -> Output:
    """An output whose rounds accept so many of three drafted tokens; the last round ends the output as it must."""
    rounds = [Round(n + 1, n, 3) for n in accepted]
    assert sum(r.tokens for r in rounds) == len(ids) - 1
    return Output(Decoded(ids, rounds, seconds), looping, place)


def test_figures_by_hand() -> None:
    # 6, 9 and 12 tokens behind the prefill's own; the last output loops, and all of its drafts are right.
    outputs = [
        drafted(STRAIGHT[:7], 1.0, [0, 1, 2]), drafted(STRAIGHT[:10], 2.0, [3, 3, 0]), drafted(LOOP[:13], 1.0, [3, 3, 3], True),
    ]  # fmt: skip
    alone = [plain(STRAIGHT[:7], 3.0), plain(STRAIGHT[:10], 3.0), plain(LOOP[:13], 6.0, True)]
    found = figures(outputs, alone, ["a", "b", "c"], 3, 0.0)
    assert found == {
        "acceptance_length": 1 + 18 / 9,
        "acceptance_by_step": [7 / 9, 6 / 7, 5 / 6],
        "tokens_per_forward": 27 / 9,
        "tokens": 27,
        "target_forwards": 9,
        "seconds": 4.0,
        "tokens_per_second": 30 / 4.0,
        "speedup": pytest.approx(12.0 / 4.0),
        "lossless": True,
        "differences": [],
        "looping_share": pytest.approx(1 / 3),
        "without_looping": {
            "prompts": 2,
            "acceptance_length": 1 + 9 / 6,
            "acceptance_by_step": [4 / 6, 3 / 4, 2 / 3],
            "tokens_per_forward": 15 / 6,
            "speedup": pytest.approx(6.0 / 3.0),
        },
    }


def test_plain_decoding_has_the_same_keys() -> None:
    alone = [plain(STRAIGHT[:7], 3.0), plain(LOOP[:13], 6.0, True)]
    found = figures(alone, alone, ["a", "b"], 0, 0.0)
    assert (found["acceptance_length"], found["tokens_per_forward"], found["speedup"]) == (1.0, 1.0, 1.0)
    assert found["acceptance_by_step"] == [] and found["lossless"] is True and found["looping_share"] == 0.5
    other = figures([drafted(STRAIGHT[:4], 1.0, [2])], alone[:1], ["a"], 3, 0.0)
    assert set(found) == set(other) and set(found["without_looping"]) == set(other["without_looping"])


def test_a_difference_is_told_and_not_lossless() -> None:
    outputs = [drafted(STRAIGHT[:4], 1.0, [2]), drafted(STRAIGHT[:4], 1.0, [2], place=3)]
    found = figures(outputs, [plain(STRAIGHT[:4], 1.0)] * 2, ["row 4", "row 9"], 3, 0.0)
    assert found["lossless"] is False and found["differences"] == [{"prompt": "row 9", "token": 3}]


def test_sampled_outputs_are_compared_by_tokens_a_second() -> None:
    """Sampled outputs differ in length, so that their times alone say nothing."""
    found = figures([drafted(STRAIGHT[:8], 1.0, [3, 2])], [plain(STRAIGHT[:2], 0.5)], ["a"], 3, 0.7)
    assert found["lossless"] is None and found["differences"] == []
    assert found["speedup"] == pytest.approx((8 / 1.0) / (2 / 0.5))


def test_without_loops_the_same_prompts_are_compared() -> None:
    """Sampled: the drafter's output of one prompt loops, plain decoding's of another."""
    outputs = [drafted(LOOP[:13], 1.0, [3, 3, 3], True), drafted(STRAIGHT[:7], 1.0, [0, 1, 2])]
    alone = [plain(STRAIGHT[:5], 1.0), plain(LOOP[:7], 3.5, True)]
    found = figures(outputs, alone, ["a", "b"], 3, 0.7)
    assert found["without_looping"]["speedup"] == pytest.approx((7 / 1.0) / (7 / 3.5))
    found = figures(outputs, [], ["a", "b"], 3, 0.7)  # no server without the drafter
    assert found["speedup"] is None and found["without_looping"]["speedup"] is None
    assert found["tokens_per_second"] == pytest.approx(20 / 2.0)


def test_nothing_to_measure_is_null() -> None:
    found = figures([], [], [], 2, 0.0)
    assert found["acceptance_by_step"] == [None, None] and found["differences"] == []
    assert (found["tokens"], found["target_forwards"], found["without_looping"]["prompts"]) == (0, 0, 0)
    for key in (
        "acceptance_length", "tokens_per_forward", "seconds", "tokens_per_second", "speedup", "lossless",
        "looping_share",
    ):  # fmt: skip
        assert found[key] is None, key
    # An output that ends with the prefill's token: no round, but there is an output and it took its time.
    found = figures([plain([2], 0.5)], [plain([2], 1.0)], ["a"], 2, 0.0)
    assert found["acceptance_length"] is None and found["speedup"] == 2.0 and found["lossless"] is True


@pytest.mark.parametrize(
    "a, b, place", [([1, 2], [1, 2], None), ([], [], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([3], [], 0)]
)
def test_first_difference(a: list[int], b: list[int], place: int | None) -> None:
    assert first_difference(a, b) == first_difference(b, a) == place


class Recorder:
    """Stands for `decode`: notes what it is asked for and answers with what the way is to say."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, target: Any, proposer: Any, prompt: list[int], ends: Any, limit: int, sampling: Any) -> Decoded:
        self.calls.append((proposer, prompt[0], limit, sampling.temperature, sampling.seed))
        ids = LOOP if prompt[0] == 5 else STRAIGHT
        ids = ids[:limit] if proposer != "wrong" else [*ids[: limit - 1], 999]
        return Decoded(ids, [Round(1, 0, 0)] * (len(ids) - 1), 1.0)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(measure, "decode", found)
    return found


PROMPTS = [Prompt("p3", [3]), Prompt("p5", [5])]
WAYS: dict[str, Any] = {"none": None, "trained": "right", "ngram": "wrong"}


def test_each_prompt_is_decoded_in_all_ways_before_the_next(recorder: Recorder) -> None:
    outputs = decode_all(None, WAYS, PROMPTS, [2], 30, 0.0, 11, "set")  # type: ignore[arg-type]
    warm_up, timed = recorder.calls[:3], recorder.calls[3:]
    assert [call[0] for call in warm_up] == [None, "right", "wrong"] and all(call[2] < 30 for call in warm_up)
    assert timed == [(way, prompt, 30, 0.0, 11 + i) for i, prompt in enumerate((3, 5)) for way in WAYS.values()]
    assert [[output.difference for output in outputs[way]] for way in WAYS] == [[None] * 2, [None] * 2, [29] * 2]
    assert [output.looping for output in outputs["trained"]] == [False, True]


def test_sampled_outputs_are_not_compared_with_plain_decoding(recorder: Recorder) -> None:
    outputs = decode_all(None, WAYS, PROMPTS, [2], 30, 0.5, 11, "set")  # type: ignore[arg-type]
    assert {output.difference for entries in outputs.values() for output in entries} == {None}
    assert {call[3] for call in recorder.calls} == {0.5}


def test_the_entry_of_a_set(recorder: Recorder) -> None:
    settings = {"draft_steps": 2, "max_new_tokens": 30, "temperature": 0.0, "seed": 0}
    found = measure_set(None, WAYS, PromptSet("file", PROMPTS, 4), [2], settings, "set")  # type: ignore[arg-type]
    assert (found["prompts"], found["source"], found["overlapping_prompts"]) == (2, "file", 4)
    assert found["lossless"] is True and found["looping_share"] == 0.5 and found["acceptance_by_step"] == [None, None]
    baselines = found["baselines"]
    assert list(baselines) == ["none", "ngram", "untrained"] and baselines["untrained"] is None
    assert [entry["prompt"] for entry in baselines["ngram"]["differences"]] == ["p3", "p5"]
    assert baselines["ngram"]["lossless"] is False and baselines["none"]["lossless"] is True
    assert measure_set(None, WAYS, PromptSet("file", [], 4), [2], settings, "set")["lossless"] is None  # type: ignore[arg-type]
