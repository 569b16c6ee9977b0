"""Another drafter to start from: a checkpoint or export of Eyas, or a published EAGLE-3 head."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eyas.drafter.checkpoint import FACTS
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.errors import EyasError
from eyas.shards import checksum, fingerprint
from eyas.target.weights import INDEX, WEIGHTS, StoredWeights

log = logging.getLogger(__name__)

CONFIG = "config.json"
# Constants, and copies of the target's that speculators keeps for its own training.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")
# Switches of other trainers (all off by default) under which the same tensors mean another function.
_OTHER_ARITHMETIC = ("norm_before_fc", "fc_norm", "norm_output")
# Targets for which SGLang 0.5.23 adds 1 to layer ids only when the first of them is 1.
_DEEPSEEK_LIKE = ("deepseek", "kimi")
_OWN_CHECKPOINT = (FACTS, "selection.json")  # either file says that Eyas wrote the folder
_HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")


@dataclass(frozen=True)
class ImportedDrafter:
    """What a run takes over, by Eyas's names.

    `weights` float32: all but the head and the maps, with `embed_tokens.weight` only where the
    run's drafter trains its own. `lm_head` [D', H] in its stored dtype (memory-mapped), and
    `target_ids` int64 [D'], the target id of each of its rows.
    """

    folder: Path
    weights: dict[str, Tensor]
    lm_head: Tensor
    target_ids: Tensor
    vocab_size: int

    def put_into(self, weights: dict[str, Tensor], target_ids: Tensor) -> None:
        """Replace `weights` (by Eyas's names), in place; head rows by the target ids (int64 [D]) of the run's map.

        Draft ids that the other drafter cannot propose keep the rows that `weights` has for them.
        """
        weights.update(self.weights)
        row_of = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        row_of[self.target_ids] = torch.arange(len(self.target_ids))
        rows = row_of[target_ids]
        known = rows >= 0
        taken = self.lm_head[rows[known]].float()
        _require_finite(self.folder, "lm_head.weight", taken)
        weights["lm_head.weight"][known] = taken
        log.info(
            "Starting from %s: %d of %d draft ids have their head row from it, the other %d are new to it.",
            self.folder, int(known.sum()), len(target_ids), int((~known).sum()),
        )  # fmt: skip


class UnusableDrafter(EyasError):
    """Why a drafter in a folder cannot be used (`what`); the message names the key that asked for it."""

    def __init__(self, folder: Path, what: str) -> None:
        super().__init__(f"model.init_from: {folder}: {what}")
        self.folder, self.what = folder, what


def _wrong(folder: Path, what: str) -> UnusableDrafter:
    return UnusableDrafter(folder, what)


@contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Whatever files that others made raise, as one message."""
    try:
        yield
    except EyasError:
        raise
    except Exception as exc:
        reason = " ".join(str(exc).split())[:300]
        message = f"its safetensors weights cannot be read ({reason}); copy the drafter there again, whole"
        raise _wrong(folder, message) from None


def open_drafter(folder: Path) -> StoredWeights:
    if not folder.is_dir():
        raise _wrong(
            folder, "no such folder; name one with a drafter's config.json and model.safetensors (download it first)"
        )
    if not (folder / CONFIG).is_file():
        raise _wrong(folder, "has no config.json; copy the drafter's there")
    if not (folder / WEIGHTS).is_file() and not (folder / INDEX).is_file():
        others = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        message = f"has no {WEIGHTS}"
        if others:
            message += f", only {', '.join(others[:3])}: such files can run code as they are read, so Eyas never does"
        raise _wrong(folder, f"{message}; put the drafter there as safetensors")
    with reading(folder):
        return StoredWeights.open(folder)


def init_checksum(model_settings: dict[str, Any]) -> str | None:
    """Digest of the files that `init: checkpoint` starts from, None for other starts.

    `model_settings`: the fields of config.DrafterModel. Raises EyasError where there is no drafter.
    """
    if model_settings["init"] != "checkpoint":
        return None
    folder = Path(model_settings["init_from"])
    stored = open_drafter(folder)
    with reading(folder):
        names = {CONFIG, *stored.files.values(), *([INDEX] if (folder / INDEX).is_file() else [])}
        return fingerprint(**{name: checksum(folder / name) for name in sorted(names)})


def read_drafter_config(folder: Path) -> dict[str, Any]:
    """config.json with its sizes at the top, wherever the maker keeps them.

    `layers`: the layer ids, or None; in Eyas's counting where `counted_from_zero`, else as they stand in the
    `eagle_config` that SGLang reads.
    """
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise _wrong(folder, f"config.json cannot be read as JSON ({exc})") from None
    if not isinstance(values, dict):
        raise _wrong(folder, "config.json is no JSON object")
    kind = values.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        raise _wrong(folder, f"its speculators_model_type is {kind}; Eyas starts from eagle3 drafters only")
    eagle = values["eagle_config"] if isinstance(values.get("eagle_config"), dict) else {}
    nested = values["transformer_layer_config"] if isinstance(values.get("transformer_layer_config"), dict) else {}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if of_vllm := values.get("eagle_aux_hidden_state_layer_ids"):
        ids = [layer - 1 for layer in of_vllm]  # at the top, where vLLM and speculators look: j is layer j - 1's output
    return nested | values | eagle | {"layers": ids, "counted_from_zero": bool(of_vllm)}


def layers_of(folder: Path, config: dict[str, Any], model_type: str, depth: int) -> tuple[int, ...]:
    """The layers that a drafter reads, in Eyas's counting (id j is the output of decoder layer j).

    `config`: see `read_drafter_config`, which has turned the ids of vLLM's and speculators' form already.
    `model_type` and `depth` (decoder layers) are the target's. A checkpoint of Eyas counts as Eyas does, all other
    folders as SGLang, which captures the input of a layer: for Llama-like targets it adds 1 to the ids itself, for
    DeepSeek-like ones only to a list that begins with 1.
    """
    ids = config["layers"]
    if not ids:  # what servers capture for heads that name none: the inputs of layers 2, n//2 and n-3
        return (1, depth // 2 - 1, depth - 4)
    if config["counted_from_zero"] or any((folder / name).is_file() for name in _OWN_CHECKPOINT):
        return tuple(ids)
    if model_type.lower().startswith(_DEEPSEEK_LIKE) and ids[0] != 1:
        return tuple(layer - 1 for layer in ids)
    return tuple(ids)


def _check_meaning(
    folder: Path, config: dict[str, Any], shape: DrafterShape, depth: int, model_type: str
) -> None:  # fmt: skip
    """Refuse drafters that compute something else from such tensors; warn where training has to adapt them."""
    if on := [key for key in _OTHER_ARITHMETIC if config.get(key)]:
        raise _wrong(
            folder,
            f"its config.json switches on {', '.join(on)}, with which the same weights compute something else than"
            " Eyas's drafter does; take another drafter",
        )
    if (before := bool(config.get("norm_before_residual"))) != shape.norm_before_residual:
        raise _wrong(
            folder,
            f"its config.json has norm_before_residual {json.dumps(before)}, with which the same weights compute"
            f" something else than here; set model.norm_before_residual: {json.dumps(before)} to start from it",
        )
    if (activation := config.get("hidden_act") or "silu") not in ("silu", "swish"):
        raise _wrong(folder, f"its hidden_act is {activation}, Eyas's drafter has silu; take another drafter")
    if (vocab_size := config.get("vocab_size") or shape.vocab_size) != shape.vocab_size:
        raise _wrong(
            folder,
            f"its vocab_size is {vocab_size}, the target's is {shape.vocab_size}: it drafts for another vocabulary;"
            " take a drafter of this target",
        )
    rope = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or rope
    differs = []
    theta = config.get("rope_theta") or rope.get("rope_theta") or 10000.0  # as Llama has it
    if float(theta) != shape.rope_theta:
        differs.append(f"rope_theta {theta}, here {shape.rope_theta}")
    if (kind := scaling.get("rope_type") or scaling.get("type") or "default") != "default":
        differs.append(f"rope_scaling {kind}, here none")
    if (layers := layers_of(folder, config, model_type, depth)) != tuple(shape.layers):
        differs.append(f"layers {list(layers)}, here {list(shape.layers)} (extraction.layers, outputs counted from 0)")
    if differs:
        log.warning(
            "%s was trained otherwise than this run trains, which has to make up for it: %s.",
            folder,
            "; ".join(differs),
        )


def _by_our_names(folder: Path, stored: StoredWeights, shape: DrafterShape) -> dict[str, str]:
    """Stored name of each tensor, by Eyas's name; EyasError lists what is missing or unknown."""
    names: dict[str, str] = {}
    for name in stored.files:
        ours = re.sub(r"^layers\.0\.", "midlayer.", name)
        if ours in names:
            raise _wrong(folder, f"holds both {names[ours]} and {name}, which are the same; delete one of them")
        if not _HARMLESS.fullmatch(name):
            names[ours] = name
    optional = {"d2t", "t2d"}
    if shape.hidden_size == shape.target_hidden_size:
        optional.add("embed_tokens.weight")
    expected = set(tensor_shapes(shape))
    missing, unknown = sorted(expected - optional - set(names)), sorted(names[n] for n in set(names) - expected)
    if missing or unknown:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        if "embed_tokens.weight" in missing:
            parts.append("a drafter of another width than the target's (model.hidden_size) needs its own embedding")
        if unknown:
            shown = ", ".join(unknown[:12]) + (f" and {len(unknown) - 12} more" if len(unknown) > 12 else "")
            parts.append(f"holds what Eyas's drafter has no place for: {shown}")
        raise _wrong(folder, f"{'; '.join(parts)}; take a one-layer Llama-like EAGLE-3 drafter")
    return names


def _check_shapes(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], shape: DrafterShape
) -> None:
    """One EyasError that names the tensors that do not fit, and the config keys that would make them fit."""
    expected = tensor_shapes(shape)
    expected["lm_head.weight"] = (shapes["lm_head.weight"][0], shape.hidden_size)  # its rows are re-mapped
    expected["d2t"] = expected["lm_head.weight"][:1]
    wrong = [f"{name} is {found}, not {expected[name]}" for name, found in shapes.items() if found != expected[name]]
    # Heads may be cut otherwise and still have tensors of the same shapes.
    theirs = {key: config[key] for key in _HEADS if isinstance(config.get(key), int)}
    if "num_attention_heads" in theirs:
        q, kv = (shapes[f"midlayer.self_attn.{part}_proj.weight"][0] for part in ("q", "k"))
        theirs.setdefault("head_dim", q // theirs["num_attention_heads"])
        theirs.setdefault("num_key_value_heads", kv // theirs["head_dim"])
    ours = asdict(shape)
    wrong += [f"{key} is {value}, not {ours[key]}" for key, value in theirs.items() if value != ours[key]]
    if not wrong:
        return
    theirs["hidden_size"] = shapes["norm.weight"][0]
    theirs["intermediate_size"] = shapes["midlayer.mlp.gate_proj.weight"][0]
    advice = [f"model.{key}: {value}" for key, value in theirs.items() if value != ours[key]]
    reads, target = shapes["fc.weight"][-1], 3 * shape.target_hidden_size
    if reads != target:
        todo = f"it reads {reads} numbers of a target's states, not {target}: take a drafter of this target"
    elif advice:
        todo = f"set {', '.join(sorted(advice))} to start from it"
    elif any(name.startswith("midlayer.self_attn") for name in wrong):
        todo = f"set {', '.join(f'model.{key}' for key in _HEADS)} to its own to start from it"
    else:
        todo = "take a drafter of this target"
    more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
    raise _wrong(folder, f"does not fit this run's drafter: {'; '.join(wrong[:3])}{more}; {todo}")


def _target_ids(folder: Path, d2t: Tensor | None, t2d: Tensor | None, rows: int, vocab_size: int) -> Tensor:
    """Target id of each of the head's `rows`: int64 [rows]; raises EyasError where the maps make no sense."""
    if d2t is not None:
        ids = d2t.long() + torch.arange(len(d2t))
    else:  # the whole vocabulary, unless a mask says which part
        ids = torch.arange(vocab_size) if t2d is None else t2d.bool().nonzero().flatten()
    if len(ids) != rows or rows == 0:
        raise _wrong(
            folder,
            f"lm_head.weight has {rows} rows for {len(ids)} draft ids"
            + (f" (without d2t it drafts the whole vocabulary of {vocab_size})" if d2t is None and t2d is None else "")
            + "; copy the drafter there again, whole",
        )
    if ids.min() < 0 or ids.max() >= vocab_size or len(ids.unique()) != rows:
        raise _wrong(folder, f"its d2t makes target ids outside 0 to {vocab_size - 1}, or the same twice")
    if t2d is not None and (int(t2d.bool().sum()) != rows or not bool(t2d.bool()[ids].all())):
        raise _wrong(folder, "its d2t and t2d contradict each other")
    return ids


def _require_finite(folder: Path, name: str, tensor: Tensor) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise _wrong(folder, f"{name} holds NaN or infinity; take another drafter")


def import_drafter(folder: Path, shape: DrafterShape, depth: int, model_type: str) -> ImportedDrafter:
    """Read the drafter in `folder` for a run whose drafter has `shape`; `depth`: decoder layers of its target.

    `model_type`: that of the target's (text) config, by which servers count the layers.

    Raises EyasError when it is not there, damaged, or does not fit; warns where it was trained otherwise.
    """
    stored = open_drafter(folder)
    try:
        config = read_drafter_config(folder)
        _check_meaning(folder, config, shape, depth, model_type)
    except (AttributeError, TypeError, ValueError) as exc:
        raise _wrong(folder, f"config.json is not one of an EAGLE-3 drafter ({exc})") from None
    with reading(folder):
        names = _by_our_names(folder, stored, shape)
        for name, place in names.items():
            if name not in ("d2t", "t2d") and (how := stored.quantisation(place)):
                raise _wrong(folder, f"{place} is quantised ({how}); take a drafter with plain weights")
        _check_shapes(folder, config, {name: stored.shape(place) for name, place in names.items()}, shape)
        maps = {name: stored.read(names[name]) if name in names else None for name in ("d2t", "t2d")}
        lm_head = stored.read(names["lm_head.weight"])
        weights = {}
        for name, place in names.items():
            unused = name == "embed_tokens.weight" and shape.hidden_size == shape.target_hidden_size
            if name not in ("d2t", "t2d", "lm_head.weight") and not unused:
                weights[name] = stored.read(place).float()
                _require_finite(folder, place, weights[name])
    ids = _target_ids(folder, maps["d2t"], maps["t2d"], len(lm_head), shape.vocab_size)
    return ImportedDrafter(folder, weights, lm_head, ids, shape.vocab_size)
