"""The evaluation section: what it fills in, what it refuses, and what a change of it re-runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from eyas.config import check_config
from eyas.config.evaluation import largest_tree
from eyas.errors import EyasError
from eyas.plan import plan_run

ROOT = Path(__file__).parents[2]


def values(**evaluation: Any) -> dict[str, Any]:
    return {
        "name": "run", "target": {"path": "owner/target"}, "data": {"prompts": ["p.jsonl"], "rows": 40},
        "drafters": {"one": {"draft_vocab_size": 8}}, "evaluation": evaluation,
    }  # fmt: skip


def settings_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **evaluation: Any) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    for name in ("p.jsonl", "q.jsonl"):
        (tmp_path / name).write_text('{"prompt": "hi"}\n')
    found: dict[str, Any] = json.loads(plan_run(values(**evaluation), "here").evaluation_settings)
    return found


def test_what_is_left_open_is_filled_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = settings_of(
        tmp_path, monkeypatch, draft_steps=3, prompts=7,
        prompt_sets={"held_out": None, "mine": {"path": "q.jsonl", "prompts": 2, "format": "prompt"}},
    )  # fmt: skip
    assert found["draft_tokens"] == 4 and (found["topk"], found["temperature"], found["seed"]) == (1, 0.0, 0)
    assert found["prompt_sets"] == {
        "held_out": {"path": None, "format": "auto", "prompts": 7},
        "mine": {"path": "q.jsonl", "format": "prompt", "prompts": 2},
    }
    assert list(settings_of(tmp_path, monkeypatch)["prompt_sets"]) == ["held_out"]


@pytest.mark.parametrize("change", [
        {"threads": 9}, {"gpu": 3}, {"draft_tokens": 6}, {"prompt_sets": {"held_out": {}}},
        {"sglang": {"concurrency": 4}},  # of the other engine
    ],
)  # fmt: skip
def test_what_changes_no_figure_changes_no_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    assert settings_of(tmp_path, monkeypatch, **change) == settings_of(tmp_path, monkeypatch)
    assert settings_of(tmp_path, monkeypatch, prompts=3) != settings_of(tmp_path, monkeypatch)


def test_the_seed_matters_to_sampling_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n')

    def found(temperature: float, seed: int) -> str:
        return plan_run(values(temperature=temperature) | {"seed": seed}, "here").evaluation_settings

    assert found(0.0, 1) == found(0.0, 2) and found(0.5, 1) != found(0.5, 2)


@pytest.mark.parametrize("steps, topk, largest", [(1, 1, 2), (5, 1, 6), (1, 4, 5), (2, 2, 7), (3, 4, 37), (5, 8, 265)])
def test_a_tree_has_so_many_tokens(steps: int, topk: int, largest: int) -> None:
    """Grown one by one: topk children of the root, then topk of each of the topk best nodes of every later depth."""
    nodes, frontier = 1, 1
    for _ in range(steps):
        nodes += frontier * topk
        frontier = topk
    assert largest_tree(steps, topk) == nodes == largest
    assert check_config(values(draft_steps=steps, topk=topk, draft_tokens=largest), "x").evaluation.topk == topk
    with pytest.raises(EyasError, match="draft_tokens"):
        check_config(values(draft_steps=steps, topk=topk, draft_tokens=largest + 1), "x")


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"topk": 1, "draft_steps": 5, "draft_tokens": 4}, "draft_tokens 4 does not go with topk 1.*draft_steps 5 has 6"),
        ({"topk": 4}, "topk 4 drafts a tree, which needs draft_tokens"),
        ({"topk": 2, "draft_steps": 2, "draft_tokens": 8}, r"more than a tree of draft_steps 2 and topk 2 has.* = 7"),
        ({"topk": 0}, "topk: .*greater than or equal to 1"),
        ({"engine": "vllm"}, "engine: .*'transformers' or 'sglang'"),
        ({"temperature": -1.0}, "temperature"),
        ({"prompt_sets": {}}, "prompt_sets"),
        ({"sglang": {"plain_url": "http://a:1"}}, "sglang.*plain_url goes with url"),
        ({"sglang": {"url": "http://a:1/", "plain_url": "http://a:1"}}, "sglang.*are the same server"),
        ({"sglang": {"url": "http://a:1", "extra_args": ["--x"]}}, "sglang.*url is a running server"),
        ({"sglang": {"extra_args": ["--speculative-num-steps=3"]}}, "--speculative-num-steps=3 is set by Eyas"),
        ({"sglang": {"dump_gb": 3}}, "dump_gb"),
        ({"engine": "sglang", "gpu": 3, "sglang": {"tp": 2}}, "gpu 3 is no multiple of sglang.tp 2"),
        ({"prompt_sets": {"held_out": {"path": "p.jsonl"}}}, "held_out is the run's held-out rows and has no path"),
        ({"prompt_sets": {"mine": {}}}, "prompt_sets.mine needs a path; only held_out has none"),
        ({"prompt_sets": {"mine": {"path": "p.txt"}}}, r"prompt_sets.mine.path: p.txt: .jsonl, .ndjson and .json files"),
        ({"prompt_sets": {"mine": {"path": "p.jsonl", "promts": 1}}}, "did you mean 'prompts'"),
        ({"prompt_sets": {"a b": {"path": "p.jsonl"}}}, "a b"),
        ({"prompt_sets": {"mine": {"path": "absent.jsonl"}}}, "prompt_sets.mine.path: absent.jsonl does not exist"),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(EyasError, match=f"evaluation.*{said}"):
        settings_of(tmp_path, monkeypatch, **wrong)


def test_sglang_does_not_know_a_normed_residual(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings_of(tmp_path, monkeypatch)
    settings = values(engine="sglang")
    settings["drafters"]["one"] = {"model": {"norm_before_residual": True}}
    with pytest.raises(EyasError, match="drafters.one.model.norm_before_residual: SGLang does not know"):
        plan_run(settings, "here")
    settings["evaluation"] = {}
    plan_run(settings, "here")


def test_the_servers_of_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n')
    server = {"python": "py", "tp": 2, "quantization": "fp8", "mem_fraction": 0.5, "extra_args": ["--x", "a b"]}
    plan = plan_run(values(engine="sglang", topk=2, draft_steps=3, draft_tokens=6, gpu=4, sglang=server), "here")
    base = "py -m sglang.launch_server --model-path owner/target --dtype float32 --tp 2 --quantization fp8"
    end = "--disable-radix-cache --skip-server-warmup --x 'a b'"
    assert plan.evaluation_server("one", drafting=False) == f"{base} --mem-fraction-static 0.5 {end}"
    assert plan.evaluation_server("one", drafting=True) == (
        f"{base} --mem-fraction-static 0.5 --speculative-algorithm EAGLE3 --speculative-draft-model-path"
        " results/run/drafters/one/export/sglang --speculative-num-steps 3 --speculative-eagle-topk 2"
        f" --speculative-num-draft-tokens 6 --speculative-draft-model-quantization unquant {end}"
    )
    assert "results/run/drafters/one/export/sglang/export.json" in plan.evaluation_export("one")
    assert json.loads(plan.evaluation_settings)["sglang"] == {
        "concurrency": 1, "quantization": "fp8", "extra_args": ["--x", "a b"],
    }  # fmt: skip
    here = plan_run(values(), "here")
    assert (here.evaluation_options, here.evaluation_server("one", True), here.evaluation_export("one")) == (
        "none", "none", [],
    )  # fmt: skip
    running = plan_run(values(engine="sglang", sglang={"url": "http://a:1"}), "here")
    assert running.evaluation_server("one", True) == "none" and running.evaluation_export("one")


def test_layers_that_a_server_cannot_hand_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n')
    config = values(engine="sglang") | {"extraction": {"layers": [0, 1, 3]}}
    config["target"] = {
        "path": "owner/target", "expect": {"vocab_size": 99, "num_hidden_layers": 4, "hidden_size": 8},
    }  # fmt: skip
    with pytest.raises(EyasError, match="extraction.layers.*evaluation.engine: transformers"):
        plan_run(config, "here")


def test_packaged_sets_need_not_be_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "hi"}\n')
    packaged = {"package": "a==1", "member": "m", "sha256": "0" * 64}
    plan = plan_run(
        values(prompt_sets={"later": {"path": "sets/later.jsonl"}}) | {"packages": {"sets/later.jsonl": packaged}}, "x"
    )
    assert plan.evaluation_files == ["sets/later.jsonl"]


@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.yaml")), ids=lambda file: file.stem)
def test_the_prompt_sets_of_the_configurations_come_from_packages_or_the_project(file: Path) -> None:
    config = check_config(yaml.safe_load(file.read_text()), file.name)
    assert "held_out" in config.evaluation.prompt_sets
    for path in config.evaluation.prompt_files:
        assert path in config.packages or (ROOT / path).is_file()
