"""Statistics of accepted drafts: tau, acceptance by position, intervals.

accept_hist[a] counts the rounds (one propose, one verify) that accepted a drafts. Such a round
emits a + 1 tokens, the bonus token included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from statistics import NormalDist

import numpy as np

Interval = tuple[float, float]

CONFIDENCE = 0.95  # of intervals
# Below six values not even (lowest, highest) holds a median with 95 % confidence.
LEAST_ROWS = 6
# Turns of each arm for an interval. Of equal arms six turns tell 6 of 100 apart, eight turns the
# promised 5 (docs/decisions/benchmark.md).
LEAST_TURNS = 8
NUM_RESAMPLES = 2000
RESAMPLES_AT_ONCE = 100  # bounds memory


def sum_hists(hists: Iterable[Sequence[int]]) -> list[int]:
    """The sum of histograms of any lengths."""
    return [sum(counts) for counts in zip_longest(*hists, fillvalue=0)]


def count_round(accept_hist: list[int], num_accepted_drafts: int) -> None:
    """Add one round in place; the histogram grows as needed."""
    accept_hist.extend([0] * (num_accepted_drafts + 1 - len(accept_hist)))
    accept_hist[num_accepted_drafts] += 1


def num_accepted(accept_hist: Sequence[int]) -> int:
    """Accepted drafts, without bonus tokens."""
    return sum(accepted * count for accepted, count in enumerate(accept_hist))


def num_emitted(accept_hist: Sequence[int]) -> int:
    """Emitted tokens: accepted drafts and bonus tokens."""
    return num_accepted(accept_hist) + sum(accept_hist)


def tau_of(accept_hist: Sequence[int]) -> float | None:
    """Emitted tokens / rounds; None without rounds."""
    rounds = sum(accept_hist)
    return num_emitted(accept_hist) / rounds if rounds else None


def accepted_by_position(accept_hist: Sequence[int]) -> list[int]:
    """[i]: the rounds that accepted more than i drafts."""
    return [sum(accept_hist[accepted:]) for accepted in range(1, len(accept_hist))]


def acceptance_by_position(accept_hist: Sequence[int]) -> list[float]:
    """[i]: of the rounds that accepted i drafts or more, the share that accepted one more."""
    return acceptance_of_positions(sum(accept_hist), accepted_by_position(accept_hist))


def acceptance_of_positions(num_rounds: float, accepted: Sequence[float]) -> list[float]:
    """As `acceptance_by_position`, from servers' counts: rounds, and accepted drafts [i]."""
    return [more / reached for reached, more in pairwise([num_rounds, *accepted]) if reached]


def tokens_per_forward(num_decoded: int, accept_hist: Sequence[int]) -> float | None:
    """Decoded tokens (all but an answer's first) per forward of the target: a round, or a token
    outside rounds. Between 1 and tau; None without tokens.
    """
    num_forwards = sum(accept_hist) + max(num_decoded - num_emitted(accept_hist), 0)
    return num_decoded / num_forwards if num_forwards else None


class RoundCounts:
    """Counts of rounds with K drafts: accept_hist [K + 1]; judged and accepted drafts [K].

    A draft is judged when all drafts before it were accepted and the answer goes on.
    """

    def __init__(self, num_draft_steps: int) -> None:
        self.accept_hist = [0] * (num_draft_steps + 1)
        self.judged = [0] * num_draft_steps
        self.accepted = [0] * num_draft_steps

    @property
    def rounds(self) -> int:
        return sum(self.accept_hist)

    @property
    def emitted(self) -> int:
        return num_emitted(self.accept_hist)

    @property
    def tau(self) -> float:
        """0 without rounds."""
        return tau_of(self.accept_hist) or 0.0

    @property
    def acceptance_by_position(self) -> list[float]:
        counts = zip(self.accepted, self.judged, strict=True)
        return [accepted / max(judged, 1) for accepted, judged in counts]

    def add(self, other: RoundCounts) -> None:
        """Add the counts of other rounds of as many drafts."""
        for name in ("accept_hist", "judged", "accepted"):
            own = getattr(self, name)
            own[:] = [one + more for one, more in zip(own, getattr(other, name), strict=True)]

    def add_rounds(self, accepted: Sequence[int]) -> None:
        """Add an answer's rounds as an engine reports them: num_accepted_drafts each, in order. The
        position after the last round's accepted drafts counts as not judged: the answer may have
        ended with a draft.
        """
        for left, count in zip(range(len(accepted) - 1, -1, -1), accepted, strict=True):
            self.accept_hist[count] += 1
            self._judge(count, count + (left > 0))

    def _judge(self, accepted: int, judged: int) -> None:
        for position in range(min(len(self.judged), judged)):
            self.judged[position] += 1
            self.accepted[position] += position < accepted

    def add_answer(self, matches: Sequence[int]) -> None:
        """Add the rounds of a chain over an answer of n tokens y_0 .. y_{n-1}.

        matches [n - 1]: of a round whose bonus token is y_j, how many drafts equal the answer, at
        most n - 1 - j. A round emits these and one token of the target. Where the answer ends with
        an accepted draft, that draft takes the place of the target's token.

            answer   [y0] [y1 y2 y3 y4] [y5 y6] [y7]     rounds that accept 3, 1, 0
        """
        K, at, left = len(self.judged), 0, len(matches)
        while left > 0:
            accepted = min(matches[at], K)
            self._judge(accepted, min(left, accepted + 1))
            emitted = min(accepted + 1, left)
            self.accept_hist[emitted - 1] += 1
            at, left = at + emitted, left - emitted


