"""What the readings of a head accepted when they were replayed, and how much more counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from eyas.tau import RoundCounts

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
    """What a reading's chains of NUM_DRAFT_STEPS accepted: of each answer the matches of its spans,
    as `tau.RoundCounts.add_answer` takes them.

    says: as in `readings.HeadReading`. kinds: of each answer's prompt. covered: share of
    the answers' tokens in the draft vocabulary.
    """

    reading: str
    answers: list[list[list[int]]]
    says: str = ""
    kinds: list[str] = field(default_factory=list)
    covered: float = 1.0

    @property
    def counts(self) -> list[RoundCounts]:
        """The rounds of each answer."""
        found = []
        for spans in self.answers:
            found.append(RoundCounts(NUM_DRAFT_STEPS))
            for matches in spans:
                found[-1].add_answer(matches)
        return found

    @property
    def tau(self) -> float:
        """Over all rounds."""
        total = RoundCounts(NUM_DRAFT_STEPS)
        for counts in self.counts:
            total.add(counts)
        return total.tau

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted from every place of each answer, rounds or not."""
        return [sum(map(sum, spans)) for spans in self.answers]

    @property
    def places(self) -> list[int]:
        """Of each answer."""
        return [sum(map(len, spans)) for spans in self.answers]

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
