"""Who drafts in the next round: the most expected tokens per millisecond, before any tree is known.

Pure functions; know no model and no clock. The trees that are expected are those of late, as each
request's own past shifts them; the rule is that of `tree.choose`, which decides again when the
trees are there.

Letters: S requests that may speculate, B all that decode, K draft steps, N nodes of a tree, R trees
of late, Q kinds of requests.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import numpy as np

from eyas.engine.tree import choose
from eyas.model.library import library, pointers


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known before a round. All ms are the cost table's.

    num_requests: B. usual_QRKN: path probabilities of the trees of late, as of an average request,
    by kind of request (Q), of each depth at most, descending. reached_QR: int64, how deep each was
    drafted. kind_S: int64. text_SN: those of text's candidates, which need no drafting; 0 for none.
    known_S, hoped_S: log-odds by which each request differs, as known and as hoped. due_S: int64,
    entries made with its root's. late_S: ms of those that it lacks besides, by round. forwards:
    [S * N + 1], by nodes. extends: by entries. steps: [S + 1], one level of trees of so many
    requests. known_factor, hoped_factor: by which drafting rounds take longer than the table says,
    against plain ones.
    """

    num_requests: int
    usual_QRKN: np.ndarray
    reached_QR: np.ndarray
    kind_S: np.ndarray
    text_SN: np.ndarray
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
    """drafting: bool [S], whose trees the head grows. rate: tokens by ms of the table that a node
    must bring.
    """

    drafting: np.ndarray
    num_drafting: int
    rate: float


def who_drafts(outlook: Outlook) -> WhoDrafts:
    """The best of drafting for nobody, for the one request that gains most, the two, the four ...
    that do, each to every depth.

    What is not known is hoped to be better where it is decided who drafts, so that it is tried; it
    is taken as known for what a node must be worth.
    """
    S, deepest = len(outlook.kind_S), int(outlook.reached_QR.max())
    best = plain = text_rate(outlook)
    found: tuple[np.ndarray, int] | None = None
    for depth in range(1, deepest + 1):
        mean_SN = outlook.usual_QRKN[:, :, depth - 1].mean(1)[outlook.kind_S]
        of_S = np.maximum(shifted(mean_SN, outlook.hoped_S), outlook.text_SN)
        gain_S = of_S.sum(1) - outlook.text_SN.sum(1)
        order_S = np.argsort(outlook.late_S * plain - gain_S, kind="stable")
        for count in counts(S):
            which = order_S[:count]
            rate = rate_of(outlook, which, depth, outlook.hoped_S, outlook.hoped_factor, best)
            if rate > best:
                best, found = rate, (which, depth)
    drafting = np.zeros(S, dtype=bool)
    if found is None:
        return WhoDrafts(drafting, 0, plain)
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
    """Tokens/ms of rounds in which the head drafts for `which` and text for all, and every node is
    worth `least`: the trees of late are dealt out to them, until all were.
    """
    count, R = len(which), outlook.usual_QRKN.shape[1]
    kinds = outlook.kind_S[which]
    before_ms = float(outlook.extends[outlook.due_S[which].sum()] + outlook.late_S[which].sum())
    has_text = outlook.text_SN[:, 0] > 0
    has_text[which] = False
    of_others, tokens, ms = outlook.text_SN[has_text], 0.0, 0.0
    for start in range(0, R, count):
        trees = (start + np.arange(count)) % R
        levels = min(depth, int(outlook.reached_QR[kinds, trees].max()))
        paths = shifted(outlook.usual_QRKN[kinds, trees, depth - 1], log_odds_S[which])
        choice = choose(
            np.concatenate((np.maximum(paths, outlook.text_SN[which]), of_others)),
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


def text_rate(outlook: Outlook) -> float:
    """Tokens/ms of a round in which the head drafts for nobody, and text for all."""
    plain = outlook.num_requests / float(outlook.forwards[0])
    text_SN = outlook.text_SN[outlook.text_SN[:, 0] > 0]
    if not len(text_SN):
        return plain
    choice = choose(text_SN, outlook.forwards, outlook.num_requests, 0.0, text_SN.shape[1], plain)
    return max(plain, choice.expected_tokens / choice.predicted_ms)


def counts(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *(2**n for n in range(int(math.log2(most)) + 1))})


def who_drafts_natively(outlook: Outlook) -> WhoDrafts:
    """`who_drafts` in the native library, which must be available."""
    Q, R, K, N = outlook.usual_QRKN.shape
    S = len(outlook.kind_S)
    drafting, rate = np.zeros(S, dtype=bool), np.zeros(1)
    arrays = (
        outlook.usual_QRKN,
        outlook.reached_QR,
        outlook.kind_S.astype(np.uint8),
        np.ascontiguousarray(outlook.text_SN),
        outlook.known_S,
        outlook.hoped_S,
        outlook.due_S,
        outlook.late_S,
        np.ascontiguousarray(outlook.forwards),
        np.ascontiguousarray(outlook.extends),
        np.ascontiguousarray(outlook.steps),
    )
    sizes = (ctypes.c_int64 * 6)(outlook.num_requests, S, K, N, R, Q)
    factors = outlook.known_factor, outlook.hoped_factor
    num_drafting: int = library().eyas_who_drafts(
        sizes, *factors, pointers(*arrays, drafting, rate)
    )
    return WhoDrafts(drafting, num_drafting, float(rate[0]))
