"""The rule that a tuned head must not lose on the old mix what it had. Knows counts of two heads on
the same conversations.

The figure is the ratio of the taus, new by old, less one. Its interval is a paired bootstrap over
conversations (Efron's percentiles): both heads are counted on the same drawn ones, so what makes a
conversation easy or hard cancels. The rule holds when the interval's lower end is above the
tolerance: too few conversations to tell is no proof.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.errors import EmptyInputError, EyasError
from eyas.tau import bootstrap, ratio_of_sums
from eyas.train.held_out import tau_of

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Comparison:
    """tau of both heads on the old mix, and their ratio less one with its interval."""

    tau_before: float
    tau_after: float
    change: float
    interval: tuple[float, float]
    level: float
    samples: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        low, high = self.interval
        return (
            f"tau on the old mix {self.tau_before:.3f} -> {self.tau_after:.3f} "
            f"({self.change:+.1%}, "
            f"{self.level:.0%} interval {low:+.1%} to {high:+.1%}, {self.samples} conversations)"
        )


def compared(before: Tensor, after: Tensor) -> Comparison:
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
    old, new = tau_of(before), tau_of(after)
    return Comparison(old, new, new / old - 1.0, interval, LEVEL, len(rows))


def change_of_tau(table: np.ndarray) -> np.ndarray:
    """[..., n, 4] -> [...]: ratio of the taus less one; emitted, rounds of the new and old head."""
    # nan for a resample without a round: then no bound holds
    with np.errstate(divide="ignore", invalid="ignore"):
        change = ratio_of_sums(table[..., :2]) / ratio_of_sums(table[..., 2:]) - 1.0
    return np.asarray(change)


def refuse_loss(comparison: Comparison, tolerance: float) -> None:
    """Raise EyasError, with the figures, unless the loss is shown to stay within the tolerance."""
    if comparison.interval[0] >= -tolerance:
        return
    remedy = (
        "mix old features into the training (start.keep_share), train for less long, or "
        "allow "
        "more (start.keep_tolerance)"
    )
    if comparison.change >= -tolerance:
        what = (
            f"too few conversations to tell that the head loses no more than {tolerance:.1%}: "
            f"{comparison}"
        )
        raise EyasError(
            what,
            f"capture more held-out conversations of the old mix (start.keep_samples), or {remedy}",
        )
    raise EyasError(f"the head loses more than {tolerance:.1%}: {comparison}", remedy)
