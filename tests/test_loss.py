"""The objective against loops in float64, and against goldens that the loops wrote (`python -m
tests.test_loss`: goldens/objective.json).
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.operators import ttt
from eyas.operators import vocab as vocab_module
from eyas.operators.batch import Batch
from eyas.operators.vocab import TargetVocabulary
from eyas.train import loss as loss_module
from eyas.train.loss import (
    ObjectiveConfig,
    batch_loss,
    judged_positions,
    loss_rows,
    part_losses,
    plan_of,
    shifted,
    teach,
)
from eyas.train.step import DRAW_STEP, LossModule
from tests.plain_eagle import PlainHead, Wanted, plain_loss, plain_objective, weights_of
from tests.tiny_batch import (
    as_examples,
    doubled,
    made_up_batch,
    made_up_samples,
    tiny_vocabulary,
    waves,
    wavy_head,
    write_golden,
)

GOLDEN = Path(__file__).parent / "goldens" / "objective.json"
ANSWER = [False] * 2 + [True] * 4
TURNS = [False, True, True, True, False, False, True, True, True]
CASES = {
    "two turns, and a shorter row": [TURNS, ANSWER],
    "everything": [[True] * 6],
    "an answer of two tokens": [[False] * 8 + [True] * 2],
    "an answer of one token beside another": [[False] * 2 + [True], ANSWER],
    "nothing judged after step 0": [[True, True, True, False]],
}
REFERENCE = {"num_ttt_steps": 7, "later_steps": "all"}
CONFIGS = {"the reference's": {}, "defaults": ObjectiveConfig().model_dump()}
HEADS = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "EAGLE-3.1": {"fc_norm": True, "norm_output": True},
    "frozen lm_head": {"train_lm_head": False},
    "all tokens": {"draft_vocab_size": 40},
}


def outcome_of(head, batch, dtype=torch.float64, **config):
    vocabulary, wanted = tiny_vocabulary(dtype), ObjectiveConfig(**{**REFERENCE, **config})
    teacher = teach(batch, vocabulary, head, plan_of(batch, wanted, head.config))
    return batch_loss(head, vocabulary.embed_tokens, batch, teacher, wanted)


def plain_outcome(head, weights, samples, **config):
    wanted, vocabulary = ObjectiveConfig(**{**REFERENCE, **config}), tiny_vocabulary(torch.float64)
    options = Wanted(num_steps=wanted.num_ttt_steps, sampled=wanted.later_steps == "sampled")
    embed_tokens = weights.get("embed_tokens", vocabulary.embed_tokens)
    plain = PlainHead(weights, head.config)
    of_target = embed_tokens, vocabulary.lm_head, head.target_ids_W.tolist()
    return plain_objective(plain, as_examples(samples), *of_target, options)


def assert_equals_the_loops(head, batch, samples, **config):
    outcome, weights = outcome_of(head, batch, **config), weights_of(head)
    outcome.loss.backward()
    plain = plain_outcome(head, weights, samples, **config)
    assert sum(plain.num_trained) > 0
    plain.loss.backward()
    near = {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(outcome.loss, plain.loss, **near)
    step_losses = torch.tensor(plain.step_losses, dtype=torch.float64)
    torch.testing.assert_close(outcome.step_losses, step_losses, **near)
    assert outcome.num_judged.tolist() == plain.num_judged
    assert outcome.num_trained.tolist() == plain.num_trained
    assert outcome.num_hits.tolist() == plain.num_hits
    for name, weight in head.named_parameters():
        if not weight.requires_grad:
            assert weight.grad is None, name
            continue
        grad = weights[name].grad
        expected = torch.zeros_like(weight) if grad is None else grad
        named = {"msg": lambda text, name=name: f"{name}: {text}"}
        torch.testing.assert_close(weight.grad, expected, **near, **named)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("masks", CASES.values(), ids=CASES.keys())
def test_loss_accuracy_and_gradients_equal_the_loops(masks, config):
    samples = made_up_samples(masks, seed=1)
    assert_equals_the_loops(wavy_head().double(), doubled(Batch.of(samples)), samples, **config)


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("flags", HEADS.values(), ids=HEADS.keys())
def test_every_option_of_the_head_equals_the_loops(flags, recompute, monkeypatch):
    monkeypatch.setattr(ttt, "RECOMPUTED_ROWS", 4)
    samples, head = made_up_samples([TURNS, ANSWER], seed=1), wavy_head(**flags).double()
    assert_equals_the_loops(head, doubled(Batch.of(samples)), samples, recompute=recompute)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "flags",
    [{}, {"sliding_window": 64}, {"sliding_window": 64, "fc_norm": True, "norm_output": True}],
    ids=["plain", "window", "window and norms"],
)
def test_what_is_computed_again_is_what_was_kept(flags, dtype, monkeypatch):
    """But for the order of float32's sums; in bfloat16 each part is rounded."""
    sums = 5e-6
    beyond = [number % 8 > 1 for number in range(100)]  # the window
    vocabulary = tiny_vocabulary()
    batch = Batch.of(made_up_samples([TURNS, beyond], seed=1))

    def outcome(recompute, rows):
        monkeypatch.setattr(ttt, "RECOMPUTED_ROWS", rows)
        head = wavy_head(**flags)
        module = LossModule(head, vocabulary, ObjectiveConfig(recompute=recompute), dtype)
        teacher = module.teach(module.planned(batch, 0))
        found = module(batch, teacher, module.trained_slots([teacher]))
        found.loss.backward()
        return found, {name: weight.grad for name, weight in head.named_parameters()}

    kept, wanted = outcome(False, 0)
    parts = (2**-10, 2**-5) if dtype == "bfloat16" else (sums, sums)  # of losses, of gradients
    for rows, (near, noise) in ((4096, (sums, sums)), (4, parts)):
        again, gradients = outcome(True, rows)
        torch.testing.assert_close(again.step_losses, kept.step_losses, rtol=near, atol=0)
        torch.testing.assert_close(again.loss, kept.loss, rtol=near, atol=0)
        for name, gradient in gradients.items():
            apart = (gradient - wanted[name]).norm() / wanted[name].norm()
            assert apart <= noise, name


