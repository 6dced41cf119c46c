"""tau on held-out conversations in the chains of `model.chain`, measured by all ranks.

The counts are whole numbers and the batches are the same on any number of ranks, so tau is too, as
far as equal weights give equal drafts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.model.batch import Batch, plan_batches
from eyas.model.chain import measure
from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary
from eyas.shards import FeatureSource, order_of
from eyas.tau import RoundCounts, ratio_of_sums
from eyas.train.ranks import Ranks


@dataclass(frozen=True, slots=True)
class HeldOutSample:
    """Conversations of a source, by number, and how they are measured: in chains of
    num_draft_steps, with maths in `dtype`.
    """

    source: FeatureSource
    numbers: tuple[int, ...]
    num_draft_steps: int
    batch_tokens: int
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        source: FeatureSource,
        num_samples: int,
        num_draft_steps: int,
        batch_tokens: int,
        dtype: torch.dtype,
    ) -> HeldOutSample:
        """num_samples conversations of the source, or all there are; always the same ones."""
        numbers = sorted(order_of(len(source), seed=0, epoch=0)[:num_samples])
        return cls(source, tuple(numbers), num_draft_steps, batch_tokens, dtype)

    def counts(self, head: Head, vocabulary: TargetVocabulary, ranks: Ranks) -> Tensor:
        """Emitted tokens and rounds of each conversation, int64 [samples, 2], on every rank."""
        lengths = [self.source.lengths[number] for number in self.numbers]
        mine = ranks.share(plan_batches(lengths, self.batch_tokens, "held out"))
        counts = torch.zeros(len(self.numbers), 2, dtype=torch.float64)  # of this rank's part
        device = vocabulary.embed_tokens.device
        with ranks.together():
            batches = self.source.batches([[self.numbers[at] for at in places] for places in mine])
            for places, samples in zip(mine, batches, strict=True):
                batch = Batch.of(samples, str(device))
                with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
                    measured = measure(head, vocabulary, batch, self.num_draft_steps)
                for number, matches in measured.spans:
                    rounds = RoundCounts(self.num_draft_steps)
                    rounds.add_answer(matches)
                    counts[places[number]] += torch.tensor([rounds.emitted, rounds.rounds])
        totals = torch.tensor(ranks.total(counts.flatten().tolist()), dtype=torch.float64)
        return totals.long().view(-1, 2)


def tau_of_counts(counts: Tensor) -> float:
    """Emitted tokens by rounds over all conversations [samples, 2]; 0 without a round."""
    return float(ratio_of_sums(counts.numpy()))
