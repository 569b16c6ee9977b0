"""The plan of a run: shards, files, and the part of the configuration that each rule depends on."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.config import Config, PromptFiles, check_against_target, check_config, identity, read_target_sizes
from eyas.conversations import count_records, expand
from eyas.errors import EyasError
from eyas.plan.export import fits_one_file, public_config, public_path
from eyas.plan.extraction import extraction_jobs
from eyas.plan.servers import capture_command, decoding_command
from eyas.plan.shard_jobs import ShardJob, StageFiles, cut, shards_per_job
from eyas.shards import Shard, shards_of
from eyas.target.files import MODEL_FILES, TOKENIZER_FILES
from eyas.versions import VERSIONS


@dataclass(frozen=True)
class RunPlan:
    """A checked configuration and what follows from it. The `…_settings` go into rules' params."""

    config: Config
    rows: int
    prompts: tuple[PromptFiles, ...]
    """The prompt files, their patterns resolved."""

    @property
    def versions(self) -> dict[str, int]:
        return VERSIONS

    @property
    def run_folder(self) -> str:
        return os.path.join(self.config.results, self.config.name)

    @cached_property
    def shards(self) -> list[Shard]:
        return shards_of(self.rows, self.config.data.shard_rows)

    @cached_property
    def shard_names(self) -> list[str]:
        return [shard.name for shard in self.shards]

    @cached_property
    def response_jobs(self) -> list[ShardJob]:
        return cut("respond", self.shards, shards_per_job(len(self.shards), self.config.data.shards_per_job))

    @cached_property
    def token_jobs(self) -> list[ShardJob]:
        return [ShardJob("tokenize", job.shards) for job in self.response_jobs]

    @cached_property
    def prompt_files(self) -> StageFiles:
        return self._stage("prompts", {"rows": ".jsonl"}, self.response_jobs, f"{self.run_folder}/prompts/index.json")

    @cached_property
    def response_files(self) -> StageFiles:
        return self._stage("conversations", {"rows": ".jsonl", "facts": ".json"}, self.response_jobs)

    @cached_property
    def token_files(self) -> StageFiles:
        return self._stage("tokens", {"tokens": ".safetensors", "facts": ".json"}, self.token_jobs)

    @cached_property
    def state_files(self) -> StageFiles:
        return self._stage("hidden_states", {"states": ".safetensors", "facts": ".json"}, self.extraction_jobs)

    def _stage(
        self, name: str, suffixes: dict[str, str], jobs: list[ShardJob], record: str | None = None
    ) -> StageFiles:
        # Extraction alone in jobs of several shards (a server that loads long) has them all as outputs.
        recorded = bool(self.response_jobs[0].shards and jobs[0].shards)
        return StageFiles(f"{self.run_folder}/{name}", suffixes, self.shards, jobs, recorded, record)

    @property
    def prompt_paths(self) -> list[str]:
        return [file.path for file in self.prompts]

    @property
    def prompt_files_json(self) -> str:
        """The prompt files as they are configured: patterns are short, what they match may be thousands."""
        return _json([file.model_dump() for file in self.config.data.prompts])

    @cached_property
    def target_files(self) -> list[str]:
        """Files of a local target that jobs read; none for a hub model."""
        path = self.config.target.path
        if self.config.target.gguf:
            return [os.path.join(path, name) for name in MODEL_FILES]
        return [os.path.join(path, "config.json")] if os.path.isdir(path) else []

    @cached_property
    def source_json(self) -> str:
        """Where the target is: all that matters for its tokenizer and its stored weights."""
        return _json(self.config.target.model_dump(include={"path", "revision", "trust_remote_code", "gguf"}))

    @cached_property
    def target_json(self) -> str:
        """The target as it computes: with its precision."""
        return _json(self.config.target.model_dump(include={"path", "revision", "trust_remote_code", "gguf", "dtype"}))

    @cached_property
    def response_settings(self) -> str:
        responses = self.config.responses
        if responses.engine == "keep":
            return _json({"engine": "keep"})
        tokenization = self.config.tokenization
        settings = identity(responses) | {"max_length": tokenization.max_length}
        endpoint = settings.pop("endpoint")
        if responses.engine == "openai":
            settings |= endpoint
        else:
            settings["template_options"] = tokenization.template_options
        if responses.truncated != "continue":
            del settings["max_continuations"]
        settings["seed"] = self.config.seed if responses.temperature > 0 else 0
        return _json(settings)

    @property
    def response_target_json(self) -> str:
        """The target for the responses; over an endpoint its files and precision do not matter."""
        return '{"path":""}' if self.config.responses.engine == "openai" else self.target_json

    @cached_property
    def response_target_files(self) -> list[str]:
        return self.target_files if self.config.responses.engine == "transformers" else []

    @cached_property
    def endpoint_json(self) -> str:
        """How the endpoint is reached: for a resource, since it re-runs nothing."""
        endpoint = self.config.responses.endpoint
        if endpoint is None or self.config.responses.engine != "openai":
            return "none"
        return _json(endpoint.model_dump(mode="json", exclude={"model", "extra_body"}))

    @cached_property
    def token_settings(self) -> str:
        return _json(identity(self.config.tokenization))

    @cached_property
    def extraction_settings(self) -> str:
        settings = identity(self.config.extraction)
        if self.config.extraction.engine != "sglang":
            del settings["sglang"]
        return _json(settings)

    @cached_property
    def extraction_jobs(self) -> list[ShardJob]:
        return extraction_jobs(self.config, self.shards)

    @cached_property
    def server_options(self) -> str:
        """How the server is reached or kept: for a resource, since it re-runs nothing."""
        extraction = self.config.extraction
        return _json(extraction.sglang.options()) if extraction.engine == "sglang" else "none"

    @cached_property
    def server_command(self) -> str:
        """The server that an extraction job starts, as a shell would take it; `none` where it starts none."""
        extraction = self.config.extraction
        starts = extraction.engine == "sglang" and extraction.sglang.url is None
        return shlex.join(capture_command(self.config)) if starts else "none"

    @cached_property
    def evaluation_settings(self) -> str:
        """All that an evaluation depends on, with what was left open filled in."""
        evaluation = self.config.evaluation
        settings = identity(evaluation, exclude={"prompts", "prompt_sets"}) | {
            "draft_tokens": evaluation.verified_tokens,
            "held_out_every": self.config.data.held_out_every,
            "template_options": self.config.tokenization.template_options,
            "seed": self.config.seed if evaluation.temperature > 0 else 0,
            "prompt_sets": {
                name: prompt_set.model_dump() | {"prompts": prompt_set.prompts or evaluation.prompts}
                for name, prompt_set in evaluation.prompt_sets.items()
            },
        }
        if evaluation.engine != "sglang":
            del settings["sglang"]
        return _json(settings)

    @property
    def evaluation_options(self) -> str:
        """How the servers of an evaluation are reached or kept: for a resource, since it re-runs nothing."""
        evaluation = self.config.evaluation
        return _json(evaluation.sglang.options()) if evaluation.engine == "sglang" else "none"

    def evaluation_server(self, drafter: str, drafting: bool) -> str:
        """The server that an evaluation starts, with the drafter or without; `none` where it starts none."""
        evaluation = self.config.evaluation
        if evaluation.engine != "sglang" or evaluation.sglang.url is not None:
            return "none"
        folder = self._export_folder(drafter) if drafting else None
        return shlex.join(decoding_command(self.config, folder))

    def evaluation_export(self, drafter: str) -> list[str]:
        """The files of the exported drafter that an evaluation's server loads; none where it needs no server."""
        if self.config.evaluation.engine != "sglang":
            return []
        names = [*self.export_weights, "config.json", "export.json"]
        return [os.path.join(self._export_folder(drafter), name) for name in names]

    def _export_folder(self, drafter: str) -> str:
        return os.path.join(self.run_folder, "drafters", drafter, "export", "sglang")

    @property
    def evaluation_files(self) -> list[str]:
        return self.config.evaluation.prompt_files

    def model_settings(self, drafter: str) -> str:
        return _json(identity(self.config.drafters[drafter].model) | {"seed": self.config.seed})

    def training_settings(self, drafter: str) -> str:
        """All that an epoch depends on; not how many epochs there are to be."""
        settings = identity(self.config.drafters[drafter].training, exclude={"epochs"})
        return _json(settings | {"seed": self.config.seed, "held_out_every": self.config.data.held_out_every})

    @cached_property
    def expected_json(self) -> str:
        """What the configuration says of the hidden states, for the trainer to compare with the manifest."""
        extraction = self.config.extraction
        return _json({"layers": extraction.layers, "dtype": extraction.dtype, "rows": self.rows})

    def initial_files(self, drafter: str) -> list[str]:
        """Files of the drafter that `init: checkpoint` starts from."""
        folder = self.config.drafters[drafter].model.init_from
        if folder is None:
            return []
        names = sorted(os.listdir(folder))
        return [os.path.join(folder, n) for n in names if n == "config.json" or ".safetensors" in n]

    @property
    def export_weights(self) -> list[str]:
        """The files of an export's weights, where they are known before there is a drafter."""
        return ["model.safetensors"] if fits_one_file(self.config) else []

    def card_settings(self, drafter: str) -> str:
        """What the model card and the provenance say of the configuration."""
        results = public_path(self.config.results)
        return _json({"results": results, "config": public_config(self.config, drafter)})

    @property
    def drafters_json(self) -> str:
        """Epochs and draft vocabulary size of each drafter, for the summary."""
        return _json({n: [d.training.epochs, d.draft_vocab_size] for n, d in self.config.drafters.items()})


