"""The times in a shard's sidecar: thinned, but true."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from eyas.extraction import timeline
from eyas.extraction.timeline import Timeline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(value=1000.0)
    monkeypatch.setattr(
        timeline, "time", SimpleNamespace(time=lambda: 1.8e9 + now.value, monotonic=lambda: 5 + now.value)
    )
    return now


def test_few_samples_are_kept_as_they_are(clock: SimpleNamespace):
    line = Timeline()
    for at, tokens in ((1001.0, 10), (1003.5, 0), (1009.0, 5), (1010.0, 7)):
        clock.value = at
        line.add(tokens)
    assert line.facts() == {
        "started": 1.8e9 + 1000, "samples": [[1.0, 10], [9.0, 15], [10.0, 22]], "longest_pause": [1.0, 8.0]
    }  # fmt: skip


def test_many_samples_are_thinned_and_the_last_one_stays(clock: SimpleNamespace):
    line = Timeline()
    for count in range(1, 10_001):
        clock.value = 1000.0 + count + (500 if count > 4000 else 0)
        line.add(3)
        samples = line.facts()["samples"]
        assert samples[-1] == [clock.value - 1000, 3 * count] and len(samples) <= 64
    facts = line.facts()
    assert facts["longest_pause"] == [4000.0, 501.0]  # exact, however few samples are left
    for at, tokens in facts["samples"]:
        count = tokens / 3
        assert at == count + (500 if count > 4000 else 0)
    steps = [b[1] - a[1] for a, b in zip(facts["samples"][:-1], facts["samples"][1:], strict=True)]
    assert len(steps) >= 31 and len(set(steps[:-1])) == 1  # evenly thinned


def test_without_tokens_there_is_no_sample(clock: SimpleNamespace):
    assert Timeline().facts() == {"started": 1.8e9 + 1000, "samples": [], "longest_pause": [0.0, 0.0]}