def golden(outcome, gradients):
    norms = [0.0 if grad is None else float(grad.norm()) for grad in gradients]
    kept = {"loss": float(outcome.loss.detach()), "gradient_norms": norms}
    kept["step_losses"] = [float(loss) for loss in outcome.step_losses]
    for name in ("num_judged", "num_trained", "num_hits"):
        kept[name] = list(map(int, getattr(outcome, name)))
    return kept


GOLDENS = {
    **{name: (config, {}) for name, config in CONFIGS.items()},
    **{name: ({}, flags) for name, flags in HEADS.items()},
}


def golden_of_the_loops(config, flags):
    samples, head = made_up_samples([TURNS, ANSWER], seed=4), wavy_head(**flags).double()
    weights = weights_of(head)
    plain = plain_outcome(head, weights, samples, **config)
    plain.loss.backward()
    trained = [name for name, one in head.named_parameters() if one.requires_grad]
    return golden(plain, [weights[name].grad for name in trained])


@pytest.mark.parametrize("name", GOLDENS)
def test_every_option_equals_its_golden(name):
    config, flags = GOLDENS[name]
    head = wavy_head(**flags).double()
    batch = Batch.of(made_up_samples([TURNS, ANSWER], seed=4))
    outcome = outcome_of(head, doubled(batch), **config)
    outcome.loss.backward()
    made = golden(outcome, [one.grad for one in head.parameters() if one.requires_grad])
    expected = json.loads(GOLDEN.read_text())["objective"][name]
    assert made.keys() == expected.keys()
    for part, value in expected.items():
        assert made[part] == pytest.approx(value, rel=1e-6, abs=1e-9), part


@given(mask=st.lists(st.booleans(), min_size=1, max_size=12))
@settings(max_examples=100)
def test_judged_are_the_tokens_that_serving_drafts(mask):
    """A judged position s stands for the token s + 1."""
    judged = judged_positions(torch.tensor([mask]))[0].tolist()
    drafted = [s >= 2 and mask[s - 1] and mask[s] for s in range(len(mask))]
    assert [False, *judged] == [*drafted, False]


def test_the_cases_hold_misses_hits_and_undraftable_slots():
    outcome = outcome_of(wavy_head().double(), doubled(made_up_batch([TURNS, ANSWER, [True] * 30])))
    assert 0 < outcome.num_trained.sum() < outcome.num_judged.sum()
    assert 0 < outcome.num_hits.sum() < outcome.num_trained.sum()


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(0, 14))
@settings(max_examples=50)
def test_shifted_reads_ahead(row, by):
    expected = [row[t + by] if t + by < len(row) else False for t in range(len(row))]
    assert shifted(torch.tensor([row]), by).tolist() == [expected]


