"""What a speculative round would bring at any load, from the trees of the last rounds. Knows no
clock and no model.

The path probabilities of recently drafted requests are kept. For S requests now, S kept ones at a
time are pooled and given the node budget that the costs ask for: expected tokens and ms of rounds
that were never run at this load.

Letters: R requests kept, N nodes of each, S requests that speculate, D depths, G groups of S.
"""

from __future__ import annotations

import numpy as np

from eyas.engine.acceptance import levels


class Forecast:
    """The last `size` drafted requests."""

    def __init__(self, max_nodes: int, size: int = 32) -> None:
        self._probs_RN = np.zeros((size, max_nodes))
        self._depths_RN = np.zeros((size, max_nodes), dtype=np.int64)
        self._drafted_R = np.zeros(size, dtype=np.int64)
        self._size, self.num_seen = size, 0

    def add(self, paths: np.ndarray, depths: np.ndarray, most: int = 4) -> None:
        """Path probabilities [B, C] of a round; at most so many of its requests, so that several
        rounds are kept.
        """
        B, N = len(paths), min(paths.shape[1], self._probs_RN.shape[1])
        picked = np.arange(self.num_seen, self.num_seen + min(most, B)) % B  # others every round
        places = np.arange(self.num_seen, self.num_seen + len(picked)) % self._size
        best = np.argsort(-paths[picked], axis=1, kind="stable")[:, :N]
        self._probs_RN[places, :N] = np.take_along_axis(paths[picked], best, 1)
        self._depths_RN[places, :N] = depths[best]
        self._probs_RN[places, N:] = 0.0
        self._drafted_R[places] = len(levels(depths))
        self.num_seen += len(picked)

    def predict(
        self, num_requests: int, num_tokens: int, ms_of_nodes: np.ndarray, ms_of_depth: np.ndarray
    ) -> tuple[float, float]:
        """Mean expected tokens and ms of a round at the depth limit that is best. `add` must have
        been called.

        ms_of_nodes[n]: the forward with n nodes, n up to num_requests * N; ms_of_depth[d - 1]: what
        precedes it, d = 1 .. D.
        """
        known, N = min(self.num_seen, self._size), self._probs_RN.shape[1]
        groups = max(1, known // num_requests)
        rows = np.resize(np.arange(known), groups * num_requests)
        depth_D = np.arange(1, len(ms_of_depth) + 1)[:, None, None]
        pooled = np.where(self._depths_RN[rows] <= depth_D, self._probs_RN[rows], 0.0)
        pooled = -np.sort(-pooled.reshape(len(ms_of_depth), groups, num_requests * N), axis=-1)
        tokens = (
            np.concatenate((np.zeros_like(pooled[..., :1]), pooled.cumsum(-1)), -1) + num_tokens
        )
        reached = np.minimum(self._drafted_R[rows], depth_D[..., 0])
        before = ms_of_depth[reached - 1].reshape(len(ms_of_depth), groups, num_requests).mean(-1)
        ms = ms_of_nodes[: tokens.shape[-1]] + before[..., None]
        rate = float(num_tokens / ms_of_nodes[0])
        for _ in range(3):  # Dinkelbach: the best trees for a rate, then the rate of these trees
            n = (tokens - rate * ms).argmax(-1)[..., None]
            tokens_D, ms_D = (
                np.take_along_axis(tokens, n, -1).mean((1, 2)),
                np.take_along_axis(ms, n, -1).mean((1, 2)),
            )
            best = int((tokens_D / ms_D).argmax())
            rate = float(tokens_D[best] / ms_D[best])
        return float(tokens_D[best]), float(ms_D[best])
