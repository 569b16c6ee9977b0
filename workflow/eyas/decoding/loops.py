"""Whether an output has fallen into a loop: such text is easy to draft, and makes acceptance look better than it is."""

from __future__ import annotations

from collections.abc import Collection, Sequence

REPEATS, TOKENS = 3, 16

DEFINITION = (
    f"an output has fallen into a loop when, an end of turn left aside, it ends with the same sequence of tokens"
    f" repeated at least {REPEATS} times in a row, the last repetition possibly begun once more, over at least"
    f" {TOKENS} tokens"
)


def _overlaps(ids: Sequence[int]) -> list[int]:
    """For each i, how many tokens from i on equal those from 0 on (the Z-function; linear time)."""
    lengths = [len(ids)] * min(1, len(ids))
    left = right = 0  # ids[left:right] equals the beginning, with the largest `right` so far
    for i in range(1, len(ids)):
        length = min(lengths[i - left], right - i) if i < right else 0
        while i + length < len(ids) and ids[length] == ids[i + length]:
            length += 1
        if i + length > right:
            left, right = i, i + length
        lengths.append(length)
    return lengths


def loop_period(ids: Sequence[int], end_ids: Collection[int] = ()) -> int | None:
    """The length of the shortest sequence that `ids` repeats at its end, as in `DEFINITION`, or None."""
    stop = len(ids)
    while stop and ids[stop - 1] in end_ids:
        stop -= 1
    backwards = list(reversed(ids[:stop]))
    for period, length in enumerate(_overlaps(backwards)):
        # the text that ends here goes on for `length` tokens as it was `period` tokens before
        if period and period + length >= max(REPEATS * period, TOKENS):
            return period
    return None


def is_looping(ids: Sequence[int], end_ids: Collection[int] = ()) -> bool:
    """Whether an output has fallen into a loop (see `DEFINITION`)."""
    return loop_period(ids, end_ids) is not None
