"""Model cards and provenance of a drafter's exports, from the files of its run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from eyas.export.card import CardFacts, render_card
from eyas.export.checkpoint import FACTS
from eyas.export.licence import find_licence, target_folder
from eyas.export.provenance import provenance
from eyas.export.servers import sglang_serving_problem
from eyas.plan.export import SERVERS, public_path
from eyas.shards import describe_file, read_json, write_lock, write_sealed, write_text
from eyas.target.tokenizer import TargetReference
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

CARD, PROVENANCE = "README.md", "provenance.json"


def _target_config(target: TargetReference) -> dict[str, Any]:
    """The target's config.json, without running the model's own code; empty where it cannot be read."""
    try:
        if target.is_folder:
            values = json.loads((Path(target.path) / "config.json").read_text(encoding="utf-8"))
        else:
            from transformers import PretrainedConfig

            values, _ = PretrainedConfig.get_config_dict(target.path, revision=target.revision)
        return values if isinstance(values, dict) else {}
    except Exception:  # a hub raises many kinds; the card then says less
        return {}


def _serving_problem(target_config: dict[str, Any], layers: list[int], model: dict[str, Any]) -> str | None:
    """What SGLang cannot do with such a drafter, as far as the target's config.json tells."""
    inner = target_config.get("text_config")
    values = target_config | (inner if isinstance(inner, dict) else {})
    depth = int(values.get("num_hidden_layers") or -1)
    return sglang_serving_problem(str(values.get("model_type")), depth, layers, model["norm_before_residual"])


def _evaluation(file: Path) -> dict[str, Any] | None:
    if not file.is_file():
        return None
    values: dict[str, Any] = read_json(file, "evaluation")
    return values if "prompt_sets" in values else None  # earlier formats had one set, with other keys


def describe_exports(run: Path, drafter: str, target: TargetReference, gguf: str | None, settings: dict) -> None:
    """Write README.md and provenance.json into every export of `drafter`, of the run's folder `run`.

    `settings`: `results` and `config`, fit to be published. Depends on the run's files alone, and on the
    versions and the commit of what runs here; raises EyasError for a file that is missing or damaged.
    """
    folder = run / "drafters" / drafter
    config = settings["config"]
    selection = read_json(folder / "best" / "selection.json", "selection")
    training = read_json(folder / f"epoch_{selection['last_epoch']}" / "trainer_state.json", "checkpoint")
    manifest = read_json(run / "hidden_states" / "data_config.json", "manifest")
    size = config["drafter"]["draft_vocab_size"]
    target_config = _target_config(target)
    problem = _serving_problem(target_config, manifest["layers"], config["drafter"]["model"])
    if problem:
        log.warning("%s: %s.", folder / "export" / "sglang", problem)
    facts = CardFacts(
        drafter=drafter,
        folder="/".join((settings["results"], run.name, "drafters", drafter)),
        config=config,
        manifest=manifest,
        statistics=read_json(run / "tokens" / "statistics.json", "statistics of the tokens"),
        vocabulary=read_json(run / "vocab_map" / f"{size}.json", "vocabulary sidecar"),
        training=training,
        selection=selection,
        evaluation=_evaluation(folder / "evaluation.json"),
        on_hub=not target.is_folder,
        architectures=[str(name) for name in target_config.get("architectures") or []],
        licence=find_licence(target_folder(target), Path(gguf) if gguf else None),
        sglang_problem=problem,
    )
    checkpoint = {"epoch": selection["epoch"], **selection["files"]["model.safetensors"]}
    of_target = manifest["target"] | {"path": public_path(manifest["target"]["path"])}
    with write_lock(folder / "export" / CARD):
        for server in SERVERS:
            export = folder / "export" / server
            sidecar = read_json(export / FACTS, "export")
            write_text(export / CARD, render_card(facts, server))
            files = sidecar["files"] | {CARD: describe_file(export / CARD)}
            values = provenance(config, of_target, training["manifest_digest"], checkpoint, files)
            write_sealed(export / PROVENANCE, {"server": server, **values, "format_version": VERSIONS["card"]})
            log.info("Wrote %s and %s.", export / CARD, export / PROVENANCE)
