"""What a round brings and takes at each load: forecast from recent trees, and measured. Knows no
clock and no model.

    Forecast     tokens and ms of a speculative round at any load, from the last rounds' trees
    LoadState    the speed-up of speculation at one load, and whether to speculate there
    Correction   the ratio of real to predicted time, by kind of round and load

Letters: R requests kept, N nodes of each, S requests that speculate, D depths.
"""

from __future__ import annotations

import math

import numpy as np

from eyas.engine.acceptance import levels

TRIALS = 5  # rounds of a kind at a load, before their own times are trusted
FIRST_PERIOD = 8  # rounds from one exploration of a load to the next; doubled up to _LAST_PERIOD
_LAST_PERIOD = 2048
_KEPT_REQUESTS = 32  # drafted requests that a forecast is made from
_KEPT_OF_A_ROUND = 4  # so that several rounds are kept
# the speed-up to begin with, and to stay with: no flipping between equals
_ENTER, _LEAVE = 1.02, 1.0
_PATIENCE = 0.1  # by how much it may miss that after one round; after n, by 1 / sqrt(n) of it
_UNKNOWN_SPEEDUP = 1.2  # before anything was drafted: try
_FORECAST_ROUNDS = 16.0  # weight of the forecast against measured rounds
# of a round's error: the part that moves the drift, the offset; and the most that is believed
_DRIFT_GAIN, _OFFSET_GAIN, _LARGEST_JUMP = 0.05, 0.01, 0.4