def test_tokens_outside_the_answer_do_not_teach():
    mask = [False] * 5 + [True] * 4 + [False] * 3
    batch = made_up_batch([mask])
    losses = []
    for noise in (0.0, 5.0):
        batch.last_hidden_BTH[0, [0, 1, 2, 3, 4, 8, 9, 10, 11]] += noise
        losses.append(outcome_of(wavy_head(), batch, torch.float32).loss)
    assert torch.equal(losses[0], losses[1])
    batch.last_hidden_BTH[0, 5] += 5.0
    assert not torch.equal(losses[0], outcome_of(wavy_head(), batch, torch.float32).loss)


def test_the_teacher_is_the_target_at_the_judged_positions():
    batch, head = doubled(made_up_batch([[True] * 9])), wavy_head().double()
    vocabulary = tiny_vocabulary(torch.float64)
    plan = plan_of(batch, ObjectiveConfig(num_ttt_steps=2, later_steps="all"), head.config)
    teacher = teach(batch, vocabulary, head, plan)
    logits_PV = batch.last_hidden_BTH[0, 1:8] @ vocabulary.lm_head.T
    rows = torch.tensor([5, 0, 5])
    capped = vocabulary.config.model_copy(update={"logit_softcap": 2.0})
    of_capped = replace(teacher, vocabulary=replace(vocabulary, config=capped))
    for one, said in ((teacher, logits_PV), (of_capped, 2 * torch.tanh(logits_PV / 2))):
        expected = said[rows][:, head.target_ids_W].softmax(-1)
        torch.testing.assert_close(one.probabilities(rows, one.draft_rows_WH), expected)
    assert torch.equal(teacher.argmax_P[:7], logits_PV.argmax(-1))
    assert torch.equal(teacher.position_mask_P, torch.isin(teacher.argmax_P, head.target_ids_W))
    assert plan.position_P.tolist() == [*range(1, 8), *[7] * 121]
    assert plan.counts.tolist() == [7, 6, 1, 9]
    # slot t at step i is judged at t + 1 + i: the slots of teacher's row 1 are 1 and then 0
    assert plan.row_S[:13].tolist() == [0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert plan.step_S.tolist() == [0, *[0, 1] * 6, *[2] * 115]
    assert plan.pick_S[:5].tolist() == [0, 1, 128, 2, 129]


def test_stored_best_tokens_are_taken_where_all_are_known(monkeypatch):
    batch, head, vocabulary = made_up_batch([TURNS, ANSWER]), wavy_head(), tiny_vocabulary()
    computed = outcome_of(head, batch, torch.float32)
    argmax_BT = vocabulary.best(batch.last_hidden_BTH.flatten(0, 1)).int().view(2, -1)
    judged_BT = judged_positions(batch.loss_mask_BT)
    stored = replace(batch, argmax_BT=argmax_BT.where(judged_BT, -1))
    argmax_BT = argmax_BT.clone()
    argmax_BT[0, 2] = -1
    assert judged_BT[0, 2]
    partly = outcome_of(head, replace(batch, argmax_BT=argmax_BT), torch.float32)
    assert partly.loss == computed.loss
    monkeypatch.setattr(TargetVocabulary, "best", lambda *_: pytest.fail("its product is stored"))
    for one, other in zip(outcome_of(head, stored, torch.float32), computed, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("at_once", [1, 7, 64, 10_000])
def test_pieces_of_the_vocabulary_change_nothing(monkeypatch, at_once):
    batch, results = doubled(made_up_batch([[True] * 30, TURNS])), []
    for size in (1 << 23, at_once):
        monkeypatch.setitem(loss_module.LOGITS_AT_ONCE, "cpu", size * 30)
        monkeypatch.setattr(vocab_module, "COLUMNS_AT_ONCE", size + 3)
        monkeypatch.setattr(loss_module, "LOGITS_IN_CACHE", size * 3)
        monkeypatch.setattr(vocab_module, "ROWS_AT_ONCE", size)
        monkeypatch.setitem(loss_module.ROWS_IN_STEPS_OF, "cpu", 16 + size % 128)
        head = wavy_head().double()
        outcome = outcome_of(head, batch, num_ttt_steps=7)
        outcome.loss.backward()
        grads = [weight.grad for weight in head.parameters()]
        results.append((outcome.loss, outcome.step_losses, outcome.num_hits, *grads))
    for whole, pieces in zip(*results, strict=True):
        torch.testing.assert_close(pieces, whole, rtol=1e-9, atol=1e-9)


def test_sampled_steps_take_their_share_and_all_slots_in_turn():
    batch, vocabulary = made_up_batch([[True] * 60]), tiny_vocabulary()
    head = wavy_head(draft_vocab_size=40)
    wanted = ObjectiveConfig(**{**REFERENCE, "later_steps": "sampled"})
    counts, sums = torch.zeros(7), torch.zeros(7)
    with torch.no_grad():
        for step in range(40):
            plan = plan_of(batch, wanted, head.config, step * DRAW_STEP % 1.0)
            teacher = teach(batch, vocabulary, head, plan)
            outcome = batch_loss(head, vocabulary.embed_tokens, batch, teacher, wanted)
            counts += outcome.num_trained
            sums += outcome.step_losses * outcome.num_trained
        whole = outcome_of(head, batch, torch.float32)
    share_K = counts / whole.num_trained / 40
    torch.testing.assert_close(share_K, 0.8 ** torch.arange(7.0), rtol=0.05, atol=0)
    torch.testing.assert_close(sums / counts, whole.step_losses, rtol=0.02, atol=0)


def test_the_losses_gradient_is_autograds_own():
    generator = torch.Generator().manual_seed(0)
    teacher_RV = 3 * torch.randn(5, 12, generator=generator, dtype=torch.float64)
    logits_RW = (2 * torch.randn(5, 7, generator=generator, dtype=torch.float64)).requires_grad_()
    kept = [0, 2, 3, 5, 8, 9, 11]
    expected_R = torch.stack(
        [plain_loss(z, teacher, kept) for z, teacher in zip(logits_RW, teacher_RV, strict=True)]
    )
    (expected_grad,) = torch.autograd.grad(expected_R.sum(), logits_RW)
    losses_R, grad_RW, choice_R = loss_rows(logits_RW.detach(), teacher_RV[:, kept].softmax(-1))
    assert torch.equal(choice_R, logits_RW.argmax(-1))
    torch.testing.assert_close(losses_R, expected_R.detach())
    torch.testing.assert_close(grad_RW, expected_grad)


def test_the_losses_are_one_graph_for_a_compiler():
    compiled = torch.compile(part_losses, backend="aot_eager", fullgraph=True)
    for R, U in ((6, 3), (9, 4)):
        logits_RW, weight_R = 3 * waves(R, 7, seed=R), waves(R, seed=1)
        p_UW, of_R = waves(U, 7, seed=2).softmax(-1), torch.arange(R).int() % U
        results = []
        for function in (part_losses, compiled):
            written = logits_RW.clone()
            results.append([*function(written, weight_R, p_UW, of_R), written])
        for plain, traced in zip(*results, strict=True):
            torch.testing.assert_close(traced, plain)


def test_nothing_as_large_as_scores_or_logits_is_kept_for_the_way_back():
    head, sizes = wavy_head(), []
    batch = made_up_batch([[True] * 100])
    with torch.autograd.graph.saved_tensors_hooks(
        lambda kept: sizes.append(kept.numel()) or kept, lambda kept: kept
    ):
        outcome = outcome_of(head, batch, torch.float32)
    num_slots, num_rows = 128, -(-int(outcome.num_judged.sum()) // 128) * 128
    assert max(sizes) < num_slots**2
    assert max(sizes) < num_rows * head.config.draft_vocab_size
    # the gradient by the rows: the hooks saw what Distillation keeps
    assert num_rows * head.config.hidden_size in sizes


def test_a_draft_that_is_sure_of_what_the_target_excludes_has_a_finite_gradient():
    logits_RW, p_RW = torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]])
    losses_R, grad_RW, _ = loss_rows(logits_RW, p_RW)
    assert losses_R.isfinite().all()
    assert grad_RW.isfinite().all()


def test_bf16_is_close_to_float32():
    batch, head, vocabulary = made_up_batch([[True] * 30, TURNS]), wavy_head(), tiny_vocabulary()
    exact = outcome_of(head, batch, torch.float32)
    plan = plan_of(batch, ObjectiveConfig(**REFERENCE), head.config)
    teacher = teach(batch, vocabulary, head, plan)
    with torch.autocast("cpu", torch.bfloat16):
        embed_tokens = vocabulary.embed_tokens.bfloat16()
        rough = batch_loss(head, embed_tokens, batch, teacher, ObjectiveConfig(**REFERENCE))
    assert rough.loss.dtype == torch.float32
    torch.testing.assert_close(rough.loss, exact.loss, rtol=0.02, atol=0)
    assert not torch.equal(rough.loss, exact.loss)


if __name__ == "__main__":
    made = {name: golden_of_the_loops(*both) for name, both in GOLDENS.items()}
    write_golden(GOLDEN, "python -m tests.test_loss", objective=made)
