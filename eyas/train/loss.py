"""The training objective: EAGLE-3's reference over the unrolled steps, as pure functions.

    tokens      [x0 x1 x2 x3 x4 x5]     loss_mask of an answer x3 x4 x5:  [0 0 0 1 1 1]
    judged      [0  0  0  1  1  0 ]     position s: x_s is the answer's, and so is x_{s+1}, which
                                        the target predicts at s
    slot t at step i is judged at s = t + 1 + i: its draft of x_{t+2+i} against the target's logits
    at s

At step 0 this is what serving asks of a head: x_{t+1} is the target's token, x_{t+2} the first
draft. A slot whose target argmax is no draft token carries no loss and counts as a miss. Logits
exist for some rows at a time. `plan_of` makes the tables of slots on the CPU, beside the batch,
with sizes rounded up by filler of weight 0: few shapes, and no step waits for the device.

Letters: B batch, T sequence, M = B T, K steps, N slots unrolled, P judged positions, S judged slots
of all steps, R some rows of P or S, U the distinct teacher's rows of R, H hidden, V target
vocabulary, W draft vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.model.config import HeadConfig
from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.ttt import Slots, by_rows, unroll
from eyas.operators.vocab import TargetVocabulary, products

STEP_DECAY = 0.8  # the weight of step i is its i-th power, as in the reference
# R x W of `Distillation`: more rows sum lm_head's gradient less often
LOGITS_AT_ONCE = {"cpu": 1 << 25}
LOGITS_AT_ONCE_ELSEWHERE = 1 << 27
LOGITS_IN_CACHE = 1 << 18  # R x W of `block_losses` on a CPU: they are read several times
# of N, P and S (U: of a sixteenth): oneDNN, compilers and allocators keep something for each size
ROWS_IN_STEPS_OF = {"cpu": 128}
ROWS_IN_STEPS_OF_ELSEWHERE = 512
GOLDEN_RATIO = (5**0.5 - 1) / 2  # the fractions of its multiples fill [0, 1) evenly


class ObjectiveConfig(BaseModel):
    """The loss: EAGLE-3's reference, except for the loss mask, the mean over judged slots, and the
    defaults of what follows (docs/decisions/training.md).

    num_ttt_steps: K, of training-time test. later_steps: `all` unrolls all slots at every step;
    `sampled` a share .8 ** i at step i, drawn anew every time: the same loss on average for little
    more than half of the work. weight_decay: of all weights but norms, times the learning rate
    (decoupled, as in AdamW). recompute: store little of each step and compute it again in the
    backward: the same loss up to rounding, in less memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_ttt_steps: int = Field(5, ge=1, le=16)
    later_steps: Literal["all", "sampled"] = "sampled"
    weight_decay: float = Field(0.0, ge=0)
    recompute: bool = False


class StepPlan(NamedTuple):
    """The tables of a batch's step; int32, on the batch's device.

    position_P: judged positions in the stream of M tokens. slots_K: slots to unroll at each step.
    tokens_K: the tokens that they embed; at step 0 all M. pick_S: the judged outputs of all steps,
    in the order of their teacher's row. row_S: that row of the P. step_S: the step; K in filler.
    blocks: for each R of the S the distinct rows [U], and the place of each in them [R]. counts:
    judged slots of each step [K], samples, tokens without padding. argmax_P: the target's best
    tokens, if all are stored.
    """

    position_P: Tensor
    slots_K: tuple[Slots, ...]
    tokens_K: tuple[Tensor, ...]
    pick_S: Tensor
    row_S: Tensor
    step_S: Tensor
    blocks: tuple[tuple[Tensor, Tensor], ...]
    counts: Tensor
    argmax_P: Tensor | None


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target at the P judged positions.

    hidden_PH: its last hidden states, as stored. argmax_P: its best tokens. position_mask_P: bool,
    whether these are draft tokens. ids_W: the draft tokens' ids in the target.
    """

    plan: StepPlan
    hidden_PH: Tensor
    argmax_P: Tensor
    position_mask_P: Tensor
    vocabulary: TargetVocabulary
    ids_W: Tensor

    @property
    def draft_rows_WH(self) -> Tensor:
        """lm_head's rows of the draft tokens, gathered anew at each call."""
        return self.vocabulary.lm_head.index_select(0, self.ids_W)

    def probabilities(self, rows_R: Tensor, draft_rows_WH: Tensor) -> Tensor:
        """The target's softmax over the draft tokens alone [R, W], at rows_R of the P."""
        logits_RW = products(self.hidden_PH.index_select(0, rows_R), draft_rows_WH)
        return self.vocabulary.capped(logits_RW).softmax(-1)


