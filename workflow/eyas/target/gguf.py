"""A transformers model folder from a GGUF file, once."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

from eyas.errors import EyasError
from eyas.shards import ensure_free, write_lock
from eyas.shards.files import sync_file, sync_folder
from eyas.target.files import MODEL_FILES

log = logging.getLogger(__name__)


def convert_gguf(gguf: Path, output: Path) -> None:
    """Write `output` (config, tokenizer, bfloat16 safetensors) from `gguf`.

    The quantised weights are dequantised, which is exact in bfloat16's precision only;
    everything downstream sees these weights, so the target stays consistent with itself.
    Raises EyasError for a file that transformers cannot read.
    """
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()  # it writes thousands of characters into logs

    if not gguf.is_file():
        raise EyasError(f"target.gguf: {gguf} is missing")
    with write_lock(output):
        # bf16 weights take about four times a 4-bit file; save_pretrained needs them once.
        ensure_free(output.parent, 5 * gguf.stat().st_size, f"Converting {gguf.name}")
        partial = output.with_name(f".{output.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        log.info("Reading %s (%.0f MB) and dequantising its weights.", gguf, gguf.stat().st_size / 1e6)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                quantization_config=transformers.GgufConfig(dequantize=True),
                dtype=torch.bfloat16,
            )
        except (OSError, ValueError, KeyError, ImportError) as exc:
            raise EyasError(f"target.gguf: {gguf} cannot be converted: {' '.join(str(exc).split())[:300]}") from None
        model.config._name_or_path = output.name
        model.save_pretrained(partial, max_shard_size="1TB")
        tokenizer.save_pretrained(partial)
        _tidy(partial, output.name)
        output.mkdir(parents=True, exist_ok=True)
        # config.json goes last: a folder that has it is whole.
        names = sorted((p.name for p in partial.iterdir()), key=lambda name: name == "config.json")
        for name in names:
            sync_file(partial / name)
            os.replace(partial / name, output / name)
            os.chmod(output / name, 0o644)
        sync_folder(output)
        partial.rmdir()
        size = sum((output / name).stat().st_size for name in names)
        log.info("Wrote %s: %d files, %.0f MB, %d parameters.", output, len(names), size / 1e6, model.num_parameters())


def _tidy(folder: Path, name: str) -> None:
    """Give the model its own name instead of the GGUF file's training label."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["_model_name_or_path"] = name
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    missing = [file for file in MODEL_FILES if not (folder / file).is_file()]
    if missing:
        raise EyasError(
            f"target.gguf: the conversion gave no {', '.join(missing)}; the file lacks a tokenizer or weights"
        )
