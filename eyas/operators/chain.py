"""Acceptance of a head's chains on stored answers, from features: no engine runs.

All slots of an answer are unrolled at once, each fed with its own drafts, and the drafts that equal
the answer's tokens are counted; `tau.RoundCounts.add_answer` makes rounds of the counts.

Letters: B batch, T sequence, N slots unrolled, K draft steps, H hidden, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.operators.batch import Batch
from eyas.operators.head import Head
from eyas.operators.ttt import Slots, unroll


@torch.inference_mode()
def matched_spans(
    head: Head, embed_tokens: Tensor, batch: Batch, num_draft_steps: int
) -> list[tuple[int, list[int]]]:
    """Of each answer of two tokens or more: its sample's number in the batch, and the matches for
    `tau.RoundCounts.add_answer`. embed_tokens: as in `free_running_drafts`.
    """
    mask_BT = batch.loss_mask_BT
    starts_BT = F.pad(mask_BT[:, 1:-1] & mask_BT[:, 2:], (0, 2))
    matches_BT = torch.zeros_like(batch.tokens_BT)
    if starts_BT.any():
        slots = Slots.where(starts_BT, window=head.config.sliding_window)
        drafts_NK = free_running_drafts(head, embed_tokens, batch, slots, num_draft_steps)
        matches_BT.view(-1)[slots.flat_N] = leading_matches(drafts_NK, batch, slots)
    rows = zip(starts_BT.tolist(), matches_BT.tolist(), strict=True)
    return [
        (number, matches_T[first:end])
        for number, (starts_T, matches_T) in enumerate(rows)
        for first, end in runs(starts_T)
    ]


def free_running_drafts(
    head: Head, embed_tokens: Tensor, batch: Batch, slots: Slots, num_draft_steps: int
) -> Tensor:
    """The chain that each slot drafts, every step fed with the draft before: target ids int64
    [N, K]. Slot t has the bonus token x_{t+1} and drafts x_{t+2} onwards.

    embed_tokens [V, H]: the target's, for a head without its own.
    """
    embed_tokens = embed_tokens if head.embed_tokens is None else head.embed_tokens
    drafts: list[Tensor] = []

    def draft(hidden_NH: Tensor) -> None:
        drafts.append(head.target_ids_W[head.logits(hidden_NH).argmax(-1)])

    def draft_embeds(_: int, hidden_NH: Tensor) -> Tensor:
        draft(hidden_NH)
        return F.embedding(drafts[-1], embed_tokens)

    embeds_BTH = F.embedding(batch.tokens_BT.roll(-1, dims=1), embed_tokens)
    aux_hidden_BTA = batch.aux_hidden_BTA.to(embed_tokens.dtype)
    steps = [slots] * num_draft_steps
    for hidden_NH in unroll(head, aux_hidden_BTA, embeds_BTH, steps, draft_embeds):
        last_NH = hidden_NH
    draft(last_NH)
    return torch.stack(drafts, dim=1)


def leading_matches(drafts_NK: Tensor, batch: Batch, slots: Slots) -> Tensor:
    """The number of drafts of each slot before its first miss of the masked tokens, int64 [N]."""
    T = batch.tokens_BT.shape[1]
    offset_K = 2 + torch.arange(drafts_NK.shape[1], device=drafts_NK.device)
    inside_NK = slots.slot_N[:, None] + offset_K < T
    flat_NK = (slots.flat_N[:, None] + offset_K).where(inside_NK, 0)
    inside_NK &= batch.loss_mask_BT.flatten()[flat_NK]
    return ((drafts_NK == batch.tokens_BT.flatten()[flat_NK]) & inside_NK).long().cumprod(1).sum(1)


def runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """[first, end) of each run of True."""
    for value, group in groupby(range(len(flags)), key=flags.__getitem__):
        if value:
            numbers = list(group)
            yield numbers[0], numbers[-1] + 1
