"""tau on held-out conversations, measured by all ranks, and the comparison of two heads by it.

Measured in the chains of `model.chain`. The unit of statistics is a conversation: its answers
depend on each other.
The counts are whole numbers and the batches are the same on any number of ranks, so tau is too, as
far as equal weights give equal drafts.

A head that continues from another must not lose on the old mix what that one had. The figure is the
ratio of the taus, new by old, less one. Its interval is a paired bootstrap over conversations
(Efron's percentiles): both heads are counted on the same resample, so what makes a conversation
easy or hard cancels. The rule holds when the interval's lower end is above the tolerance: too few
conversations to tell is no proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EmptyInputError, WorseHeadError
from eyas.model.batch import Batch, plan_batches
from eyas.model.chain import measure
from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary
from eyas.shards import FeatureSource, order_of
from eyas.tau import RoundCounts, bootstrap, ratio_of_sums
from eyas.train.ranks import Ranks

LEVEL = 0.95  # of the interval


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


@dataclass(frozen=True, slots=True)
class HeadComparison:
    """tau of both heads on the old mix, and their ratio less one with its interval."""

    tau_before: float
    tau_after: float
    change: float
    interval: tuple[float, float]
    level: float
    samples: int

    def to_json(self, tolerance: float) -> dict[str, Any]:
        return {**asdict(self), "tolerance": tolerance}

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> HeadComparison:
        """What `to_json` told, without the tolerance."""
        return cls(**{name: value for name, value in told.items() if name != "tolerance"})

    def __str__(self) -> str:
        return self.line("the old mix")

    def line(self, mix: str) -> str:
        """The figures on a mix, for people."""
        low, high = self.interval
        return (
            f"tau on {mix} {self.tau_before:.3f} -> {self.tau_after:.3f} "
            f"({self.change:+.1%}, {self.level:.0%} interval {low:+.1%} to {high:+.1%}, "
            f"{self.samples} conversations)"
        )


def compare_heads(before: Tensor, after: Tensor) -> HeadComparison:
    """Two heads by their counts on the same conversations: emitted tokens and rounds, int64
    [samples, 2] each.

    Raises EmptyInputError where no answer has a round.
    """
    if not (before[:, 1].any() and after[:, 1].any()):
        raise EmptyInputError(
            "the old mix's held-out conversations have no answer of two tokens or more to compare "
            "two heads on",
            "capture the old mix with a larger held_out_share",
        )
    rows = torch.cat((after, before), dim=1).numpy()
    # least: a wide interval of few conversations is an answer here, it fails the rule
    interval = bootstrap(rows, change_of_tau, LEVEL, least=1)
    assert interval is not None
    old, new = tau_of_counts(before), tau_of_counts(after)
    return HeadComparison(old, new, new / old - 1.0, interval, LEVEL, len(rows))


def change_of_tau(table: np.ndarray) -> np.ndarray:
    """[..., n, 4] -> [...]: ratio of the taus less one; emitted, rounds of the new and old head."""
    # nan for a resample without a round: then no bound holds
    with np.errstate(divide="ignore", invalid="ignore"):
        change = ratio_of_sums(table[..., :2]) / ratio_of_sums(table[..., 2:]) - 1.0
    return np.asarray(change)


def refuse_lower_tau(comparison: HeadComparison, tolerance: float) -> None:
    """Raise WorseHeadError, with the figures, unless tau is shown to fall by `tolerance` at most.

    Shown: the lower end of the interval is above -tolerance.
    """
    if comparison.interval[0] >= -tolerance:
        return
    remedy = (
        "mix old features into the training (start.keep_share), train for less long, or allow "
        "more (start.keep_tolerance)"
    )
    if comparison.change >= -tolerance:
        raise WorseHeadError(
            f"too few conversations to tell that the head loses no more than {tolerance:.1%}: "
            f"{comparison}",
            f"capture more held-out conversations of the old mix, or {remedy}",
        )
    raise WorseHeadError(f"the head loses more than {tolerance:.1%}: {comparison}", remedy)
