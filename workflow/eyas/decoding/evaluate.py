"""The evaluation of a drafter: acceptance from hidden states, and real decoding of prompt sets beside baselines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from eyas.decoding.eagle import EagleProposer
from eyas.decoding.measure import DEFINITIONS, PLAIN, measure_set
from eyas.decoding.ngram import NgramProposer
from eyas.decoding.proposers import Proposer
from eyas.decoding.run_data import RunData, RunFiles, epoch_of, log_set
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.model import Drafter
from eyas.shards import write_lock, write_sealed
from eyas.target.model import TargetModel, load_target
from eyas.target.tokenizer import TargetReference

__all__ = ["Measurement", "RunFiles", "evaluate"]


class Measurement(RunData):
    """A run's data and target, ready to measure drafters on in this process."""

    def __init__(self, run: RunFiles, reference: TargetReference, settings: Mapping[str, Any], gpus: int = 0) -> None:
        super().__init__(run, reference, settings)
        self.target: TargetModel = load_target(reference, gpus)

    def evaluate(
        self, drafter: Drafter, checkpoint: str, untrained: Drafter | None = None, states: bool = True
    ) -> dict[str, Any]:
        """The contents of evaluation.json.

        `checkpoint`: how the drafter is called there. `states` False leaves out the figures from hidden states
        (they are null then). Raises EyasError when no held-out row is usable for them.
        """
        drafter, untrained = self._ready(drafter), None if untrained is None else self._ready(untrained)
        from_states: dict[str, Any] = {"trained": None, "untrained": None}
        usable: set[int] | None = None
        if states:
            from_states, usable = self.from_states({"trained": drafter, "untrained": untrained})
        steps = self.settings["draft_steps"]
        ways: dict[str, Proposer | None] = {PLAIN: None, "trained": self._eagle(drafter), "ngram": NgramProposer(steps)}
        if untrained is not None:
            ways["untrained"] = self._eagle(untrained)
        measured = {}
        for name, prompt_set in self.prompt_sets(usable).items():
            measured[name] = measure_set(self.target, ways, prompt_set, self.end_ids, self.settings, name)
            log_set(name, measured[name])
        return self.contents("transformers", checkpoint, usable, from_states, measured, DEFINITIONS)

    def _ready(self, drafter: Drafter) -> Drafter:
        return drafter.to(self.target.device).eval()

    def _eagle(self, drafter: Drafter) -> EagleProposer:
        settings = self.settings
        return EagleProposer(
            drafter, drafter.shape.layers, settings["draft_steps"], settings["topk"], settings["draft_tokens"]
        )


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
    with write_lock(output), torch.inference_mode():
        measurement = Measurement(run, reference, settings, gpus)
        write_sealed(output, measurement.evaluate(load_drafter(trained), epoch_of(trained), load_drafter(untrained)))
