"""The training objective: EAGLE-3's reference over the unrolled steps, as pure functions.

    tokens      [x0 x1 x2 x3 x4 x5]     loss_mask of an answer x3 x4 x5:  [0 0 0 1 1 1]
    judged      [0  0  0  1  1  0 ]     position s: x_s is the answer's, and so is x_{s+1}, which
                                        the target predicts at s
    slot t at step i is judged at s = t + 1 + i: its draft of x_{t+2+i} against the target's logits
    at s

At step 0 this is loss_mask[t+1] and loss_mask[t+2], what serving asks of a head: x_{t+1} is the
target's own token, x_{t+2} the first draft. Every later step is the same set, shifted left by one
more. No position is judged from another document's slot. A slot whose target argmax is outside the
draft vocabulary carries no loss and counts as a miss.
docs/decisions/training.md says where the reference leaves a choice.

Nothing as wide as a vocabulary is kept: the target's logits are computed again where they are
needed, some rows at a time.

Letters: B batch, T sequence, K steps, N slots unrolled, P judged positions, S slots with a loss at
all steps together, R some rows of P or S, U the distinct teacher's rows of R, H hidden, A = 3 * the
target's hidden size, V target vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.ttt import Slots, by_rows, unroll
from eyas.operators.vocab import TargetVocabulary

STEP_DECAY = 0.8  # the weight of step i is its i-th power, as in the reference
# How many numbers are computed at a time
TEACHER_ROWS = 1024  # R of the teacher's argmax
# R x W of `Distillation`: 64 MB in bf16; with more rows lm_head's gradient is summed less often
LOGITS_AT_ONCE = 1 << 25
LOGITS_IN_CACHE = 1 << 18  # R x W of `block_losses` on a CPU: they are read several times
SLOTS_IN_STEPS_OF = 128  # N is a multiple of it: oneDNN keeps code and buffers for every size
GOLDEN_RATIO = (5**0.5 - 1) / 2  # its multiples, without their whole part, fill [0, 1) evenly


class ObjectiveConfig(BaseModel):
    """The loss: EAGLE-3's reference, except for the loss mask, the mean over judged slots, and the
    defaults of what follows (docs/decisions/training.md).

    num_ttt_steps: K. later_steps: whether all slots are unrolled to the last step, or of step i the
    share STEP_DECAY ** i (sampled), others in every training step: the same loss on average, for
    little more than half of the work. weight_decay: of all weights but norms, times the learning
    rate (decoupled, as in AdamW). recompute: keep little of each step of the unroll for the
    backward and compute the rest again: the same loss but for rounding, in a fraction of the
    memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_ttt_steps: int = Field(5, ge=1, le=16)
    later_steps: Literal["all", "sampled"] = "sampled"
    weight_decay: float = Field(0.0, ge=0)
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target at the P judged positions.

    row_BT: int64, the position's row among the P, -1 where nothing is judged. hidden_PH: the
    target's last hidden states there. lm_head_WH: the rows of its lm_head for the draft's tokens.
    argmax_P: int64, its best token in the whole vocabulary. position_mask_P: bool, whether that
    token is in the draft vocabulary. draw: in [0, 1), which slots continue where later steps are
    sampled.
    """

    row_BT: Tensor
    hidden_PH: Tensor
    lm_head_WH: Tensor
    argmax_P: Tensor
    position_mask_P: Tensor
    vocabulary: TargetVocabulary
    draw: float = 0.0

    def probabilities(self, rows_R: Tensor) -> Tensor:
        """The target's softmax over the draft's tokens alone [R, W], at rows_R, int64, of the P."""
        logits_RW = self.vocabulary.capped(
            self.hidden_PH.index_select(0, rows_R) @ self.lm_head_WH.T
        )
        return logits_RW.softmax(-1)


class BatchLoss(NamedTuple):
    """The loss of a batch, a scalar with a gradient, and figures of each step [K].

    step_losses: the mean loss. num_judged: judged slots. num_trained: those that carry loss.
    num_hits: of these, drafts equal to the target's argmax. A tuple, so that FSDP2 finds the loss
    in it and hooks into its backward.
    """

    loss: Tensor
    step_losses: Tensor
    num_judged: Tensor
    num_trained: Tensor
    num_hits: Tensor


def judged_positions(loss_mask_BT: Tensor, starts_BT: Tensor | None = None) -> Tensor:
    """bool [B, T]: the positions s whose prediction of x_{s+1} is trained on.

    Position s is judged where x_s and x_{s+1} are under the mask and of one document, of which s
    is not the first. loss_mask_BT: bool. starts_BT: as in a Batch; without it every row is one
    document without padding.
    """
    starts_BT = (
        torch.zeros_like(loss_mask_BT, dtype=torch.int64) if starts_BT is None else starts_BT
    )
    has_next_BT = (starts_BT >= 0) & (shifted(starts_BT + 1, 1) - 1 == starts_BT)
    column_T = torch.arange(loss_mask_BT.shape[1], device=loss_mask_BT.device)
    return loss_mask_BT & shifted(loss_mask_BT, 1) & (column_T > starts_BT) & has_next_BT


def shifted(x_BT: Tensor, by: int) -> Tensor:
    """[B, T] -> [B, T]: column t holds x_BT[:, t + by], or 0 (False) beyond the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])))


