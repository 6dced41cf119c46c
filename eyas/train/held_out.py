"""tau on held-out conversations in the chains of `operators.chain`, measured by all ranks.

The counts are whole numbers and the batches are the same on any number of ranks, so tau is too, as
far as equal weights give equal drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from eyas.operators.batch import Batch, plan_batches
from eyas.operators.chain import measure
from eyas.operators.head import Head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import FeatureSource, order_of
from eyas.tau import RoundCounts, ratio_of_sums
from eyas.train.ranks import Ranks

MEASURED_SAMPLES = 48  # conversations: tau is measured several times in a run
MEASURED_STEPS = 7  # of the chains: as many as the default objective unrolls


@dataclass(frozen=True)
class HeldOutSample:
    """MEASURED_SAMPLES conversations of a source."""

    source: FeatureSource
    batch_tokens: int

    @cached_property
    def numbers(self) -> list[int]:
        """Of the conversations; always the same ones."""
        return sorted(order_of(len(self.source), seed=0, epoch=0)[:MEASURED_SAMPLES])

    def counts(
        self, head: Head, vocabulary: TargetVocabulary, ranks: Ranks, dtype: torch.dtype
    ) -> Tensor:
        """Emitted tokens and rounds of each conversation, int64 [samples, 2], on every rank; with
        maths in `dtype`.
        """
        lengths = [self.source.lengths[number] for number in self.numbers]
        mine = ranks.share(plan_batches(lengths, self.batch_tokens, "held out"))
        counts = torch.zeros(len(self.numbers), 2, dtype=torch.float64)  # of this rank's part
        device = vocabulary.embed_tokens.device
        with ranks.together():
            batches = self.source.batches([[self.numbers[at] for at in places] for places in mine])
            for places, samples in zip(mine, batches, strict=True):
                batch = Batch.of(samples, str(device))
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    measured = measure(head, vocabulary, batch, MEASURED_STEPS)
                for number, matches in measured.spans:
                    rounds = RoundCounts(MEASURED_STEPS)
                    rounds.add_answer(matches)
                    counts[places[number]] += torch.tensor([rounds.emitted, rounds.rounds])
        totals = torch.tensor(ranks.total(counts.flatten().tolist()), dtype=torch.float64)
        return totals.long().view(-1, 2)


def tau_of_counts(counts: Tensor) -> float:
    """Emitted tokens by rounds over all conversations [samples, 2]; 0 without a round."""
    return float(ratio_of_sums(counts.numpy()))
