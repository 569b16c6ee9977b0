"""Epochs from checkpoint to checkpoint on small synthetic states: exact, repeatable, and refused where they must be."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafter_reference import TRAINING, file_bytes, random_rows
from drafter_runs import LENGTHS, SEED, Run, history_of, make_run, metrics_of, same_epoch
from eyas.drafter.checkpoint import build_drafter, load_checkpoint
from eyas.drafter.epoch import Runtime
from eyas.drafter.objective import ttt_loss
from eyas.drafter.packing import epoch_batches
from eyas.drafter.step import learning_rate
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

FILES = {"model.safetensors", "config.json", "trainer_state.safetensors", "trainer_state.json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows(LENGTHS))


@pytest.fixture(scope="module")
def epochs(run: Run) -> list[Path]:
    """Checkpoints of epochs 0 to 3."""
    folder = run.folder / "drafter"
    places = [run.start(folder / "epoch_0")]
    for epoch in (1, 2, 3):
        places.append(run.train(places[-1], epoch, folder / f"epoch_{epoch}"))
    return places


def test_the_loss_falls(epochs: list[Path]) -> None:
    history = load_checkpoint(epochs[3]).facts["history"]
    assert [record["epoch"] for record in history] == [1, 2, 3]
    losses = [record["loss"] for record in history]
    assert losses[0] > losses[1] > losses[2]
    assert losses[2] < losses[0] - 0.25  # the teacher's own entropy is most of what is left
    for record in history:
        chain = np.cumprod([a or 0 for a in record["accuracy_by_step"]])
        assert record["acceptance_length"] == pytest.approx(1 + chain.sum())
    assert history[2]["accuracy_by_step"][0] > history[0]["accuracy_by_step"][0]


def test_epochs_by_themselves_equal_one_long_training_bit_for_bit(run: Run, epochs: list[Path]) -> None:
    """A loop written here, two epochs without a checkpoint between them: nothing is lost in saving and loading."""
    checkpoint = load_checkpoint(epochs[0])
    drafter = build_drafter(checkpoint.shape, checkpoint.weights)
    data = run.data
    rows = np.array([row for row in range(12) if row % 5 != 4])
    head = AutoModelForCausalLM.from_pretrained(run.target.path).lm_head.weight.detach()[run.mapping.target_ids]
    optimizer = torch.optim.AdamW(
        [p for p in drafter.parameters() if p.requires_grad], betas=(0.9, 0.95), weight_decay=0.0
    )
    step = 0
    for epoch in (1, 2):
        batches = epoch_batches(rows, data.lengths, 48, SEED, epoch)
        for batch in batches:
            optimizer.param_groups[0]["lr"] = learning_rate(step, len(batches), TRAINING)
            loss, _, _ = ttt_loss(drafter, data.batch(batch), head, torch.from_numpy(run.mapping.draft_ids()), 3, 0.8)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for _, p in sorted(drafter.named_parameters()) if p.requires_grad], 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    found = load_checkpoint(epochs[2])
    assert found.facts["step"] == step
    for name, parameter in drafter.named_parameters():
        assert torch.equal(found.weights[name], parameter.detach()), name
        if parameter.requires_grad:
            assert not torch.equal(found.weights[name], checkpoint.weights[name]), name
            assert torch.equal(found.moments[f"exp_avg.{name}"], optimizer.state[parameter]["exp_avg"]), name
            assert torch.equal(found.moments[f"exp_avg_sq.{name}"], optimizer.state[parameter]["exp_avg_sq"]), name


def test_training_again_gives_the_same_bytes(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    torch.manual_seed(12345)  # the global random streams have no say
    np.random.seed(12345)
    place = run.start(tmp_path / "epoch_0")
    for epoch in (0, 1, 2):
        if epoch:
            place = run.train(place, epoch, tmp_path / f"epoch_{epoch}")
        assert sorted(file_bytes(place)) == sorted(FILES | ({"metrics.jsonl"} if epoch else set()))
        assert file_bytes(place) == file_bytes(epochs[epoch])
    assert not (tmp_path / ".staging").exists()


def test_metrics_have_a_line_for_each_step(run: Run, epochs: list[Path]) -> None:
    step, counted = 0, run.data.counted(run.mapping.draft_ids(), 3)
    for epoch in (1, 2, 3):
        batches, lines, record = run.batches(epoch), metrics_of(epochs[epoch]), history_of(epochs[epoch])[-1]
        assert [(line["epoch"], line["step"]) for line in lines] == [(epoch, step + 1 + i) for i in range(len(batches))]
        step += len(batches)
        for line, batch in zip(lines, batches, strict=True):
            assert line["tokens"] == sum(LENGTHS[row] for row in batch) <= 48
            assert line["counted"] == counted[batch].sum()
            chain = np.cumprod([a or 0 for a in line["accuracy_by_step"]])
            assert line["acceptance_length"] == pytest.approx(1 + chain.sum())
            assert 0 < line["gradient_norm"] < 1e3
            assert line["learning_rate"] == learning_rate(line["step"] - 1, len(batches), TRAINING)
            assert not [key for key in line if "second" in key or "time" in key]  # the same run, the same file
        assert record["loss"] == pytest.approx(np.mean([line["loss"] for line in lines]))
        assert (record["steps"], record["rows"], record["tokens"]) == (len(batches), 10, sum(LENGTHS) - 20 - 18)
        assert record["counted"] == sum(line["counted"] for line in lines)


def test_passes_change_the_last_bits_only(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    """A batch in several passes through the drafter: gradients add up to the batch's."""
    place = run.train(epochs[0], 1, tmp_path / "epoch_1", runtime=Runtime(micro_tokens=12))
    assert not same_epoch(place, epochs[1])
    for line, whole in zip(metrics_of(place), metrics_of(epochs[1]), strict=True):
        for key in ("loss", "gradient_norm"):
            assert line[key] == pytest.approx(whole[key], rel=1e-5)
        assert {k: line[k] for k in ("step", "tokens", "counted")} == {
            k: whole[k] for k in ("step", "tokens", "counted")
        }
    found, expected = load_checkpoint(place), load_checkpoint(epochs[1])
    for name, tensor in found.weights.items():
        torch.testing.assert_close(tensor, expected.weights[name], rtol=0, atol=2e-4, msg=name)