class BatchLoss(NamedTuple):
    """The loss, a scalar with a gradient, and figures of each step [K]: the mean loss; judged
    slots; those that carry loss; of these, drafts equal to the target's argmax.

    A tuple, so that FSDP2 finds the loss in it and hooks into its backward.
    """

    loss: Tensor
    step_losses: Tensor
    num_judged: Tensor
    num_trained: Tensor
    num_hits: Tensor


def judged_positions(loss_mask_BT: Tensor) -> Tensor:
    """bool [B, T]: positions s > 0 with x_s and x_{s+1} under the mask."""
    judged_BT = loss_mask_BT & shifted(loss_mask_BT, 1)
    judged_BT[:, 0] = False
    return judged_BT


def shifted(x_BT: Tensor, by: int) -> Tensor:
    """[B, T] -> [B, T]: column t holds x_BT[:, t + by], or 0 beyond the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])))


def plan_of(
    batch: Batch, config: ObjectiveConfig, shape: HeadConfig, draw: float = 0.0, kind: str = "cpu"
) -> StepPlan:
    """The plan of a batch on the CPU, for a head of this shape.

    draw: in [0, 1), which slots later steps continue. kind: of the device that computes.
    """
    size = ROWS_IN_STEPS_OF.get(kind, ROWS_IN_STEPS_OF_ELSEWHERE)
    judged_BT = judged_positions(batch.loss_mask_BT)
    position_P = judged_BT.flatten().nonzero().squeeze(1)
    row_BT = (judged_BT.flatten().cumsum(0).view_as(judged_BT) - 1).where(judged_BT, -1)
    row_at_step_BT = rows_at_steps(row_BT, config, draw)
    slots_K, rows_K = slots_at_steps(row_at_step_BT, size, shape.sliding_window, kind)
    tokens_K = [shifted(batch.tokens_BT, 1).flatten()]
    tokens_K += [
        slots.take(shifted(batch.tokens_BT, 1 + step)) for step, slots in enumerate(slots_K) if step
    ]
    row_O = torch.cat(rows_K)  # of all outputs, -1 where none is judged
    step_O = torch.repeat_interleave(torch.tensor([len(row_N) for row_N in rows_K]))
    pick_S = (row_O >= 0).nonzero().squeeze(1)
    row_S, order_S = row_O[pick_S].sort(stable=True)
    pick_S = pick_S[order_S]
    num_judged = torch.bincount(step_O[pick_S], minlength=config.num_ttt_steps)
    last_row = int(row_S[-1]) if len(row_S) else 0
    row_S = filled(row_S, size, last_row)
    at_once = LOGITS_AT_ONCE.get(kind, LOGITS_AT_ONCE_ELSEWHERE) // shape.draft_vocab_size
    blocks = []
    for rows_R in torch.split(row_S, max(size, at_once // size * size)):
        rows_U, of_R = torch.unique_consecutive(rows_R, return_inverse=True)
        blocks.append((filled(rows_U, size // 16, last_row).int(), of_R.int()))
    sizes = torch.tensor([len(batch.keys), sum(batch.lengths)])
    argmax_P = batch.argmax_BT.flatten()[position_P]
    position_P = filled(position_P, size, int(position_P[-1]) if len(position_P) else 0)
    return StepPlan(
        position_P.int(),
        tuple(slots_K),
        tuple(one.int() for one in tokens_K),
        filled(pick_S, size, 0).int(),
        row_S.int(),
        filled(step_O[pick_S], size, config.num_ttt_steps).int(),
        tuple(blocks),
        torch.cat([num_judged, sizes]).int(),
        # clamp: without judged positions the filler has no best token, and counts nowhere
        batch.argmax_BT.flatten()[position_P].clamp(min=0) if (argmax_P >= 0).all() else None,
    )


def filled(x: Tensor, size: int, value: int) -> Tensor:
    """x [N] padded with this value to a multiple of `size` above 0."""
    return F.pad(x, (0, -len(x) % size if len(x) else size), value=value)


@torch.no_grad()
def teach(batch: Batch, vocabulary: TargetVocabulary, head: Head, plan: StepPlan) -> Teacher:
    """The target at the plan's judged positions.

    Without stored best tokens: argmax of logits in float32, or wider with lm_head; call it outside
    autocast. Of equal logits the smallest id wins.
    """
    hidden_PH = batch.last_hidden_BTH.flatten(0, 1).index_select(0, plan.position_P)
    argmax_P = vocabulary.best(hidden_PH) if plan.argmax_P is None else plan.argmax_P
    in_draft_P = head.t2d.index_select(0, argmax_P)
    return Teacher(plan, hidden_PH, argmax_P, in_draft_P, vocabulary, head.target_ids_W)


def loss_rows(logits_RW: Tensor, p_RW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropies [R], their gradient by the logits [R, W], and the argmax [R].

    Logits are float32 or wider. The loss is -sum_w p_w log q_w, q the draft's softmax, p_RW the
    target's over the draft vocabulary.
    """
    q_RW = logits_RW.softmax(-1)
    best_R, choice_R = logits_RW.max(-1)
    log_sum_R = best_R - q_RW.gather(-1, choice_R.unsqueeze(-1)).squeeze(-1).log()
    losses_R = log_sum_R - torch.linalg.vecdot(p_RW, logits_RW)
    return losses_R, q_RW.sub_(p_RW), choice_R


