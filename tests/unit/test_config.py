"""The configuration: what is refused, in which words, and what counts as the identity of a stage."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from eyas.config import (
    Config,
    TargetSizes,
    check_against_target,
    check_config,
    default_layers,
    identity,
    read_config,
    read_target_sizes,
)
from eyas.errors import EyasError
from hypothesis import given, settings
from hypothesis import strategies as st

SIZES = TargetSizes(vocab_size=400, num_hidden_layers=8, hidden_size=64)


def values(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A small valid configuration with dotted keys changed."""
    made: dict[str, Any] = {
        "name": "run",
        "target": {"path": "models/tiny"},
        "data": {"prompts": ["prompts.jsonl"], "rows": 100},
        "drafters": {"small": {"draft_vocab_size": 64}},
    }
    for key, value in (changes or {}).items():
        section = made
        *parents, last = key.split(".")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return made


def problems(changes: dict[str, Any]) -> list[str]:
    """The lines of the refusal, which all name the file first."""
    with pytest.raises(EyasError) as caught:
        check_config(values(changes), "run.yaml")
    lines = str(caught.value).split("\n")
    assert all(line.startswith("run.yaml: ") for line in lines)
    return [line.removeprefix("run.yaml: ") for line in lines]


def test_defaults_are_filled_in():
    config = check_config(values(), "run.yaml")
    assert (config.data.shard_rows, config.data.held_out_every, config.seed) == (500, 20, 0)
    assert config.drafters["small"].training.ttt_steps == 7
    assert config.extraction.layers is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("data.shard_row", "shard_rows"),
        ("tokenisation", "tokenization"),
        ("target.pth", "path"),
        ("drafters.small.training.learning_rates", "learning_rate"),
        ("drafters.small.model.head_dims", "head_dim"),
        ("target.expect.vocab_sizes", "vocab_size"),
    ],
)
def test_unknown_key_names_the_nearest_known_one(key: str, meant: str):
    found = [line for line in problems({key: 1}) if "unknown key" in line]
    assert found == [f"{key}: unknown key; did you mean {meant!r}?"]


def test_unknown_key_without_a_near_one_lists_what_is_known():
    (line,) = problems({"evaluation.zzz": 1})
    assert line.startswith("evaluation.zzz: unknown key; known here: engine, draft_steps, topk, draft_tokens")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.shard_rows", "500", 'must be a whole number (you wrote "500")'),
        ("data.shard_rows", True, "must be a whole number (you wrote true)"),  # bool is an int in Python
        ("data.shard_rows", 2.5, "(you wrote 2.5)"),
        ("data.shard_rows", 0, "must be greater than or equal to 1 (you wrote 0)"),
        ("data.max_bad_rows", -1, "must be greater than or equal to 0 (you wrote -1)"),
        ("seed", True, "must be a whole number (you wrote true)"),
        ("target.trust_remote_code", 1, "must be true or false (you wrote 1)"),
        ("target.path", 7, "must be text (you wrote 7)"),
        ("target.dtype", "fp8", "'bfloat16', 'float16' or 'float32'"),
        ("data.prompts", "a.jsonl", 'must be a list (you wrote "a.jsonl")'),
        ("data", [1], "must be a mapping (you wrote [1])"),
        ("drafters", {}, "at least 1"),
        ("name", "a/b", "pattern"),
        ("responses.temperature", "warm", 'must be a number (you wrote "warm")'),
        ("responses.temperature", True, "must be a number (you wrote true)"),
        ("responses.top_p", float("nan"), "(you wrote NaN)"),
        ("responses.temperature", float("inf"), "finite number"),
        ("drafters.small.training.learning_rate", "1e999", "finite number"),
        ("drafters.small.training.learning_rate", 0, "greater than 0"),
        ("drafters.small.model.head_dim", 7.0, "must be a whole number"),
        ("extraction.layers", [2, 1, 3], "must be three different layer ids in ascending order"),
        ("extraction.layers", [1, 1, 3], "must be three different layer ids in ascending order"),
        ("extraction.layers", [1, 3], "must be three different layer ids in ascending order"),
    ],
)
def test_wrong_values_are_one_line_with_their_key(key: str, value: Any, words: str):
    (line,) = problems({key: value})
    assert line.startswith(f"{key}: ") and words in line


@pytest.mark.parametrize("value", [0, True, "all"])
def test_rows_are_a_number_or_auto_in_one_line(value: Any):
    (line,) = problems({"data.rows": value})
    assert line.startswith("data.rows: ") and "auto" in line


def test_every_problem_has_its_line():
    lines = problems({"data.shard_rows": 0, "seed": -1, "target.path": 3, "nam": 1})
    assert sorted(line.split(":")[0] for line in lines) == ["data.shard_rows", "nam", "seed", "target.path"]


def test_missing_sections_are_all_named():
    with pytest.raises(EyasError) as caught:
        check_config({"name": "run"}, "run.yaml")
    assert str(caught.value).split("\n") == [f"run.yaml: {key}: is missing" for key in ("target", "data", "drafters")]


