"""What a head would have accepted of an answer, in chains, from features alone: no engine runs.

Every slot of an answer is unrolled at once, fed with its own drafts; how many of them equal the
answer's own tokens is all that a round begun there depends on. `tau.RoundCounts.add_answer` walks
these numbers as serving walks the answer.

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
    """Of each answer of two tokens or more its sample's number in the batch and its `matches`, as
    `tau.RoundCounts.add_answer` takes them. embed_tokens: as in `free_running_drafts`.
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
    """The chain that each slot drafts when every step takes the draft of the one before: target ids
    int64 [N, K].

    Slot t has x_{t+1} for its bonus token; its drafts stand for x_{t+2} onwards. embed_tokens [V,
    H]: the target's, for a head that has none of its own.
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
    """How many drafts of each slot, before its first miss, equal the tokens under the loss mask:
    int64 [N].
    """
    T = batch.tokens_BT.shape[1]
    offset_K = 2 + torch.arange(drafts_NK.shape[1], device=drafts_NK.device)
    inside_NK = slots.slot_N[:, None] + offset_K < T
    flat_NK = (slots.flat_N[:, None] + offset_K).where(inside_NK, 0)
    inside_NK &= batch.loss_mask_BT.flatten()[flat_NK]
    return ((drafts_NK == batch.tokens_BT.flatten()[flat_NK]) & inside_NK).long().cumprod(1).sum(1)


def runs(flags: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """First and end of each run of True."""
    for value, group in groupby(range(len(flags)), key=flags.__getitem__):
        if value:
            numbers = list(group)
            yield numbers[0], numbers[-1] + 1
