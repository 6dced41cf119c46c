"""Which candidates the target verifies: one budget over all requests, by one sort. Pure functions;
knows no model.

A node's path probability is the chance that it is emitted because it is in the tree, and a sum of
them the expected number of extra tokens, whatever the tree. The best n nodes of all requests are
therefore the n of highest path probability, and the only question is n: each more brings fewer
tokens, and costs what the machine's curve says.

Letters: B requests, C candidates a request, n nodes kept in all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MAX_NODES = 63  # a request's, root excluded: the bits of a row's mask


@dataclass(frozen=True, slots=True)
class Choice:
    """kept bool [B, C] is connected: a kept node's parent is kept. expected_tokens counts one token
    a request besides.
    """

    kept: np.ndarray
    num_nodes: int
    expected_tokens: float
    predicted_ms: float


def choose(
    path_probs: np.ndarray,
    ms_of_nodes: np.ndarray,
    num_tokens: int,
    fixed_ms: float = 0.0,
    max_nodes: int = MAX_NODES,
    rate: float | None = None,
) -> Choice:
    """The prefix of the sorted candidates that is worth most.

    path_probs [B, C]: level by level, a child at most its parent's. ms_of_nodes[n]: cost of the
    verifying forward with n nodes besides the roots; its length limits n. num_tokens: those emitted
    without any node, one a request in the forward. max_nodes: per request. rate None: the highest
    (num_tokens + sum of kept) / (fixed_ms + ms_of_nodes[n]). With the long-run rate (tokens/ms)
    given, the highest tokens - rate * ms instead: rounds differ, and what maximises the tokens of
    all rounds over the time of all rounds is to stop where a node earns less than the average round
    does.
    """
    B, C = path_probs.shape
    width = min(C, max_nodes)
    # Stable sorts: at equal scores the lower index goes first, and a parent's index is below its
    # child's.
    order = np.argsort(-path_probs, axis=1, kind="stable")[:, :width]
    if B == 1:
        best = path_probs[0, order[0]]
        flat = order[0]
    else:
        ranked = np.take_along_axis(path_probs, order, 1).ravel()
        pooled = np.argsort(-ranked, kind="stable")
        best = ranked[pooled]
        flat = (order + C * np.arange(B)[:, None]).ravel()[pooled]
    limit = min(best.size, len(ms_of_nodes) - 1)
    tokens = np.empty(limit + 1)
    tokens[0] = num_tokens
    tokens[1:] = best[:limit]
    # in this order, so that a tie in worth is a tie for `choose_plainly` too
    np.cumsum(tokens, out=tokens)
    ms = ms_of_nodes[: limit + 1] + fixed_ms
    n = int((tokens / ms if rate is None else tokens - rate * ms).argmax())
    kept = np.zeros(B * C, dtype=bool)
    kept[flat[:n]] = True
    return Choice(kept.reshape(B, C), n, float(tokens[n]), float(ms[n]))


def choose_plainly(
    path_probs: Sequence[Sequence[float]],
    ms_of_nodes: Sequence[float],
    num_tokens: int,
    fixed_ms: float = 0.0,
    max_nodes: int = MAX_NODES,
    rate: float | None = None,
) -> tuple[set[tuple[int, int]], float, float]:
    """`choose` read aloud: the kept (request, candidate), expected tokens and predicted ms."""
    ranked: list[tuple[float, int, int, int]] = []
    for b, row in enumerate(path_probs):
        best = sorted(range(len(row)), key=lambda c: (-row[c], c))[:max_nodes]
        ranked += [(-row[c], b, rank, c) for rank, c in enumerate(best)]
    ranked.sort()
    tokens, ms = float(num_tokens), ms_of_nodes[0] + fixed_ms
    best_n, best_tokens, best_ms = 0, tokens, ms
    for n, (negative, *_) in enumerate(ranked[: len(ms_of_nodes) - 1], start=1):
        tokens, ms = tokens - negative, ms_of_nodes[n] + fixed_ms
        worth, best_worth = (
            (tokens / ms, best_tokens / best_ms)
            if rate is None
            else (tokens - rate * ms, best_tokens - rate * best_ms)
        )
        if worth > best_worth:
            best_n, best_tokens, best_ms = n, tokens, ms
    return {(b, c) for _, b, _, c in ranked[:best_n]}, best_tokens, best_ms


def most_probable(scores: np.ndarray, num_nodes: int) -> np.ndarray:
    """The tree of a fixed size, kept bool [B, C]: each request's `num_nodes` best (EAGLE-2, arXiv
    2406.16858, section 4.2).
    """
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, np.argsort(-scores, axis=1, kind="stable")[:, :num_nodes], True, axis=1)
    return kept


def values_by_depth(
    path_probs: np.ndarray,
    depths: np.ndarray,
    ms_of_nodes: np.ndarray,
    rate: float,
    max_nodes: int = MAX_NODES,
) -> np.ndarray:
    """Worth in tokens, above verifying nothing, of the best tree of depth at most d: float64 [D +
    1], d = 0 .. D.
    """
    deepest = int(depths[-1]) if len(depths) else 0
    values = np.zeros(deepest + 1)
    for depth in range(1, deepest + 1):
        shallow = path_probs[:, : int(np.searchsorted(depths, depth, side="right"))]
        choice = choose(shallow, ms_of_nodes, 0, 0.0, max_nodes, rate)
        values[depth] = choice.expected_tokens - rate * (
            choice.predicted_ms - float(ms_of_nodes[0])
        )
    return values
