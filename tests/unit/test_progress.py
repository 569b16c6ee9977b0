"""The progress line: bar, figures, speed of this attempt alone, time that is left; one line in an interval."""

from __future__ import annotations

import logging

import pytest
from eyas.jobs import BatchProgress, Progress
from eyas.jobs import progress as module


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_bar_figures_speed_and_time_left(clock: Clock) -> None:
    progress = Progress("Epoch 3", 4000, "tokens")
    assert progress.line() == "Epoch 3 [--------------------] 0 of 4,000 tokens (0%), 0.0 tokens/s"
    clock.now += 10
    progress.advance(1000)
    assert progress.line() == (
        "Epoch 3 [#####---------------] 1,000 of 4,000 tokens (25%), 100.0 tokens/s, 00:30 left"
    )  # fmt: skip
    assert progress.line("loss 2.125").endswith("tokens/s, 00:30 left; loss 2.125")
    assert (progress.speed, progress.seconds) == (100.0, 10.0)
    clock.now += 30
    progress.advance(3000)
    assert (
        progress.line("loss 1") == "Epoch 3 [####################] 4,000 of 4,000 tokens (100%), 100.0 tokens/s; loss 1"
    )


def test_work_of_an_earlier_attempt_is_in_the_bar_and_not_in_the_speed(clock: Clock) -> None:
    progress = Progress("Epoch 1", 1000, "tokens", already=500)
    clock.now += 5
    progress.advance(50)
    assert progress.line() == "Epoch 1 [###########---------] 550 of 1,000 tokens (55%), 10.0 tokens/s, 00:45 left"


@pytest.mark.parametrize("done, full", [(0, 0), (49, 0), (50, 1), (999, 19), (1000, 20), (1100, 20)])
def test_the_bar_is_full_only_at_the_end(done: int, full: int, clock: Clock) -> None:
    progress = Progress("Rows", 1000, "rows")
    clock.now += 1
    progress.advance(done)
    assert f"[{'#' * full}{'-' * (20 - full)}]" in progress.line()
    assert (" left" in progress.line()) == (0 < done < 1000)


def test_nothing_to_do_is_done(clock: Clock) -> None:
    assert Progress("Checksums", 0, "bytes").line() == (
        "Checksums [####################] 0 of 0 bytes (100%), 0.0 bytes/s"
    )  # fmt: skip


@pytest.mark.parametrize(
    "seconds, text",
    [(0, "00:00"), (0.5, "00:01"), (59.4, "00:59"), (59.6, "01:00"), (3599, "59:59"), (3600, "1:00:00"), (90061, "25:01:01")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert module.duration(seconds) == text


def test_a_line_in_an_interval(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = Progress("Rows", 100, "rows", interval=5)
    with caplog.at_level(logging.INFO, "eyas"):
        for _ in range(50):
            clock.now += 0.5
            progress.advance(1, "note")
    assert len(caplog.messages) == 5
    assert caplog.messages[0] == "Rows [##------------------] 10 of 100 rows (10%), 2.0 rows/s, 00:45 left; note"


def test_the_line_of_a_batch(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """The run of the design page: 37,312 rows, 87.8 M tokens, 3.5 TB."""
    progress = BatchProgress("Hidden states", 87_800_000, 3_500_000_000_000)
    with caplog.at_level(logging.INFO, "eyas"):
        clock.now += 5.2
        progress.batch(4, 9_300)
        clock.now += 4.8
        progress.batch(6, 12_700)
    assert caplog.messages == [
        "Batch 1-4: 5.2s, Total: 4 samples, 9300 tokens, 0.77 samples/s, 1788.5 tok/s,"
        " 0.371 GB written of 3500.0 GB, ETA 13:39",
        "Batch 5-10: 4.8s, Total: 10 samples, 22000 tokens, 1.00 samples/s, 2200.0 tok/s,"
        " 0.877 GB written of 3500.0 GB, ETA 11:05",
    ]


def test_batches_of_an_earlier_attempt_are_in_the_totals_and_not_in_the_speeds(clock: Clock) -> None:
    progress = BatchProgress("Hidden states", 1000, 20_000_000_000, already=500, samples_already=50)
    assert progress.batch_line(51, 0).endswith("0.0 tok/s, 10.0 GB written of 20.0 GB, ETA --:--")
    clock.now += 10
    progress.batch(5, 250)
    assert progress.batch_line(51, 10) == (
        "Batch 51-55: 10.0s, Total: 55 samples, 750 tokens, 0.50 samples/s, 25.0 tok/s,"
        " 15.0 GB written of 20.0 GB, ETA 00:01"
    )
    clock.now += 10
    progress.batch(5, 250, written=19_000_000_000)
    assert progress.batch_line(56, 10, 19_000_000_000).endswith("19.0 GB written of 20.0 GB, ETA 00:00")


def test_batches_in_an_interval(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    progress = BatchProgress("Hidden states", 1000, 8000, interval=2)
    with caplog.at_level(logging.INFO, "eyas"):
        for _ in range(10):
            clock.now += 0.5
            progress.batch(1, 10)
    assert [message.split(":")[0] for message in caplog.messages] == ["Batch 4-4", "Batch 8-8"]
