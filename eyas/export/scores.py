"""What the readings of a head accepted when they were replayed, and how much more counts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

NUM_DRAFT_STEPS = 4
MEANINGS = "; "  # between the names of meanings that are taken together


class Gain(NamedTuple):
    """What one reading accepts more: drafts a place, share of the other's, standard errors."""

    drafts: float
    share: float
    standard_errors: float

    def reaches(self, bar: Gain) -> bool:
        """Whether it is as much in all three."""
        return all(own >= least for own, least in zip(self, bar, strict=True))


# From these on, another reading that accepts more counts. Sound heads: the best of all others
# accepts 4 to 10 % less.
WARNING = Gain(0.03, 0.02, 1.5)
ERROR = Gain(0.06, 0.05, 3.0)
# of the declared reading: below it a head is not worth its time, and the engine warns as well
LEAST_TAU = 1.3


@dataclass(frozen=True, slots=True)
class ReadingScore:
    """What a reading's chain of NUM_DRAFT_STEPS accepted: tau over rounds, and the drafts accepted
    [answers] from every place of each answer, rounds or not, with the places [answers].
    """

    reading: str
    tau: float
    accepted: list[int]
    places: list[int]

    @property
    def accepted_drafts(self) -> float:
        """Mean over all places."""
        return sum(self.accepted) / sum(self.places)

    def gain(self, other: ReadingScore) -> Gain:
        """What this reading accepts more than another on the same answers.

        Answers are the sample, places of one answer are not independent: the ratio estimator's
        error (Cochran 1977, 6.4).
        """
        total = sum(self.places)
        differences = [one - two for one, two in zip(self.accepted, other.accepted, strict=True)]
        mean = sum(differences) / total
        errors = (d - mean * n for d, n in zip(differences, self.places, strict=True))
        spread = sum(error**2 for error in errors) ** 0.5 / total
        return Gain(mean, mean / max(other.accepted_drafts, 1e-9), mean / max(spread, 1e-9))
