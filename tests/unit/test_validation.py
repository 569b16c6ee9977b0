"""Held-out rows: measured as slow loops measure them, never trained on; early stopping repeats the last epoch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_reference import TRAINING, file_bytes, random_rows, read_json_file, reference_counts, reference_loss
from drafter_runs import LENGTHS, Run, history_of, make_run, metrics_of, same_epoch
from eyas.decoding.offline import chained_accuracy
from eyas.drafter.checkpoint import build_drafter, load_checkpoint
from eyas.drafter.dataset import Batch
from eyas.drafter.epoch import Runtime
from eyas.drafter.processes import Processes
from eyas.drafter.step import DrafterLoss
from eyas.drafter.validation import validate
from eyas.errors import EyasError
from eyas.shards import read_json, write_sealed
from torch import Tensor
from transformers import AutoModelForCausalLM

HELD_OUT = [4, 9]
TENSORS = ("model.safetensors", "config.json", "trainer_state.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows(LENGTHS))


@pytest.fixture(scope="module")
def epochs(run: Run) -> list[Path]:
    """Checkpoints of epochs 0 to 2."""
    folder = run.folder / "drafter"
    places = [run.start(folder / "epoch_0")]
    for epoch in (1, 2):
        places.append(run.train(places[-1], epoch, folder / f"epoch_{epoch}"))
    return places


def in_double(batch: Batch) -> Batch:
    return replace(batch, aux=batch.aux.double(), last=batch.last.double())


@pytest.fixture(scope="module")
def measured(run: Run, epochs: list[Path]) -> dict[str, Any]:
    """The held-out rows by loops in float64: loss, and accuracy of chains."""
    checkpoint = load_checkpoint(epochs[2])
    weights: dict[str, Tensor] = {
        name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in checkpoint.weights.items()
    }
    head = AutoModelForCausalLM.from_pretrained(run.target.path).lm_head.weight.detach().double()
    batch = in_double(run.data.batch(HELD_OUT))
    loss, counted, chosen = reference_loss(weights, checkpoint.shape, batch, head, 3, TRAINING["loss_decay"])
    assert all(len(places) > 5 for places in counted)
    reached, right = reference_counts(batch, 3, chosen)
    accuracy = [r / n if n else None for r, n in zip(right, reached, strict=True)]
    chain = np.cumprod([a or 0.0 for a in accuracy])
    return {
        "rows": 2, "loss": float(loss), "accuracy_by_step": accuracy, "acceptance_length": 1 + float(chain.sum()),
    }  # fmt: skip


def close_to(values: dict[str, Any]) -> dict[str, Any]:
    return values | {key: pytest.approx(values[key], rel=1e-5) for key in ("loss", "acceptance_length")}


def test_held_out_figures_equal_the_loops(run: Run, epochs: list[Path], measured: dict[str, Any]) -> None:
    found = history_of(epochs[2])[-1]["held_out"]
    assert found == close_to(measured)
    drafter = build_drafter(*(getattr(load_checkpoint(epochs[2]), name) for name in ("shape", "weights")))
    counts = chained_accuracy(drafter, run.data, HELD_OUT, 3)  # as the evaluation measures it
    assert found["accuracy_by_step"] == counts.accuracy
    assert found["acceptance_length"] == counts.acceptance_length()


@pytest.mark.parametrize("max_tokens", [1, 20, 38])
def test_held_out_figures_do_not_depend_on_how_rows_are_packed(
    max_tokens: int, run: Run, epochs: list[Path], measured: dict[str, Any]
) -> None:
    """A row in each pass, or both in one: the mean is over all predictions, not over the passes."""
    checkpoint, draft_ids = load_checkpoint(epochs[2]), run.mapping.draft_ids()
    drafter = build_drafter(checkpoint.shape, checkpoint.weights)
    head = AutoModelForCausalLM.from_pretrained(run.target.path).lm_head.weight.detach()[drafter.target_ids]
    loss = DrafterLoss(drafter, head, torch.from_numpy(draft_ids), 3, TRAINING["loss_decay"], torch.float32)
    alone = Processes.alone(torch.device("cpu"))
    counted = run.data.counted(draft_ids, 3)
    assert validate(loss, run.data, np.array(HELD_OUT), counted, alone, max_tokens) == close_to(measured)
    assert all(parameter.grad is None for parameter in loss.parameters()) and loss.training


def test_held_out_rows_never_reach_the_weights(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    other = run.copy(tmp_path)
    for row in HELD_OUT:
        for name in ("aux_hidden_states", "last_hidden_state"):
            other.change_states(row, lambda states: np.negative(states, out=states), name)
    place = other.train(epochs[0], 1, tmp_path / "drafter" / "epoch_1")
    ours, expected = file_bytes(place), file_bytes(epochs[1])
    assert {name for name in ours if ours[name] != expected[name]} == {"trainer_state.json"}
    record, before = history_of(place)[-1], history_of(epochs[1])[-1]
    assert record.pop("held_out")["loss"] != before.pop("held_out")["loss"]  # but they are what is measured
    assert record == before
    # and a row that is trained on does reach them
    other.change_states(3, lambda states: np.negative(states, out=states))
    again = file_bytes(other.train(epochs[0], 1, tmp_path / "drafter" / "again"))
    assert all(again[name] != expected[name] for name in ("model.safetensors", "trainer_state.safetensors"))


def test_no_held_out_row_no_figures(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    place = run.train(epochs[0], 1, tmp_path / "epoch_1", held_out_every=100)
    (record,) = history_of(place)
    assert record["rows"] == 12 and "held_out" not in record


# ---- early stopping ----


def with_history(source: Path, folder: Path, *lengths: float | None) -> Path:
    """A checkpoint whose epochs had these acceptance lengths on the held-out rows (None: not measured)."""
    place = folder / f"epoch_{len(lengths)}"
    shutil.copytree(source, place)
    facts = read_json(place / "trainer_state.json")
    measured = [{} if length is None else {"held_out": {"rows": 2, "acceptance_length": length}} for length in lengths]
    history = [{"epoch": epoch + 1, **values} for epoch, values in enumerate(measured)]
    write_sealed(place / "trainer_state.json", facts | {"epoch": len(lengths), "history": history})
    return place


def test_an_epoch_after_the_stop_repeats_the_one_before(
    run: Run, epochs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = with_history(epochs[1], tmp_path, 1.2, 1.5, 1.4, 1.5)  # as good is no progress
    steps: list[int] = []
    step = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self: steps.append(1) or step(self))
    repeated = [place]
    for epoch in (5, 6):
        repeated.append(run.train(repeated[-1], epoch, tmp_path / f"epoch_{epoch}", runtime=Runtime(early_stop=2)))
    assert not steps
    history = history_of(place)
    for epoch, folder in zip((5, 6), repeated[1:], strict=True):
        found = file_bytes(folder)
        assert {name: found[name] for name in TENSORS} == {name: file_bytes(place)[name] for name in TENSORS}
        assert metrics_of(folder) == []
        history.append({"epoch": epoch, "stopped_after": 4})
        facts = read_json_file(folder / "trainer_state.json")
        assert (facts["epoch"], facts["history"]) == (epoch, history)
        assert facts["step"] == read_json_file(place / "trainer_state.json")["step"]
        assert load_checkpoint(folder).facts == facts  # whole, with its checksums
        for name in TENSORS:  # no second name of the same file: Snakemake compares times
            assert not (folder / name).samefile(place / name)
    assert not (tmp_path / ".staging").exists()
    again = run.train(repeated[-1], 7, tmp_path / "epoch_7", runtime=Runtime(early_stop=None))  # turned off
    assert steps and history_of(again)[-1]["loss"] > 0
    assert history_of(again)[:-1] == history
    assert file_bytes(again)["model.safetensors"] != file_bytes(place)["model.safetensors"]


@pytest.mark.parametrize(
    "lengths, patience",
    [((1.2, 1.5, 1.4), 2), ((1.2, 1.5, 1.6), 1), ((1.5, 1.4, 1.3), None), ((None, None, None), 1), ((1.5,), 1)],
)
def test_training_goes_on(
    lengths: tuple[float | None, ...], patience: int | None, run: Run, epochs: list[Path], tmp_path: Path
) -> None:
    place, number = with_history(epochs[1], tmp_path, *lengths), len(lengths)
    stopping = run.train(place, number + 1, tmp_path / "stopping", runtime=Runtime(early_stop=patience))
    assert "stopped_after" not in history_of(stopping)[-1]
    assert same_epoch(stopping, run.train(place, number + 1, tmp_path / "going"))


@pytest.mark.parametrize("name", ["aux_hidden_states", "last_hidden_state"])
def test_held_out_states_that_are_no_numbers_name_their_rows(
    name: str, run: Run, epochs: list[Path], tmp_path: Path
) -> None:
    bad = run.copy(tmp_path)
    bad.change_states(9, lambda states: states.fill(np.nan), name)
    with pytest.raises(EyasError, match=r"held.out.* rows \[9\].*NaN or infinity"):
        bad.train(epochs[0], 1, tmp_path / "drafter" / "epoch_1")
    assert not (tmp_path / "drafter" / "epoch_1").exists()
