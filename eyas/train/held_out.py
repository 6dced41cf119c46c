"""What a head would have accepted on a fixed sample of held-out conversations, the work shared by
all ranks.

Knows the chain of `model.chain`. Does not know why anybody asks. The unit is a conversation, whose
answers depend on each other.

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
from eyas.shards import order_of
from eyas.shards.source import FeatureSource
from eyas.tau import RoundCounts, ratio_of_sums
from eyas.train.ranks import Ranks


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A sample of a source, and how it is measured: in chains of num_draft_steps, maths in `dtype`."""

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
    ) -> HeldOut:
        """num_samples conversations of the source, or all there are; always the same ones."""
        numbers = sorted(order_of(len(source), seed=0, epoch=0)[:num_samples])
        return cls(source, tuple(numbers), num_draft_steps, batch_tokens, dtype)

    def counts(self, head: Head, vocabulary: TargetVocabulary, ranks: Ranks) -> Tensor:
        """Emitted tokens and rounds of each conversation, int64 [samples, 2], all of them on every
        rank.
        """
        lengths = [self.source.lengths[number] for number in self.numbers]
        mine = list(ranks.share(plan_batches(lengths, self.batch_tokens, "held out")))
        counted = ranks.together(lambda: self._counted(head, vocabulary, mine))
        totals = torch.tensor(ranks.total(counted.flatten().tolist()), dtype=torch.float64)
        return totals.long().view(-1, 2)

    def _counted(
        self, head: Head, vocabulary: TargetVocabulary, batches: list[list[int]]
    ) -> Tensor:
        """Of the conversations in these batches, given by their places in the sample; zeros for the
        others.
        """
        counts = torch.zeros(len(self.numbers), 2, dtype=torch.int64)
        device = vocabulary.embed_tokens.device
        samples_of = self.source.batches(
            [[self.numbers[place] for place in places] for places in batches]
        )
        for places, samples in zip(batches, samples_of, strict=True):
            with torch.autocast(device.type, self.dtype, enabled=self.dtype != torch.float32):
                measured = measure(
                    head, vocabulary, Batch.of(samples, str(device)), self.num_draft_steps
                )
            for number, matches in measured.spans:
                rounds = RoundCounts(self.num_draft_steps)
                rounds.add_answer(matches)
                counts[places[number]] += torch.tensor([rounds.emitted, rounds.rounds])
        return counts


def tau_of(counts: Tensor) -> float:
    """Emitted tokens by rounds over all conversations [samples, 2]; 0 where no answer has a round."""
    return float(ratio_of_sums(counts.numpy()))
