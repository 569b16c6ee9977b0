"""The TTT loss, its gradients and its counts against plain loops in float64 (tests/drafter_reference.py)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from drafter_reference import (
    reference_counts,
    reference_loss,
    reference_states,
    small_batch,
    small_drafter,
    small_shape,
)
from eyas.drafter import loss as loss_module
from eyas.drafter.dataset import Batch
from eyas.drafter.loss import StepTargets, teacher_probabilities, ttt_cross_entropy
from eyas.drafter.model import Drafter
from eyas.drafter.objective import StepCounts, find_predictions, ttt_loss
from torch import Tensor

DECAY = 0.8
SHAPES = {
    "as the target": small_shape(),
    "other width": small_shape(hidden_size=8, head_dim=4, num_attention_heads=3, num_key_value_heads=1),
    "normed residual": small_shape(norm_before_residual=True),
}


class Case:
    """A drafter in float64, the target's head, and packed rows with gaps in their masks."""

    def __init__(self, shape_name: str = "as the target", lengths: tuple[int, ...] = (9, 2, 13, 1, 3, 7)) -> None:
        self.shape = SHAPES[shape_name]
        self.drafter: Drafter = small_drafter(self.shape).double()
        generator = torch.Generator().manual_seed(5)
        size = (self.shape.vocab_size, self.shape.target_hidden_size)
        self.head = torch.randn(size, generator=generator, dtype=torch.float64)
        self.batch = small_batch(self.shape, self.head, list(lengths))
        self.ids = self.drafter.d2t + torch.arange(len(self.drafter.d2t))
        self.draft_ids = torch.full((self.shape.vocab_size,), -1)
        self.draft_ids[self.ids] = torch.arange(len(self.ids))

    def ours(self, steps: int, batch: Batch | None = None) -> tuple[Tensor, int, StepCounts]:
        return ttt_loss(self.drafter, batch or self.batch, self.head[self.ids], self.draft_ids, steps, DECAY)

    def weights(self) -> dict[str, Tensor]:
        """The drafter's tensors as fresh leaves."""
        trained = {name for name, p in self.drafter.named_parameters() if p.requires_grad}
        copies = {name: t.detach().clone() for name, t in self.drafter.state_dict().items()}
        return {name: t.requires_grad_() if name in trained else t for name, t in copies.items()}


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize("shape_name", SHAPES)
def test_loss_and_all_gradients_equal_the_loops(shape_name: str, steps: int) -> None:
    case = Case(shape_name)
    loss, counted, counts = case.ours(steps)
    loss.backward()
    weights = case.weights()
    expected, expected_counted, chosen = reference_loss(weights, case.shape, case.batch, case.head, steps, DECAY)
    assert counted == sum(map(len, expected_counted)) > 2 * steps
    torch.testing.assert_close(loss, expected, rtol=1e-11, atol=0)
    expected.backward()
    trained = {name: p for name, p in case.drafter.named_parameters() if p.requires_grad}
    assert ("embed_tokens.weight" in trained) == (shape_name == "other width")
    assert len(trained) == 13 + (shape_name == "other width")
    for name, parameter in trained.items():
        assert weights[name].grad.abs().max() > 0, name
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert (counts.reached.tolist(), counts.right.tolist()) == reference_counts(case.batch, steps, chosen)


def test_a_mask_that_lags_by_one_gives_another_loss() -> None:
    case = Case()
    right, _, _ = reference_loss(case.weights(), case.shape, case.batch, case.head, 3, DECAY)
    lagging, _, _ = reference_loss(case.weights(), case.shape, case.batch, case.head, 3, DECAY, lag=1)
    loss = case.ours(3)[0]
    assert abs(loss - right) < 1e-9 < 1e-2 < abs(loss - lagging)


