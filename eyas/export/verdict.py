"""The verdict on a head: the lint's findings, settled by the readings' acceptance in the replay."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple

from eyas.export.check import CheckFinding, in_order, warning
from eyas.tau import RoundCounts

NUM_DRAFT_STEPS = 4
MEANINGS = "; "  # separates names of combined meanings


class Gain(NamedTuple):
    """How much more a reading accepts: drafts a place, share of the other's, standard errors."""

    drafts: float
    share: float
    standard_errors: float

    def reaches(self, bar: Gain) -> bool:
        """Whether all three are at least the bar's."""
        return all(own >= least for own, least in zip(self, bar, strict=True))


# Least gains of another reading that count. For sound heads the best other accepts 4 to 10 % less.
WARNING = Gain(0.03, 0.02, 1.5)
ERROR = Gain(0.06, 0.05, 3.0)
# below it a head is not worth its time; the engine warns, too
LEAST_TAU = 1.3


@dataclass(frozen=True, slots=True)
class ReadingScore:
    """What a reading's chains of NUM_DRAFT_STEPS accepted. answers: of each the matches of its
    spans, for `tau.RoundCounts.add_answer`. hint: as in `readings.HeadReading`.
    """

    reading: str
    answers: list[list[list[int]]]
    hint: str = ""

    @property
    def tau(self) -> float:
        total = RoundCounts(NUM_DRAFT_STEPS)
        for matches in chain.from_iterable(self.answers):
            total.add_answer(matches)
        return total.tau

    @property
    def accepted(self) -> list[int]:
        """Drafts accepted from all places of each answer, not only those of rounds."""
        return [sum(map(sum, spans)) for spans in self.answers]

    @property
    def places(self) -> list[int]:
        return [sum(map(len, spans)) for spans in self.answers]

    @property
    def accepted_drafts(self) -> float:
        """Mean over all places."""
        return sum(self.accepted) / sum(self.places)

    def gain(self, other: ReadingScore) -> Gain:
        """How much more it accepts than another reading of the same answers.

        The error is the ratio estimator's over answers, since places of one answer are not
        independent (Cochran 1977, 6.4).
        """
        total = sum(self.places)
        differences = [one - two for one, two in zip(self.accepted, other.accepted, strict=True)]
        mean = sum(differences) / total
        errors = (d - mean * n for d, n in zip(differences, self.places, strict=True))
        spread = sum(error**2 for error in errors) ** 0.5 / total
        return Gain(mean, mean / max(other.accepted_drafts, 1e-9), mean / max(spread, 1e-9))


def verdict(
    findings: Sequence[CheckFinding], replayed: Sequence[ReadingScore]
) -> list[CheckFinding]:
    """The lint's findings, settled by the replay, and the replay's; errors first."""
    of_lint = [settled(finding, replayed) if finding.meanings else finding for finding in findings]
    return in_order([*of_lint, *reading_findings(replayed)])


def settled(finding: CheckFinding, replayed: Sequence[ReadingScore]) -> CheckFinding:
    """An ambiguity, its hint with tau of the best two meanings and what to write if they differ."""
    best: dict[str, ReadingScore] = {}
    for one in replayed:
        for name in set(one.reading.split(MEANINGS)) & finding.meanings.keys():
            best[name] = max(one, best.get(name, one), key=lambda it: it.accepted_drafts)
    if len(best) < 2:
        return finding
    first, second, *_ = sorted(best, key=lambda name: -best[name].accepted_drafts)
    taus = ", ".join(f"{best[name].tau:.2f} with {name!r}" for name in (first, second))
    gain = best[first].gain(best[second])
    keys = json.dumps(finding.meanings[first])
    answer = (
        f"{first!r} is meant: write {keys}" if gain.reaches(WARNING) else "which tells too little"
    )
    return replace(finding, hint=f"{finding.hint}. Replayed, tau is {taus}: {answer}")


def reading_findings(replayed: Sequence[ReadingScore]) -> Iterator[CheckFinding]:
    """Whether another reading is better than the declared one, or none is useful."""
    if not replayed:
        return
    declared, *others = replayed
    better = [one for one in others if one.gain(declared).reaches(WARNING)]
    if better:
        best = max(better, key=lambda one: one.gain(declared).drafts)
        gain = best.gain(declared)
        yield CheckFinding(
            "error" if gain.reaches(ERROR) else "warning",
            f"read as {best.reading!r} the head accepts more than {declared.reading}: tau "
            f"{best.tau:.2f} against {declared.tau:.2f}, {gain.share:+.0%} drafts "
            f"({gain.standard_errors:.1f} standard errors)",
            best.hint,
        )
    elif declared.tau < LEAST_TAU:
        yield warning(
            f"the head drafts next to nothing of this text: tau {declared.tau:.2f} by its own "
            "reading and no better by others",
            "wrong weights, embeddings or target; or text that it was not trained for: give --text",
        )