def test_rows_without_a_held_out_one():
    (line,) = problems({"data.rows": 19})
    assert line.startswith("data.held_out_every: 20 leaves no held-out row") and "at most 19" in line
    assert check_config(values({"data.rows": 20}), "run.yaml").data.rows == 20


def test_reply_as_long_as_the_row():
    (line,) = problems({"responses.max_new_tokens": 64, "tokenization.max_length": 64})
    assert line.startswith("responses.max_new_tokens: 64 ") and "tokenization.max_length = 64" in line


@pytest.mark.parametrize("file", ["prompts.csv", "prompts.parquet.gz", "prompts"])
def test_prompt_files_that_nothing_reads(file: str):
    (line,) = problems({"data.prompts": ["ok.json", file]})
    assert line.startswith("data.prompts: ") and file in line


@pytest.mark.parametrize("name", ["int", "constrained-x"])
def test_a_drafter_may_be_called_like_a_pydantic_type(name: str):
    assert problems({f"drafters.{name}.training.epochs": 0})[0].startswith(f"drafters.{name}.training.epochs: ")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.just(datetime.date(2020, 1, 1)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=2),
    max_leaves=3,
)


@settings(max_examples=60, deadline=None)
@given(
    key=st.sampled_from(["data", "data.rows", "extraction.layers", "drafters.small", "target.expect", "packages"]),
    junk=JUNK,
)
def test_junk_is_accepted_or_refused_by_eyas_error(key: str, junk: Any):
    try:
        assert isinstance(check_config(values({key: junk}), "run.yaml"), Config)
    except EyasError as exc:
        assert all(line.startswith(f"run.yaml: {key}") for line in str(exc).split("\n"))


@pytest.mark.parametrize(
    "text",
    ["data: [{2020-01-01: 1}]\n", "data: &a [*a]\n", '"two\\nlines": 1\n'],
    ids=["date as a key", "list in itself", "newline in a key"],
)
def test_odd_yaml_is_refused_one_line_a_problem(tmp_path: Path, text: str):
    file = tmp_path / "run.yaml"
    file.write_text(f"name: run\n{text}target: {{path: x}}\ndrafters: {{a: {{}}}}\n")
    with pytest.raises(EyasError) as caught:
        read_config(file)
    assert all(line.startswith(f"{file}: ") for line in str(caught.value).split("\n"))


def test_number_without_a_dot_in_yaml(tmp_path: Path):
    """PyYAML reads 1e-4 as text."""
    file = tmp_path / "run.yaml"
    file.write_text(
        "name: run\ntarget: {path: x}\ndata: {prompts: [a.json]}\n"
        "drafters: {small: {training: {learning_rate: 1e-4, weight_decay: 1}}}\n"
    )
    training = read_config(file).drafters["small"].training
    assert (training.learning_rate, training.weight_decay) == (1e-4, 1.0)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"name: [1", "not valid YAML"), (b"name: \xff", "not valid YAML"), (b"", "is empty"), (b"- 1\n", "is empty")],
)
def test_bad_yaml_file(tmp_path: Path, content: bytes, words: str):
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(EyasError, match=words) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"{file}: ") and "\n" not in str(caught.value)


def test_no_yaml_file(tmp_path: Path):
    with pytest.raises(EyasError, match=r"none\.yaml: cannot be read \(No such file"):
        read_config(tmp_path / "none.yaml")


def test_layers_and_vocabulary_against_the_target():
    config = check_config(values({"extraction.layers": [1, 2, 8], "drafters.small.draft_vocab_size": 401}), "run.yaml")
    with pytest.raises(EyasError) as caught:
        check_against_target(config, SIZES)
    layers, vocabulary = str(caught.value).split("\n")
    assert layers.startswith("extraction.layers: [1, 2, 8] reaches outside") and "0 to 7" in layers
    assert vocabulary.startswith("drafters.small.draft_vocab_size: 401 is larger") and "400" in vocabulary
    # One less of each is fine.
    check_against_target(check_config(values({"extraction.layers": [1, 2, 7]}), "run.yaml"), SIZES)


def test_what_sglang_cannot_capture_is_refused_before_anything_runs():
    sglang = {"extraction.engine": "sglang", "extraction.layers": [1, 2, 7]}
    with pytest.raises(EyasError, match=r"extraction\.layers: \[1, 2, 7\] has the target's last layer.*up to 6"):
        check_against_target(check_config(values(sglang), "run.yaml"), SIZES)
    good = check_config(values(sglang | {"extraction.layers": [1, 2, 6]}), "run.yaml")
    check_against_target(good, SIZES)
    gemma = replace(SIZES, values={"model_type": "gemma3_text"})
    with pytest.raises(EyasError, match=r"extraction\.engine: sglang gives wrong hidden states for gemma3_text"):
        check_against_target(good, gemma)


