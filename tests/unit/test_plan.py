"""A killed Snakemake's lock is taken over; a living one's is not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from eyas.plan import WorkingFolder

HOLD = "import sys, pathlib; from eyas.plan import WorkingFolder; w = WorkingFolder(pathlib.Path(sys.argv[1])); print(w.hold(), flush=True); sys.stdin.read()"


def locked(records: Path) -> list[str]:
    (records / "locks").mkdir(parents=True, exist_ok=True)
    (records / "locks" / "0.input.lock").write_text("a\n")
    return ["0.input.lock"]


def test_the_lock_of_a_living_one_stays_and_that_of_a_killed_one_goes(tmp_path: Path) -> None:
    records = tmp_path / ".snakemake"
    locked(records)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(records)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout.readline() == "True\n"
    ours = WorkingFolder(records)
    assert not ours.hold() and not ours.hold(patience=0.3)
    ours.drop_stale_lock()
    assert [p.name for p in (records / "locks").iterdir()] == ["0.input.lock"]
    other.kill()
    other.wait()
    assert ours.hold()
    ours.drop_stale_lock()
    assert list((records / "locks").iterdir()) == []
    assert ours.hold()  # once is enough
