"""The evaluation of a drafter: offline acceptance and real greedy chain decoding on held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.conversations import Row, read_rows
from eyas.decoding import offline
from eyas.decoding.chain import Decoded, greedy, speculate
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.model import Drafter
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest, require, require_target
from eyas.jobs import Progress
from eyas.shards import is_held_out, read_json, shards_of, write_json, write_lock
from eyas.target.chat import ChatTemplate
from eyas.target.model import TargetModel, config_hash, load_target
from eyas.target.tokenizer import TargetReference, TemplateRefusal, end_of_turn_ids, load_tokenizer, tokenizer_hashes
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["evaluation"]

CHAIN_DEFINITION = (
    "acceptance_length: tokens committed per target forward pass after the prefill (accepted drafts + 1), greedy,"
    " chain of draft_steps; lossless: every output equals the target's own greedy output, token for token"
)


def held_out_rows(folder: Path, rows: int, shard_rows: int, held_out_every: int) -> list[Row]:
    """The usable held-out conversations of a run, in row order."""
    found = []
    for shard in shards_of(rows, shard_rows):
        if any(is_held_out(row, held_out_every) for row in range(shard.start, shard.end)):
            found += [row for row in read_rows(folder / f"{shard.name}.jsonl") if is_held_out(row.row, held_out_every)]
    return [row for row in found if row.skipped is None]


def _offline(drafter: Drafter, data: HiddenStates, rows: list[int], steps: int) -> dict[str, Any]:
    counts = offline.chained_accuracy(drafter, data, rows, steps)
    return {
        "accuracy_by_step": counts.accuracy,
        "positions_by_step": counts.reached.tolist(),
        "expected_acceptance_length": counts.acceptance_length(steps),
    }


def _epoch_of(folder: Path) -> str:
    """The name of the epoch that a checkpoint folder holds."""
    selection = folder / "selection.json"
    return f"epoch_{read_json(selection)['epoch']}" if selection.is_file() else folder.name


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token where two outputs differ, or None."""
    for index in range(max(len(a), len(b))):
        if a[index : index + 1] != b[index : index + 1]:
            return index
    return None


def _chain(
    target: TargetModel,
    drafter: Drafter,
    layers: Sequence[int],
    prompts: Sequence[tuple[int, list[int]]],
    end_ids: Sequence[int],
    references: Sequence[Decoded],
    settings: dict[str, Any],
    progress: Progress,
) -> dict[str, Any]:
    steps = settings["draft_steps"]
    tokens = forwards = 0
    reached, right = [0] * steps, [0] * steps
    differences: list[dict[str, int]] = []
    for (row, prompt), reference in zip(prompts, references, strict=True):
        made = speculate(target, drafter, layers, prompt, end_ids, settings["max_new_tokens"], steps)
        tokens += len(made.ids) - 1  # the first token is the prefill's
        forwards += made.forwards
        for accepted in made.accepted:
            for step in range(min(accepted + 1, steps)):
                reached[step] += 1
                right[step] += step < accepted
        place = _first_difference(made.ids, reference.ids)
        if place is not None:
            differences.append({"row": row, "token": place})
            log.warning("Row %d: the output differs from plain greedy decoding at token %d.", row, place)
        progress.advance(1, f"{tokens / max(forwards, 1):.2f} tokens a target forward")
    return {
        "acceptance_length": tokens / forwards if forwards else None,
        "acceptance_by_step": [r / n if n else None for r, n in zip(right, reached, strict=True)],
        "tokens": tokens,
        "target_forwards": forwards,
        "lossless": not differences,
        "differences": differences,
    }