def test_width_that_a_target_layer_cannot_start():
    changes = {"drafters.small.model.hidden_size": 32}
    with pytest.raises(EyasError, match=r"drafters\.small\.model\.hidden_size: 32 differs from the target's 64"):
        check_against_target(check_config(values(changes), "run.yaml"), SIZES)
    check_against_target(check_config(values({**changes, "drafters.small.model.init": "random"}), "run.yaml"), SIZES)


def test_expected_sizes_against_config_json(tmp_path: Path):
    expect = {"vocab_size": 400, "num_hidden_layers": 8, "hidden_size": 64}
    there = check_config(values({"target.path": str(tmp_path), "target.expect": expect}), "run.yaml")
    absent = check_config(values({"target.path": "nowhere", "target.expect": expect}), "run.yaml")
    assert read_target_sizes(absent) == SIZES
    (tmp_path / "config.json").write_text(json.dumps({"text_config": expect}))  # multimodal targets nest them
    assert read_target_sizes(there) == SIZES
    (tmp_path / "config.json").write_text(json.dumps({**expect, "hidden_size": 65}))
    with pytest.raises(EyasError, match=r"target\.expect: .*hidden_size=64.*hidden_size=65"):
        read_target_sizes(there)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"vocab_size": 400}'])
def test_target_folder_that_is_no_model(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(EyasError, match=r"^target\.path: ") as caught:
        read_target_sizes(check_config(values({"target.path": str(tmp_path)}), "run.yaml"))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("depth", "layers"),
    [
        (3, [0, 1, 2]),
        (4, [0, 2, 3]),
        (6, [0, 3, 5]),
        (7, [1, 2, 3]),
        (8, [1, 3, 4]),
        (36, [1, 17, 32]),
        (61, [1, 29, 57]),
    ],
)
def test_default_layers(depth: int, layers: list[int]):
    assert default_layers(depth) == layers


def test_default_layers_are_always_three_of_the_target():
    for depth in range(3, 130):
        low, middle, high = default_layers(depth)
        assert 0 <= low < middle < high < depth
    with pytest.raises(EyasError, match=r"extraction\.layers: the target has 2 layers"):
        default_layers(2)


def test_identity_leaves_runtime_fields_out():
    config = check_config(values({"extraction.layers": [1, 2, 3]}), "run.yaml")
    sglang = {"quantization": None, "extra_args": []}
    kept = {"engine": "transformers", "dtype": "bfloat16", "sglang": sglang}
    assert identity(config.extraction) == kept | {"layers": [1, 2, 3]}
    assert identity(config.extraction, {"layers"}) == kept
    assert not {"batch_rows", "threads", "gpu"} & set(identity(config.responses))
    assert identity(config.responses)["max_new_tokens"] == 512
    training = identity(config.drafters["small"].training)
    assert "threads" not in training and training["batch_tokens"] == 2048  # here it changes the optimizer's steps


def test_identity_leaves_nested_runtime_fields_out():
    training = identity(check_config(values(), "run.yaml").drafters["small"])["training"]
    assert "epochs" in training and not {"threads", "gpu"} & set(training)


def test_nodes_share_gpus_and_processes_evenly():
    training = "drafters.small.training"
    for changes, message in (
        ({"gpu": 8, "nodes": 3}, "gpu 8 cannot be shared evenly by 3 nodes"),
        ({"processes": 3, "nodes": 2}, "processes 3 cannot be shared evenly by 2 nodes"),
        ({"nodes": 2}, "processes 1 cannot be shared evenly by 2 nodes"),
    ):
        (line,) = problems({f"{training}.{key}": value for key, value in changes.items()})
        assert line.startswith(f"{training}: ") and message in line
    settings = (
        check_config(values({f"{training}.gpu": 16, f"{training}.nodes": 2}), "run.yaml").drafters["small"].training
    )
    assert settings.world_size == 16 and "nodes" not in identity(settings)


def test_what_a_cluster_is_asked_for_grows_with_each_try():
    config = check_config(values({"extraction.gpu": 2, "extraction.threads": 3, "responses.memory_gb": 5}), "run.yaml")
    assert [config.extraction.memory_mb(attempt) for attempt in (1, 2, 3)] == [52_000, 104_000, 156_000]
    assert [config.responses.memory_mb(attempt) for attempt in (1, 2)] == [5_000, 10_000]
    assert [config.responses.minutes(attempt) for attempt in (1, 2)] == [1440, 2880]
    waiting = {"extraction.engine": "sglang", "extraction.sglang": {"dump_gb": 7.5}, "evaluation.hours": 0.01}
    config = check_config(values(waiting), "run.yaml")
    assert config.extraction.memory_mb(1) == 19_500  # states that wait in memory are the job's
    assert config.evaluation.minutes(1) == 1
    assert not {"memory_gb", "hours"} & set(identity(config.extraction))


def test_importing_the_configuration_is_light():
    """The Snakefile imports it in every job."""
    code = "import sys, eyas.config; print(sorted({'torch', 'transformers', 'numba', 'pydantic'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['pydantic']"
