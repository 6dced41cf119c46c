"""Does a head's loss tell answers that it was trained on from others? Not if it kept nothing of any
one conversation.

Letters: B samples, T the longest of them, N slots, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from eyas.artifact import Artifact
from eyas.errors import EmptyInputError
from eyas.evaluate.walks import BATCH_TOKENS, AnswerWalks
from eyas.hub import resolve_head, resolve_target
from eyas.operators.batch import Batch, plan_batches
from eyas.operators.head import Head
from eyas.operators.ttt import Slots, unroll
from eyas.operators.vocab import TargetVocabulary, products
from eyas.shards import Features, decode_sample, encoded
from eyas.tau import LEAST_ROWS, Interval

MOST_ANSWERS = 2000  # of each side


@dataclass(frozen=True, slots=True)
class Membership:
    """auc: of pairs of a trained and a held-out answer, the share in which the trained one has the
    smaller loss; .5 is a guess. interval: 95 % (DeLong et al. 1988). The rest counts answers.
    """

    auc: float
    interval: Interval
    trained: int
    held_out: int

    @classmethod
    def of(cls, trained: Sequence[float], held_out: Sequence[float]) -> Membership:
        """By the losses of either side. Raises EmptyInputError where one has fewer than LEAST_ROWS:
        of two each, all pairs are in order by chance once in six times, with no width at all.
        """
        if min(len(trained), len(held_out)) < LEAST_ROWS:
            raise EmptyInputError(
                f"there are {len(trained)} trained and {len(held_out)} held-out answers to compare",
                f"give stored features with {LEAST_ROWS} of both: capture.held_out_share above 0",
            )
        won = shares_above(trained, held_out), 1 - shares_above(held_out, trained)
        auc = float(won[0].mean())
        half = 1.96 * sum(one.var(ddof=1) / len(one) for one in won) ** 0.5
        return cls(auc, (auc - half, auc + half), len(trained), len(held_out))


def shares_above(losses: Sequence[float], others: Sequence[float]) -> np.ndarray:
    """For each loss, the share of the others above it; equal ones count half."""
    ordered = np.sort(others)
    below, up_to = (np.searchsorted(ordered, losses, side) for side in ("left", "right"))
    return 1 - (below + up_to) / 2 / len(ordered)


def membership(head: str, target: str, features: Artifact) -> Membership:
    """Of features that a head was trained on, and those held out beside them, MOST_ANSWERS each.
    Raises what `AnswerWalks.load`, `Features` and `Membership.of` raise.
    """
    vocabulary = TargetVocabulary.load(resolve_target(target, True))
    trained, held_out = Features(features, "train"), Features(features, "held_out")
    loaded = AnswerWalks.load(vocabulary, Path(resolve_head(head)), (), 1, trained).head
    assert loaded is not None
    of_held_out = losses(loaded, vocabulary, held_out, trained)
    return Membership.of(losses(loaded, vocabulary, trained), of_held_out)


def losses(
    head: Head, vocabulary: TargetVocabulary, source: Features, like: Features | None = None
) -> list[float]:
    """Of the first MOST_ANSWERS samples. like: features whose codec rounds; these samples are
    rounded too, else that alone would tell the two apart.
    """
    found = []
    lengths = source.lengths[:MOST_ANSWERS]
    for samples in source.batches(plan_batches(lengths, BATCH_TOKENS, "membership")):
        if like and like.codec and not like.meta.is_exact:
            stored = [encoded(sample, like.meta, like.codec) for sample in samples]
            samples = [decode_sample(one.data, one.entry, like.meta, like.codec) for one in stored]
        loss_B = answer_losses(head, vocabulary, Batch.of(samples))
        found += loss_B[loss_B.isfinite()].tolist()
    return found


@torch.inference_mode()
def answer_losses(head: Head, vocabulary: TargetVocabulary, batch: Batch) -> Tensor:
    """How far each answer's first drafts are from the target on average: KL divergence in nats over
    the draft vocabulary [B], NaN where nothing is drafted. An answer that is hard for the target
    too is not far.
    """
    batch, embed_tokens = batch.to(str(vocabulary.lm_head.device)), vocabulary.embed_tokens
    mask_BT = batch.loss_mask_BT
    drafts_BT = F.pad(mask_BT[:, 1:-1] & mask_BT[:, 2:], (0, 2))
    if not drafts_BT.any():
        return torch.full((len(mask_BT),), torch.nan)
    slots = Slots.where(drafts_BT, window=head.config.sliding_window)
    embeds_BTH = F.embedding(batch.tokens_BT.roll(-1, dims=1), embed_tokens)
    aux_hidden_BTA = batch.aux_hidden_BTA.to(embed_tokens.dtype)
    (hidden_NH,) = unroll(head, aux_hidden_BTA, embeds_BTH, [slots], lambda _, hidden: hidden)
    draft_NW = head.logits(hidden_NH).log_softmax(-1)
    next_NH = batch.last_hidden_BTH.flatten(0, 1)[slots.flat_N + 1]
    rows_WH = vocabulary.lm_head[head.target_ids_W]
    target_NW = vocabulary.capped(products(next_NH, rows_WH)).log_softmax(-1)
    loss_N = (target_NW.exp() * (target_NW - draft_NW)).sum(-1)
    sums_B = loss_N.new_zeros(len(mask_BT)).index_add(0, drafts_BT.nonzero()[:, 0], loss_N)
    return sums_B / drafts_BT.sum(1)
