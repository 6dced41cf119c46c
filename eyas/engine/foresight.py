"""How large the next round's trees are to be, where the host must say so before they grow. Knows
past proposals; no model.

The policy's rule for one more level (the frontier's probability against a threshold) is applied to
what frontiers were like, and its number of nodes is that of the last rounds.

Letters: S requests that draft, K draft steps.
"""

from __future__ import annotations

import math

import numpy as np

from eyas.model.rows import Proposals

_WEIGHT = 0.1  # of the newest round


class Foresight:
    """Means over the last rounds, by request."""

    def __init__(self, num_draft_steps: int) -> None:
        # probability of the best path, by level
        self._frontiers = 0.7 ** np.arange(1, num_draft_steps)
        self._num_nodes: float | None = None

    def depth(self, thresholds: list[float], num_requests: int) -> int:
        """Levels, the first included, for `thresholds` as `Draft.propose` takes them."""
        expected = (num_requests * self._frontiers).tolist()
        for level, (sum_of_best, least) in enumerate(
            zip(expected, thresholds, strict=True), start=1
        ):
            if sum_of_best < least:
                return level
        return len(thresholds) + 1

    def num_nodes(self, num_requests: int, max_nodes: int) -> int:
        """Of all trees, roots excluded: at least one."""
        each = max_nodes if self._num_nodes is None else self._num_nodes
        return max(1, math.ceil(num_requests * each))

    def observe(self, proposals: Proposals, num_nodes: int) -> None:
        """num_nodes: how many of these candidates would have been worth it."""
        S = len(proposals.scores)
        for level in range(min(int(proposals.depths[-1]), len(self._frontiers))):
            best = np.exp(proposals.scores[:, proposals.depths == level + 1].max(1)).mean()
            self._frontiers[level] += _WEIGHT * (float(best) - self._frontiers[level])
        each = num_nodes / S
        self._num_nodes = (
            each
            if self._num_nodes is None
            else self._num_nodes + _WEIGHT * (each - self._num_nodes)
        )
