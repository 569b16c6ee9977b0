"""The collector's benchmark on little data: every byte goes the way that it is there to measure."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from extraction_collector import measure, result


def test_small_shards_are_written_and_planned(tmp_path: Path) -> None:
    """20 MB; that the shard holds the dumps' states is checked by the benchmark itself."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="eyas-test-") as memory:
        found = measure(tmp_path, Path(memory), 20_000_000, rounds=2, hidden_size=1024)
        assert list(Path(memory).iterdir()) == []  # every dump was deleted
    assert len(found.collector) == len(found.plain) == 2
    assert result(found)["plan_error"] <= 0.001
    assert result(found)["collector_ratio"] > 0
    assert len(list((tmp_path / "run" / "hidden_states").glob("rows_*.safetensors"))) == 3