def test_states_do_not_depend_on_where_queries_are_gathered() -> None:
    """Unsupervised positions cost their step-0 key only; doing all of them gives the same states at the others."""
    case = Case()
    found = find_predictions(case.batch, 4)
    gathered = case.drafter.ttt_states(case.batch.aux, case.batch.tokens, case.batch.positions, found.where)
    full_mask = replace(case.batch, mask=torch.ones_like(case.batch.mask))
    everywhere = find_predictions(full_mask, 4)
    full = case.drafter.ttt_states(case.batch.aux, case.batch.tokens, case.batch.positions, everywhere.where)
    assert len(found.where.steps[0].flat) < len(everywhere.where.steps[0].flat)
    for i, (some, every) in enumerate(zip(gathered, full, strict=True)):
        flat, all_flat = found.where.steps[i].flat, everywhere.where.steps[i].flat
        torch.testing.assert_close(some, every[torch.searchsorted(all_flat, flat)], rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape_name", SHAPES)
def test_states_equal_the_loops_position_by_position(shape_name: str) -> None:
    case = Case(shape_name)
    where = find_predictions(replace(case.batch, mask=torch.ones_like(case.batch.mask)), 5).where
    states = case.drafter.ttt_states(case.batch.aux, case.batch.tokens, case.batch.positions, where)
    for start, end in case.batch.spans:
        expected = reference_states(
            case.weights(), case.shape, case.batch.aux[start:end], case.batch.tokens[start:end].tolist(), 5
        )
        for i, step in enumerate(where.steps):
            for slot, flat in enumerate(step.flat.tolist()):
                if start <= flat < end and flat - start in expected[i]:
                    torch.testing.assert_close(states[i][slot], expected[i][flat - start], rtol=0, atol=1e-11)


def test_other_rows_change_nothing() -> None:
    """Attention, tokens and masks stop at the row's end: alone, each row has its share of the packed loss."""
    case = Case(lengths=(9, 6))
    packed, _, packed_counts = case.ours(1)
    alone = Case(lengths=(9, 6))
    parts = []
    for start, end in case.batch.spans:
        tensors = {
            n: getattr(case.batch, n)[start:end] for n in ("aux", "last", "tokens", "target_token", "mask", "positions")
        }
        parts.append(alone.ours(1, Batch(**tensors, spans=[(0, end - start)], row_ids=[0])))
    count = sum(counted for _, counted, _ in parts)
    assert all(counted for _, counted, _ in parts)
    torch.testing.assert_close(packed, sum(loss * counted for loss, counted, _ in parts) / count, rtol=1e-11, atol=0)
    assert packed_counts.reached.tolist() == [sum(int(c.reached[0]) for _, _, c in parts)]


def test_a_step_without_counted_positions_adds_nothing() -> None:
    case = Case(lengths=(3,))  # only step 0 has a token to predict
    batch = replace(case.batch, mask=torch.tensor([False, False, True]), target_token=case.ids[[0, 4, 0]])
    one, many = case.ours(1, batch), case.ours(7, batch)
    assert one[1] == many[1] == 1
    assert one[0].item() == many[0].item() > 0


def test_no_counted_position_is_a_zero_loss_and_every_draft_is_wrong() -> None:
    """Goals outside the draft vocabulary cannot be drafted: nothing to learn, but they count as wrong (DEFINITION)."""
    case = Case(lengths=(6, 4))
    outside = int((case.draft_ids < 0).nonzero()[0])
    batch = replace(
        case.batch,
        target_token=torch.full_like(case.batch.target_token, outside),
        mask=torch.ones_like(case.batch.mask),
    )
    loss, counted, counts = case.ours(2, batch)
    assert (loss.item(), counted) == (0.0, 0)
    assert counts.right.tolist() == [0, 0]
    assert counts.reached.tolist() == [4 + 2, 0]


def test_no_supervised_token_is_a_zero_loss() -> None:
    case = Case(lengths=(6, 4))
    loss, counted, counts = case.ours(3, replace(case.batch, mask=torch.zeros_like(case.batch.mask)))
    assert (loss.item(), counted, counts.reached.tolist()) == (0.0, 0, [0, 0, 0])


@pytest.mark.parametrize("seed", range(5))
def test_chained_counts_equal_the_loops(seed: int) -> None:
    case = Case()
    batch = small_batch(case.shape, case.head, [12, 3, 20, 1, 8], seed=seed, follow=0.9, supervised=0.9)
    found = find_predictions(batch, 4)
    generator = torch.Generator().manual_seed(seed)
    hit = torch.rand(found.goal.shape, generator=generator) < 0.7
    chosen = torch.where(hit, found.goal, torch.randint(-1, case.shape.vocab_size, hit.shape, generator=generator))
    by_place = {}
    for slot, flat in enumerate(found.where.steps[0].flat.tolist()):
        row = next(r for r, (start, end) in enumerate(batch.spans) if start <= flat < end)
        by_place |= {(row, flat - batch.spans[row][0], i): int(chosen[i, slot]) for i in range(4)}
    counts = StepCounts.of(found, chosen)
    expected = reference_counts(batch, 4, by_place)
    assert (counts.reached.tolist(), counts.right.tolist()) == expected
    assert expected[1][2] > 0  # some chains get far


def test_acceptance_length_is_one_plus_the_sum_of_products() -> None:
    counts = StepCounts(torch.tensor([10, 8, 4, 0]), torch.tensor([8, 4, 1, 0]))
    assert counts.accuracy == [0.8, 0.5, 0.25, None]
    assert counts.acceptance_length() == pytest.approx(1 + 0.8 + 0.4 + 0.1)
    assert counts.acceptance_length(2) == pytest.approx(1 + 0.8 + 0.4)
    total = StepCounts.zero(4)
    total += counts
    total += counts
    assert (total.reached.tolist(), total.right.tolist()) == ([20, 16, 8, 0], [16, 8, 2, 0])
    assert StepCounts.zero(3).acceptance_length() == 1.0


@pytest.mark.parametrize("chunk", [1, 3, 10, 1024])
def test_ttt_cross_entropy_equals_torch(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "_CHUNK", chunk)  # several chunks, a last one that is not full
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    states, counted, teachers = [random(9, 5), random(7, 5), random(4, 5)], [6, 4, 0], 5
    norm, head, last, teacher_head = random(5), random(7, 5), random(teachers, 3), 3 * random(7, 3)
    targets = [
        StepTargets(
            torch.randperm(len(state), generator=generator)[:count].sort().values,
            torch.randint(teachers, (count,), generator=generator).sort().values,
            0.5 + step,
        )
        for step, (state, count) in enumerate(zip(states, counted, strict=True))
    ]
    leaves = [t.requires_grad_() for t in (*states, norm, head)]
    loss, predicted = ttt_cross_entropy(states, targets, norm, 1e-5, head, last, teacher_head)
    found = torch.autograd.grad(2.5 * loss, leaves)
    teacher = torch.softmax(last @ teacher_head.T, -1)
    expected = torch.zeros((), dtype=torch.float64)
    for state, step, chosen in zip(states, targets, predicted, strict=True):
        logits = F.rms_norm(state[step.pick], (5,), norm, 1e-5) @ head.T
        expected = expected + step.weight * F.cross_entropy(logits, teacher[step.teacher], reduction="sum")
        assert torch.equal(chosen, logits.argmax(-1))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for ours, theirs in zip(found, torch.autograd.grad(2.5 * expected, leaves), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)
    with torch.no_grad():  # evaluation: no gradient is computed, the loss is the same
        torch.testing.assert_close(
            ttt_cross_entropy(states, targets, norm, 1e-5, head, last, teacher_head)[0], expected
        )


@pytest.mark.parametrize("chunk", [1, 2, 5, 100])
def test_each_teacher_is_computed_once(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case, rows = Case(), []
    original = loss_module.teacher_probabilities
    monkeypatch.setattr(loss_module, "_CHUNK", chunk)
    monkeypatch.setattr(
        loss_module, "teacher_probabilities", lambda last, head: rows.append(len(last)) or original(last, head)
    )
    found = find_predictions(case.batch, 5)
    case.ours(5)
    counted = found.supervised & (case.draft_ids[found.goal] >= 0)
    speakers = {int(f) + 1 + i for i in range(5) for f in found.where.steps[0].flat[counted[i]]}
    assert sum(rows) == len(speakers)


def test_the_teacher_is_the_full_softmax_restricted_and_renormalised() -> None:
    case = Case()
    full = torch.softmax(case.batch.last @ case.head.T, -1)[:, case.ids]
    found = teacher_probabilities(case.batch.last, case.head[case.ids])
    torch.testing.assert_close(found, full / full.sum(-1, keepdim=True), rtol=1e-12, atol=0)
    assert found.dtype == torch.float64
    assert math.isclose(float(found[0].sum()), 1.0)
