"""Outputs that have fallen into a loop are found, and no others."""

from __future__ import annotations

from eyas.decoding.loops import DEFINITION, REPEATS, TOKENS, is_looping, loop_period
from hypothesis import example, given
from hypothesis import strategies as st


def by_definition(ids: list[int]) -> int | None:
    """Every period is tried, and every place where the repetition may begin."""
    for period in range(1, len(ids)):
        for start in range(len(ids)):
            tail = ids[start:]
            whole = len(tail) >= REPEATS * period and len(tail) >= TOKENS
            if whole and all(tail[i] == tail[i % period] for i in range(len(tail))):
                return period
    return None


PARTS = st.lists(st.integers(0, 3), max_size=12)


@given(before=PARTS, part=st.lists(st.integers(0, 3), min_size=1, max_size=12), times=st.integers(0, 18), rest=PARTS)
@example(before=[], part=[1], times=15, rest=[])
@example(before=[], part=[1], times=16, rest=[])
@example(before=[5], part=[1, 2, 3, 4, 5, 6, 7], times=3, rest=[])
def test_loops_are_those_of_the_definition(
    before: list[int], part: list[int], times: int, rest: list[int]
) -> None:  # fmt: skip
    ids = before + part * times + rest
    assert loop_period(ids) == by_definition(ids)
    assert is_looping(ids) == (loop_period(ids) is not None)


@given(part=st.lists(st.integers(0, 50), min_size=1, max_size=20), before=PARTS, more=st.integers(0, 19))
def test_a_repeated_part_is_a_loop(part: list[int], before: list[int], more: int) -> None:
    ids = before + part * max(REPEATS, -(-TOKENS // len(part))) + part[:more]
    period = loop_period(ids)
    assert period is not None and period <= len(part)
    assert is_looping([*ids, 99], end_ids=[99])  # an end of turn does not undo it
    assert loop_period(ids) == loop_period([*ids, 99, 98], end_ids={98, 99})


def test_what_is_no_loop() -> None:
    assert not is_looping([])
    assert not is_looping([7, 7], end_ids=[7])
    assert not is_looping(list(range(60)))
    twice = list(range(30)) * 2
    assert not is_looping(twice) and is_looping(twice + list(range(30)))
    assert not is_looping([1] * 20 + [2, 3])  # it got out again
    assert not is_looping([5] * (TOKENS - 1)) and is_looping([5] * TOKENS)
    assert f"at least {REPEATS} times" in DEFINITION and f"{TOKENS} tokens" in DEFINITION


def test_long_outputs_take_linear_time() -> None:
    ids = [1, 2] * 100_000 + [3]
    assert loop_period(ids) is None  # 4 * 10^10 comparisons would never end
    assert loop_period(ids[:-1]) == 2
