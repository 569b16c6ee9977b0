"""A whole evaluation of a small run: the file, `eyas evaluate` on its drafters and on foreign ones, the summary's table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_reference import TRAINING, extracted
from eyas.cli.main import main
from eyas.conversations import Row
from eyas.decoding import offline
from eyas.decoding.evaluate import RunFiles, evaluate
from eyas.drafter.checkpoint import load_drafter
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.initialise import initialise
from eyas.drafter.processes import Processes
from eyas.drafter.trainer import train_epoch
from eyas.errors import EyasError
from eyas.extraction.manifest import read_manifest
from eyas.plan import RunPlan, begin_record, plan_run
from eyas.shards import read_json, write_json, write_sealed
from eyas.summary.acceptance import acceptance_facts, render_acceptance
from eyas.target.tokenizer import TargetReference, tokenizer_hashes
from eyas.vocabulary.mapping import build_map
from recorded_rows import write_recorded_rows
from safetensors.torch import load_file, save_file
from tiny import WORDS, answer, question
from transformers import AutoModelForCausalLM, AutoTokenizer

END, EVERY, STEPS, LIMIT = 2, 7, 3, 16
HELD_OUT = [6, 13, 20, 27, 34]


@dataclass
class Evaluated:
    """A run in the folder `path`, with one trained drafter and its evaluation."""

    path: Path
    plan: RunPlan
    result: dict[str, Any]

    @property
    def run(self) -> Path:
        return self.path / "results" / "tiny"

    @property
    def drafter(self) -> Path:
        return self.run / "drafters" / "small"

    def command(self, folder: Path, *more: str) -> list[str]:
        return ["evaluate", "--run", str(self.run), "--drafter-folder", str(folder), "--threads", "1", *more]


@pytest.fixture(scope="module")
def evaluated(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    path, reference = tmp_path_factory.mktemp("evaluated"), TargetReference(str(tiny_target))
    run = path / "results" / "tiny"
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    rows, conversations = [], []
    for start in range(len(WORDS) - 1):
        messages = [{"role": "user", "content": question(start)}, {"role": "assistant", "content": answer(start)}]
        ids = np.array(tokenizer.apply_chat_template(messages, return_dict=False), dtype=np.int32)
        prompt = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=False)
        rows.append((start, ids, (np.arange(len(ids)) >= len(prompt)).astype(np.uint8)))
        conversations.append(Row(start, "s", messages))
    extracted(run, reference, [rows])
    facts = run / "hidden_states" / "data_config.json"  # with the real hashes, which `extracted` does not know
    write_sealed(facts, read_json(facts) | tokenizer_hashes(tokenizer))
    manifest = read_manifest(facts)
    (run / "conversations").mkdir()
    write_recorded_rows(run / "conversations" / f"rows_0-{len(rows)}.jsonl", conversations)
    write_json(run / "prompts" / "index.json", {"rows": len(rows), "shard_rows": 100})
    counts = np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=len(tokenizer))
    sizes = dict.fromkeys(
        ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    folder = run / "drafters" / "small"
    start = sizes | {"init": "target_layer"}
    initialise(reference, manifest, build_map(counts, 120, [END]), start, 0, folder / "epoch_0", "mark")
    settings = TRAINING | {"batch_tokens": 120, "learning_rate": 5e-3, "schedule_epochs": 4}
    for epoch in range(1, 5):
        train_epoch(
            manifest, run / "tokens", reference, folder / f"epoch_{epoch - 1}", epoch, settings, EVERY, 0,
            folder / f"epoch_{epoch}", "mark", Processes.alone(torch.device("cpu")),
        )  # fmt: skip
    # Asked in training: 0, and 1 in other letters; asked in a held-out row alone: 6.
    asked = [question(0), question(6), question(1).upper(), f"say {WORDS[3]} ?"]
    (path / "set.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in asked))
    values = {
        "name": "tiny", "results": str(path / "results"), "target": {"path": str(tiny_target)},
        "data": {"prompts": [str(path / "set.jsonl")], "rows": len(rows), "held_out_every": EVERY},
        "extraction": {"layers": [0, 1, 3]}, "drafters": {"small": {"draft_vocab_size": 120}},
        "evaluation": {
            "draft_steps": STEPS, "prompts": 4, "max_new_tokens": LIMIT,
            "prompt_sets": {"held_out": {}, "mine": {"path": str(path / "set.jsonl")}},
        },
    }  # fmt: skip
    plan = plan_run(values, "here")
    begin_record(plan)
    output = folder / "evaluation.json"
    evaluate(
        RunFiles(run, len(rows), 100), reference, folder / "epoch_4", folder / "epoch_0",
        json.loads(plan.evaluation_settings), output,
    )  # fmt: skip
    return Evaluated(path, plan, read_json(output))


FIGURES = {
    "acceptance_length", "acceptance_by_step", "tokens_per_forward", "tokens", "target_forwards", "seconds", "speedup",
    "tokens_per_second", "lossless", "differences", "looping_share", "without_looping",
}  # fmt: skip


def test_the_file_has_what_is_promised(evaluated: Evaluated) -> None:
    result = evaluated.result
    assert set(result) == {
        "format_version", "definitions", "engine", "settings", "checkpoint", "held_out_rows", "offline", "prompt_sets",
    }  # fmt: skip
    assert (result["format_version"], result["engine"], result["checkpoint"]) == (3, "transformers", "epoch_4")
    assert result["settings"] == {
        "draft_steps": STEPS, "topk": 1, "draft_tokens": STEPS + 1, "temperature": 0.0, "max_new_tokens": LIMIT,
    }  # fmt: skip
    assert set(result["definitions"]) == {"offline", "decoding", "looping", "speedup", "baselines"}
    assert list(result["prompt_sets"]) == ["held_out", "mine"] and result["held_out_rows"] == len(HELD_OUT)
    for figures in result["prompt_sets"].values():
        assert set(figures) == FIGURES | {"prompts", "source", "overlapping_prompts", "baselines"}
        assert list(figures["baselines"]) == ["none", "ngram", "untrained"]
        for values in (figures, *figures["baselines"].values()):
            assert set(values) >= FIGURES and values["lossless"] is True and values["differences"] == []
            rates = {"acceptance_length", "acceptance_by_step", "tokens_per_forward", "speedup"}
            assert set(values["without_looping"]) == {"prompts"} | rates
            assert values["seconds"] > 0 and values["speedup"] > 0


def test_the_counts_add_up(evaluated: Evaluated) -> None:
    """The tokens are those of transformers' own generation, and the figures follow from the counts."""
    target = evaluated.plan.config.target.path
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target).eval(), AutoTokenizer.from_pretrained(target)
    asked = {"held_out": [question(row) for row in HELD_OUT[:4]], "mine": [question(6), f"say {WORDS[3]} ?"]}
    for name, texts in asked.items():
        figures = evaluated.result["prompt_sets"][name]
        tokens = 0
        for text in texts:
            given = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            made = model.generate(**given, do_sample=False, max_new_tokens=LIMIT, eos_token_id=END)
            tokens += made.shape[1] - given["input_ids"].shape[1] - 1
        assert figures["prompts"] == len(texts)
        for values in (figures, *figures["baselines"].values()):
            assert values["tokens"] == tokens
            assert values["tokens_per_forward"] == tokens / values["target_forwards"]
            assert values["acceptance_length"] >= values["tokens_per_forward"]
        plain = figures["baselines"]["none"]
        assert (plain["target_forwards"], plain["acceptance_length"], plain["speedup"]) == (tokens, 1.0, 1.0)


