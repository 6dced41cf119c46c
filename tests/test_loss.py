"""The objective against loops in float64 that know nothing of how the package computes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.model.batch import Batch
from eyas.train.loss import SoftCrossEntropy, judged_positions, objective, shifted, teach
from tests.plain_eagle import PlainHead, plain_objective, weights_of
from tests.tiny_batch import as_examples, doubled, made_up_batch, made_up_samples, tiny_vocabulary, wavy_head

ANSWER = [False] * 2 + [True] * 4
TURNS = [False, True, True, True, False, False, True, True, True]
CASES = {
    "two turns, and a shorter row": [TURNS, ANSWER],
    "everything": [[True] * 6],
    "an answer of two tokens": [[False] * 8 + [True] * 2],
    "an answer of one token beside another": [[False] * 2 + [True], ANSWER],
    "nothing judged after step 0": [[True, True, True, False]],
}


def outcome_of(head, batch, dtype=torch.float64, steps=7):
    vocabulary = tiny_vocabulary(dtype)
    return objective(head, vocabulary.embed_tokens, batch, teach(batch, vocabulary, head), steps, 0.8)


@pytest.mark.parametrize("masks", CASES.values(), ids=CASES.keys())
def test_loss_accuracy_and_gradients_equal_the_loops(masks):
    samples = made_up_samples(masks, seed=1)
    head, vocabulary = wavy_head().double(), tiny_vocabulary(torch.float64)
    outcome = outcome_of(head, doubled(Batch.of(samples)))
    outcome.loss.backward()
    weights = weights_of(head)
    plain = plain_objective(
        PlainHead(weights, head.config),
        as_examples(samples),
        vocabulary.embed_tokens,
        vocabulary.lm_head,
        head.target_ids_W.tolist(),
        num_steps=7,
    )
    assert sum(plain.num_trained) > 0
    plain.loss.backward()
    torch.testing.assert_close(outcome.loss, plain.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(outcome.step_losses, torch.tensor(plain.step_losses, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    assert outcome.num_judged.tolist() == plain.num_judged
    assert outcome.num_trained.tolist() == plain.num_trained
    assert outcome.num_hits.tolist() == plain.num_hits
    for name, weight in head.named_parameters():
        expected = weights[name].grad if weights[name].grad is not None else torch.zeros_like(weights[name])
        torch.testing.assert_close(weight.grad, expected, rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_the_cases_hold_misses_hits_and_undraftable_slots():
    """Otherwise the equality above would say little."""
    outcome = outcome_of(wavy_head().double(), doubled(made_up_batch([TURNS, ANSWER, [True] * 30])))
    assert 0 < outcome.num_trained.sum() < outcome.num_judged.sum()
    assert 0 < outcome.num_hits.sum() < outcome.num_trained.sum()


def test_judged_at_step_zero_are_the_slots_that_serving_drafts_from():
    """x_3 .. x_6 is an answer: rounds begin with x_3, x_4 or x_5 as bonus token, at the slot before each."""
    mask_BT = torch.tensor([[False, False, False, True, True, True, True]])
    assert shifted(judged_positions(mask_BT), 1).tolist() == [[False, False, True, True, True, False, False]]
    assert shifted(judged_positions(mask_BT), 3).tolist() == [[True, True, True, False, False, False, False]]


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 14))
@settings(max_examples=50, deadline=None)
def test_shifted_reads_ahead(row, by):
    expected = [row[t + by] if t + by < len(row) else False for t in range(len(row))]
    assert shifted(torch.tensor([row]), by).tolist() == [expected]


def test_tokens_outside_the_answer_do_not_teach():
    """What the target thought of the prompt, and of the answer's last token, has no influence on loss or gradient."""
    mask = [False] * 5 + [True] * 4 + [False] * 3
    batch = made_up_batch([mask])
    losses = []
    for noise in (0.0, 5.0):
        batch.last_hidden_BTH[0, [0, 1, 2, 3, 4, 8, 9, 10, 11]] += noise
        losses.append(outcome_of(wavy_head(), batch, torch.float32).loss)
    assert torch.equal(losses[0], losses[1])
    batch.last_hidden_BTH[0, 5] += 5.0
    assert not torch.equal(losses[0], outcome_of(wavy_head(), batch, torch.float32).loss)


def test_target_p_is_renormalised_over_the_draft_vocabulary():
    batch, head = doubled(made_up_batch([[True] * 9])), wavy_head().double()
    teacher = teach(batch, tiny_vocabulary(torch.float64), head)
    logits_PV = batch.last_hidden_BTH[0, :8] @ tiny_vocabulary(torch.float64).lm_head.T
    full_PV = logits_PV.softmax(-1)
    on_draft_PW = full_PV[:, head.target_ids_W]
    torch.testing.assert_close(teacher.target_p_PW, on_draft_PW / on_draft_PW.sum(-1, keepdim=True))
    assert torch.equal(teacher.argmax_P, full_PV.argmax(-1))
    assert torch.equal(teacher.position_mask_P, torch.isin(teacher.argmax_P, head.target_ids_W))
    assert teacher.row_BT.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, -1]]


@pytest.mark.parametrize(("R", "W"), [(1, 3), (127, 5), (128, 7), (300, 33)])
def test_soft_cross_entropy_equals_autograds_own(R, W):
    generator = torch.Generator().manual_seed(R)
    logits_RW = (5 * torch.randn(R, W, generator=generator, dtype=torch.float64)).requires_grad_()
    target_p_PW = torch.randn(4, W, generator=generator, dtype=torch.float64).softmax(-1)
    row_R = torch.randint(4, (R,), generator=generator)
    weight_R = torch.rand(R, generator=generator, dtype=torch.float64)
    loss_R, choice_R = SoftCrossEntropy.apply(logits_RW, target_p_PW, row_R)
    (grad,) = torch.autograd.grad((weight_R * loss_R).sum(), logits_RW)
    expected_R = -(target_p_PW[row_R] * logits_RW.log_softmax(-1)).sum(-1)
    (expected_grad,) = torch.autograd.grad((weight_R * expected_R).sum(), logits_RW)
    torch.testing.assert_close(loss_R, expected_R)
    torch.testing.assert_close(grad, expected_grad)
    assert torch.equal(choice_R, logits_RW.argmax(-1))


def test_bf16_is_close_to_float32():
    batch, head, vocabulary = made_up_batch([[True] * 30, TURNS]), wavy_head(), tiny_vocabulary()
    exact = outcome_of(head, batch, torch.float32)
    teacher = teach(batch, vocabulary, head)
    with torch.autocast("cpu", torch.bfloat16):
        rough = objective(head, vocabulary.embed_tokens.bfloat16(), batch, teacher, 7, 0.8)
    assert rough.loss.dtype == torch.float32
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.02, atol=0)
    assert not torch.equal(rough.loss, exact.loss)