@torch.no_grad()
def teach(batch: Batch, vocabulary: TargetVocabulary, head: Head, draw: float = 0.0) -> Teacher:
    """What the losses of a batch need from the target, at its judged positions.

    Call it outside autocast: the argmax is that of logits in lm_head's precision. Of equal logits
    the smallest id wins.
    """
    judged_BT = judged_positions(batch.loss_mask_BT, batch.starts_BT)
    rank_BT = judged_BT.flatten().cumsum(0).view_as(judged_BT) - 1
    stored_PH = batch.last_hidden_BTH[judged_BT]
    argmax_P = torch.cat([vocabulary.best(part) for part in torch.split(stored_PH, TEACHER_ROWS)])
    lm_head_WH = vocabulary.lm_head.index_select(0, head.target_ids_W)
    return Teacher(
        rank_BT.where(judged_BT, -1),
        stored_PH.to(vocabulary.lm_head.dtype),
        lm_head_WH,
        argmax_P,
        head.t2d[argmax_P],
        vocabulary,
        draw,
    )


def loss_rows(logits_RW: Tensor, p_RW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cross entropies [R] of draft logits, their gradient by the logits [R, W], and the argmax
    [R].

    Logits are float32 or wider. With q the draft's softmax and p_RW the target's over the draft
    vocabulary alone, the loss is -sum_w p_w log q_w.
    """
    q_RW = logits_RW.softmax(-1)
    best_R, choice_R = logits_RW.max(-1)
    log_sum_R = best_R - q_RW.gather(-1, choice_R.unsqueeze(-1)).squeeze(-1).log()
    losses_R = log_sum_R - torch.linalg.vecdot(p_RW, logits_RW)
    return losses_R, q_RW.sub_(p_RW), choice_R


class Distillation(torch.autograd.Function):
    """lm_head and loss in one function: hidden states [S, H] -> loss, without logits [S, W].

    Returns the weighted sum of the rows' losses (a scalar), each row's loss [S] and argmax [S].
    Logits and their gradient exist for R rows at a time; the gradients of the rows and of lm_head
    are computed in the forward and kept for the backward. Rows must be sorted by row_S, so that a
    teacher's row is computed once for all steps that share it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed_SH: Tensor,
        lm_head_WH: Tensor,
        weight_S: Tensor,
        row_S: Tensor,
        teacher: Teacher,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """weight_S: of each row in the sum. row_S: int64, the teacher's row of each row.

        Only the sum has a gradient.
        """
        wide = torch.promote_types(normed_SH.dtype, torch.float32)
        by_rows, by_head = ctx.needs_input_grad[:2]
        grad_SH = torch.empty_like(normed_SH) if by_rows else None
        grad_WH = torch.zeros_like(lm_head_WH, dtype=wide) if by_head else None
        losses, choices = [weight_S[:0]], [row_S[:0]]  # a batch may hold no row that carries loss
        step = SLOTS_IN_STEPS_OF
        at_once = max(step, LOGITS_AT_ONCE // len(lm_head_WH) // step * step)
        for first in range(0, len(normed_SH), at_once):
            part = slice(first, first + at_once)
            normed_RH, R = normed_SH[part], len(normed_SH[part])
            normed_RH = F.pad(normed_RH, (0, 0, 0, -R % step)) if R % step else normed_RH
            logits_RW = normed_RH @ lm_head_WH.T
            losses_R, choices_R = block_losses(logits_RW[:R], weight_S[part], row_S[part], teacher)
            grad_RW = logits_RW
            grad_RW[R:] = 0
            losses.append(losses_R)
            choices.append(choices_R)
            if grad_SH is not None:
                grad_SH[part] = (grad_RW @ lm_head_WH)[:R]
            if grad_WH is not None:
                grad_WH += grad_RW.T @ normed_RH
        ctx.save_for_backward(grad_SH, grad_WH)
        losses_S, choices_S = torch.cat(losses), torch.cat(choices)
        ctx.mark_non_differentiable(losses_S, choices_S)
        return (weight_S * losses_S).sum(), losses_S, choices_S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        """grads: those of the three outputs; only the first, the sum's, is used."""
        grad_SH, grad_WH = ctx.saved_tensors
        by_rows = None if grad_SH is None else grad_SH * grads[0].to(grad_SH.dtype)
        return by_rows, None if grad_WH is None else grad_WH * grads[0], None, None, None


def block_losses(
    logits_RW: Tensor, weight_R: Tensor, row_R: Tensor, teacher: Teacher
) -> tuple[Tensor, Tensor]:
    """The losses and the argmax [R] of rows of logits, block by block.

    row_R: the teacher's rows, ascending. logits_RW is overwritten by the gradient of the weighted
    losses.
    """
    rows_U, of_R = torch.unique_consecutive(row_R, return_inverse=True)
    p_UW = teacher.probabilities(rows_U)
    at_once = (
        max(1, LOGITS_IN_CACHE // logits_RW.shape[1])
        if logits_RW.device.type == "cpu"
        else len(row_R)
    )
    losses, choices = [], []
    for first in range(0, len(row_R), at_once):
        part = slice(first, first + at_once)
        p_RW = p_UW.index_select(0, of_R[part])
        losses_R, grad_RW, choice_R = loss_rows(logits_RW[part].to(p_RW.dtype), p_RW)
        choices.append(choice_R)
        losses.append(losses_R)
        torch.mul(grad_RW, weight_R[part].unsqueeze(-1), out=logits_RW[part])
    return torch.cat(losses), torch.cat(choices)


def batch_loss(
    head: Head,
    embed_tokens: Tensor,
    batch: Batch,
    teacher: Teacher,
    config: ObjectiveConfig,
    divisor_K: Tensor | None = None,
) -> BatchLoss:
    """The loss of a batch: sum_i STEP_DECAY^i * mean loss of the slots of step i that carry loss.

    Tokens are teacher-forced; the fed-back state is not detached. embed_tokens [V, H]: the
    target's, for a head that has none of its own; the unroll starts in its dtype. divisor_K: the
    sum of `divisors` over all batches that the loss is of; by default this batch's own.
    """
    embed_tokens = (
        embed_tokens if head.embed_tokens is None else head.embed_tokens.to(embed_tokens.dtype)
    )
    row_at_step_BT = rows_at_steps(batch, teacher, config)
    slots_K = slots_at_steps(row_at_step_BT, batch.starts_BT, head.config.sliding_window)

    def true_embeds(step: int, _: Tensor) -> Tensor:
        return F.embedding(slots_K[step].take(shifted(batch.tokens_BT, 1 + step)), embed_tokens)

    embeds_BTH = F.embedding(shifted(batch.tokens_BT, 1), embed_tokens)
    aux_hidden_BTA = batch.aux_hidden_BTA.to(embed_tokens.dtype)
    hidden, rows, num_judged = [], [], []
    outputs = unroll(head, aux_hidden_BTA, embeds_BTH, slots_K, true_embeds, config.recompute)
    for slots, row_BT, hidden_NH in zip(slots_K, row_at_step_BT, outputs, strict=True):
        row_N = slots.take(row_BT)
        trained_R = carries_loss(row_N, teacher).nonzero().squeeze(1)
        hidden.append(hidden_NH.index_select(0, trained_R))
        rows.append(row_N[trained_R])
        num_judged.append((row_N >= 0).sum())
    divisor_K = divisors(batch, teacher, config) if divisor_K is None else divisor_K
    return slot_losses(head, hidden, rows, torch.stack(num_judged), teacher, config, divisor_K)


def divisors(batch: Batch, teacher: Teacher, config: ObjectiveConfig) -> Tensor:
    """int64 [K]: the slots of each step that carry loss."""
    rows = rows_at_steps(batch, teacher, config)
    return torch.stack([carries_loss(row_BT, teacher).sum() for row_BT in rows])


def rows_at_steps(batch: Batch, teacher: Teacher, config: ObjectiveConfig) -> list[Tensor]:
    """For each step the teacher's row of each slot, int64 [B, T], -1 for none.

    Where later steps are sampled, slot number n of a document continues to step i if n times
    the golden ratio plus teacher.draw, without its whole part, is below STEP_DECAY ** i.
    """
    rows = [
        ahead(teacher.row_BT, batch.starts_BT, 1 + step) for step in range(config.num_ttt_steps)
    ]
    if config.later_steps == "all":
        return rows
    number_BT = torch.arange(batch.starts_BT.shape[1], device=batch.starts_BT.device)
    number_BT = (number_BT - batch.starts_BT).double()  # the same in packed and in padded rows
    place_BT = (number_BT * GOLDEN_RATIO + teacher.draw) % 1.0
    return [row_BT.where(place_BT < STEP_DECAY**step, -1) for step, row_BT in enumerate(rows)]


def slots_at_steps(
    row_at_step_BT: Sequence[Tensor], starts_BT: Tensor, window: int | None = None
) -> list[Slots]:
    """The slots to unroll at each step: those with a row at it or later, rounded up. window: the
    head's.
    """
    slots_K: list[Slots] = []
    left_BT, reverse = torch.zeros_like(starts_BT, dtype=torch.bool), []
    for row_BT in reversed(row_at_step_BT):
        left_BT = left_BT | (row_BT >= 0)
        reverse.append(left_BT)
    candidates_BT = starts_BT >= 0
    for active_BT in reversed(reverse):
        wanted_BT = rounded_up(active_BT, candidates_BT) if active_BT.any() else candidates_BT
        if slots_K and torch.equal(wanted_BT, candidates_BT):
            slots_K.append(slots_K[-1])
        else:
            slots_K.append(Slots.where(wanted_BT, starts_BT, window))
        candidates_BT = wanted_BT
    return slots_K


def carries_loss(row: Tensor, teacher: Teacher) -> Tensor:
    """bool of `row`'s shape: which slots carry loss. row: their teacher's rows, -1 for none."""
    return (row >= 0) & teacher.position_mask_P[row.clamp(min=0)]


def ahead(row_BT: Tensor, starts_BT: Tensor, by: int) -> Tensor:
    """[B, T]: column t holds row_BT[:, t + by], or -1 if that is another document or padding."""
    same_BT = shifted(starts_BT + 1, by) - 1 == starts_BT
    return (shifted(row_BT + 1, by) - 1).where(same_BT, -1)


def rounded_up(active_BT: Tensor, candidates_BT: Tensor) -> Tensor:
    """active_BT with candidates added up to a multiple of SLOTS_IN_STEPS_OF.

    The added slots carry no loss; there may be too few candidates for a whole multiple.
    """
    missing = -int(active_BT.sum()) % SLOTS_IN_STEPS_OF
    others = (~active_BT & candidates_BT).flatten().nonzero().squeeze(1)[:missing]
    return active_BT.flatten().index_fill(0, others, True).view_as(active_BT)


def slot_losses(
    head: Head,
    hidden: list[Tensor],
    rows: list[Tensor],
    num_judged: Tensor,
    teacher: Teacher,
    config: ObjectiveConfig,
    divisor_K: Tensor,
) -> BatchLoss:
    """The loss from the slots that carry loss, in one call of `Distillation` for all steps.

    hidden, rows: for each step the layer's outputs [R, H] and the teacher's rows [R]. num_judged,
    divisor_K: int64 [K].
    """
    sizes = [len(row_R) for row_R in rows]
    device = teacher.row_BT.device
    num_trained = torch.tensor(sizes, device=device)
    wide = teacher.hidden_PH.dtype
    decay = STEP_DECAY ** torch.arange(len(sizes), dtype=wide, device=device)
    divisor_K = divisor_K.to(wide).clamp(min=1)
    step_S = torch.repeat_interleave(torch.arange(len(sizes), device=device), num_trained)
    row_S, order_S = torch.cat(rows).sort(stable=True)
    step_S = step_S[order_S]
    hidden_SH = torch.cat(hidden).index_select(0, order_S)
    (normed_SH,) = by_rows(lambda rows: (head.normed(rows),), config.recompute, hidden_SH)
    lm_head_WH = head.lm_head.weight
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        normed_SH, lm_head_WH = normed_SH.to(dtype), lm_head_WH.to(dtype)
    with torch.autocast(device.type, enabled=False):
        loss, loss_S, choice_S = Distillation.apply(  # type: ignore[no-untyped-call]
            normed_SH, lm_head_WH, (decay / divisor_K)[step_S], row_S, teacher
        )
    hit_S = head.target_ids_W[choice_S] == teacher.argmax_P[row_S]
    return BatchLoss(
        loss=loss,
        step_losses=loss_S.new_zeros(len(sizes)).index_add(0, step_S, loss_S) / divisor_K,
        num_judged=num_judged,
        num_trained=num_trained,
        num_hits=torch.zeros_like(num_trained).index_add(0, step_S, hit_S.long()),
    )
