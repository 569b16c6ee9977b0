"""Epochs from checkpoint to checkpoint on small synthetic states: exact, repeatable, and refused where they must be."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafter_reference import TRAINING, extracted, file_bytes, random_rows, save_llama
from eyas.drafter.checkpoint import build_drafter, load_checkpoint
from eyas.drafter.dataset import HiddenStates
from eyas.drafter.initialise import initialise
from eyas.drafter.objective import ttt_loss
from eyas.drafter.packing import epoch_batches
from eyas.drafter.processes import Processes
from eyas.drafter.step import learning_rate
from eyas.drafter.trainer import train_epoch
from eyas.errors import EyasError
from eyas.extraction.manifest import Manifest
from eyas.target.tokenizer import TargetReference
from eyas.vocabulary import VocabularyMap
from eyas.vocabulary.mapping import build_map
from transformers import AutoModelForCausalLM

OPEN = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
)  # the target's
HELD_OUT_EVERY, SEED, DRAFT_VOCAB = 5, 3, 30


@dataclass
class Run:
    """A random target, states of its rows, and a vocabulary map."""

    folder: Path
    target: TargetReference
    manifest: Manifest
    mapping: VocabularyMap

    def start(self, output: Path, init: str = "target_layer", **sizes: int) -> Path:
        initialise(self.target, self.manifest, self.mapping, OPEN | sizes | {"init": init}, SEED, output, "mark")
        return output

    def train(
        self, previous: Path, epoch: int, output: Path, held_out_every: int = HELD_OUT_EVERY, **changes: Any
    ) -> Path:
        train_epoch(
            self.manifest, self.folder / "tokens", self.target, previous, epoch, TRAINING | changes, held_out_every,
            SEED, output, "mark", Processes.alone(torch.device("cpu")),
        )  # fmt: skip
        return output


def make_run(folder: Path, rows: list[tuple], **target_changes: Any) -> Run:
    target = save_llama(folder / "target", **target_changes)
    counts = np.bincount(np.concatenate([ids for _, ids, _ in rows]), minlength=40)
    return Run(folder, target, extracted(folder, target, [rows]), build_map(counts, DRAFT_VOCAB, [2]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("run"), random_rows([17, 9, 24, 12, 20, 15, 8, 22, 11, 18, 14, 21]))


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
    data = HiddenStates(run.manifest, run.folder / "tokens")
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
        assert len(file_bytes(place)) == 4
        assert file_bytes(place) == file_bytes(epochs[epoch])


def test_more_epochs_leave_the_finished_ones_as_they_are(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    assert file_bytes(run.train(epochs[1], 2, tmp_path / "epoch_2", epochs=8)) == file_bytes(epochs[2])


def test_the_frozen_embedding_and_the_map_do_not_move(run: Run, epochs: list[Path]) -> None:
    first, last = load_checkpoint(epochs[0]), load_checkpoint(epochs[3])
    for name in ("embed_tokens.weight", "d2t", "t2d"):
        assert torch.equal(first.weights[name], last.weights[name])
    embedding = AutoModelForCausalLM.from_pretrained(run.target.path).model.embed_tokens.weight
    assert torch.equal(last.weights["embed_tokens.weight"], embedding.detach().bfloat16())


SCHEDULE = dict(learning_rate=2.0, min_learning_rate_ratio=0.1, warmup_steps=4, schedule_epochs=2)


@pytest.mark.parametrize("schedule, at_12, end", [("cosine", 1.1, 0.2), ("linear", 1.1, 0.2), ("constant", 2.0, 2.0)])
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


def test_rows_that_teach_nothing_are_an_error(tmp_path: Path) -> None:
    """The first prediction is the third token: masks on the first two only would train to nothing in silence."""
    rows = random_rows([9, 7])
    for _, _, mask in rows:
        mask[:], mask[:2] = 0, 1
    run = make_run(tmp_path, rows)
    with pytest.raises(EyasError, match="no usable training row"):
        run.train(run.start(tmp_path / "epoch_0"), 1, tmp_path / "epoch_1")
    assert not (tmp_path / "epoch_1").exists()


def test_a_loss_that_is_no_number_names_the_rows(run: Run, epochs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(EyasError, match=r"epoch 1, step \d+: loss .* in a batch of rows \[\d"):
        run.train(epochs[0], 1, tmp_path / "epoch_1", learning_rate=1e30, warmup_steps=0)
    assert not (tmp_path / "epoch_1").exists()


@pytest.mark.parametrize("tied", [False, True])
def test_target_layer_copies_the_last_layer(tied: bool, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_rows([9, 7]), tie_word_embeddings=tied)
    found = load_checkpoint(run.start(tmp_path / "epoch_0")).weights
    model = AutoModelForCausalLM.from_pretrained(run.target.path)
    # norms of a fresh model are all one: the names below are told apart by the shapes and by random matrices
    layer = {name: tensor.detach() for name, tensor in model.model.layers[4].named_parameters()}
    for part in ("q_proj", "k_proj", "v_proj"):
        weight = found[f"midlayer.self_attn.{part}.weight"]
        assert torch.equal(weight[:, 16:], layer[f"self_attn.{part}.weight"])  # what reads the state
        assert 0 < weight[:, :16].std() < 0.05  # what reads the embedding
    for name in ("self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"):
        assert torch.equal(found[f"midlayer.{name}"], layer[name])
    aux = torch.randn(4, 48)
    assert torch.equal(aux @ found["fc.weight"].T, aux[:, 32:])  # hands on the highest of the three states
    assert torch.equal(found["lm_head.weight"], model.lm_head.weight.detach()[run.mapping.target_ids])
    assert torch.equal(found["embed_tokens.weight"], model.model.embed_tokens.weight.detach().bfloat16())
    assert np.array_equal(found["d2t"].numpy() + np.arange(DRAFT_VOCAB), np.flatnonzero(found["t2d"].numpy()))


def test_norms_are_copied_to_their_places(tmp_path: Path) -> None:
    run = make_run(tmp_path, random_rows([9, 7]))
    model = AutoModelForCausalLM.from_pretrained(run.target.path)
    last = model.model.layers[4]
    norms = {"hidden_norm": last.input_layernorm, "post_attention_layernorm": last.post_attention_layernorm}
    with torch.no_grad():
        for number, norm in enumerate([*norms.values(), model.model.norm]):
            norm.weight.copy_(torch.arange(16) + 100.0 * number)
    model.save_pretrained(run.target.path)
    found = load_checkpoint(run.start(tmp_path / "epoch_0")).weights
    for name, norm in norms.items():
        assert torch.equal(found[f"midlayer.{name}.weight"], norm.weight.detach())
    assert torch.equal(found["norm.weight"], model.model.norm.weight.detach())
    assert torch.equal(found["midlayer.input_layernorm.weight"], torch.ones(16))  # the embedding's, not in the target


def test_random_weights_of_another_width_train_their_embedding(run: Run, tmp_path: Path) -> None:
    start = run.start(tmp_path / "epoch_0", init="random", hidden_size=24, head_dim=6)
    before = load_checkpoint(start)
    assert (before.shape.hidden_size, before.shape.target_hidden_size) == (24, 16)
    assert before.weights["fc.weight"].shape == (24, 48)
    assert "embed_tokens.weight" in before.facts["trained"]
    assert file_bytes(run.start(tmp_path / "again", init="random", hidden_size=24, head_dim=6)) == file_bytes(start)
    after = load_checkpoint(run.train(start, 1, tmp_path / "epoch_1"))
    seen = np.unique(np.concatenate([ids for _, ids, _ in random_rows([17, 9])]))
    assert not torch.equal(
        before.weights["embed_tokens.weight"][seen[0]], after.weights["embed_tokens.weight"][seen[0]]
    )
    assert torch.equal(
        before.weights["embed_tokens.weight"][0], after.weights["embed_tokens.weight"][0]
    )  # id 0 is in no row


def test_target_layer_of_another_width_is_refused(run: Run, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="set model.init: random"):
        run.start(tmp_path / "epoch_0", hidden_size=24)


def test_states_of_another_target_and_maps_of_another_vocabulary_are_refused(run: Run, tmp_path: Path) -> None:
    other = replace(run, target=save_llama(tmp_path / "other", rope_theta=77.0))
    with pytest.raises(EyasError, match="config hash"):
        other.start(tmp_path / "epoch_0")
    small = replace(run, mapping=build_map(np.ones(39, dtype=np.int64), 5, []))
    with pytest.raises(EyasError, match="39 target tokens, the target has 40"):
        small.start(tmp_path / "epoch_0")
    assert not (tmp_path / "epoch_0").exists()
