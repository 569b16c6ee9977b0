"""How far each stage is: files by name, drafters and their epochs from the run's own record."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.plan.export import SERVERS
from eyas.shards import Shard

_EXPORTED = ("export.json", "README.md", "provenance.json")  # of a whole export, for each server


@dataclass(frozen=True)
class Stage:
    """Finished parts of a stage; `total` None where the run does not say how many there are to be."""

    name: str
    done: int
    total: int | None

    @property
    def complete(self) -> bool:
        return self.total is not None and self.done >= self.total


@dataclass(frozen=True)
class Training:
    """The last line of an epoch's metrics."""

    drafter: str
    epoch: int
    step: int
    loss: float | None
    acceptance_length: float | None
    newest: float


def _there(*paths: str) -> int:
    return sum(os.path.exists(path) for path in paths)


def _names(folder: Path) -> list[str]:
    """Folders in a small folder (drafters, epochs)."""
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def drafters_of(run: Path, record: dict[str, Any] | None) -> dict[str, dict[str, int | None]]:
    """Drafters with their `epochs` and `draft_vocab_size`, None where they are not known."""
    if record and isinstance(record.get("drafters"), dict):
        return dict(record["drafters"])
    return {name: {"epochs": None, "draft_vocab_size": None} for name in _names(run / "drafters")}


def read_stages(
    run: Path, shards: Sequence[Shard], states_done: int, drafters: dict[str, dict[str, int | None]]
) -> list[Stage]:
    """All stages in order."""
    count = len(shards)
    numbered = os.path.exists(run / "prompts" / "index.json")
    stages = [
        Stage("prompts", count if numbered else 0, count),
        Stage("responses", _there(*(f"{run}/conversations/{shard.name}.json" for shard in shards)), count),
        Stage("tokens", _there(*(f"{run}/tokens/{shard.name}.json" for shard in shards)), count),
        Stage("hidden_states", states_done, count),
        Stage("manifest", _there(f"{run}/hidden_states/data_config.json"), 1),
    ]
    sizes = {values.get("draft_vocab_size") for values in drafters.values()}
    if None not in sizes:
        stages.append(Stage("vocabulary", _there(*(f"{run}/vocab_map/{size}.json" for size in sizes)), len(sizes)))
    done, total = 0, 0
    for name, values in drafters.items():
        epochs = values.get("epochs")
        folder = run / "drafters" / name
        numbers = range(1, epochs + 1) if epochs else [n[6:] for n in _names(folder) if n.startswith("epoch_")]
        done += _there(*(f"{folder}/epoch_{n}/trainer_state.json" for n in numbers if str(n) != "0"))
        total += epochs or 0
    known = all(values.get("epochs") for values in drafters.values())
    stages.append(Stage("epochs", done, total if known and drafters else None))
    wanted = len(drafters) or None
    stages.append(Stage("evaluation", _there(*(f"{run}/drafters/{name}/evaluation.json" for name in drafters)), wanted))
    exports = [f"{run}/drafters/{name}/export/{server}" for name in drafters for server in SERVERS]
    whole = sum(all(os.path.exists(f"{export}/{file}") for file in _EXPORTED) for export in exports)
    stages.append(Stage("export", whole, len(exports) or None))
    return [*stages, Stage("report", _there(f"{run}/summary.txt", f"{run}/report.html"), 2)]


def read_training(run: Path, drafters: dict[str, dict[str, int | None]]) -> list[Training]:
    """Where each drafter's training is: the newest epoch that has metrics."""
    found = []
    for name, values in drafters.items():
        folder = run / "drafters" / name
        epochs = values.get("epochs") or len(_names(folder)) + 1
        for epoch in range(epochs, 0, -1):
            places = (folder / ".staging" / f"epoch_{epoch}", folder / f"epoch_{epoch}")
            last = next(filter(None, (_last_metrics(place / "metrics.jsonl") for place in places)), None)
            if last is not None:
                facts, newest = last
                found.append(
                    Training(name, epoch, int(facts["step"]), facts.get("loss"), facts.get("acceptance_length"), newest)
                )
                break
    return found


def _last_metrics(path: Path) -> tuple[dict[str, Any], float] | None:
    """The last whole line of a metrics file, and when it was written."""
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            file.seek(max(status.st_size - 8192, 0))
            lines = file.read().split(b"\n")[:-1]
        facts = json.loads(lines[-1])
        return (facts, status.st_mtime) if type(facts["step"]) is int else None
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return None
