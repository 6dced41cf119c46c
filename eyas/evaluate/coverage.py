"""What the draft vocabulary alone allows: a token that it lacks is never drafted. Knows token ids.

The ceiling on tau is that of a draft which is right wherever its vocabulary lets it be: of every
round all num_draft_steps drafts are accepted up to the first token that it lacks, and that one is
the target's own. On the same answers no draft with this vocabulary and this many steps needs fewer
rounds, chain or tree: from a later token of an answer a round never ends earlier, so to go as far
as possible each time is best.

    in the vocabulary   y  y  y  n  y  y  y  y  y        K = 3
    rounds              0  [1  2  3] [4  5  6  7] [8]    the first token comes with the prefill
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eyas.tau import RoundCounts


def leading_runs(drafted: Sequence[bool]) -> list[int]:
    """Of an answer of n tokens, of which some are in the draft vocabulary: how many in a row follow
    each of the first n - 1 that are. [n - 1], as `RoundCounts.add_answer` takes them."""
    found, length = [], 0
    for is_drafted in reversed(drafted[1:]):
        length = length + 1 if is_drafted else 0
        found.append(length)
    return found[::-1]


def tau_ceiling(answers: Iterable[Sequence[bool]], num_draft_steps: int) -> float:
    """The highest tau on these answers (bool for each of their tokens: it is in the draft
    vocabulary); see above.
    """
    tally = RoundCounts(num_draft_steps)
    for drafted in answers:
        tally.add_answer(leading_runs(drafted))
    return tally.tau


def ceilings(answers: Sequence[Sequence[bool]], num_draft_steps: int) -> dict[str, float]:
    """tau_ceiling, and the same of a draft that has all tokens: how answers end alone keeps it
    below num_draft_steps + 1.
    """
    everything = [[True] * len(drafted) for drafted in answers]
    return {
        "tau_ceiling": tau_ceiling(answers, num_draft_steps),
        "tau_ceiling_full_vocabulary": tau_ceiling(everything, num_draft_steps),
    }


def share(answers: Iterable[Sequence[bool]]) -> float:
    """Of all tokens of the answers, those in the draft vocabulary."""
    known = count = 0
    for drafted in answers:
        known, count = known + sum(drafted), count + len(drafted)
    return known / max(count, 1)
