"""Small trainings on synthetic states, as tests and the scripts that tests start share them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drafter_reference import TRAINING, extracted, file_bytes, read_json_file, save_llama
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.epoch import Runtime
from eyas.drafter.initialise import initialise
from eyas.drafter.packing import epoch_batches
from eyas.drafter.processes import Processes
from eyas.drafter.trainer import train_epoch
from eyas.extraction.manifest import Manifest, read_manifest
from eyas.shards import map_arrays
from eyas.target.tokenizer import TargetReference
from eyas.vocabulary import VocabularyMap
from eyas.vocabulary.mapping import build_map

OPEN = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)  # the target's
HELD_OUT_EVERY, SEED, DRAFT_VOCAB = 5, 3, 30
LENGTHS = [17, 9, 24, 12, 20, 15, 8, 22, 11, 18, 14, 21]  # rows 4 and 9 are held out


@dataclass
class Run:
    """A random target, states of its rows, and a vocabulary map."""

    folder: Path
    target: TargetReference
    manifest: Manifest
    mapping: VocabularyMap

    @property
    def data(self) -> HiddenStates:
        return HiddenStates(self.manifest, self.folder / "tokens")

    def start(self, output: Path, init: str = "target_layer", **sizes: int) -> Path:
        initialise(self.target, self.manifest, self.mapping, OPEN | sizes | {"init": init}, SEED, output, "mark")
        return output

    def train(
        self,
        previous: Path,
        epoch: int,
        output: Path,
        held_out_every: int = HELD_OUT_EVERY,
        runtime: Runtime | None = None,
        processes: Processes | None = None,
        mark: str = "mark",
        **changes: Any,
    ) -> Path:
        train_epoch(
            self.manifest, self.folder / "tokens", self.target, previous, epoch, TRAINING | changes, held_out_every,
            SEED, output, mark, processes or Processes.alone(torch.device("cpu")), runtime,
        )  # fmt: skip
        return output

    def batches(self, epoch: int, batch_tokens: int = TRAINING["batch_tokens"]) -> list[list[int]]:
        """Rows of an epoch's batches: all but every fifth."""
        data = self.data
        rows = np.array([i for i, row in enumerate(data.row_ids) if row % HELD_OUT_EVERY != HELD_OUT_EVERY - 1])
        return epoch_batches(rows, data.lengths, batch_tokens, SEED, epoch)

    def copy(self, folder: Path) -> Run:
        """The same with states and tokens of its own, to be spoilt."""
        for name in ("hidden_states", "tokens"):
            shutil.copytree(self.folder / name, folder / name)
        return Run(folder, self.target, read_manifest(folder / "hidden_states" / "data_config.json"), self.mapping)

    def change_states(self, row: int, change: Callable[[np.ndarray], None], name: str = "aux_hidden_states") -> None:
        """Write into the states [tokens, width] of a row, in place."""
        for file in self.manifest.shards:
            arrays = map_arrays(file, (name, "offsets", "row_ids"))
            places = np.flatnonzero(arrays["row_ids"] == row)
            if len(places):
                start, end = (int(i) for i in arrays["offsets"][places[0] : places[0] + 2])
                states = np.array(arrays[name])
                change(states[start:end])
                _overwrite(file, name, states)


def _overwrite(file: Path, name: str, values: np.ndarray) -> None:
    """Replace a tensor's bytes inside a safetensors file."""
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + size])[name]["data_offsets"]
    content[8 + size + start : 8 + size + end] = values.tobytes()
    file.write_bytes(content)


def make_run(folder: Path, rows: list[tuple], **target_changes: Any) -> Run:
    target = save_llama(folder / "target", **target_changes)
    counts = np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=40)
    return Run(folder, target, extracted(folder, target, [rows]), build_map(counts, DRAFT_VOCAB, [2]))


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of an epoch's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def same_epoch(first: Path, second: Path) -> bool:
    """Whether two epochs hold the same bytes."""
    one, other = file_bytes(first), file_bytes(second)
    assert len(one) >= 4
    return one == other


def history_of(folder: Path) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = read_json_file(folder / "trainer_state.json")["history"]
    return history
