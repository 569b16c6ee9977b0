"""One epoch of training: from the checkpoint of the epoch before to the next one."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.checkpoint import Checkpoint, build_drafter, load_checkpoint, save_checkpoint
from eyas.drafter.dataset import HiddenStates, epoch_batches
from eyas.drafter.initialise import load_head
from eyas.drafter.model import Drafter
from eyas.drafter.objective import StepCounts, ttt_loss
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, require_target
from eyas.jobs import Progress
from eyas.target.model import config_hash
from eyas.target.tokenizer import TargetReference

log = logging.getLogger(__name__)


def learning_rate(step: int, steps_per_epoch: int, settings: dict[str, Any]) -> float:
    """Rate of optimizer step `step` (from 0): linear warm-up, then decay to the floor over `schedule_epochs`.

    The horizon does not depend on how many epochs are asked for, so that asking for more
    leaves the finished ones as they are.
    """
    peak, floor = settings["learning_rate"], settings["learning_rate"] * settings["min_learning_rate_ratio"]
    warmup = settings["warmup_steps"]
    if step < warmup:
        return float(peak * (step + 1) / warmup)
    horizon = max(settings["schedule_epochs"] * steps_per_epoch - warmup, 1)
    done = min((step - warmup) / horizon, 1.0)
    if settings["schedule"] == "constant":
        return float(peak)
    share = 1 - done if settings["schedule"] == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return float(floor + (peak - floor) * share)


def _optimizer(drafter: Drafter, settings: dict[str, Any]) -> torch.optim.AdamW:
    named = sorted((n, p) for n, p in drafter.named_parameters() if p.requires_grad)
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": settings["weight_decay"]},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(settings["beta1"], settings["beta2"]))


def _restore(optimizer: torch.optim.AdamW, drafter: Drafter, moments: dict[str, Tensor], step: int) -> None:
    for name, parameter in drafter.named_parameters():
        if f"exp_avg.{name}" in moments:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": moments[f"exp_avg.{name}"].to(parameter.device),
                "exp_avg_sq": moments[f"exp_avg_sq.{name}"].to(parameter.device),
            }


def _moments(optimizer: torch.optim.AdamW, drafter: Drafter) -> dict[str, Tensor]:
    moments = {}
    for name, parameter in drafter.named_parameters():
        if parameter in optimizer.state:
            for key in ("exp_avg", "exp_avg_sq"):
                moments[f"{key}.{name}"] = optimizer.state[parameter][key].detach().cpu()
    return moments


def train_epoch(
    manifest: Manifest,
    tokens_folder: Path,
    target: TargetReference,
    previous: Path,
    epoch: int,
    settings: dict[str, Any],
    held_out_every: int,
    seed: int,
    output: Path,
    fingerprint: str,
    device: torch.device,
) -> None:
    """Train epoch `epoch` from the checkpoint `previous` (of epoch - 1) and write `output`.

    `settings`: the fields of `config.Training`. Raises EyasError when the checkpoint belongs to
    other data, when no row can be trained on, and when the loss stops being a number.
    """
    checkpoint = load_checkpoint(previous)
    if checkpoint.facts["epoch"] != epoch - 1:
        raise EyasError(f"{previous}: holds epoch {checkpoint.facts['epoch']}, epoch {epoch} needs epoch {epoch - 1}")
    if checkpoint.facts["manifest_digest"] != manifest.digest:
        raise EyasError(
            f"{previous}: was trained on other data (manifest {checkpoint.facts['manifest_digest']}, now"
            f" {manifest.digest}); delete the drafter's folder and run snakemake again"
        )
    require_target(manifest, config_hash(target), target.path)
    torch.use_deterministic_algorithms(device.type == "cpu")
    data = HiddenStates(manifest, tokens_folder)
    rows = data.select(held_out_every, held_out=False)
    if len(rows) == 0:
        raise EyasError("no usable training row; the tokens' .json files say why rows were skipped")
    batches = epoch_batches(rows, data.lengths, settings["batch_tokens"], seed, epoch)
    drafter = build_drafter(checkpoint.shape, checkpoint.weights).to(device)
    optimizer = _optimizer(drafter, settings)
    step = int(checkpoint.facts["step"])
    _restore(optimizer, drafter, checkpoint.moments, step)
    _, teacher_head = load_head(target, drafter.target_ids.cpu())
    teacher_head = teacher_head.to(device)
    draft_ids = drafter.draft_ids
    log.info(
        "Epoch %d: %d rows, %d tokens in %d batches, %d TTT steps, on %s with %d thread(s).",
        epoch, len(rows), int(data.lengths[rows].sum()), len(batches), settings["ttt_steps"], device,
        torch.get_num_threads(),
    )  # fmt: skip
    counts, loss_sum, counted_batches = StepCounts.zero(settings["ttt_steps"]), 0.0, 0
    recent = float("nan")
    progress = Progress(f"Epoch {epoch}", int(data.lengths[rows].sum()), "tokens")
    for indices in batches:
        batch = data.batch(indices).to(device)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, len(batches), settings)
        loss, counted, chained = ttt_loss(
            drafter, batch, teacher_head, draft_ids, settings["ttt_steps"], settings["loss_decay"]
        )
        counts += chained
        if counted:
            loss.backward()
            parameters = [p for p in drafter.parameters() if p.grad is not None]
            loss, norm = loss.detach(), torch.nn.utils.clip_grad_norm_(parameters, settings["grad_clip"])
            if not math.isfinite(float(loss)) or not math.isfinite(float(norm)):
                raise EyasError(
                    f"epoch {epoch}, step {step}: loss {float(loss)}, gradient norm {float(norm)}, in a batch of rows"
                    f" {batch.row_ids}; lower training.learning_rate, or look at these rows"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            loss_sum, counted_batches = loss_sum + float(loss), counted_batches + 1
            recent = float(loss) if math.isnan(recent) else 0.9 * recent + 0.1 * float(loss)
            step += 1
        progress.advance(
            len(batch.tokens),
            f"loss {recent:.3f}, first-step accuracy {counts.accuracy[0] or 0:.3f},"
            f" expected acceptance length {counts.acceptance_length():.2f}",
        )
    if not counted_batches:
        raise EyasError(
            f"no usable training row: no position of {len(rows)} rows predicts a supervised token that the draft"
            " vocabulary holds; raise draft_vocab_size, or look at the masks in the run's tokens"
        )
    record = {
        "epoch": epoch,
        "loss": loss_sum / max(counted_batches, 1),
        "accuracy_by_step": counts.accuracy,
        "acceptance_length": counts.acceptance_length(),
        "learning_rate": learning_rate(max(step - 1, 0), len(batches), settings),
    }
    facts = checkpoint.facts | {"epoch": epoch, "step": step, "history": [*checkpoint.facts["history"], record]}
    facts.pop("files"), facts.pop("fingerprint"), facts.pop("format_version")
    weights = {name: tensor.detach().cpu() for name, tensor in drafter.state_dict().items()}
    save_checkpoint(Checkpoint(checkpoint.shape, weights, _moments(optimizer, drafter), facts), output, fingerprint)
    log.info("%s.", progress.line())
    log.info(
        "Wrote %s: mean loss %.4f, first-step accuracy %.3f, expected acceptance length %.3f on the training rows.",
        output, record["loss"], counts.accuracy[0] or 0.0, record["acceptance_length"],
    )  # fmt: skip
