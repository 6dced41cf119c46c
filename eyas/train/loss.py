"""The training objective: EAGLE-3's reference (EAGLE3.md, section 3) over the unrolled steps, as pure functions.

Knows the masks, the teacher and the loss. Does not know optimizers, files or where batches come from.

    tokens      [x0 x1 x2 x3 x4 x5]     loss_mask of an answer x3 x4 x5:  [0 0 0 1 1 1]
    judged      [0  0  0  1  1  0 ]     position s: x_s is the answer's and so is x_{s+1}, which the target predicts there
    slot t at step i is judged at s = t + 1 + i: its draft of x_{t+2+i} against the target's logits at s

At step 0 this is loss_mask[t+1] and loss_mask[t+2], what serving asks of a head: x_{t+1} is the target's own token, x_{t+2} the
first draft. Every later step is the same set, shifted left by one more.

Letters: B batch, T sequence, N slots unrolled, P judged positions, R slots with a loss at one step, S = R
of all steps, H hidden, V target
vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.model.batch import Batch
from eyas.model.head import Head
from eyas.model.ttt import Slots, unroll
from eyas.model.vocab import TargetVocabulary

ROWS_AT_ONCE = 512  # of logits over the whole target vocabulary: 256 MB at 128 k tokens
ROWS_IN_CACHE = 128  # of logits over the draft vocabulary: 1 MB at 2048 tokens


@dataclass(frozen=True, slots=True)
class Teacher:
    """What the target says at the P judged positions.

    row_BT: int64, the position's row among the P, -1 where nothing is judged. target_p_PW: softmax over the draft vocabulary
    only, float32 or wider. argmax_P: the target's own choice in its whole vocabulary. position_mask_P: is it draftable.
    """

    row_BT: Tensor
    target_p_PW: Tensor
    argmax_P: Tensor
    position_mask_P: Tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The loss of a batch, and per step: its loss, the slots judged, those that carry loss, and drafts equal to the argmax."""

    loss: Tensor
    step_losses: Tensor
    num_judged: Tensor
    num_trained: Tensor
    num_hits: Tensor


def judged_positions(loss_mask_BT: Tensor) -> Tensor:
    """bool [B, T]: token s and the next one are both under the loss mask."""
    return loss_mask_BT & shifted(loss_mask_BT, 1)


def shifted(x_BT: Tensor, by: int) -> Tensor:
    """x_BT[:, t + by] at t, zeros (False) beyond the end."""
    return F.pad(x_BT[:, by:], (0, min(by, x_BT.shape[1])))


@torch.no_grad()
def teach(batch: Batch, vocabulary: TargetVocabulary, head: Head) -> Teacher:
    """Run the target's lm_head over the judged positions' last hidden states; call it outside autocast."""
    judged_BT = judged_positions(batch.loss_mask_BT)
    rank_BT = judged_BT.flatten().cumsum(0).view_as(judged_BT) - 1
    ids_W = head.target_ids_W
    target_p, argmax = [], []
    for hidden_RH in torch.split(batch.last_hidden_BTH[judged_BT].to(vocabulary.lm_head.dtype), ROWS_AT_ONCE):
        logits_RV = hidden_RH @ vocabulary.lm_head.T
        target_p.append(logits_RV.index_select(1, ids_W).softmax(-1))
        argmax.append(logits_RV.argmax(-1))
    argmax_P = torch.cat(argmax)
    return Teacher(rank_BT.where(judged_BT, -1), torch.cat(target_p), argmax_P, head.t2d[argmax_P])


