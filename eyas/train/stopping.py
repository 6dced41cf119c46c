"""When a run ends before its last step: held-out tau that rises no more, or a loss that runs away.
Knows numbers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

MEMORY = 0.9  # of the running mean of the loss
SETTLED = 20  # steps before a running mean is one
FLOOR = 0.05  # of the first loss: near zero, many times the lowest is still nothing


class StopConfig(BaseModel):
    """When tau is measured while training, and when a run stops.

    measurements: how often in a run, at equal distances, on `samples` held-out conversations; 0
    measures nothing. patience: stop after so many measurements in a row without a gain of min_gain;
    null goes on to the end. The head that is kept is the best measured. num_draft_steps: of the
    chains that are measured. diverged_at: stop when the running mean of the loss is so many times
    its lowest.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    measurements: int = Field(8, ge=0)
    samples: int = Field(48, ge=1)
    num_draft_steps: int = Field(7, ge=1, le=16)
    patience: int | None = Field(None, ge=1)
    min_gain: float = Field(0.0, ge=0)
    diverged_at: float = Field(3.0, gt=1)


def measured_steps(num_steps: int, config: StopConfig) -> set[int]:
    """The numbers of steps done at which tau is measured: the last one always among them, if any
    is.
    """
    count = min(config.measurements, num_steps)
    return {math.ceil(num_steps * (number + 1) / count) for number in range(count)}


@dataclass(slots=True)
class Patience:
    """The best tau so far and the step it was measured at; the tau of the last gain and the
    measurements since then.
    """

    best: float = 0.0
    best_step: int = 0
    bar: float = 0.0
    misses: int = 0

    def add(self, step: int, tau: float, min_gain: float) -> bool:
        """Take a measurement, above 0; is it the best, or as good and later? A gain is a rise of
        min_gain or more.
        """
        gains = tau > self.bar and tau >= self.bar + min_gain
        self.bar, self.misses = (tau, 0) if gains else (self.bar, self.misses + 1)
        if tau < self.best:
            return False
        self.best, self.best_step = tau, step
        return True

    def is_over(self, config: StopConfig) -> bool:
        """Has it waited for long enough?"""
        return config.patience is not None and self.misses >= config.patience


@dataclass(slots=True)
class Drift:
    """The first loss, their running mean, and its lowest value once it was settled."""

    num_losses: int = 0
    first: float = 0.0
    mean: float = 0.0
    lowest: float = math.inf

    def add(self, loss: float) -> None:
        """Take the loss of one more step."""
        if self.num_losses == 0:
            self.first = self.mean = loss
        self.mean = MEMORY * self.mean + (1.0 - MEMORY) * loss
        self.num_losses += 1
        if self.num_losses >= SETTLED:
            self.lowest = min(self.lowest, self.mean)

    def is_away(self, config: StopConfig) -> bool:
        """Does the loss run away?"""
        return self.mean > config.diverged_at * max(self.lowest, FLOOR * self.first)
