"""From a mapping or a YAML file to a checked :class:`Config`, or one clear message."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from eyas.config.fields import Asked
from eyas.config.schema import Config, Responses
from eyas.errors import EyasError

# What a value must be, where pydantic's own words would not help a person.
_MESSAGES = {
    "missing": "is missing",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "model_attributes_type": "must be a mapping",
}


def _known_keys(path: tuple[str | int, ...]) -> list[str]:
    """Keys allowed in the section at `path`; empty where it cannot be told."""
    kind: Any = Config
    for part in path:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            if part not in kind.model_fields:
                return []
            kind = kind.model_fields[str(part)].annotation
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return []
        while get_args(kind) and get_origin(kind) is not dict:  # Optional[...] and the like
            models = [a for a in get_args(kind) if isinstance(a, type) and issubclass(a, BaseModel)]
            if not models:
                return []
            kind = models[0]
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return []
    return sorted(kind.model_fields, key=lambda name: name in Asked.model_fields)  # what all jobs ask for comes last


def _problem(error: Mapping[str, Any]) -> str:
    location = tuple(error["loc"])
    if location[-1:] == ("[key]",):
        location = location[:-1]
    key = ".".join(str(part) if str(part).isprintable() else repr(part) for part in location) or "(the whole config)"
    if error["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        close = difflib.get_close_matches(str(location[-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known) or 'none'}"
        return f"{key}: unknown key; {hint}"
    message = _MESSAGES.get(error["type"], error["msg"].removeprefix("Value error, "))
    message = message.replace("Input should be", "must be")
    if error["type"] == "missing" or isinstance(error.get("input"), Mapping):
        return f"{key}: {message}"
    return f"{key}: {message} (you wrote {_shown(error.get('input'))})"


def _shown(value: Any) -> str:
    try:
        return json.dumps(value, default=str)[:80]
    except (TypeError, ValueError, RecursionError):
        return repr(value)[:80]


def check_config(values: Any, source: str) -> Config:
    """Validate `values`; raises EyasError with one line per problem, each with its key's path."""
    if not isinstance(values, Mapping) or not values:
        raise EyasError(f"{source}: the configuration is empty; it needs at least name, target, data and drafters")
    try:
        config = Config.model_validate(dict(values))
    except ValidationError as exc:
        lines = dict.fromkeys(_problem(dict(error)) for error in exc.errors())
        raise EyasError("\n".join(f"{source}: {line}" for line in lines)) from None
    problems = _impossible(config)
    if problems:
        raise EyasError("\n".join(f"{source}: {line}" for line in problems))
    return config


def read_config(path: str | os.PathLike[str]) -> Config:
    """Read and validate a YAML file, outside Snakemake."""
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as exc:
        raise EyasError(f"{path}: cannot be read ({exc.strerror}); name a configuration file") from None
    except RecursionError:
        raise EyasError(f"{path}: not valid YAML: nested too deeply") from None
    except (yaml.YAMLError, ValueError) as exc:  # a date such as 2026-13-45 is a ValueError
        raise EyasError(f"{path}: not valid YAML: {' '.join(str(exc).split())}") from None
    return check_config(values, str(path))


_READ = re.compile(r"\.((jsonl|ndjson|json)(\.gz|\.zst)?|parquet)$", re.IGNORECASE)


def _unreachable(responses: Responses) -> list[str]:
    """What of the endpoint's settings cannot work."""
    endpoint = responses.endpoint
    assert endpoint
    problems = []
    if endpoint.max_spend is not None and not (endpoint.input_price or endpoint.output_price):
        problems.append(
            "responses.endpoint.max_spend: nothing has a price; write input_price and output_price (per million tokens)"
        )
    taken = {"model", "messages", "stream", "n"} & endpoint.extra_body.keys()
    problems += [f"responses.endpoint.extra_body.{key}: is set by Eyas; delete it" for key in sorted(taken)]
    return problems


def _impossible(config: Config) -> list[str]:
    """Combinations that need no look at the target."""
    problems = []
    data, responses = config.data, config.responses
    if data.rows != "auto" and data.rows < data.held_out_every:
        problems.append(
            f"data.held_out_every: {data.held_out_every} leaves no held-out row among data.rows = {data.rows};"
            f" write at most {data.rows}"
        )
    if responses.engine != "keep" and responses.max_new_tokens >= config.tokenization.max_length:
        problems.append(
            f"responses.max_new_tokens: {responses.max_new_tokens} leaves no room for a prompt in"
            f" tokenization.max_length = {config.tokenization.max_length}"
        )
    for file in data.prompts:
        if not _READ.search(file.path) and not any(character in file.path for character in "*?["):
            problems.append(
                f"data.prompts: {file.path}: .jsonl, .ndjson and .json files (also as .gz or .zst) and .parquet"
                " files are read"
            )
    for name, prompt_set in config.evaluation.prompt_sets.items():
        if prompt_set.path is not None and not _READ.search(prompt_set.path):
            problems.append(
                f"evaluation.prompt_sets.{name}.path: {prompt_set.path}: .jsonl, .ndjson and .json files (also as"
                " .gz or .zst) and .parquet files are read"
            )
    if responses.engine == "openai":
        problems += _unreachable(responses)
    places = [*config.packages, *([config.target.path] if config.target.gguf else [])]
    if len({os.path.normpath(p) for p in places}) < len(places):
        problems.append("packages: two files would be written to the same place")
    for name, drafter in config.drafters.items():
        if drafter.model.norm_before_residual and config.evaluation.engine == "sglang":
            problems.append(
                f"drafters.{name}.model.norm_before_residual: SGLang does not know such drafters and computes something"
                " else; set evaluation.engine: transformers"
            )
    for place in config.packages:
        if os.path.isabs(place) or ".." in Path(place).parts:
            problems.append(f"packages.{place}: must be a path below the working folder")
    return problems
