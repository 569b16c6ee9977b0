"""The SGLang form of a drafter, with its key set checked: SGLang skips wrong names in silence."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from eyas.drafter.checkpoint import CONFIG, MODEL, served_tensors
from eyas.drafter.shape import DrafterShape, tensor_shapes
from eyas.errors import EyasError
from eyas.shards import describe_file, fingerprint, is_complete, read_header, read_json, write_json, write_lock
from eyas.shards.files import publish
from eyas.versions import VERSIONS

log = logging.getLogger(__name__)

FORMAT_VERSION = VERSIONS["export"]
FACTS = "export.json"

# SGLang 0.5.23 adds 1 to the ids for these; for DeepSeek-like targets only when the first id is 1.
_DEEPSEEK_LIKE = ("deepseek", "kimi")


def sglang_layer_ids(layers: list[int], target_model_type: str) -> list[int]:
    """Eyas's layer ids (outputs of layers, 0-based) as SGLang 0.5.23 counts them for this kind of target.

    SGLang captures the *input* of layer i, which is the output of layer i - 1. For Llama-like
    targets it adds 1 to the ids itself, so they stay as they are; for DeepSeek-like ones it adds
    1 only to lists that begin with 1.
    """
    if target_model_type.lower().startswith(_DEEPSEEK_LIKE) and layers[0] != 1:
        shifted = [layer + 1 for layer in layers]
        if shifted[0] == 1:
            raise EyasError(
                f"layers {layers}: SGLang cannot be told to capture the output of layer 0 of a {target_model_type}"
                " target; choose a higher first layer in extraction.layers"
            )
        return shifted
    return list(layers)


def vllm_layer_ids(layers: list[int]) -> list[int]:
    """Eyas's layer ids as vLLM counts them: its id j is the output of layer j - 1."""
    return [layer + 1 for layer in layers]


def check_export(folder: Path) -> DrafterShape:
    """Raise EyasError unless the folder holds exactly the tensors, shapes and dtypes that servers expect."""
    shape = DrafterShape.from_config_json(read_json(folder / CONFIG, "drafter configuration"))
    expected = tensor_shapes(shape)
    found, _ = read_header(folder / MODEL)
    if set(found) != set(expected):
        missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
        raise EyasError(
            f"{folder / MODEL}: tensors missing {missing}, unexpected {extra}; servers would skip them in silence"
        )
    for name, spec in found.items():
        dtype = {"d2t": "I64", "t2d": "BOOL"}.get(name, "BF16")
        if spec.shape != expected[name] or spec.dtype != dtype:
            raise EyasError(
                f"{folder / MODEL}: {name} is {spec.dtype} {spec.shape}, servers expect {dtype} {expected[name]}"
            )
    return shape


def export_sglang(checkpoint: Path, target_model_type: str, output: Path) -> None:
    """Write `output/` (config.json, model.safetensors, export.json) from a checkpoint folder.

    Keys, shapes, dtypes and finiteness are checked before anything is written.
    """
    from safetensors.torch import load_file, save_file

    source = describe_file(checkpoint / MODEL)
    mark = fingerprint(
        version=FORMAT_VERSION, model=source, config=describe_file(checkpoint / CONFIG), target=target_model_type
    )
    with write_lock(output):
        if is_complete(output / FACTS, mark):
            log.info("%s was finished by another process in the meantime.", output)
            return
        shape = DrafterShape.from_config_json(read_json(checkpoint / CONFIG, "drafter configuration"))
        read_header(checkpoint / MODEL)
        tensors = served_tensors(load_file(checkpoint / MODEL), shape)
        staging = output.parent / ".staging" / output.name
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        save_file(tensors, staging / MODEL, metadata={"format": "pt"})
        write_json(staging / CONFIG, shape.config_json(sglang_layer_ids(list(shape.layers), target_model_type)))
        check_export(staging)
        files = {name: describe_file(staging / name) for name in (MODEL, CONFIG)}
        write_json(staging / FACTS, {"format_version": FORMAT_VERSION, "fingerprint": mark, "files": files})
        publish({staging / name: output / name for name in (MODEL, CONFIG, FACTS)}, staging)
        log.info(
            "Wrote %s: %d tensors, %d bytes; keys and shapes are those that SGLang loads.",
            output,
            len(tensors),
            files[MODEL]["bytes"],
        )