def test_bfloat16_products_with_float32_masters(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    place = run.train(epochs[0], 1, tmp_path / "epoch_1", precision="bfloat16")
    ours, exact = metrics_of(place), metrics_of(epochs[1])
    for line, whole in zip(ours, exact, strict=True):
        assert line["loss"] == pytest.approx(whole["loss"], rel=2e-2)
        assert line["gradient_norm"] == pytest.approx(whole["gradient_norm"], rel=0.1)
    assert abs(ours[0]["loss"] - exact[0]["loss"]) > 1e-6 * exact[0]["loss"]  # they were really used
    state, before = load_file(place / "trainer_state.safetensors"), load_checkpoint(epochs[0]).weights
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32, name
        if name.startswith("master."):
            moved = tensor - before[name.removeprefix("master.")]
            assert 0 < moved.abs().max() < 0.5
            assert not torch.equal(tensor, tensor.bfloat16().float()), name  # updates finer than bf16 are not lost


def test_more_epochs_leave_the_finished_ones_as_they_are(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    assert file_bytes(run.train(epochs[1], 2, tmp_path / "epoch_2", epochs=8)) == file_bytes(epochs[2])


def test_the_frozen_embedding_and_the_map_do_not_move(run: Run, epochs: list[Path]) -> None:
    first, last = load_checkpoint(epochs[0]), load_checkpoint(epochs[3])
    for name in ("embed_tokens.weight", "d2t", "t2d"):
        assert torch.equal(first.weights[name], last.weights[name])
    embedding = AutoModelForCausalLM.from_pretrained(run.target.path).model.embed_tokens.weight
    assert torch.equal(last.weights["embed_tokens.weight"], embedding.detach().bfloat16())


SCHEDULE = dict(learning_rate=2.0, min_learning_rate_ratio=0.1, warmup_steps=4, schedule_epochs=2, decay_share=0.25)


@pytest.mark.parametrize(
    "schedule, at_12, end", [("cosine", 1.1, 0.2), ("linear", 1.1, 0.2), ("constant", 2.0, 2.0), ("wsd", 2.0, 0.2)]
)
def test_learning_rate(schedule: str, at_12: float, end: float) -> None:
    rate = [learning_rate(step, 10, SCHEDULE | {"schedule": schedule}) for step in range(60)]
    assert rate[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rate[12] == pytest.approx(at_12)  # half-way between the warm-up and the end of the second epoch
    assert rate[20:] == pytest.approx([end] * 40)  # the floor, however many epochs follow
    assert all(a >= b for a, b in zip(rate[3:], rate[4:], strict=False))
    if schedule == "cosine":
        assert rate[8] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi / 4)))
    if schedule == "linear":
        assert rate[8] == pytest.approx(0.2 + 1.8 * 0.75)
    if schedule == "wsd":
        assert rate[4:21] == pytest.approx([2.0] * 13 + [1.55, 1.1, 0.65, 0.2])  # the last quarter of 16 steps
    assert learning_rate(0, 10, SCHEDULE | {"schedule": schedule, "warmup_steps": 0}) == 2.0


