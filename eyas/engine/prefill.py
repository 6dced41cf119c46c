"""How much of each prompt is read next, and what that costs on the machine now."""

from __future__ import annotations

import math
from collections.abc import Sequence

LEAST_ROWS = 8  # fewer cost as much, as all weights are read
_PACE_RATE, _MOST_PACE_ERROR = 0.5, 0.7


def shares(left: Sequence[int], budget: int, least: int = LEAST_ROWS) -> list[int]:
    """How many of `budget` rows each prompt reads next.

    left: unread rows of each, 1 or more; the prompt that has waited longest is first. least: rows
    that it reads beside prompts that end, where the budget has room.

    The shortest rest goes first (SRPT, Schrage and Miller 1966), but the oldest keeps half of the
    budget. Beside prompts that end, one that does not end reads no more than all of these, so a
    short prompt beside longer ones is read within twice its rows.
    """
    counts, given = [0] * len(left), 0
    for prompt in sorted(range(len(left)), key=left.__getitem__):
        kept = 0 if prompt == 0 or counts[0] else min(left[0], max(1, budget // 2))
        count = min(left[prompt], budget - given - kept)
        if given and count < left[prompt]:
            break
        counts[prompt], given = count, given + count
    ends = any(map(int.__eq__, counts, left))
    oldest = next((prompt for prompt, count in enumerate(counts) if not count), None)
    if oldest is not None:
        most = max(given, least) if ends else budget
        counts[oldest] = min(left[oldest], budget - given, most)
    return counts


class PromptPace:
    """Milliseconds of a prompt's row and, in addition, of a scored row: least mean squares of the
    log over all prefills.
    """

    def __init__(self) -> None:
        self._row_ms = self._scored_ms = 0.0  # not known before the first prefill

    def rows(self, ms: float, is_scored: bool) -> int:
        """Rows that fit, at least LEAST_ROWS."""
        row_ms = self._row_ms + self._scored_ms * is_scored
        return max(LEAST_ROWS, int(ms / (row_ms or 1.0)))

    def observe(self, rows: int, scored: int, real_ms: float) -> None:
        if not self._row_ms:
            self._row_ms = self._scored_ms = real_ms / (rows + scored)
        scored_ms = self._scored_ms * scored
        predicted_ms = self._row_ms * rows + scored_ms
        error = math.log(real_ms / predicted_ms)
        error = _PACE_RATE * max(-_MOST_PACE_ERROR, min(_MOST_PACE_ERROR, error))
        share = scored_ms / predicted_ms
        self._row_ms *= math.exp(error * (1 - share))
        self._scored_ms *= math.exp(error * share)