def test_a_trained_drafter_is_better_than_an_untrained_one(evaluated: Evaluated) -> None:
    figures = evaluated.result["prompt_sets"]["held_out"]
    assert figures["acceptance_length"] > 1.5
    assert figures["acceptance_length"] > figures["baselines"]["untrained"]["acceptance_length"] + 0.2


def test_what_training_rows_ask_is_left_out(evaluated: Evaluated) -> None:
    assert evaluated.result["prompt_sets"]["mine"]["overlapping_prompts"] == 2
    assert evaluated.result["prompt_sets"]["held_out"]["overlapping_prompts"] == 0


def test_expected_lengths_are_those_of_the_products(evaluated: Evaluated) -> None:
    for which, folder in (("trained", "epoch_4"), ("untrained", "epoch_0")):
        facts = evaluated.result["offline"][which]
        accuracies = [accuracy or 0.0 for accuracy in facts["accuracy_by_step"]]
        expected = [1 + sum(np.prod(accuracies[: i + 1]) for i in range(n)) for n in range(1, STEPS + 1)]
        assert facts["expected_acceptance_lengths"] == pytest.approx(expected)
        assert facts["expected_acceptance_length"] == facts["expected_acceptance_lengths"][-1]
        data = HiddenStates(
            read_manifest(evaluated.run / "hidden_states" / "data_config.json"), evaluated.run / "tokens"
        )
        counts = offline.chained_accuracy(load_drafter(evaluated.drafter / folder).eval(), data, HELD_OUT, STEPS)
        assert facts["positions_by_step"] == counts.reached.tolist()