def test_a_checkpoint_of_other_data_is_refused(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    totals = run.manifest.values["totals"] | {"tokens": 1}
    other = replace(run, manifest=Manifest(run.manifest.path, run.manifest.values | {"totals": totals}))
    with pytest.raises(EyasError, match="other data"):
        other.train(epochs[0], 1, tmp_path / "epoch_1")
    assert not (tmp_path / "epoch_1").exists()


def test_a_checkpoint_of_another_epoch_is_refused(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="holds epoch 1, epoch 3 needs epoch 2"):
        run.train(epochs[1], 3, tmp_path / "epoch_3")


def test_no_training_row_is_an_error(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="no usable training row"):
        run.train(epochs[0], 1, tmp_path / "epoch_1", held_out_every=1)


MASKS = {
    "all-zero loss masks": lambda mask: mask.fill(0),
    # the first prediction is the third token: masks on the first two only would train to nothing in silence
    "no position of 2 rows predicts a supervised token": lambda mask: np.copyto(mask, np.arange(len(mask)) < 2),
}


@pytest.mark.parametrize("message", MASKS)
def test_rows_that_teach_nothing_are_refused_before_the_first_step(
    message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, steps = random_rows([9, 7, 8]), []  # the third one is held out: its mask does not help
    for _, _, mask in rows[:2]:
        MASKS[message](mask)
    run = make_run(tmp_path, rows)
    start = run.start(tmp_path / "drafter" / "epoch_0")
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda *_: steps.append(1))
    with pytest.raises(EyasError, match=f"no usable training row: .*{message}"):
        run.train(start, 1, tmp_path / "drafter" / "epoch_1", held_out_every=3, runtime=Runtime(checkpoint_seconds=0))
    assert (steps, os.listdir(tmp_path / "drafter")) == ([], ["epoch_0"])


@pytest.mark.parametrize("micro_tokens", [8192, 25])
def test_states_that_are_no_numbers_name_their_rows(
    micro_tokens: int, run: Run, epochs: list[Path], tmp_path: Path
) -> None:
    """One batch of all rows: of these, those with bad states and no others."""
    bad = run.copy(tmp_path)
    bad.change_states(6, lambda states: states[2].fill(np.nan))
    bad.change_states(11, lambda states: states[9, :3].fill(np.inf), "last_hidden_state")
    bad.change_states(4, lambda states: states.fill(np.nan))  # held out
    with pytest.raises(EyasError, match=r"epoch 1, step 0: loss nan.* rows \[6, 11\]; their hidden states hold NaN"):
        bad.train(
            epochs[0], 1, tmp_path / "drafter" / "epoch_1", runtime=Runtime(micro_tokens=micro_tokens),
            batch_tokens=1000,
        )  # fmt: skip
    assert not (tmp_path / "drafter" / "epoch_1").exists()


def test_a_training_that_explodes_names_the_rows_of_the_batch(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="lower training.learning_rate, or look at these rows") as caught:
        run.train(epochs[0], 1, tmp_path / "epoch_1", learning_rate=1e30, warmup_steps=0)
    found = re.search(
        r"epoch 1, step (\d+): loss \S+, gradient norm \S+, in a batch with rows (\[.*\]);", str(caught.value)
    )
    assert found and int(found[1]) > 0  # the first step is still sound
    assert json.loads(found[2]) == sorted(run.batches(1)[int(found[1])])
    assert not (tmp_path / "epoch_1").exists()
