"""Two heads on the same answers: the change of tau with its interval, in all and by source.

Intervals are paired bootstraps over prompts, with percentiles expanded for few prompts (Hesterberg
2015); none for fewer than LEAST_ROWS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eyas.errors import WorseHeadError
from eyas.evaluate.breakdown import AnswerCounts, summed_by_prompt
from eyas.tau import LEAST_ROWS, bootstrap, expanded, ratio_of_sums

LEVEL = 0.95  # of the intervals
FEW = 30  # prompts: a comparison of fewer has a warning
ALL = "all"  # all sources


def compare(
    other: Sequence[AnswerCounts], new: Sequence[AnswerCounts]
) -> dict[str, dict[str, Any]]:
    """Changes of tau over all answers (ALL), then by source.

    other, new: of the same prompts, in the same order. change: ratio of the taus less 1.
    change_interval: None if a head has no round, or for too few prompts.
    """
    pairs = list(zip(other, new, strict=True))
    found = {ALL: change_of_tau(pairs)}
    for source in sorted({answer.source for answer in new}):
        found[source] = change_of_tau([pair for pair in pairs if pair[1].source == source])
    return found


def change_of_tau(pairs: Sequence[tuple[AnswerCounts, AnswerCounts]]) -> dict[str, Any]:
    """The change over pairs of answers of the other and the new head."""
    counts = [
        (new.counts.emitted, new.counts.rounds, other.counts.emitted, other.counts.rounds)
        for other, new in pairs
    ]
    rows = summed_by_prompt([new.prompt for _, new in pairs], counts)
    tau_other, tau = float(ratio_of_sums(rows[:, 2:])), float(ratio_of_sums(rows[:, :2]))
    enough = len(rows) >= LEAST_ROWS and tau and tau_other
    interval = bootstrap(rows, _changes, expanded(LEVEL, len(rows))) if enough else None
    known = interval is not None and bool(np.isfinite(interval).all())
    return {
        "tau_other": tau_other,
        "tau": tau,
        "change": tau / tau_other - 1.0 if tau_other else None,
        "change_interval": list(interval) if interval is not None and known else None,
        "answers": len(pairs),
        "prompts": len(rows),
    }


def _changes(table: np.ndarray) -> np.ndarray:
    """[..., n, 4] -> [...]: ratio of the taus less 1; emitted, rounds of the new and other head."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a resample without a round: nan
        return np.asarray(ratio_of_sums(table[..., :2]) / ratio_of_sums(table[..., 2:]) - 1.0)


def described(change: Mapping[str, Any]) -> str:
    """A change in words."""
    if change["change_interval"] is None:
        few = f"fewer than {LEAST_ROWS}" if change["prompts"] < LEAST_ROWS else "without a round"
        return f"unknown: {change['prompts']} prompts, {few}"
    low, high = change["change_interval"]
    return (
        f"tau {change['tau_other']:.3f} -> {change['tau']:.3f} ({change['change']:+.1%}, "
        f"{LEVEL:.0%} interval {low:+.1%} to {high:+.1%}, {change['answers']} answers to "
        f"{change['prompts']} prompts)"
    )


def refuse_worse(changes: Mapping[str, Mapping[str, Any]], tolerance: float) -> None:
    """Raise WorseHeadError unless the whole interval shows that tau is higher over all answers, and
    falls by `tolerance` at most on every source.
    """
    overall, more = changes[ALL], "measure on more prompts (capture.held_out_share, num_prompts)"
    if overall["change_interval"] is None or overall["change_interval"][0] <= 0:
        seems_better = overall["change"] is not None and overall["change"] > 0
        raise WorseHeadError(
            f"the new head is not shown to be better: {described(overall)}",
            more if seems_better else "keep the other head, or train on more prompts or for longer",
        )
    for source, change in changes.items():
        if change["change_interval"] is not None and change["change_interval"][0] >= -tolerance:
            continue
        falls = change["change"] is not None and change["change"] < -tolerance
        raise WorseHeadError(
            f"the new head {'loses more than' if falls else 'is not shown to lose less than'} "
            f"{tolerance:.1%} on {source}: {described(change)}",
            "train on more prompts of this source, at a lower learning_rate, or allow more "
            "(eval.tolerance)" + ("" if falls else f"; or {more}"),
        )
