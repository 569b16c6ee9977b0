"""Many rows and shards through tokenising, a stand-in for extraction, and the manifest: memory and files stay flat."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from eyas.config.schema import PromptFiles
from eyas.conversations import read_rows
from eyas.conversations.prompts import write_prompts
from eyas.extraction.engines.base import Captured, CapturedRow
from eyas.extraction.manifest import read_manifest, write_manifest
from eyas.extraction.shard import extract_shard
from eyas.shards import Shard, shards_of
from eyas.target.tokenizer import TargetReference
from eyas.tokenization.shard import tokenize_shard
from ledger import Faults
from recorded_rows import write_recorded_rows

WIDTH = 64  # of the tiny target


class Reader:
    """What the process holds: megabytes of memory, open files."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.samples: list[tuple[float, int]] = []

    def sample(self) -> None:
        self.samples.append((self.process.memory_info().rss / 1e6, self.process.num_fds()))

    def require_flat(self, megabytes: float) -> None:
        """The last quarter holds no more than the second: what grows with the work would."""
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        assert max(fds for _, fds in late) <= max(fds for _, fds in early) + 2
        grown = float(np.median([rss for rss, _ in late]) - np.median([rss for rss, _ in early]))
        assert grown < megabytes, f"{grown:.1f} MB more"


class StandIn:
    """Made-up states, at once."""

    journal_seconds = 0.0
    way = {"engine": "stand-in"}

    def begin(self) -> None: ...

    def capture(
        self, name: str, sequences: Sequence[np.ndarray], finished: frozenset[int]
    ) -> Generator[list[tuple[int, Captured]], None, None]:
        for index, ids in enumerate(sequences):
            states = torch.ones(len(ids), 3 * WIDTH, dtype=torch.bfloat16)
            yield [(index, CapturedRow(states, states[:, :WIDTH], np.zeros(len(ids), dtype=np.int32)))]

    def close(self) -> None: ...


def tokenize(run: Path, shard: Shard, target: TargetReference) -> None:
    settings = {
        "max_length": 128, "overlong": "skip", "truncation_side": "right", "train_on": "all_turns", "reasoning": "train",
        "template_options": {},
    }  # fmt: skip
    name = f"{shard.name}.jsonl"
    # the responses are in the prompts already
    conversations = write_recorded_rows(run / "conversations" / name, read_rows(run / "prompts" / name))
    tokenize_shard(conversations, (run / "tokens" / name).with_suffix(".safetensors"), target, settings)


@pytest.mark.timeout(3 * 3600)
def test_many_rows_and_shards(faults: Faults, tiny_target: Path, tmp_path: Path) -> None:
    shards = shards_of(faults.count(200, 10_000), 2)  # 5,000 shards
    prompts = tmp_path / "prompts.jsonl"
    with open(prompts, "w") as file:
        for number in range(shards[-1].end):
            file.write(json.dumps({
                "messages": [
                    {"role": "user", "content": f"what follows {number} ?"}, {"role": "assistant", "content": "badabe"},
                ]
            }) + "\n")  # fmt: skip
    run = tmp_path / "run"
    write_prompts([PromptFiles(path=str(prompts))], shards[-1].end, 2, 0, run / "prompts", duplicates="keep")
    target = TargetReference(str(tiny_target))
    tokenising, extracting = Reader(), Reader()
    with faults.tried(f"{shards[-1].end:,} rows in {len(shards):,} shards: tokenising"):
        for shard in shards:
            tokenize(run, shard, target)
            tokenising.sample()
        tokenising.require_flat(20)
    with faults.tried(f"{shards[-1].end:,} rows in {len(shards):,} shards: extraction"):
        engine = StandIn()
        for shard in shards:
            output = run / "hidden_states" / f"{shard.name}.safetensors"
            extract_shard(run / "tokens" / output.name, output, target, [0, 1, 2], "bfloat16", engine=engine)
            extracting.sample()
        extracting.require_flat(20)
    with faults.tried(f"{shards[-1].end:,} rows in {len(shards):,} shards: manifest"):
        files = [run / "hidden_states" / f"{shard.name}.safetensors" for shard in shards]
        before = psutil.Process().num_fds()
        write_manifest(files, shards[-1].end, run / "hidden_states" / "data_config.json")
        manifest = read_manifest(run / "hidden_states" / "data_config.json")
        assert len(manifest.values["shards"]) == len(shards)
        assert manifest.values["totals"]["rows"] == shards[-1].end
        assert psutil.Process().num_fds() == before
    assert [name for name in os.listdir(run / "hidden_states") if name.startswith(".")] == []
