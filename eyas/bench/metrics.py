"""The figures of a benchmark that follow from times; `eyas.tau` has those of accepted drafts.

send ──ttft──▶ first text ──itl──▶ chunk ──itl──▶ ... ──▶ last chunk
     └──────────────────────── e2e ──────────────────────────┘

tpot = (e2e - ttft) / (tokens - 1)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from eyas.tau import CONFIDENCE, Interval


def tpot_ms(ttft_ms: float, e2e_ms: float, num_output_tokens: int) -> float | None:
    """Time per output token after the first; None for an answer of one token, which has none."""
    if num_output_tokens < 2:
        return None
    return (e2e_ms - ttft_ms) / (num_output_tokens - 1)


def median_interval(values: Sequence[float]) -> Interval | None:
    """Order statistics around the population's median with at least CONFIDENCE: the number of
    values below it is binomial(n, 1/2). None below 6 values.
    """
    n = len(values)
    miss, left_out = 0.0, -1
    for k in range((n + 1) // 2):
        # the median lies outside [k], [n - 1 - k], counted from 0
        miss += 2 * math.comb(n, k) / 2**n
        if miss > 1 - CONFIDENCE:
            break
        left_out = k
    if left_out < 0:
        return None
    ordered = sorted(values)
    return ordered[left_out], ordered[n - 1 - left_out]


def spread(values: Sequence[float]) -> dict[str, Any] | None:
    """A sample's count, median, low, high, p90 and p99; None for an empty one. low and high hold
    the median with 95 % confidence, and are None below 6 values.
    """
    if not values:
        return None
    median, p90, p99 = map(float, np.quantile(values, (0.5, 0.9, 0.99)))
    low, high = median_interval(values) or (None, None)
    middle = {"count": len(values), "median": median, "low": low, "high": high}
    return {**middle, "p90": p90, "p99": p99}