def first_prompts(
    rows: Sequence[Row], usable: set[int], chat: ChatTemplate, wanted: int
) -> list[tuple[int, list[int]]]:
    """(row, ids up to the open answer) of the first user turn, with what is before it, of `wanted` rows.

    The first ones among `usable` that have a prompt: ready text has none, nor has a conversation without a
    user's turn; one whose beginning the chat template refuses is left out.
    """
    prompts: list[tuple[int, list[int]]] = []
    for row in rows:
        if len(prompts) == wanted:
            break
        asked = next((i for i, message in enumerate(row.messages) if message["role"] == "user"), None)
        if row.row not in usable or row.text is not None or asked is None:
            continue
        try:
            prompts.append((row.row, chat.prompt_ids(row.messages[: asked + 1], row.tools)))
        except TemplateRefusal as exc:
            log.info("Row %d (%s) gives no prompt: %s.", row.row, row.place or row.source, exc)
    return prompts


def evaluate(
    manifest: Manifest,
    tokens_folder: Path,
    held_out: Sequence[Row],
    target_reference: TargetReference,
    checkpoints: dict[str, Path],
    settings: dict[str, Any],
    output: Path,
    gpus: int = 0,
) -> None:
    """Measure each of `checkpoints` (`trained`, `untrained`: folder) and write `output` as JSON.

    `settings`: draft_steps, prompts, max_new_tokens, held_out_every, template_options. `held_out`: usable
    held-out conversations; where none has a prompt (ready text), only the offline figures are measured and
    the acceptance of decoding is null. Raises EyasError when no held-out row is usable.
    """
    with write_lock(output):
        data = HiddenStates(manifest, tokens_folder)
        rows = data.select(settings["held_out_every"], held_out=True).tolist()
        if not rows or not held_out:
            raise EyasError(
                "no usable held-out row to measure acceptance on; lower data.held_out_every or add rows (the tokens'"
                " .json files say why rows were skipped)"
            )
        tokenizer = load_tokenizer(target_reference)
        require_target(manifest, config_hash(target_reference), target_reference.path)
        require(manifest, **tokenizer_hashes(tokenizer))
        target = load_target(target_reference, gpus)
        end_ids = end_of_turn_ids(target_reference, tokenizer)
        usable = {int(data.row_ids[i]) for i in rows}  # tokenisation may have skipped more
        chat = ChatTemplate(tokenizer, settings.get("template_options"))
        prompts = first_prompts(held_out, usable, chat, settings["prompts"])
        if not prompts:
            log.warning("No held-out row has a prompt, so acceptance is measured from the hidden states alone.")
        progress = Progress("Plain greedy decoding", len(prompts), "prompts")
        references = []
        for _, prompt in prompts:
            references.append(greedy(target, prompt, end_ids, settings["max_new_tokens"]))
            progress.advance(1)
        log.info("%s.", progress.line())
        result: dict[str, Any] = {
            "format_version": FORMAT_VERSION,
            "definitions": {"offline": offline.DEFINITION, "decoding": CHAIN_DEFINITION},
            "draft_steps": settings["draft_steps"],
            "held_out_rows": len(usable),
            "prompts": len(prompts),
            "drafters": {},
        }
        for name, folder in checkpoints.items():
            drafter = load_drafter(folder).to(target.device).eval()
            progress = Progress(f"Speculative decoding, {name}", len(prompts), "prompts")
            with torch.inference_mode():
                facts: dict[str, Any] = {
                    "checkpoint": _epoch_of(folder),
                    "offline": _offline(drafter, data, rows, settings["draft_steps"]),
                    "decoding": _chain(
                        target, drafter, manifest.layers, prompts, end_ids, references, settings, progress
                    ),
                }
            result["drafters"][name] = facts
            log.info(
                "%s drafter: expected acceptance length %.3f offline; %.3f tokens a target forward in decoding, %s.",
                name.capitalize(), facts["offline"]["expected_acceptance_length"],
                facts["decoding"]["acceptance_length"] or 1.0,
                "lossless" if facts["decoding"]["lossless"] else "NOT equal to plain greedy decoding",
            )  # fmt: skip
        write_json(output, result)
