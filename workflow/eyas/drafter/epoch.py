"""The batches of an epoch in one process: steps, saves inside the epoch, and what is kept of it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from eyas.drafter.checkpoint import METRICS, Checkpoint, build_drafter
from eyas.drafter.dataset import Batch, HiddenStates, ahead
from eyas.drafter.metrics import Metrics
from eyas.drafter.objective import StepCounts
from eyas.drafter.packing import epoch_batches, share_rows
from eyas.drafter.processes import Parallel, Processes, gradients_meet, like, whole
from eyas.drafter.resume import load_state, save_state
from eyas.drafter.step import (
    DrafterLoss,
    learning_rate,
    make_optimizer,
    product_dtype,
    read_moments,
    restore_moments,
    trained,
)
from eyas.drafter.validation import validate
from eyas.errors import EyasError
from eyas.jobs import Progress
from eyas.target.head import load_teacher_head
from eyas.target.tokenizer import TargetReference

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """How an epoch is computed. None of it changes the result, but for the last bits."""

    parallel: Parallel = "ddp"
    micro_tokens: int = 8192
    checkpoint_seconds: float = 600.0
    early_stop: int | None = None
    events: Path | None = None
    """Folder of TensorBoard event files, or None."""


@dataclass
class Standing:
    """Where an epoch stands after `batches` of its batches; all that a save needs besides tensors."""

    step: int
    batches: int = 0
    tokens: int = 0
    loss_sum: float = 0.0
    steps_done: int = 0
    recent: float = math.nan
    reached: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)

    @property
    def counts(self) -> StepCounts:
        return StepCounts(torch.tensor(self.reached), torch.tensor(self.right))

    def add(self, loss: float, reached: Sequence[float], right: Sequence[float]) -> None:
        self.loss_sum, self.steps_done, self.step = self.loss_sum + loss, self.steps_done + 1, self.step + 1
        self.recent = loss if math.isnan(self.recent) else 0.9 * self.recent + 0.1 * loss
        self.reached = [a + int(b) for a, b in zip(self.reached, reached, strict=True)]
        self.right = [a + int(b) for a, b in zip(self.right, right, strict=True)]

    @property
    def note(self) -> str:
        accuracy = " ".join("-" if a is None else f"{a:.2f}" for a in self.counts.accuracy)
        return (
            f"loss {self.recent:.3f}, accuracy by step {accuracy},"
            f" expected acceptance length {self.counts.acceptance_length():.2f}"
        )


class Epoch:
    """The state of an epoch in one process."""

    def __init__(
        self,
        data: HiddenStates,
        checkpoint: Checkpoint,
        target: TargetReference,
        epoch: int,
        settings: dict[str, Any],
        held_out_every: int,
        seed: int,
        processes: Processes,
        runtime: Runtime,
    ) -> None:
        self.data, self.epoch, self.settings, self.processes, self.runtime = data, epoch, settings, processes, runtime
        device, steps = processes.device, settings["ttt_steps"]
        torch.use_deterministic_algorithms(device.type == "cpu")
        self.rows = data.select(held_out_every, held_out=False)
        self.held_out = data.select(held_out_every, held_out=True)
        self.drafter = build_drafter(checkpoint.shape, checkpoint.weights).to(device)
        draft_ids = self.drafter.draft_ids
        self.counted = data.counted(draft_ids.cpu().numpy(), steps)
        processes.first_then_all(self._refuse_nothing)
        teacher_head = load_teacher_head(target, self.drafter.target_ids.cpu())
        dtype = product_dtype(settings["precision"], device)
        loss = DrafterLoss(
            self.drafter, teacher_head.to(device, dtype), draft_ids, steps, settings["loss_decay"], dtype
        )
        self.loss = processes.distribute(loss, runtime.parallel)
        self.parameters = trained(self.loss)
        self.optimizer = make_optimizer(self.parameters, settings)
        self.standing = Standing(int(checkpoint.facts["step"]), reached=[0] * steps, right=[0] * steps)
        restore_moments(self.optimizer, self.parameters, checkpoint.moments, self.standing.step)
        self.batches = epoch_batches(self.rows, data.lengths, settings["batch_tokens"], seed, epoch)
        # what a row costs: its supervised positions go through every step, the others through a part of one
        self.work = self.counted.sum(1) * 4 + data.lengths

    def _refuse_nothing(self) -> None:
        if len(self.rows) == 0:
            raise EyasError("no usable training row; the tokens' .json files say why rows were skipped")
        supervised = int(self.data.supervised()[self.rows].sum())
        if supervised == 0:
            raise EyasError(
                f"no usable training row: none of the {len(self.rows)} training rows has a supervised token (all-zero"
                " loss masks); look at the chat template and tokenization settings"
            )
        if not self.counted[self.rows].any():
            raise EyasError(
                f"no usable training row: no position of {len(self.rows)} rows predicts a supervised token that the"
                " draft vocabulary holds; raise draft_vocab_size, or look at the masks in the run's tokens"
            )

    # ---- the loop ----

    def run(self, staging: Path, fingerprint: str, stop: list[int]) -> None:
        """Do the epoch's batches that are not done yet, and save now and then."""
        kept = self._resume(staging, fingerprint)
        data, processes, standing = self.data, self.processes, self.standing
        first = processes.rank == 0
        tokens = int(data.lengths[self.rows].sum())
        if first:
            log.info(
                "Epoch %d: %d rows, %d tokens in %d batches, %d TTT steps, on %s with %d process(es) of %d thread(s).",
                self.epoch, len(self.rows), tokens, len(self.batches), self.settings["ttt_steps"],
                processes.device.type, processes.count, torch.get_num_threads(),
            )  # fmt: skip
        metrics = Metrics(self.metrics_file(staging), kept, self.runtime.events, standing.step) if first else None
        progress = Progress(f"Epoch {self.epoch}", tokens, "tokens", standing.tokens)
        saved = time.monotonic()
        self.loss.train()
        try:
            for number, passes in ahead(self._load, range(standing.batches, len(self.batches))):
                due = first and time.monotonic() - saved >= self.runtime.checkpoint_seconds
                record, save, stopping = self._step(number, passes, due, bool(stop))
                size = int(data.lengths[self.batches[number]].sum())
                standing.batches, standing.tokens = number + 1, standing.tokens + size
                progress.advance(size, standing.note)
                if metrics is not None and record:
                    metrics.write(record, progress.speed)
                if (save or stopping) and standing.batches < len(self.batches):
                    self._save(staging, fingerprint, metrics)
                    saved = time.monotonic()
                if stopping:
                    raise KeyboardInterrupt
            if first:
                log.info("%s.", progress.line(standing.note))
            self.validation = validate(
                self.loss, data, self.held_out, self.counted, processes, self.runtime.micro_tokens
            )
            if metrics is not None:
                if self.validation:
                    metrics.write_held_out(self.validation, standing.step)
                metrics.sync()
        finally:
            if metrics is not None:
                metrics.close()

    def _load(self, number: int) -> tuple[int, list[Batch | None]]:
        shares = share_rows(
            self.batches[number], self.data.lengths, self.work, self.processes.count, self.runtime.micro_tokens
        )
        own = shares[self.processes.rank]
        return number, [self.data.batch(rows) if rows else None for rows in own]

    def _step(
        self, number: int, passes: list[Batch | None], due: bool, stop: bool
    ) -> tuple[dict[str, Any] | None, bool, bool]:
        """One optimizer step over all processes: its record, whether to save, whether to stop after it."""
        settings, standing, processes = self.settings, self.standing, self.processes
        totals = self.counted[self.batches[number]].sum(0)
        steps = len(totals)
        shared = torch.zeros(3 + 2 * steps, dtype=torch.float64)
        shared[0], shared[1] = due, stop
        if totals.any():
            for place, batch in enumerate(passes):
                with gradients_meet(self.loss, place == len(passes) - 1):
                    # gradients are averaged over the processes, and are to be summed
                    loss, _, counts = self.loss(
                        batch if batch is None else batch.to(processes.device), totals / processes.count
                    )
                    loss.backward()
                shared[2] += float(loss.detach()) / processes.count
                shared[3 : 3 + steps] += counts.reached
                shared[3 + steps :] += counts.right
        shared = processes.sum(shared)
        save, stopping = bool(shared[0]), bool(shared[1])
        if not totals.any():
            return None, save, stopping
        rate = learning_rate(standing.step, len(self.batches), settings)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = float(whole(torch.nn.utils.clip_grad_norm_(self.parameters.values(), settings["grad_clip"])))
        loss_value = float(shared[2])
        if not math.isfinite(loss_value) or not math.isfinite(norm):
            self._refuse_numbers(passes, loss_value, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        reached, right = shared[3 : 3 + steps].tolist(), shared[3 + steps :].tolist()
        standing.add(loss_value, reached, right)
        batch_counts = StepCounts(torch.tensor(reached).long(), torch.tensor(right).long())
        record = {
            "epoch": self.epoch,
            "step": standing.step,
            "tokens": int(self.data.lengths[self.batches[number]].sum()),
            "counted": int(totals.sum()),
            "loss": loss_value,
            "accuracy_by_step": batch_counts.accuracy,
            "acceptance_length": batch_counts.acceptance_length(),
            "learning_rate": rate,
            "gradient_norm": norm,
        }
        return record, save, stopping

    def _refuse_numbers(self, passes: list[Batch | None], loss: float, norm: float) -> None:
        """Raise EyasError that names the rows whose states, or whose own loss, are not finite."""
        own = [row for batch in passes if batch is not None for row in batch.unsound_rows()]
        rows = sorted({row for found in self.processes.gather(own) for row in found})
        advice = "their hidden states hold NaN or infinity; delete their shards and run snakemake again"
        if not rows:
            own = [row for batch in passes if batch is not None for row in batch.row_ids]
            rows = sorted({row for found in self.processes.gather(own) for row in found})
            advice = "lower training.learning_rate, or look at these rows"
        message = (
            f"epoch {self.epoch}, step {self.standing.step}: loss {loss}, gradient norm {norm}, in a batch with rows"
            f" {rows}; {advice}"
        )
        self.processes.first_then_all(lambda: _refuse(message))

    # ---- what is kept ----

    def metrics_file(self, staging: Path) -> Path:
        return staging / METRICS

    def weights(self) -> dict[str, Tensor]:
        """What is trained, whole, on the CPU; all processes must call it."""
        return {name: whole(parameter) for name, parameter in self.parameters.items()}

    def _save(self, staging: Path, fingerprint: str, metrics: Metrics | None) -> None:
        tensors = {f"master.{name}": tensor for name, tensor in self.weights().items()}
        tensors |= read_moments(self.optimizer, self.parameters)
        if metrics is not None:
            tensors["random_state"] = torch.get_rng_state()
            facts = {"standing": vars(self.standing) | {"recent": repr(self.standing.recent)}}
            save_state(staging, fingerprint, self.standing.batches, tensors, facts | {"metrics": metrics.sync()})
            log.info("Saved after %d of %d batches.", self.standing.batches, len(self.batches))

    def _resume(self, staging: Path, fingerprint: str) -> int:
        """Go on from the last whole save, if there is one; returns how much of the metrics belongs to it."""
        found = load_state(staging, fingerprint) if self.processes.rank == 0 else None
        # the first process chooses: a save that is just not visible elsewhere must not part them
        batches = int(self.processes.sum(torch.tensor(found[1]["batches"] if found else 0)))
        if batches == 0:
            return 0
        if found is None:
            found = load_state(staging, fingerprint)
        if found is None or found[1]["batches"] != batches:
            raise EyasError(f"{staging}: the save after batch {batches} cannot be read by every process")
        tensors, facts = found
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(like(tensors[f"master.{name}"], parameter))
        standing = facts["standing"]
        self.standing = Standing(**(standing | {"recent": float(standing["recent"])}))
        restore_moments(self.optimizer, self.parameters, tensors, self.standing.step)
        torch.set_rng_state(tensors["random_state"])
        if self.processes.rank == 0:
            log.info("Going on after %d of %d batches of epoch %d.", batches, len(self.batches), self.epoch)
        return int(facts["metrics"])

    def record(self) -> dict[str, Any]:
        """The epoch's line in the checkpoint's history."""
        standing, counts = self.standing, self.standing.counts
        record: dict[str, Any] = {
            "epoch": self.epoch,
            "rows": len(self.rows),
            "tokens": int(self.data.lengths[self.rows].sum()),
            "counted": int(self.counted[self.rows].sum()),
            "steps": standing.steps_done,
            "loss": standing.loss_sum / max(standing.steps_done, 1),
            "accuracy_by_step": counts.accuracy,
            "acceptance_length": counts.acceptance_length(),
            "learning_rate": learning_rate(max(standing.step - 1, 0), len(self.batches), self.settings),
        }
        return record | ({"held_out": self.validation} if self.validation else {})


def _refuse(message: str) -> NoReturn:
    raise EyasError(message)
