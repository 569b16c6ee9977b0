"""A small finished run over the tiny target: its folder, the target, prompts, and drafters that are right or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from drafter_reference import TRAINING, extracted
from eyas.drafter.checkpoint import build_drafter, load_drafter
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.initialise import initialise, random_weights
from eyas.drafter.model import Drafter
from eyas.drafter.processes import Processes
from eyas.drafter.shape import DrafterShape
from eyas.drafter.trainer import train_epoch
from eyas.target.model import TargetModel, load_target
from eyas.target.tokenizer import TargetReference, tokenizer_hashes
from eyas.vocabulary.mapping import build_map
from tiny import WORDS, answer, question
from transformers import AutoTokenizer

LAYERS = [0, 1, 3]
END = 2
STARTS = [0, 7, 20, 28, 33]

_BUILT: dict[tuple[Path, tuple[int, ...]], World] = {}


@dataclass
class World:
    """The tiny target, states of its own answers, a drafter trained on them and a random one.

    `run`: the run's folder, with the trained drafter as its `eagle3`.
    """

    run: Path
    target: TargetModel
    prompts: list[list[int]]
    data: HiddenStates
    drafters: dict[str, Drafter]


def build_world(
    tiny_target: Path, folder: Path, layers: Sequence[int] = LAYERS, epochs: int = 6, learning_rate: float = 5e-3
) -> World:
    """The world of a target, built once a session: in `folder`, or where it was built before.

    `layers`: those that the drafters read. Servers cannot hand out the last one, which the usual ones have.
    """
    key = tiny_target, tuple(layers)
    if key not in _BUILT:
        _BUILT[key] = _build(tiny_target, folder / "results" / "tiny", list(layers), epochs, learning_rate)
    return _BUILT[key]


def _build(tiny_target: Path, run: Path, layers: list[int], epochs: int, learning_rate: float) -> World:
    reference = TargetReference(str(tiny_target))
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    rows, prompts = [], []
    for start in range(len(WORDS) - 1):
        messages = [{"role": "user", "content": question(start)}, {"role": "assistant", "content": answer(start)}]
        ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
        prompts.append(tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False))
        rows.append((start, ids, (np.arange(len(ids)) >= len(prompts[-1])).astype(np.uint8)))
    (run / "prompts").mkdir(parents=True)
    manifest = extracted(run, reference, [rows], layers=tuple(layers))
    manifest.values.update(tokenizer_hashes(tokenizer))
    manifest.path.write_text(json.dumps(manifest.values))
    mapping = build_map(np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=len(tokenizer)), 120, [END])
    sizes = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    drafter = run / "drafters" / "eagle3"
    initialise(reference, manifest, mapping, sizes | {"init": "target_layer"}, 0, drafter / "epoch_0", "mark")
    settings = TRAINING | {
        "batch_tokens": 120, "learning_rate": learning_rate, "ttt_steps": 3, "schedule_epochs": epochs,
    }  # fmt: skip
    for epoch in range(1, epochs + 1):
        train_epoch(
            manifest, run / "tokens", reference, drafter / f"epoch_{epoch - 1}", epoch, settings, 10**6, 0,
            drafter / f"epoch_{epoch}", "mark", Processes.alone(torch.device("cpu")),
        )  # fmt: skip
    shutil.copytree(drafter / f"epoch_{epochs}", drafter / "best")
    target = load_target(reference)
    shape = DrafterShape.for_target(target.config, sizes, 120, layers)
    drafters = {"trained": load_drafter(drafter / "best")}
    maps = {"d2t": torch.from_numpy(mapping.d2t), "t2d": torch.from_numpy(mapping.t2d)}
    drafters["random"] = build_drafter(shape, random_weights(shape, 1) | maps)
    return World(run, target, [prompts[s] for s in STARTS], HiddenStates(manifest, run / "tokens"), drafters)