def bootstrap(
    rows: Sequence[Sequence[float]] | np.ndarray,
    figure: Callable[[np.ndarray], np.ndarray],
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Interval | None:
    """Percentile bootstrap of a figure over rows [n, k]; None for fewer than LEAST_ROWS rows.

    figure: resamples [..., n, k] -> values [...]. A row is one prompt: the rounds of an answer are
    correlated, and resampling them would give too narrow an interval. Efron, Tibshirani 1993,
    chapter 13.
    """
    table = np.asarray(rows, dtype=np.float64)
    if len(table) < LEAST_ROWS:
        return None
    rng = np.random.default_rng(seed)
    values = [
        figure(table[rng.integers(len(table), size=(RESAMPLES_AT_ONCE, len(table)))])
        for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE)
    ]
    ends = [(1 - confidence) / 2, (1 + confidence) / 2]
    low, high = np.quantile(np.concatenate(values), ends).tolist()
    return low, high


def tau_interval(emitted: Sequence[int], rounds: Sequence[int], seed: int = 0) -> Interval | None:
    """Interval of sum(emitted) / sum(rounds), counts by prompt [n]; None without a round."""
    rows = list(zip(emitted, rounds, strict=True))
    return bootstrap(rows, ratio_of_sums, seed=seed) if sum(rounds) else None


def intervals_of_turns(
    turns: Sequence[np.ndarray],
    figures: Sequence[Callable[[np.ndarray], np.ndarray]],
) -> list[Interval | None]:
    """Simultaneous bootstrap intervals of figures [F] over the turns that arms took.

    turns: the rows [n, k] of each turn, a row the results of both arms for one prompt; NaN is
    unknown. Turns are drawn whole, since their requests met the same busy seconds. For few turns
    the percentiles are expanded (Hesterberg 2015, "What teachers should know about the bootstrap");
    simultaneous by Besag, Green, Higdon, Mengersen 1995, section 6.3. None below LEAST_TURNS turns,
    and for a figure that is unknown in some resample.
    """
    G = len(turns)
    if G < LEAST_TURNS:
        return [None] * len(figures)
    n = max(len(rows) for rows in turns)
    table = np.full((G, n, turns[0].shape[1]), np.nan)
    for turn, rows in zip(table, turns, strict=True):
        turn[: len(rows)] = rows
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(NUM_RESAMPLES // RESAMPLES_AT_ONCE):
        drawn = table[rng.integers(G, size=(RESAMPLES_AT_ONCE, G))]
        flat = drawn.reshape(RESAMPLES_AT_ONCE, G * n, -1)
        parts.append(np.stack([figure(flat) for figure in figures], axis=-1))
    values_RF = np.concatenate(parts)
    known = np.isfinite(values_RF).all(axis=0)
    if not known.any():
        return [None] * len(figures)
    ordered_RF = np.sort(values_RF, axis=0)
    ranks_RF = 1 + np.argsort(np.argsort(values_RF, axis=0, kind="stable"), axis=0, kind="stable")
    # each resample's most extreme rank over all figures
    depth_R = np.maximum(ranks_RF, NUM_RESAMPLES + 1 - ranks_RF)[:, known].max(axis=1)
    last = int(np.quantile(depth_R, expanded(CONFIDENCE, G), method="higher"))
    ends = ordered_RF[NUM_RESAMPLES - last], ordered_RF[last - 1]
    return [
        (float(low), float(high)) if is_known else None
        for low, high, is_known in zip(*ends, known, strict=True)
    ]


def expanded(confidence: float, n: int) -> float:
    """The confidence at which percentiles of resamples of n rows hold with `confidence`."""
    normal = NormalDist()
    z, v = normal.inv_cdf((1 + confidence) / 2), n - 1
    # Student's t, Abramowitz and Stegun 26.7.5
    t = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return 2 * normal.cdf(t * math.sqrt(n / v)) - 1


def ratio_of_medians(table: np.ndarray) -> np.ndarray:
    """[..., n, 2] -> [...]: median of the first column over the second's, without NaN."""
    ordered = np.sort(table, axis=-2)  # NaN last
    count = np.maximum((~np.isnan(ordered)).sum(axis=-2, keepdims=True), 1)
    middle = [np.take_along_axis(ordered, at, axis=-2) for at in ((count - 1) // 2, count // 2)]
    medians = (middle[0] + middle[1])[..., 0, :] / 2
    return np.asarray(medians[..., 0] / medians[..., 1])


def ratio_of_sums(table: np.ndarray) -> np.ndarray:
    """[..., n, 2] -> [...]: sum of the first column over the second's, without NaN; 0 / 0 is 0."""
    sums = np.nansum(table, axis=-2)
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], np.finfo(float).tiny))
