"""The figures of a benchmark that follow from times. Pure functions; `eyas.tau` has the figures
that follow from accepted drafts.

    send ──ttft──▶ first text ──itl──▶ chunk ──itl──▶ ... ──▶ last chunk
         └──────────────────────── e2e ──────────────────────────┘

    tpot = (e2e - ttft) / (tokens - 1)

Times are in milliseconds, as their names say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict


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
