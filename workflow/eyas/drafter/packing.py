"""Rows into batches: best-fit packing, and a batch's rows over processes and passes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


def best_fit(order: Sequence[int], lengths: np.ndarray, max_tokens: int) -> list[list[int]]:
    """Put rows, in the given order, each into the batch where it leaves the least room.

    Every row is in exactly one batch, whole; one longer than `max_tokens` goes alone. Batches are
    in the order in which they were begun. A million rows take seconds: compiling this
    would not pay.
    """
    batches: list[list[int]] = []
    rooms: list[int] = []  # the different rooms left in open batches, ascending
    open_with: dict[int, list[int]] = {}  # room -> batches that have it
    shortest = int(min((lengths[i] for i in order), default=0))
    for index in order:
        length = int(lengths[index])
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            number = open_with[room].pop()
            if not open_with[room]:
                del open_with[room]
                rooms.pop(at)
            batches[number].append(int(index))
        else:
            room, number = max_tokens, len(batches)
            batches.append([int(index)])
        left = room - length
        if left >= max(shortest, 1):  # else no row fits any more
            if left not in open_with:
                open_with[left] = []
                insort(rooms, left)
            open_with[left].append(number)
    return batches


def epoch_batches(rows: np.ndarray, lengths: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The batches of an epoch. They depend on the rows, their lengths, seed and epoch alone.

    Rows are shuffled before they are packed; batches again, because the last ones begun are the
    ones that short rows had no time to fill.
    """
    random = np.random.default_rng([seed, epoch])
    batches = best_fit(random.permutation(rows).tolist(), lengths, batch_tokens)
    return [batches[i] for i in random.permutation(len(batches)).tolist()]


def share_rows(
    batch: Sequence[int], lengths: np.ndarray, work: np.ndarray, processes: int, micro_tokens: int
) -> list[list[list[int]]]:
    """Cut a batch into what each process takes through the drafter at once: rows by [process][pass].

    Rows go, the most work first, to the process that has the least so far. All processes have the
    same number of passes (some may be empty): collective operations inside them must meet.
    """
    loads = [0.0] * processes
    shares: list[list[int]] = [[] for _ in range(processes)]
    order = sorted(range(len(batch)), key=lambda i: (-int(work[batch[i]]), i)) if processes > 1 else range(len(batch))
    for i in order:
        least = min(range(processes), key=lambda p: (loads[p], p))
        shares[least].append(i)
        loads[least] += int(work[batch[i]])
    passes = [best_fit([batch[i] for i in sorted(share)], lengths, micro_tokens) for share in shares]
    longest = max(map(len, passes))
    return [own + [[]] * (longest - len(own)) for own in passes]