def _json(values: Any) -> str:
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def plan_run(values: Mapping[str, Any], source: str) -> RunPlan:
    """Check a configuration against itself, the target and the disk; raises EyasError with every key's path.

    Leaves nothing on the disk: whether this is a dry run is not known when the Snakefile is read.
    """
    config = check_config(values, source)
    try:
        _check_target_folder(config)
        sizes = read_target_sizes(config)
        if sizes:
            check_against_target(config, sizes)
        prompts = expand(config.data.prompts, lambda path: _is_packaged(config, path))
        rows = _count_rows(config, [file.path for file in prompts])
        _check_starts(config)
        _check_prompt_sets(config)
        _check_results(config.results)
    except EyasError as exc:
        raise EyasError("\n".join(f"{source}: {line}" for line in str(exc).splitlines())) from None
    return RunPlan(config, rows, tuple(prompts))


def _check_target_folder(config: Config) -> None:
    path = config.target.path
    if gguf := config.target.gguf:
        built = os.path.isfile(os.path.join(path, "config.json"))
        if not (built or os.path.exists(gguf) or _is_packaged(config, gguf)):
            raise EyasError(f"target.gguf: {gguf} does not exist")
    elif os.path.isdir(path):
        if not any(os.path.isfile(os.path.join(path, name)) for name in TOKENIZER_FILES):
            raise EyasError(
                f"target.path: {path} has no tokenizer (tokenizer.json); copy the target's tokenizer files there"
            )
    elif os.path.isabs(path) or path.startswith((".", "~")) or path.count("/") > 1 or os.path.exists(path):
        raise EyasError(
            f"target.path: {path} is no folder; name a transformers model folder, or a hub model (owner/name)"
        )


