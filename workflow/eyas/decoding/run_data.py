"""What of a run drafters are measured on, apart from decoding: held-out states, prompts, and the table they go into."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.decoding import offline
from eyas.decoding.prompt_sets import Conversations, PromptSet, read_prompt_sets
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.model import Drafter
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, read_manifest, require, require_target
from eyas.shards import read_json
from eyas.target.chat import ChatTemplate
from eyas.target.model import target_identity
from eyas.target.tokenizer import TargetReference, end_of_turn_ids, load_tokenizer, tokenizer_hashes
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

_SETTINGS = ("draft_steps", "topk", "draft_tokens", "temperature", "max_new_tokens")


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


class RunData:
    """A run's tokenizer, held-out rows and prompts.

    `settings`: all of `RunPlan.evaluation_settings`. Raises EyasError when the target is not the one that the
    run's hidden states are from.
    """

    def __init__(self, run: RunFiles, reference: TargetReference, settings: Mapping[str, Any]) -> None:
        self.run, self.settings = run, settings
        self.manifest = run.manifest()
        self.tokenizer = load_tokenizer(reference)
        require_target(self.manifest, target_identity(reference))
        require(self.manifest, **tokenizer_hashes(self.tokenizer))
        self.end_ids = end_of_turn_ids(reference, self.tokenizer)

    def from_states(self, drafters: Mapping[str, Drafter | None]) -> tuple[dict[str, Any], set[int]]:
        """The figures from the states of the held-out rows, by drafter, and these rows' numbers.

        Raises EyasError when no held-out row is usable.
        """
        data = HiddenStates(self.manifest, self.run.folder / "tokens")
        rows: list[int] = data.select(self.settings["held_out_every"], held_out=True).tolist()
        if not rows:
            raise EyasError(
                "no usable held-out row to measure acceptance on; lower data.held_out_every or add rows (the tokens'"
                " .json files say why rows were skipped)"
            )
        usable = {int(data.row_ids[i]) for i in rows}
        found: dict[str, Any] = {}
        for which, drafter in drafters.items():
            found[which] = drafter and _figures(drafter, data, rows, self.settings["draft_steps"])
            if found[which]:
                length = found[which]["expected_acceptance_length"]
                log.info("From the states of %d held-out rows, %s: acceptance length %.3f.", len(usable), which, length)
        return found, usable

    def prompt_sets(self, usable: set[int] | None) -> dict[str, PromptSet]:
        """The prompts to decode, by set; `usable`: the held-out rows that tokenisation left."""
        chat = ChatTemplate(self.tokenizer, self.settings["template_options"])
        conversations = self.run.conversations(self.settings["held_out_every"])
        return read_prompt_sets(self.settings["prompt_sets"], conversations, chat, usable)

    def contents(
        self, engine: str, checkpoint: str, usable: set[int] | None, from_states: Mapping[str, Any],
        measured: Mapping[str, Any], definitions: Mapping[str, str], **more: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """The contents of evaluation.json; `more`: settings of this engine alone."""
        definitions = {"offline": offline.DEFINITION, **definitions}
        for definition in definitions.values():
            log.info("%s.", definition)
        return {
            "format_version": VERSIONS["evaluation"],
            "definitions": definitions,
            "engine": engine,
            "settings": {key: self.settings[key] for key in _SETTINGS} | more,
            "checkpoint": checkpoint,
            "held_out_rows": None if usable is None else len(usable),
            "offline": dict(from_states),
            "prompt_sets": dict(measured),
        }


def _figures(drafter: Drafter, data: HiddenStates, rows: list[int], steps: int) -> dict[str, Any]:
    counts = offline.chained_accuracy(drafter, data, rows, steps)
    return {
        "accuracy_by_step": counts.accuracy,
        "positions_by_step": counts.reached.tolist(),
        "expected_acceptance_length": counts.acceptance_length(steps),
        "expected_acceptance_lengths": [counts.acceptance_length(length) for length in range(1, steps + 1)],
    }


def log_set(name: str, figures: Mapping[str, Any]) -> None:
    """The figures of a prompt set, a line for each way of decoding."""
    for way, values in [("trained", figures), *figures["baselines"].items()]:
        if values is None or values["acceptance_length"] is None:
            continue
        lossless = {True: ", lossless", False: ", NOT equal to plain greedy decoding", None: ""}[values["lossless"]]
        speedup = "" if values["speedup"] is None else f"speedup {values['speedup']:.2f}, "
        log.info(
            "%s, %s: acceptance length %.3f, %.3f tokens a target forward, %s%.0f%% looping%s.",
            name, way, values["acceptance_length"], values["tokens_per_forward"], speedup,
            100 * values["looping_share"], lossless,
        )  # fmt: skip


def epoch_of(folder: Path) -> str:
    """The name of the epoch that a checkpoint folder holds."""
    selection = folder / "selection.json"
    return f"epoch_{read_json(selection)['epoch']}" if selection.is_file() else folder.name
