"""The evaluation of a drafter: acceptance from hidden states, and real decoding of prompt sets beside baselines."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas.decoding import offline
from eyas.decoding.eagle import EagleProposer
from eyas.decoding.measure import DEFINITIONS, PLAIN, measure_set
from eyas.decoding.ngram import NgramProposer
from eyas.decoding.prompt_sets import Conversations, read_prompt_sets
from eyas.decoding.proposers import Proposer
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.model import Drafter
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, read_manifest, require, require_target
from eyas.shards import read_json, write_lock, write_record
from eyas.target.chat import ChatTemplate
from eyas.target.model import TargetModel, config_hash, load_target
from eyas.target.tokenizer import TargetReference, end_of_turn_ids, load_tokenizer, tokenizer_hashes
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["evaluation"]


@dataclass(frozen=True)
class RunFiles:
    """What a run has to measure drafters on: `folder` with its manifest, tokens and conversations."""

    folder: Path
    rows: int
    shard_rows: int

    def manifest(self) -> Manifest:
        return read_manifest(self.folder / "hidden_states" / "data_config.json")

    def conversations(self, held_out_every: int) -> Conversations:
        return Conversations(self.folder / "conversations", self.rows, self.shard_rows, held_out_every)


class Measurement:
    """A run's target and data, ready to measure drafters on.

    `settings`: all of `RunPlan.evaluation_settings`. Raises EyasError when the target is not the one that the
    run's hidden states are from.
    """

    def __init__(self, run: RunFiles, reference: TargetReference, settings: Mapping[str, Any], gpus: int = 0) -> None:
        self.run, self.settings = run, settings
        self.manifest = run.manifest()
        self.tokenizer = load_tokenizer(reference)
        require_target(self.manifest, config_hash(reference), reference.path)
        require(self.manifest, **tokenizer_hashes(self.tokenizer))
        self.end_ids = end_of_turn_ids(reference, self.tokenizer)
        self.target: TargetModel = load_target(reference, gpus)

    def evaluate(
        self, drafter: Drafter, checkpoint: str, untrained: Drafter | None = None, states: bool = True
    ) -> dict[str, Any]:
        """The contents of evaluation.json.

        `checkpoint`: how the drafter is called there. `states` False leaves out the figures from hidden states
        (they are null then). Raises EyasError when no held-out row is usable for them.
        """
        settings = self.settings
        steps = settings["draft_steps"]
        drafter, untrained = self._ready(drafter), None if untrained is None else self._ready(untrained)
        from_states: dict[str, Any] = {"trained": None, "untrained": None}
        usable: set[int] | None = None
        if states:
            data, rows = self._held_out()
            usable = {int(data.row_ids[i]) for i in rows}
            for which, one in (("trained", drafter), ("untrained", untrained)):
                if one is not None:
                    from_states[which] = _from_states(one, data, rows, steps)
                    length = from_states[which]["expected_acceptance_length"]
                    log.info(
                        "From the states of %d held-out rows, %s: acceptance length %.3f.", len(usable), which, length
                    )
        chat = ChatTemplate(self.tokenizer, settings["template_options"])
        conversations = self.run.conversations(settings["held_out_every"])
        prompt_sets = read_prompt_sets(settings["prompt_sets"], conversations, chat, usable)
        ways: dict[str, Proposer | None] = {PLAIN: None, "trained": self._eagle(drafter), "ngram": NgramProposer(steps)}
        if untrained is not None:
            ways["untrained"] = self._eagle(untrained)
        measured = {}
        for name, prompt_set in prompt_sets.items():
            measured[name] = measure_set(self.target, ways, prompt_set, self.end_ids, settings, name)
            _log_set(name, measured[name])
        definitions = {"offline": offline.DEFINITION} | DEFINITIONS
        for definition in definitions.values():
            log.info("%s.", definition)
        return {
            "format_version": FORMAT_VERSION,
            "definitions": definitions,
            "engine": "transformers",
            "settings": {
                key: settings[key] for key in ("draft_steps", "topk", "draft_tokens", "temperature", "max_new_tokens")
            },
            "checkpoint": checkpoint,
            "held_out_rows": None if usable is None else len(usable),
            "offline": from_states,
            "prompt_sets": measured,
        }

    def _ready(self, drafter: Drafter) -> Drafter:
        return drafter.to(self.target.device).eval()

    def _eagle(self, drafter: Drafter) -> EagleProposer:
        settings = self.settings
        return EagleProposer(
            drafter, drafter.shape.layers, settings["draft_steps"], settings["topk"], settings["draft_tokens"]
        )

    def _held_out(self) -> tuple[HiddenStates, list[int]]:
        data = HiddenStates(self.manifest, self.run.folder / "tokens")
        rows: list[int] = data.select(self.settings["held_out_every"], held_out=True).tolist()
        if not rows:
            raise EyasError(
                "no usable held-out row to measure acceptance on; lower data.held_out_every or add rows (the tokens'"
                " .json files say why rows were skipped)"
            )
        return data, rows


def _from_states(drafter: Drafter, data: HiddenStates, rows: list[int], steps: int) -> dict[str, Any]:
    counts = offline.chained_accuracy(drafter, data, rows, steps)
    return {
        "accuracy_by_step": counts.accuracy,
        "positions_by_step": counts.reached.tolist(),
        "expected_acceptance_length": counts.acceptance_length(steps),
        "expected_acceptance_lengths": [counts.acceptance_length(length) for length in range(1, steps + 1)],
    }


def _log_set(name: str, figures: Mapping[str, Any]) -> None:
    """The figures of a prompt set, a line for each way of decoding."""
    for way, values in [("trained", figures), *figures["baselines"].items()]:
        if values is None or values["acceptance_length"] is None:
            continue
        lossless = {True: ", lossless", False: ", NOT equal to plain greedy decoding", None: ""}[values["lossless"]]
        log.info(
            "%s, %s: acceptance length %.3f, %.3f tokens a target forward, speedup %.2f, %.0f%% looping%s.",
            name, way, values["acceptance_length"], values["tokens_per_forward"], values["speedup"],
            100 * values["looping_share"], lossless,
        )  # fmt: skip


def _epoch_of(folder: Path) -> str:
    """The name of the epoch that a checkpoint folder holds."""
    selection = folder / "selection.json"
    return f"epoch_{read_json(selection)['epoch']}" if selection.is_file() else folder.name


def evaluate(
    run: RunFiles,
    reference: TargetReference,
    trained: Path,
    untrained: Path,
    settings: Mapping[str, Any],
    output: Path,
    gpus: int = 0,
) -> None:
    """Measure the checkpoint in the folder `trained` beside the one before training; write `output` as JSON."""
    if settings["engine"] != "transformers":
        raise EyasError(f"evaluation.engine: {settings['engine']} is not there yet; write transformers")
    with write_lock(output), torch.inference_mode():
        measurement = Measurement(run, reference, settings, gpus)
        write_record(output, measurement.evaluate(load_drafter(trained), _epoch_of(trained), load_drafter(untrained)))