class Distillation(torch.autograd.Function):
    """lm_head and loss in one: hidden states [S, H] -> loss, without logits [S, W].

    Returns the weighted sum (a scalar), and of each row loss and argmax [S]. The forward computes
    the gradients, R rows at a time, in the plan's order: a teacher's row is computed once for all
    steps that share it.
    """

    @staticmethod
    def forward(
        ctx: Any, normed_SH: Tensor, lm_head_WH: Tensor, weight_S: Tensor, teacher: Teacher
    ) -> tuple[Tensor, Tensor, Tensor]:
        """weight_S: of each row in the sum, which alone has a gradient."""
        wide = torch.promote_types(normed_SH.dtype, torch.float32)
        by_rows, by_head = ctx.needs_input_grad[:2]
        grad_SH = torch.empty_like(normed_SH) if by_rows else None
        grad_WH = torch.zeros_like(lm_head_WH, dtype=wide) if by_head else None
        draft_rows_WH = teacher.draft_rows_WH
        losses, choices, end = [], [], 0
        for rows_U, of_R in teacher.plan.blocks:
            part = slice(end, end := end + len(of_R))
            grad_RW = normed_SH[part] @ lm_head_WH.T  # the logits: overwritten by their gradient
            p_UW = teacher.probabilities(rows_U, draft_rows_WH)
            losses_R, choices_R = block_losses(grad_RW, weight_S[part], p_UW, of_R)
            losses.append(losses_R)
            choices.append(choices_R)
            if grad_SH is not None:
                torch.mm(grad_RW, lm_head_WH, out=grad_SH[part])
            if grad_WH is not None:
                grad_WH += grad_RW.T @ normed_SH[part]
        ctx.save_for_backward(grad_SH, grad_WH)
        losses_S, choices_S = torch.cat(losses), torch.cat(choices)
        ctx.mark_non_differentiable(losses_S, choices_S)
        return (weight_S * losses_S).sum(), losses_S, choices_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_SH, grad_WH = ctx.saved_tensors
        by_rows = None if grad_SH is None else grad_SH * grads[0].to(grad_SH.dtype)
        return by_rows, None if grad_WH is None else grad_WH * grads[0], None, None