class Forecast:
    """The path probabilities of recently drafted requests.

    For S requests now, S kept ones at a time are pooled and given the node budget that the costs
    ask for: expected tokens and ms of rounds that were never run at this load.
    """

    def __init__(self, max_nodes: int) -> None:
        self.num_seen = 0
        self._probs_RN = np.zeros((_KEPT_REQUESTS, max_nodes))
        self._depths_RN = np.zeros((_KEPT_REQUESTS, max_nodes), dtype=np.int64)
        self._drafted_R = np.zeros(_KEPT_REQUESTS, dtype=np.int64)

    def add(self, paths: np.ndarray, depths: np.ndarray) -> None:
        """Path probabilities [B, C] of a round, of which a few requests are kept."""
        B, N = len(paths), min(paths.shape[1], self._probs_RN.shape[1])
        count = min(_KEPT_OF_A_ROUND, B)
        picked = np.arange(self.num_seen, self.num_seen + count) % B  # others every round
        places = np.arange(self.num_seen, self.num_seen + count) % _KEPT_REQUESTS
        best = np.argsort(-paths[picked], axis=1, kind="stable")[:, :N]
        self._probs_RN[places, :N] = np.take_along_axis(paths[picked], best, 1)
        self._depths_RN[places, :N] = depths[best]
        self._probs_RN[places, N:] = 0.0
        self._drafted_R[places] = len(levels(depths))
        self.num_seen += count

    def predict(
        self, num_requests: int, num_tokens: int, ms_of_nodes: np.ndarray, ms_of_depth: np.ndarray
    ) -> tuple[float, float]:
        """Mean expected tokens and ms of a round at the best depth limit. Needs one `add` before.

        ms_of_nodes[n]: the forward with n nodes, n up to num_requests * N; ms_of_depth[d - 1]: what
        precedes it, d = 1 .. D.
        """
        known, N = min(self.num_seen, _KEPT_REQUESTS), self._probs_RN.shape[1]
        groups = max(1, known // num_requests)
        rows = np.resize(np.arange(known), groups * num_requests)
        depth_D = np.arange(1, len(ms_of_depth) + 1)[:, None, None]
        pooled = np.where(self._depths_RN[rows] <= depth_D, self._probs_RN[rows], 0.0)
        pooled = -np.sort(-pooled.reshape(len(ms_of_depth), groups, num_requests * N), axis=-1)
        nothing = np.zeros_like(pooled[..., :1])
        tokens = np.concatenate((nothing, pooled.cumsum(-1)), -1) + num_tokens
        reached = np.minimum(self._drafted_R[rows], depth_D[..., 0])
        before = ms_of_depth[reached - 1].reshape(len(ms_of_depth), groups, num_requests).mean(-1)
        ms = ms_of_nodes[: tokens.shape[-1]] + before[..., None]
        rate = float(num_tokens / ms_of_nodes[0])
        for _ in range(3):  # Dinkelbach: the best trees for a rate, then the rate of these trees
            n = (tokens - rate * ms).argmax(-1)[..., None]
            tokens_D = np.take_along_axis(tokens, n, -1).mean((1, 2))
            ms_D = np.take_along_axis(ms, n, -1).mean((1, 2))
            best = int((tokens_D / ms_D).argmax())
            rate = float(tokens_D[best] / ms_D[best])
        return float(tokens_D[best]), float(ms_D[best])


class LoadState:
    """What is known of speculation at one load, and when the other way was last tried.

    The speed-up over a plain round that takes what the table says; the plain rounds' own offset is
    known better with every one that runs, so it is multiplied on when the speed-up is asked for.
    The drift of both cancels.
    """

    def __init__(self) -> None:
        self.speculates = True
        self.forecast: float | None = None
        self.age = self.num_rounds = 0  # rounds since the forecast, and in all
        # of the last speculative rounds, in plain rounds: by tokens, by time
        self.worth = self.spent = 0.0
        self.num_measured = 0
        self.since, self.period = 0, FIRST_PERIOD  # rounds since the last exploration; to the next

    def speedup(self, plain_offset: float) -> float:
        """Of a speculative round over plain rounds with as many tokens."""
        if self.forecast is None:
            return _UNKNOWN_SPEEDUP
        worth = self.worth + _FORECAST_ROUNDS * self.forecast
        return plain_offset * worth / (self.spent + _FORECAST_ROUNDS)

    def decide(self, speedup: float) -> bool:
        """Whether to speculate at this speed-up."""
        patience = _PATIENCE / math.sqrt(1 + self.num_measured) if self.speculates else 0.0
        speculates = speedup >= (_LEAVE - patience if self.speculates else _ENTER)
        if speculates != self.speculates:
            self.speculates, self.since, self.period = speculates, 0, 2 * FIRST_PERIOD
        return speculates

    def explored(self) -> None:
        """The way that is not taken was tried in this round."""
        self.since, self.period = 0, min(2 * self.period, _LAST_PERIOD)

    def measured(self, worth: float, spent: float) -> None:
        """A speculative round: its tokens and its time, in plain rounds."""
        self.worth, self.spent = 0.99 * self.worth + worth, 0.99 * self.spent + spent
        self.num_measured += 1

    def rested(self) -> None:
        """A plain round: what was measured of speculation grows old, slowly."""
        self.worth, self.spent = 0.999 * self.worth, 0.999 * self.spent


class Correction:
    """The ratio real / predicted of rounds, by their kind and load, followed slowly.

    A ratio is the exponential of a drift that all kinds share (another program on the machine slows
    all of them, also the kind that is not running now) and an offset of its own (what the table
    does not know: Python, sampling). Until `TRIALS` rounds were observed an offset is borrowed: the
    first trees meet cold caches, and one that took twice its time would be the last. Then their
    median sets it; later ones move mostly the drift.
    """

    def __init__(self) -> None:
        self._drift = 0.0
        self._offsets: dict[tuple[str, int], float] = {}  # by kind and load
        self._counts: dict[tuple[str, int], int] = {}
        self._firsts: dict[tuple[str, int], list[float]] = {}
        self._latest: dict[str, float] = {}  # kind -> the offset last moved

    def ratio(self, kind: str, load: int) -> float:
        return self.drift * self.offset(kind, load)

    @property
    def drift(self) -> float:
        """What all kinds share: the machine against the table."""
        return math.exp(self._drift)

    def offset(self, kind: str, load: int) -> float:
        """A load hardly seen borrows from another of its kind, a kind hardly seen from another
        kind: the table's own error.
        """
        own = self._offsets.get((kind, load))
        if own is None:
            own = self._latest.get(kind, next(iter(self._latest.values()), 0.0))
        return math.exp(own)

    def observe(self, kind: str, load: int, predicted_ms: float, real_ms: float) -> None:
        """Both above 0."""
        count = self.count(kind, load)
        self._counts[kind, load] = count + 1
        if count < TRIALS:
            firsts = self._firsts.setdefault((kind, load), [])
            firsts.append(math.log(real_ms / predicted_ms) - self._drift)
            if len(firsts) < TRIALS:
                return
            offset = sorted(firsts)[TRIALS // 2]
        else:
            # From here on one pause of the machine is not to be believed in full.
            offset = self._offsets[kind, load]
            error = math.log(real_ms / predicted_ms) - self._drift - offset
            error = max(-_LARGEST_JUMP, min(_LARGEST_JUMP, error))
            gain = max(_OFFSET_GAIN, 1 / (count + 2))
            self._drift += _DRIFT_GAIN * (1 - gain) * error
            offset += gain * error
        self._offsets[kind, load] = self._latest[kind] = offset

    def count(self, kind: str, load: int) -> int:
        """How many of this kind and load were observed."""
        return self._counts.get((kind, load), 0)
