"""The target's tokenizer and chat template."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eyas.errors import EyasError
from eyas.target.files import TOKENIZER_FILES
from eyas.target.refusal import TemplateRefusal

__all__ = ["TargetReference", "TemplateRefusal", "end_of_turn_ids", "load_tokenizer", "text_config", "tokenizer_hashes"]


@dataclass(frozen=True)
class TargetReference:
    """How to find the target: a local folder or a hub name, as the configuration says."""

    path: str
    revision: str | None = None
    trust_remote_code: bool = False
    dtype: str = "float32"

    @classmethod
    def from_json(cls, text: str) -> TargetReference:
        values = json.loads(text)
        return cls(**{name: values[name] for name in cls.__dataclass_fields__ if name in values})

    @property
    def source(self) -> dict[str, Any]:
        """Arguments that every from_pretrained takes."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    @property
    def is_folder(self) -> bool:
        return Path(self.path).is_dir()


def unreadable(target: TargetReference, what: str, exc: BaseException) -> EyasError:
    """One clear message for a target that transformers cannot load."""
    reason = " ".join(str(exc).split())[:300]
    if target.is_folder:
        return EyasError(f"target.path: {target.path} has no readable {what} ({reason})")
    return EyasError(
        f"target.path: {target.path} is no local folder, and its {what} could not be loaded from a hub ({reason});"
        " name a transformers model folder, or a hub model on a machine with a network"
    )


def load_tokenizer(target: TargetReference) -> Any:
    """The target's fast tokenizer, which must have a chat template; raises EyasError otherwise."""
    import transformers

    if target.is_folder and not any((Path(target.path) / name).is_file() for name in TOKENIZER_FILES):
        raise EyasError(
            f"target.path: {target.path} has no tokenizer (tokenizer.json); copy the target's tokenizer files there"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(target.path, **target.source)
    except Exception as exc:  # transformers raises many kinds for a damaged or missing tokenizer
        raise unreadable(target, "tokenizer", exc) from None
    if not tokenizer.is_fast:
        raise EyasError(f"target.path: {target.path} has a slow tokenizer only; a tokenizer.json is needed for offsets")
    if not tokenizer.chat_template:
        raise EyasError(
            f"target.path: the tokenizer of {target.path} has no chat template, so conversations cannot be rendered;"
            " put the model's chat_template.jinja into that folder (base models have none: take the instruct model)"
        )
    return tokenizer


def tokenizer_hashes(tokenizer: Any) -> dict[str, str]:
    """Digests of the tokenizer (vocabulary, merges, added tokens) and of its chat template."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["truncation"] = state["padding"] = None  # set by whoever used the tokenizer last
    serialised = json.dumps(state, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    template = tokenizer.chat_template
    template = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return {
        "tokenizer_hash": f"xxh3_128:{xxhash.xxh3_128_hexdigest(serialised)}",
        "chat_template_hash": f"xxh3_128:{xxhash.xxh3_128_hexdigest(template.encode())}",
    }


def text_config(target: TargetReference) -> Any:
    """The target's configuration (of its language part, for multimodal ones); raises EyasError."""
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(target.path, **target.source).get_text_config()
    except Exception as exc:  # transformers raises many kinds for a damaged or missing folder
        raise unreadable(target, "config.json", exc) from None


def end_of_turn_ids(target: TargetReference, tokenizer: Any) -> list[int]:
    """Ids that end the target's generation: generation_config's eos, config's, the tokenizer's."""
    import transformers

    ids: set[int] = set()
    missing = target.is_folder and not (Path(target.path) / "generation_config.json").is_file()
    try:
        given = (
            None
            if missing
            else transformers.GenerationConfig.from_pretrained(
                target.path, revision=target.revision or "main"
            ).eos_token_id
        )
    except Exception as exc:
        # A model without the file is served by the others; one that cannot be read now must not
        # silently lose its end-of-turn tokens.
        if "does not appear to have a file named" not in str(exc):
            raise unreadable(target, "generation_config.json", exc) from None
        given = None
    if given is None:
        given = getattr(text_config(target), "eos_token_id", None)
    ids.update(given if isinstance(given, list) else [given] if given is not None else [])
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if not ids:
        raise EyasError(f"target.path: {target.path} names no end-of-turn token (eos_token_id)")
    return sorted(int(i) for i in ids)