def evaluate_json(capsys: pytest.CaptureFixture[str], command: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


TIMES = ("seconds", "speedup", "tokens_per_second")


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: timeless(entry) for key, entry in value.items() if key not in TIMES}
    return value


def test_eyas_evaluate_measures_a_checkpoint_as_the_run_did(
    evaluated: Evaluated, capsys: pytest.CaptureFixture[str]
) -> None:
    found = evaluate_json(capsys, evaluated.command(evaluated.drafter / "epoch_4"))
    for name, figures in evaluated.result["prompt_sets"].items():
        expected = timeless(figures)
        expected["baselines"]["untrained"] = None  # a drafter folder says nothing of its beginnings
        assert timeless(found["prompt_sets"][name]) == expected
    assert found["offline"] == {"trained": evaluated.result["offline"]["trained"], "untrained": None}
    assert found["checkpoint"] == str(evaluated.drafter / "epoch_4")


def foreign(evaluated: Evaluated, folder: Path, layers: list[int], **changes: Any) -> Path:
    """The trained drafter as a published head: vLLM's names, no t2d, no embedding."""
    folder.mkdir()
    tensors = load_file(evaluated.drafter / "epoch_4" / "model.safetensors")
    kept = {
        n.replace("midlayer.", "layers.0."): t for n, t in tensors.items() if n not in ("t2d", "embed_tokens.weight")
    }
    save_file(kept, folder / "model.safetensors")
    config = json.loads((evaluated.drafter / "epoch_4" / "config.json").read_text())
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = layers
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_eyas_evaluate_measures_a_foreign_head(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign(evaluated, tmp_path / "head", [0, 1, 3])
    found = evaluate_json(capsys, evaluated.command(folder, "--prompts", "1", "--draft-steps", "2"))
    expected = evaluated.result["offline"]["trained"]
    assert found["offline"]["trained"]["accuracy_by_step"] == expected["accuracy_by_step"][:2]
    assert (found["settings"]["draft_steps"], found["settings"]["draft_tokens"]) == (2, 3)
    assert [figures["prompts"] for figures in found["prompt_sets"].values()] == [1, 1]


def test_other_layers_are_refused_or_measured_in_decoding_alone(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = foreign(evaluated, tmp_path / "head", [1, 2, 3])
    assert main(evaluated.command(folder)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert str(folder) in line and "[1, 2, 3]" in line and "[0, 1, 3]" in line and "--decoding-only" in line
    found = evaluate_json(capsys, evaluated.command(folder, "--prompts", "2", "--decoding-only"))
    assert found["offline"] == {"trained": None, "untrained": None} and found["held_out_rows"] is None
    figures = found["prompt_sets"]["held_out"]
    assert figures["lossless"] is True and figures["prompts"] == 2
    right = evaluate_json(capsys, evaluated.command(evaluated.drafter / "epoch_4", "--prompts", "2", "--decoding-only"))
    assert figures["acceptance_length"] < right["prompt_sets"]["held_out"]["acceptance_length"]


def test_a_tree_is_measured(evaluated: Evaluated, capsys: pytest.CaptureFixture[str]) -> None:
    command = evaluated.command(evaluated.drafter / "epoch_4", "--decoding-only", "--prompts", "2")
    chain = evaluate_json(capsys, command)["prompt_sets"]["held_out"]
    result = evaluate_json(capsys, [*command, "--topk", "3", "--draft-tokens", "8"])
    tree = result["prompt_sets"]["held_out"]
    assert (result["settings"]["topk"], result["settings"]["draft_tokens"]) == (3, 8)
    assert tree["lossless"] is True and tree["acceptance_length"] >= chain["acceptance_length"]


def test_sampling_is_neither_lossless_nor_not(evaluated: Evaluated, capsys: pytest.CaptureFixture[str]) -> None:
    command = evaluated.command(
        evaluated.drafter / "epoch_4", "--decoding-only", "--prompts", "1", "--temperature", "0.8"
    )
    for figures in evaluate_json(capsys, command)["prompt_sets"].values():
        assert figures["lossless"] is None and figures["baselines"]["none"]["lossless"] is None


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"vocab_size": 50000}, "its vocab_size is 50000"),
        ({"norm_before_fc": True}, "norm_before_fc"),
    ],
)
def test_a_drafter_that_does_not_fit_is_one_clear_error(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    folder = foreign(evaluated, tmp_path / "head", [0, 1, 3], **changes)
    assert main(evaluated.command(folder)) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: {folder}: ") and said in line and "init_from" not in line


@pytest.mark.parametrize(
    "more, said",
    [
        (["--topk", "4"], "draft_tokens: must be given for topk 4"),
        (["--draft-tokens", "9"], "draft_tokens"),
        (["--temperature", "-1"], "temperature"),
        (["--configfile", "absent.yaml"], "absent.yaml: cannot be read"),
    ],
)
def test_impossible_settings(
    evaluated: Evaluated, capsys: pytest.CaptureFixture[str], more: list[str], said: str
) -> None:
    assert main(evaluated.command(evaluated.drafter / "epoch_4", *more)) == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_a_run_without_a_record_asks_for_its_configuration(
    evaluated: Evaluated, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results" / "bare" / "prompts").mkdir(parents=True)
    command = ["evaluate", "--run", "bare", "--results", str(tmp_path / "results"), "--drafter-folder", "x"]
    assert main(command) == 2
    assert "--configfile" in capsys.readouterr().err


def test_no_held_out_row_is_an_error(evaluated: Evaluated, tmp_path: Path) -> None:
    settings = json.loads(evaluated.plan.evaluation_settings) | {"held_out_every": 1000}
    with pytest.raises(EyasError, match="no usable held-out row"):
        evaluate(
            RunFiles(evaluated.run, len(WORDS) - 1, 100), TargetReference(evaluated.plan.config.target.path),
            evaluated.drafter / "epoch_4", evaluated.drafter / "epoch_0", settings, tmp_path / "evaluation.json",
        )  # fmt: skip
    assert not (tmp_path / "evaluation.json").exists()


def test_the_table_shows_the_figures_and_what_they_mean(evaluated: Evaluated) -> None:
    facts = acceptance_facts(evaluated.result)
    text = render_acceptance("small", facts)
    for name, figures in evaluated.result["prompt_sets"].items():
        assert f"{name} ({figures['prompts']})" in text
        for values in (figures, *figures["baselines"].values()):
            assert f"{values['acceptance_length']:.3f}" in text and f"{values['speedup']:.2f}" in text
    for way in ("trained", "untrained", "n-grams", "no drafter"):
        assert way in text
    plain = " ".join(text.split())
    for definition in evaluated.result["definitions"].values():
        assert definition in plain
    assert "2 prompts are asked in training rows" in plain
    assert facts["offline"]["trained"] == evaluated.result["offline"]["trained"]["expected_acceptance_length"]
    assert max(map(len, text.splitlines())) <= 100


def test_the_table_says_what_is_not_known() -> None:
    unknown = dict.fromkeys(FIGURES) | {"without_looping": None}
    evaluation = {
        "engine": "sglang", "held_out_rows": None, "offline": {"trained": None, "untrained": None}, "definitions": {},
        "settings": {"draft_steps": 2, "topk": 4, "draft_tokens": 8, "temperature": 0.5, "max_new_tokens": 9},
        "prompt_sets": {
            "mine": {"prompts": 0, "overlapping_prompts": 3, "baselines": {"none": None, "ngram": None, "untrained": None}}
            | unknown
        },
    }  # fmt: skip
    text = render_acceptance("small", acceptance_facts(evaluation))
    assert "tree of topk 4, 8 tokens, 2 steps, temperature 0.5" in " ".join(text.split())
    assert "no drafter" not in text and text.count("–") == 9 and "none" not in text and "Expected" not in text
    assert "–: not measured, or nothing to compare with." in text
