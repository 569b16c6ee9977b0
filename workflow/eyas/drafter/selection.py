"""Which epoch is the best, and whether training should have stopped: by the held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def best_epoch(history: Sequence[dict[str, Any]]) -> int:
    """The epoch with the longest expected acceptance on the held-out rows (the earliest of equals).

    The last one trained, where no held-out row could be measured.
    """
    done = [record for record in history if "stopped_after" not in record]
    measured = [record for record in done if record.get("held_out")]
    if not measured:
        return int(done[-1]["epoch"]) if done else 0
    best = max(measured, key=lambda record: (record["held_out"]["acceptance_length"], -record["epoch"]))
    return int(best["epoch"])


def stopped_after(history: Sequence[dict[str, Any]], patience: int | None) -> int | None:
    """The epoch after which training stopped, or None while it is to go on.

    It stops when `patience` epochs in a row have not been better than the best before them.
    """
    if history and "stopped_after" in history[-1]:
        return int(history[-1]["stopped_after"]) if patience is not None else None
    done = [record for record in history if "stopped_after" not in record]  # there are others if it was turned off
    if patience is None or not done or not all(record.get("held_out") for record in done):
        return None
    best = best_epoch(done)
    return int(done[-1]["epoch"]) if sum(record["epoch"] > best for record in done) >= patience else None