class SoftCrossEntropy(torch.autograd.Function):
    """-sum_w p_w log softmax(logits)_w of each row, and the row's argmax, in one sweep over the logits.

    The gradient, softmax(logits) - p, is made while a block of rows is in the cache and kept in the logits' dtype: a third of
    the time of autograd's own, at 2048 draft tokens on a CPU. Sums are float32 or wider.
    """

    @staticmethod
    def forward(ctx: Any, logits_RW: Tensor, target_p_PW: Tensor, row_R: Tensor) -> tuple[Tensor, Tensor]:
        """row_R: which row of target_p_PW is each row's p. Returns losses [R] and argmax int64 [R]."""
        losses, choices, grad_RW = [], [], torch.empty_like(logits_RW)
        blocks = zip(*(torch.split(x, ROWS_IN_CACHE) for x in (logits_RW, row_R, grad_RW)), strict=True)
        for logits, rows, grad in blocks:
            log_q = logits.log_softmax(-1, dtype=target_p_PW.dtype)
            p = target_p_PW.index_select(0, rows)
            losses.append(-(p * log_q).sum(-1))
            choices.append(log_q.max(-1).indices)
            grad.copy_(log_q.exp_().sub_(p))
        ctx.save_for_backward(grad_RW)
        choice_R = torch.cat(choices)
        ctx.mark_non_differentiable(choice_R)
        return torch.cat(losses), choice_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        """Of the losses' gradient [R] only: the argmax has none."""
        (grad_RW,) = ctx.saved_tensors
        return grad_RW * grads[0].to(grad_RW.dtype).unsqueeze(-1), None, None


def objective(
    head: Head, embed_tokens: Tensor, batch: Batch, teacher: Teacher, num_ttt_steps: int, step_decay: float
) -> Outcome:
    """loss = sum_i step_decay^i * mean soft cross entropy of step i over its slots that carry loss.

    Slots whose target argmax is outside the draft vocabulary carry none, and count as misses. Tokens are teacher-forced; the
    fed-back state is not detached. embed_tokens [V, H]: the unroll starts in its dtype. A batch must hold a judged position.
    """
    row_at_step_BT = [shifted(teacher.row_BT + 1, 1 + step) - 1 for step in range(num_ttt_steps)]
    token_at_step_BT = [shifted(batch.tokens_BT, 1 + step) for step in range(num_ttt_steps)]
    slots = Slots.where(torch.stack(row_at_step_BT).amax(0) >= 0)

    def true_embeds(step: int, _: Tensor) -> Tensor:
        return F.embedding(slots.take(token_at_step_BT[step]), embed_tokens)

    embeds_BTH = F.embedding(token_at_step_BT[0], embed_tokens)
    aux_hidden_BTA = batch.aux_hidden_BTA.to(embed_tokens.dtype)
    hidden, rows, num_judged = [], [], []
    for step, hidden_NH in enumerate(unroll(head, aux_hidden_BTA, embeds_BTH, slots, true_embeds, num_ttt_steps)):
        row_N = slots.take(row_at_step_BT[step])
        trained_R = ((row_N >= 0) & teacher.position_mask_P[row_N.clamp(min=0)]).nonzero().squeeze(1)
        hidden.append(hidden_NH.index_select(0, trained_R))
        rows.append(row_N[trained_R])
        num_judged.append((row_N >= 0).sum())
    logits_SW, row_S = head.logits(torch.cat(hidden)), torch.cat(rows)  # all steps at once: one product, one gradient
    loss_S, choice_S = SoftCrossEntropy.apply(logits_SW, teacher.target_p_PW, row_S)  # type: ignore[no-untyped-call]
    hit_S = head.target_ids_W[choice_S] == teacher.argmax_P[row_S]
    sizes = [len(row_R) for row_R in rows]
    step_losses = torch.stack([loss_R.sum() / max(len(loss_R), 1) for loss_R in torch.split(loss_S, sizes)])
    decay = step_decay ** torch.arange(num_ttt_steps, dtype=step_losses.dtype, device=step_losses.device)
    return Outcome(
        loss=(decay * step_losses).sum(),
        step_losses=step_losses.detach(),
        num_judged=torch.stack(num_judged),
        num_trained=torch.tensor(sizes),
        num_hits=torch.stack([hit_R.sum() for hit_R in torch.split(hit_S, sizes)]),
    )
