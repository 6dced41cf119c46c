"""The verdict on a head: the lint's findings, settled by the readings' acceptance in the replay.

Intervals of `why_findings` are over answers, paired, and hold for all readings together: a sound
head raises a false alarm in one of 20 checks at most. Letters: N answers, R readings, C = R - 1.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from eyas.export.check import CheckFinding, in_order, warning
from eyas.tau import LEAST_ROWS, Interval, RoundCounts, expanded, tau_interval

NUM_DRAFT_STEPS = 4
MEANINGS = "; "  # separates names of combined meanings
# of `why_findings`:
CONFIDENCE = 0.95
LEAST_JUMP = 1.02  # of tau, below the whole interval
EDGES = (0, 16, 64, 256, 1024, 2**31)  # first tokens of the groups of places in an answer
LEAST_PLACES = 100
LEAST_COVERED = 0.9  # of tokens, by the draft vocabulary


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
    spans, for `tau.RoundCounts.add_answer`.

    hint: as in `readings.HeadReading`. kinds: of the answers' prompts. covered: share of the
    answers' tokens in the draft vocabulary.
    """

    reading: str
    answers: list[list[list[int]]]
    hint: str = ""
    kinds: list[str] = field(default_factory=list)
    covered: float = 1.0

    @property
    def counts(self) -> list[RoundCounts]:
        found = []
        for spans in self.answers:
            found.append(RoundCounts(NUM_DRAFT_STEPS))
            for matches in spans:
                found[-1].add_answer(matches)
        return found

    @property
    def tau(self) -> float:
        total = RoundCounts(NUM_DRAFT_STEPS)
        for counts in self.counts:
            total.add(counts)
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
    findings: Sequence[CheckFinding],
    replayed: Sequence[ReadingScore],
    why: Sequence[CheckFinding] | None = None,
) -> list[CheckFinding]:
    """The lint's findings, settled by the replay, and the replay's (why: of `why_findings`); errors
    first.
    """
    of_replay = list(reading_findings(replayed)) if why is None else why
    of_lint = [settled(finding, replayed) if finding.meanings else finding for finding in findings]
    return in_order([*of_lint, *of_replay])


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
            "correct config.json or the tensors; the table has all readings",
        )
    elif declared.tau < LEAST_TAU:
        yield warning(
            f"the head drafts next to nothing of this text: tau {declared.tau:.2f} by its own "
            "reading and no better by others",
            "wrong weights, embeddings or target; or text that it was not trained for: give --text",
        )


class Jump(NamedTuple):
    """tau of another reading over the declared one's, with its interval."""

    score: ReadingScore
    ratio: float
    interval: Interval


def jumps(scores: Sequence[ReadingScore]) -> list[Jump]:
    """The change of tau from the first reading to every other one: the delta method on ratios of
    sums over answers, Student's t, and Bonferroni's bound for all readings together.
    """
    if len(scores) < 2:
        return []
    counts = [[(one.emitted, one.rounds) for one in score.counts] for score in scores]
    sums_2RN = np.array(counts, dtype=float).transpose(2, 0, 1)
    (emitted_RN, rounds_RN), (emitted_R, rounds_R) = sums_2RN, sums_2RN.sum(2)
    log_tau_R, N = np.log(emitted_R / rounds_R), len(counts[0])
    effect_RN = emitted_RN / emitted_R[:, None] - rounds_RN / rounds_R[:, None]
    error_C = np.sqrt(((effect_RN[1:] - effect_RN[0]) ** 2).sum(1) * N / max(N - 1, 1))
    together = expanded(1 - (1 - CONFIDENCE) / len(error_C), N)
    bound_C = NormalDist().inv_cdf((1 + together) / 2) * error_C
    change_C = log_tau_R[1:] - log_tau_R[0]
    rows = np.exp([change_C, change_C - bound_C, change_C + bound_C]).T.tolist()
    return [
        Jump(score, ratio, (low, high))
        for score, (ratio, low, high) in zip(scores[1:], rows, strict=True)
    ]


def named(scores: Sequence[ReadingScore]) -> list[Jump]:
    """The reading that raises tau most, and those that do not differ from it significantly."""
    if len(scores[0].answers) < LEAST_ROWS:
        return []
    found = sorted(jumps(scores), key=lambda one: -one.ratio)
    gains = [one for one in found if one.interval[0] > LEAST_JUMP]
    if not gains:
        return []
    best, *others = gains
    rivals = jumps([best.score, *(one.score for one in others)])
    pairs = zip(others, rivals, strict=True)
    return [best, *(one for one, rival in pairs if rival.interval[1] >= 1)]


def why_findings(scores: Sequence[ReadingScore]) -> Iterator[CheckFinding]:
    """The reading that explains a low tau, or that the head is sound and what it lacks."""
    if not scores:
        return
    declared, found = scores[0], named(scores)
    if len(declared.answers) < LEAST_ROWS:
        what = f"{len(declared.answers)} answers are too few to say why"
        yield warning(what, f"give --text with {LEAST_ROWS} prompts or more, better 50")
        return
    if found:
        best, names = found[0], " or ".join(repr(one.score.reading) for one in found)
        low, high = best.interval
        yield CheckFinding(
            "error",
            f"why: read as {names}: tau {declared.tau:.2f} -> {best.score.tau:.2f}, "
            f"{best.ratio:.2f} times ({low:.2f} to {high:.2f}, {CONFIDENCE:.0%} for the "
            f"{len(scores) - 1} readings together)",
            "; ".join(dict.fromkeys(one.score.hint for one in found)),
        )
        return
    what = f"no other reading makes tau ({declared.tau:.2f}) jump"
    if declared.tau < LEAST_TAU:
        hint = "it is hardly trained, or for another target or other text: give --text of its own"
        yield warning(f"the head drafts next to nothing of this text, and {what}", hint)
    else:
        hint = "it is read as it was trained; what it may lack follows"
        yield CheckFinding("note", f"the head is sound: {what}", hint)
    for what, hint in lacks(declared):
        yield CheckFinding("note", what, hint)


def lacks(declared: ReadingScore) -> Iterator[tuple[str, str]]:
    """What a sound head may lack (vocabulary, kinds of text, long answers), and what to do."""
    if declared.covered < LEAST_COVERED:
        what = f"the draft vocabulary covers {declared.covered:.0%} of the answers' tokens"
        yield what, "train with a larger draft_vocab_size, counted on answers like these"
    counts, by_kind = declared.counts, []
    for kind in sorted(set(declared.kinds)):
        own = [one for one, of in zip(counts, declared.kinds, strict=True) if of == kind]
        emitted, rounds = [one.emitted for one in own], [one.rounds for one in own]
        if interval := tau_interval(emitted, rounds):
            words = f"{sum(emitted) / sum(rounds):.2f} ({interval[0]:.2f} to {interval[1]:.2f})"
            by_kind.append(f"{words} {kind}")
    if len(by_kind) > 1:
        yield f"tau by kind: {'; '.join(sorted(by_kind))}", "train on more of the lowest kinds"
    # the first draft only: it is judged at every place, even near the end
    places = [(n, m > 0) for spans in declared.answers for one in spans for n, m in enumerate(one)]
    by_place = []
    for first, end in pairwise(EDGES):
        judged = [is_accepted for n, is_accepted in places if first <= n < end]
        if len(judged) >= LEAST_PLACES:
            by_place.append(f"from {first + 1} {sum(judged) / len(judged):.0%}")
    if len(by_place) > 1:
        what = f"first drafts accepted, by token of the answer: {'; '.join(by_place)}"
        yield what, "lower at the end: train on longer answers"