def block_losses(
    logits_RW: Tensor, weight_R: Tensor, p_UW: Tensor, of_R: Tensor
) -> tuple[Tensor, Tensor]:
    """`part_losses` some rows at a time; on a GPU compiled."""
    if logits_RW.is_cuda:
        return compiled_losses()(logits_RW, weight_R, p_UW, of_R)
    at_once = max(1, LOGITS_IN_CACHE // logits_RW.shape[1])
    parts = (torch.split(of_all, at_once) for of_all in (logits_RW, weight_R, of_R))
    made = [
        part_losses(logits, weight, p_UW, of) for logits, weight, of in zip(*parts, strict=True)
    ]
    losses, choices = zip(*made, strict=True)
    return torch.cat(losses), torch.cat(choices)


def part_losses(
    logits_RW: Tensor, weight_R: Tensor, p_UW: Tensor, of_R: Tensor
) -> tuple[Tensor, Tensor]:
    """Losses and argmax [R] of logits, which are overwritten by the gradient of the weighted
    losses. p_UW: the teacher's rows; of_R: that of each row.
    """
    p_RW = p_UW.index_select(0, of_R)
    losses_R, grad_RW, choice_R = loss_rows(logits_RW.to(p_RW.dtype), p_RW)
    logits_RW.copy_(grad_RW.mul_(weight_R.unsqueeze(-1)))
    return losses_R, choice_R


@functools.cache
def compiled_losses() -> Callable[..., tuple[Tensor, Tensor]]:
    """`part_losses` for a GPU."""
    return torch.compile(part_losses)


def batch_loss(
    head: Head,
    embed_tokens: Tensor,
    batch: Batch,
    teacher: Teacher,
    config: ObjectiveConfig,
    divisor_K: Tensor | None = None,
) -> BatchLoss:
    """sum_i STEP_DECAY^i * mean loss of the slots of step i that carry loss.

    Tokens are teacher-forced; the fed-back state is not detached. embed_tokens [V, H]: the
    target's, for a head without its own; the unroll starts in its dtype. divisor_K: the sum of
    `trained_slots` over all batches of the step; default: this batch's.
    """
    embed_tokens = (
        embed_tokens if head.embed_tokens is None else head.embed_tokens.to(embed_tokens.dtype)
    )
    plan = teacher.plan

    def true_embeds(step: int, _: Tensor) -> Tensor:
        return F.embedding(plan.tokens_K[step], embed_tokens)

    embeds_BTH = true_embeds(0, embed_tokens).view(*batch.tokens_BT.shape, -1)
    aux_hidden_BTA = batch.aux_hidden_BTA.to(embed_tokens.dtype)
    outputs = unroll(head, aux_hidden_BTA, embeds_BTH, plan.slots_K, true_embeds, config.recompute)
    hidden_SH = torch.cat([*outputs]).index_select(0, plan.pick_S)
    K, device = config.num_ttt_steps, hidden_SH.device
    trained_K = trained_slots(teacher, K)
    divisor_K = (trained_K if divisor_K is None else divisor_K.to(trained_K)).clamp(min=1)
    decay_K = STEP_DECAY ** torch.arange(K, dtype=divisor_K.dtype, device=device)
    carries_S = teacher.position_mask_P.index_select(0, plan.row_S)
    weight_S = F.pad(decay_K / divisor_K, (0, 1)).index_select(0, plan.step_S) * carries_S
    (normed_SH,) = by_rows(lambda rows: (head.normed(rows),), config.recompute, hidden_SH)
    lm_head_WH = head.lm_head.weight
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        normed_SH, lm_head_WH = normed_SH.to(dtype), lm_head_WH.to(dtype)
    with torch.autocast(device.type, enabled=False):
        loss, loss_S, choice_S = Distillation.apply(  # type: ignore[no-untyped-call]
            normed_SH, lm_head_WH, weight_S, teacher
        )
    # a target's best token that is no draft token is never hit
    hit_S = head.target_ids_W[choice_S] == teacher.argmax_P.index_select(0, plan.row_S)
    return BatchLoss(
        loss=loss,
        step_losses=by_step(loss_S * carries_S, plan, K) / divisor_K,
        num_judged=plan.counts[:K],
        num_trained=trained_K,
        num_hits=by_step(hit_S.to(loss_S), plan, K),
    )


def trained_slots(teacher: Teacher, num_steps: int) -> Tensor:
    """The slots of each step that carry loss, in the loss' dtype [K]."""
    plan, lm_head = teacher.plan, teacher.vocabulary.lm_head
    carries_P = teacher.position_mask_P.to(torch.promote_types(lm_head.dtype, torch.float32))
    return by_step(carries_P.index_select(0, plan.row_S), plan, num_steps)


def by_step(x_S: Tensor, plan: StepPlan, num_steps: int) -> Tensor:
    """The sums of x_S over the slots of each step [K]."""
    return x_S.new_zeros(num_steps + 1).index_add(0, plan.step_S, x_S)[:num_steps]


def rows_at_steps(row_BT: Tensor, config: ObjectiveConfig, draw: float) -> list[Tensor]:
    """The teacher's row of each slot at each step, int64 [B, T], -1 for none, from row_BT of the
    positions.

    Sampled: slot n continues to step i if frac(n * golden ratio + draw) < STEP_DECAY ** i.
    """
    rows = [shifted(row_BT + 1, 1 + step) - 1 for step in range(config.num_ttt_steps)]
    if config.later_steps == "all":
        return rows
    place_T = (torch.arange(row_BT.shape[1]).double() * GOLDEN_RATIO + draw) % 1.0
    return [row_BT.where(place_T < STEP_DECAY**step, -1) for step, row_BT in enumerate(rows)]


def slots_at_steps(
    row_at_step_BT: Sequence[Tensor], size: int, window: int | None, kind: str
) -> tuple[list[Slots], list[Tensor]]:
    """The slots to unroll at each step, and the teacher's row of each, -1 for none.

    Those with a row at the step or later, filled up to a multiple of `size`; the slots of the step
    before if that is no fewer.
    """
    active_KBT = torch.stack([row_BT >= 0 for row_BT in row_at_step_BT])
    active_KBT = active_KBT.flip(0).cumsum(0).flip(0) > 0
    slots_K: list[Slots] = []
    rows_K, num_real = [], 0
    for active_BT, row_BT in zip(active_KBT, row_at_step_BT, strict=True):
        flat_N = active_BT.flatten().nonzero().squeeze(1)
        spare = flat_N[-1:] if len(flat_N) else slots_K[-1].flat_N[:1] if slots_K else [0]
        flat_N, wanted = filled(flat_N, size, int(spare[0])), len(flat_N)
        if slots_K and len(flat_N) == len(slots_K[-1].flat_N):
            slots_K.append(slots_K[-1])
        else:
            num_real = wanted
            of_step = Slots.of(flat_N, active_BT.shape, window, kind)
            if slots_K:
                kept_N = torch.searchsorted(slots_K[-1].flat_N, of_step.flat_N, out_int32=True)
                of_step = of_step._replace(kept_N=kept_N)
            slots_K.append(of_step)
        row_N = slots_K[-1].take(row_BT)
        row_N[num_real:] = -1
        rows_K.append(row_N)
    return slots_K, rows_K