def _is_packaged(config: Config, file: str) -> bool:
    return os.path.normpath(file) in {os.path.normpath(place) for place in config.packages}


def _count_rows(config: Config, prompts: list[str]) -> int:
    data, run = config.data, Path(config.results) / config.name
    missing = [f for f in prompts if not os.path.exists(f) and not _is_packaged(config, f)]
    if missing and not (run / "prompts" / "index.json").is_file():
        raise EyasError(f"data.prompts: {missing[0]} does not exist; name files of prompts")
    if data.rows != "auto":
        return data.rows
    if packaged := [f for f in prompts if not os.path.exists(f)]:
        raise EyasError(
            f"data.rows: auto counts local files, and {packaged[0]} is not there yet; write the number of rows"
        )
    rows = count_records(prompts, Path(".snakemake") / "eyas_row_counts.json")
    if rows < data.held_out_every:
        raise EyasError(
            f"data.held_out_every: {data.held_out_every} leaves no held-out row among the {rows} rows of the prompt"
            f" files; write at most {rows}"
        )
    return rows


def _check_starts(config: Config) -> None:
    """Whether the drafters that others start from are there."""
    for name, drafter in config.drafters.items():
        folder = drafter.model.init_from
        if folder is not None and not os.path.isfile(os.path.join(folder, "config.json")):
            raise EyasError(
                f"drafters.{name}.model.init_from: {folder} has no config.json; name the folder of a drafter"
                " (config.json and model.safetensors)"
            )


def _check_prompt_sets(config: Config) -> None:
    """Whether the prompt sets are there, or will be."""
    for name, prompt_set in config.evaluation.prompt_sets.items():
        path = prompt_set.path
        if path is not None and not (os.path.isfile(path) or _is_packaged(config, path)):
            raise EyasError(
                f"evaluation.prompt_sets.{name}.path: {path} does not exist; name a file of prompts, or one of packages"
            )


def _check_results(results: str) -> None:
    """Whether results can be written there."""
    advice = "name a folder that you can write to"
    existing = Path(results).absolute()
    while not os.path.exists(existing):  # Path.exists raises where a parent may not be entered
        existing = existing.parent
    if not existing.is_dir():
        raise EyasError(f"results: {existing} is a file; {advice}")
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as exc:
        raise EyasError(f"results: cannot write in {existing} ({exc.strerror}); {advice}") from None
