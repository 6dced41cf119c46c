"""The figures of a benchmark as pure functions of times and counts. Knows no server, no file and no
other code of ours.

    send ──ttft──▶ first text ──itl──▶ chunk ──itl──▶ ... ──▶ last chunk          tpot = (e2e - ttft) / (tokens - 1)
         └──────────────────────── e2e ──────────────────────────┘

Times are in milliseconds, as their names say. accept_hist[a] counts the rounds that accepted a
drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, zip_longest
from typing import TypedDict

import numpy as np

Interval = tuple[float, float]
# values, from which on an interval is given: below, not even (lowest, highest) holds a median with
# 95 %
ENOUGH = 6
RESAMPLES = 1000


class Spread(TypedDict):
    """A sample in five numbers; low and high hold the median with 95 % confidence, None for fewer
    than 6 values.
    """

    count: int
    median: float
    low: float | None
    high: float | None
    p90: float
    p99: float


def tpot_ms(ttft_ms: float, e2e_ms: float, num_output_tokens: int) -> float | None:
    """Time per output token after the first; None for an answer of one token, which has none."""
    if num_output_tokens < 2:
        return None
    return (e2e_ms - ttft_ms) / (num_output_tokens - 1)


def itl_ms(chunk_times_ms: Sequence[float]) -> list[float]:
    """The gaps between chunks. A chunk may hold several tokens, so this is what a reader sees and
    not a time per token.
    """
    return [after - before for before, after in pairwise(chunk_times_ms)]


def throughput_tps(num_output_tokens: int, seconds: float) -> float:
    """Output tokens per second of a whole run, prefill and waiting included."""
    return num_output_tokens / seconds


def sum_hists(hists: Iterable[Sequence[int]]) -> list[int]:
    """Histograms of any lengths, added up."""
    return [sum(counts) for counts in zip_longest(*hists, fillvalue=0)]


def num_emitted(accept_hist: Sequence[int]) -> int:
    """Tokens that the rounds emitted: accepted drafts, and the bonus token of each round."""
    return sum((accepted + 1) * count for accepted, count in enumerate(accept_hist))


def tau(accept_hist: Sequence[int]) -> float | None:
    """Emitted tokens / rounds over all rounds; None without rounds."""
    rounds = sum(accept_hist)
    return num_emitted(accept_hist) / rounds if rounds else None


def acceptance_by_position(accept_hist: Sequence[int]) -> list[float]:
    """[i]: the share of the rounds that accepted i drafts or more which accepted one more, while
    there are any.
    """
    at_least = [sum(accept_hist[accepted:]) for accepted in range(len(accept_hist))]
    return [more / reached for reached, more in pairwise(at_least) if reached]


def acceptance_of_positions(num_drafts: float, accepted: Sequence[float]) -> list[float]:
    """As acceptance_by_position, from what servers count: rounds, and drafts accepted at position
    1, 2, ...
    """
    return [own / before for before, own in pairwise([num_drafts, *accepted]) if before]


def tokens_per_forward(num_decoded: int, accept_hist: Sequence[int]) -> float | None:
    """Decoded tokens (the first of an answer is none) for each forward of the target; what no round
    emitted took one each.

    It lies between 1 and tau, and is tau where every token came from a round; None without tokens.
    """
    num_forwards = sum(accept_hist) + max(num_decoded - num_emitted(accept_hist), 0)
    return num_decoded / num_forwards if num_forwards else None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0..1) of the sample lies, linear between neighbours (numpy's
    default).
    """
    assert values, "no sample"
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Sequence[float]) -> float:
    """The middle of the sample, or the mean of its two middles."""
    return percentile(values, 0.5)


def median_interval(
    values: Sequence[float], confidence: float = 0.95
) -> tuple[float, float] | None:
    """Order statistics between which the population's median lies with at least this confidence,
    whatever the distribution.

    The number of values below the median is binomial(n, 1/2); the interval leaves out the k lowest
    and the k highest, with the largest k for which that misses the median in at most 1 - confidence
    of all samples. None where even (lowest, highest) misses it more often: below 6 values at 95 %.
    """
    n = len(values)
    miss, left_out = 0.0, -1
    for k in range((n + 1) // 2):
        # the median lies outside [k], [n - 1 - k], counted from 0
        miss += 2 * math.comb(n, k) / 2**n
        if miss > 1 - confidence:
            break
        left_out = k
    if left_out < 0:
        return None
    ordered = sorted(values)
    return ordered[left_out], ordered[n - 1 - left_out]


def bootstrap_interval(
    rows: Sequence[Sequence[float]],
    figure: Callable[[np.ndarray], np.ndarray],
    confidence: float = 0.95,
) -> Interval | None:
    """Percentile bootstrap of a figure over the rows [n, k], each row what is known of one request;
    the same every time.

    figure: resamples [..., n, k] -> values [...]. None for fewer than ENOUGH rows. Efron,
    Tibshirani 1993, chapter 13.
    """
    if len(rows) < ENOUGH:
        return None
    table = np.asarray(rows, float)
    drawn = np.random.default_rng(0).integers(0, len(table), (RESAMPLES, len(table)))
    low, high = np.quantile(figure(table[drawn]), [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def ratio_of_medians(table: np.ndarray) -> np.ndarray:
    """[..., n, 2] -> [...]: median of the first column over that of the second."""
    medians = np.median(table, axis=-2)
    return np.asarray(medians[..., 0] / medians[..., 1])


def ratio_of_sums(table: np.ndarray) -> np.ndarray:
    """[..., n, 2] -> [...]: sum of the first column over that of the second; 0 / 0 is 0."""
    sums = table.sum(axis=-2)
    return np.asarray(sums[..., 0] / np.maximum(sums[..., 1], np.finfo(float).tiny))


def spread(values: Sequence[float]) -> Spread | None:
    """The sample in five numbers; None for an empty one."""
    if not values:
        return None
    low, high = median_interval(values) or (None, None)
    return {
        "count": len(values),
        "median": median(values),
        "low": low,
        "high": high,
        "p90": percentile(values, 0.9),
        "p99": percentile(values, 0.99),
    }
