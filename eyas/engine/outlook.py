"""Who drafts in the next round: the most expected tokens per millisecond, before any tree is known.

Pure functions; know no model and no clock. The trees that are expected are those of late, as each
request's own past shifts them; the rule is that of `tree.choose`, which decides again when the
trees are there.

Letters: S requests that may speculate, B all that decode, K draft steps, N nodes of a tree, R trees
of late.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from eyas.engine.acceptance import pointers
from eyas.engine.tree import choose
from eyas.model.native import library


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known before a round. All ms are the cost table's.

    num_requests: B. usual_2RKN: path probabilities of the trees of late, as of an average request,
    sampled and greedy, of each depth at most, descending. reached_2R: int64, how deep each was
    drafted. greedy_S: bool. known_S, hoped_S: log-odds by which
    each request differs, as known and as hoped. due_S: int64, entries made with its root's. late_S:
    ms of those that it lacks besides, by round. forwards: [S * N + 1], by nodes. extends: by
    entries. steps: [S + 1], one level of trees of so many requests. known_factor, hoped_factor: by
    which drafting rounds take longer than the table says, against plain ones.
    """

    num_requests: int
    usual_2RKN: np.ndarray
    reached_2R: np.ndarray
    greedy_S: np.ndarray
    known_S: np.ndarray
    hoped_S: np.ndarray
    due_S: np.ndarray
    late_S: np.ndarray
    forwards: np.ndarray
    extends: np.ndarray
    steps: np.ndarray
    known_factor: float
    hoped_factor: float


@dataclass(frozen=True, slots=True)
class WhoDrafts:
    """drafting: bool [S]. rate: tokens by ms of the table that a node must bring."""

    drafting: np.ndarray
    num_drafting: int
    rate: float


def who_drafts(outlook: Outlook) -> WhoDrafts:
    """The best of drafting for nobody, for the one request that gains most, the two, the four ...
    that do, each to every depth.

    What is not known is hoped to be better where it is decided who drafts, so that it is tried; it
    is taken as known for what a node must be worth.
    """
    S, deepest = len(outlook.greedy_S), int(outlook.reached_2R.max())
    best = plain = outlook.num_requests / float(outlook.forwards[0])
    found: tuple[np.ndarray, int] | None = None
    kind_S = outlook.greedy_S.astype(np.int64)
    for depth in range(1, deepest + 1):
        mean_SN = outlook.usual_2RKN[:, :, depth - 1].mean(1)[kind_S]
        gain_S = shifted(mean_SN, outlook.hoped_S).sum(1)
        order_S = np.argsort(outlook.late_S * plain - gain_S, kind="stable")
        for count in counts(S):
            which = order_S[:count]
            rate = rate_of(outlook, which, depth, outlook.hoped_S, outlook.hoped_factor, best)
            if rate > best:
                best, found = rate, (which, depth)
    drafting = np.zeros(S, dtype=bool)
    if found is None:
        return WhoDrafts(drafting, 0, 0.0)
    which, depth = found
    drafting[which] = True
    rate = plain
    for _ in range(3):  # Dinkelbach: the best trees for a rate, then the rate of these trees
        known = rate_of(outlook, which, depth, outlook.known_S, outlook.known_factor, rate)
        rate = max(plain, known)
    return WhoDrafts(drafting, len(which), rate * outlook.known_factor)


def shifted(paths_SN: np.ndarray, log_odds_S: np.ndarray) -> np.ndarray:
    """An average request's path probabilities as those of requests that differ, [S, N]."""
    odds_SN = np.exp(log_odds_S)[:, None] * paths_SN
    of_requests: np.ndarray = odds_SN / (1.0 - paths_SN + odds_SN)
    return of_requests


def rate_of(
    outlook: Outlook,
    which: np.ndarray,
    depth: int,
    log_odds_S: np.ndarray,
    factor: float,
    least: float,
) -> float:
    """Tokens/ms of rounds in which `which` draft and every node is worth `least`: the trees of late
    are dealt out to them, until all were.
    """
    count, R = len(which), outlook.usual_2RKN.shape[1]
    kinds = outlook.greedy_S[which].astype(np.int64)
    before_ms = float(outlook.extends[outlook.due_S[which].sum()] + outlook.late_S[which].sum())
    tokens = ms = 0.0
    for start in range(0, R, count):
        trees = (start + np.arange(count)) % R
        levels = min(depth, int(outlook.reached_2R[kinds, trees].max()))
        paths = shifted(outlook.usual_2RKN[kinds, trees, depth - 1], log_odds_S[which])
        choice = choose(
            paths,
            outlook.forwards,
            outlook.num_requests,
            before_ms + (levels - 1) * float(outlook.steps[count]),
            paths.shape[1],
            least * factor,
        )
        # a round that drafts in vain is not hoped to be faster than a plain one
        taken = factor if choice.num_nodes else max(1.0, factor)
        tokens, ms = tokens + choice.expected_tokens, ms + choice.predicted_ms * taken
    return tokens / ms


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**n for n in range(int(math.log2(most)) + 1))})


def who_drafts_natively(outlook: Outlook) -> WhoDrafts:
    """`who_drafts` in the native library, which must be available."""
    _, R, K, N = outlook.usual_2RKN.shape
    S = len(outlook.greedy_S)
    drafting, rate = np.zeros(S, dtype=bool), np.zeros(1)
    arrays = (
        outlook.usual_2RKN,
        outlook.reached_2R,
        np.ascontiguousarray(outlook.greedy_S, dtype=bool),
        outlook.known_S,
        outlook.hoped_S,
        outlook.due_S,
        outlook.late_S,
        np.ascontiguousarray(outlook.forwards),
        np.ascontiguousarray(outlook.extends),
        np.ascontiguousarray(outlook.steps),
    )
    sizes = (ctypes.c_int64 * 5)(outlook.num_requests, S, K, N, R)
    factors = outlook.known_factor, outlook.hoped_factor
    num_drafting: int = library().eyas_who_drafts(
        sizes, *factors, pointers(*arrays, drafting, rate)
    )
    return WhoDrafts(drafting, num_drafting, float(rate[0]))
