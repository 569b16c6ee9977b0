"""Which epoch is the best, when training should have stopped, and what is put where the best one is looked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from drafter_reference import file_bytes, read_json_file
from eyas.drafter.selection import best_epoch, stopped_after
from eyas.drafter.stages import select_best
from eyas.errors import EyasError
from eyas.shards import describe_file

Record = dict[str, Any]


def trained(*lengths: float | None) -> list[Record]:
    """A history of epochs from 1 with these acceptance lengths on the held-out rows (None: not measured)."""
    measured = [{} if length is None else {"held_out": {"rows": 3, "acceptance_length": length}} for length in lengths]
    return [{"epoch": epoch + 1, "loss": 1.0, **values} for epoch, values in enumerate(measured)]


def repeated(history: list[Record], count: int) -> list[Record]:
    last = history[-1]["epoch"]
    return history + [{"epoch": last + 1 + i, "stopped_after": last} for i in range(count)]


@pytest.mark.parametrize(
    "history, best",
    [
        ([], 0),
        (trained(1.2), 1),
        (trained(1.2, 1.9, 1.5), 2),
        (trained(1.2, 1.9, 1.9, 1.5, 1.9), 2),  # the earliest of equals
        (trained(2.0, 1.9), 1),
        (trained(None, None, None), 3),  # nothing measured: the last
        (trained(None, 1.5, None), 2),
        (repeated(trained(1.2, 1.9, 1.5), 3), 2),
        (repeated(trained(None, None), 3), 2),  # the last that was trained, not a repetition of it
    ],
)
def test_the_best_epoch(history: list[Record], best: int) -> None:
    assert best_epoch(history) == best


@pytest.mark.parametrize(
    "history, patience, stopped",
    [
        ([], 1, None),
        (trained(1.2), 1, None),
        (trained(1.2, 1.3), 1, None),
        (trained(1.3, 1.2), 1, 2),
        (trained(1.3, 1.3), 1, 2),  # as good is not better
        (trained(1.3, 1.2), 2, None),
        (trained(1.3, 1.2, 1.25), 2, 3),
        (trained(1.3, 1.2, 1.31, 1.2), 2, None),  # a better one starts the count again
        (trained(1.3, 1.2, 1.31, 1.2, 1.1), 2, 5),
        (trained(1.3, 1.2, 1.1), None, None),  # turned off
        (trained(None, None, None), 1, None),  # nothing measured: never
        (trained(1.3, None), 1, None),
        (repeated(trained(1.3, 1.2), 1), 1, 2),  # once stopped, stopped
        (repeated(trained(1.3, 1.2), 4), 1, 2),
        (repeated(trained(1.3, 1.2), 4), None, None),  # turned off afterwards
        ([*repeated(trained(1.3, 1.2), 3), *trained(*[1.1] * 6)[5:]], 3, None),  # and on: what was trained counts
        ([*repeated(trained(1.3, 1.2), 3), *trained(*[1.1] * 6)[5:]], 2, 6),
        ([*repeated(trained(1.3, 1.2), 3), *trained(*[1.4] * 6)[5:]], 1, None),
    ],
)
def test_when_it_stopped(history: list[Record], patience: int | None, stopped: int | None) -> None:
    assert stopped_after(history, patience) == stopped


# ---- the folder of the best ----


def write_epochs(folder: Path, history: list[Record]) -> Path:
    """Folders of epochs 0 to the last of a history; returns the last."""
    for epoch in range(len(history) + 1):
        place = folder / f"epoch_{epoch}"
        place.mkdir(parents=True)
        for name in ("model.safetensors", "config.json", "trainer_state.safetensors"):
            (place / name).write_text(f"{name} of epoch {epoch}")
        files = {path.name: describe_file(path) for path in sorted(place.iterdir())}
        facts = {"format_version": 1, "epoch": epoch, "history": history[:epoch], "files": files}
        (place / "trainer_state.json").write_text(json.dumps(facts))
    return place


@pytest.mark.parametrize(
    "history, best",
    [
        ([], 0),
        (trained(1.2, 1.9, 1.5), 2),
        (trained(1.9, 1.2, 1.9), 1),
        (trained(None, None), 2),
        (repeated(trained(1.2, 1.9, 1.5), 2), 2),
        (repeated(trained(None, None), 1), 2),
    ],
)
def test_the_best_epoch_is_copied(history: list[Record], best: int, tmp_path: Path) -> None:
    last = write_epochs(tmp_path, history)
    select_best(last, tmp_path / "best")
    found = file_bytes(tmp_path / "best")
    assert sorted(found) == ["config.json", "model.safetensors", "selection.json"]
    for name in ("config.json", "model.safetensors"):
        assert found[name].decode() == f"{name} of epoch {best}"
        assert not (tmp_path / "best" / name).samefile(tmp_path / f"epoch_{best}" / name)
    selection = read_json_file(tmp_path / "best" / "selection.json")
    assert (selection["epoch"], selection["last_epoch"]) == (best, len(history))
    assert "held-out rows" in selection["definition"]  # what the number is, where it is shown
    lengths = {epoch: held_out and held_out["acceptance_length"] for epoch, held_out in selection["held_out"].items()}
    assert lengths == {str(r["epoch"]): r.get("held_out", {}).get("acceptance_length") for r in history}
    assert selection["files"] == {n: describe_file(tmp_path / "best" / n) for n in ("model.safetensors", "config.json")}
    assert {path.name for path in tmp_path.iterdir()} == {"best", *(f"epoch_{i}" for i in range(len(history) + 1))}


def test_it_is_written_again_only_when_something_changed(tmp_path: Path) -> None:
    write_epochs(tmp_path, trained(1.2, 1.9, 2.5))
    best = tmp_path / "best"
    select_best(tmp_path / "epoch_2", best)
    times = {path: path.stat().st_mtime_ns for path in best.iterdir()}
    select_best(tmp_path / "epoch_2", best)
    assert {path: path.stat().st_mtime_ns for path in best.iterdir()} == times
    (best / "model.safetensors").unlink()
    select_best(tmp_path / "epoch_2", best)
    assert (best / "model.safetensors").read_text() == "model.safetensors of epoch 2"
    select_best(tmp_path / "epoch_3", best)  # more epochs, a better one
    assert (best / "model.safetensors").read_text() == "model.safetensors of epoch 3"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_epoch_is_refused(name: str, tmp_path: Path) -> None:
    last = write_epochs(tmp_path, trained(1.2, 1.9, 1.5))
    damaged = tmp_path / "epoch_2" / name
    damaged.write_text(damaged.read_text().upper())  # the same size
    with pytest.raises(EyasError, match=rf"epoch_2/{name}: not as it was written .*delete .*/epoch_2 and run"):
        select_best(last, tmp_path / "best")
    assert not (tmp_path / "best").exists()
    other = write_epochs(tmp_path / "other", trained(1.2, 1.9, 1.5))
    (tmp_path / "other" / "epoch_1" / name).write_text("spoilt")  # one that is not chosen
    select_best(other, tmp_path / "other" / "best")
