"""Who drafts in the next round: the most expected tokens per millisecond, before any tree is known.

Knows no model and no clock. The trees that are expected are those of late, as each request's own
past shifts them; the rule is that of `tree.choose`, which decides again when the trees are there.

Letters: S requests that may speculate, B all that decode, K draft steps, N nodes of a tree, R trees
of late, Q kinds of requests, W widths of a draft step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.engine.acceptance import BELIEF, MEMORY, RequestAcceptance, shifted
from eyas.engine.tree import choose
from eyas.model.rows import Proposals

NUM_TREES = 32  # of late
# of trees before any was seen, chains: the best path's probability, each further one times it again
_FIRST_PATH = 0.85
# tokens that a level brings for a frontier of probability 1, before it is learned
FIRST_GAIN = 0.4
TEXT_BOUNDS = np.array([1e-9, 0.4, 1.2])  # of the tokens that text is expected to bring
NUM_KINDS = 2 * (len(TEXT_BOUNDS) + 1)


class ExpectedTrees:
    """What a tree that is not drafted yet will be: one of the trees of late.

    paths_WQRKN: path probabilities float64 of each as an average request's, the best first, drafted
    to each depth at most, by width and kind of request. reached_WQR: int64, how deep it was
    drafted. num_seen_WQ: int64. brought, grown_from: float64 [W, K - 1], the tokens that each level
    but the first has brought, and the probability of the frontiers that it grew from; of both what
    is above the worth of a node.
    """

    def __init__(self, num_draft_steps: int, max_nodes: int, widths: tuple[int, ...]) -> None:
        """widths: the candidates of a request that a level may grow from, the most first."""
        self.widths, W = widths, len(widths)
        chain_N = _FIRST_PATH ** np.arange(1.0, max_nodes + 1)
        first_KN = np.tile(chain_N, (num_draft_steps, 1))
        first_KN *= np.arange(max_nodes) <= np.arange(num_draft_steps)[:, None]
        self.paths_WQRKN = np.tile(first_KN, (W, NUM_KINDS, NUM_TREES, 1, 1))
        self.reached_WQR = np.full((W, NUM_KINDS, NUM_TREES), num_draft_steps)
        self.num_seen_WQ = np.zeros((W, NUM_KINDS), dtype=np.int64)
        self.brought, self.grown_from = np.zeros((2, W, num_draft_steps - 1))

    def gains(self, w: int) -> np.ndarray:
        """Tokens that each level but the first brings, by what it grows from, float64 [K - 1]."""
        gains: np.ndarray = (self.brought[w] + BELIEF * FIRST_GAIN) / (self.grown_from[w] + BELIEF)
        return gains

    def observe(
        self,
        proposals: Proposals,
        paths: np.ndarray,
        log_odds: np.ndarray,
        kinds: np.ndarray,
        unworthy: float,
        width: int,
    ) -> None:
        """Trees that were drafted at a width, text's candidates in them at any depth. A wide tree
        tells what the narrow one would have been.

        log_odds [B]: shifts of the requests. kinds: int64, of those for which the head has drafted.
        unworthy: the path probability that counts for nothing.
        """
        parents, scores, depth = proposals.parents, proposals.scores, int(proposals.depths[-1])
        is_text = np.zeros(paths.shape, dtype=bool)
        if (text := proposals.text) is not None:
            paths, scores, log_odds = paths[text.grown], scores[text.grown], log_odds[text.grown]
            parents, is_text, depth = (
                parents[text.grown],
                text.cells[text.grown] >= 0,
                text.head_depth,
            )
        first = self.widths.index(width)
        for w in range(first, len(self.widths)):
            is_of = np.ones(paths.shape, dtype=bool)
            if w > first:
                is_of = of_best_path(parents, scores, proposals.depths)
            self._keep(
                w,
                proposals.depths,
                depth,
                (paths, scores, is_of, is_text),
                log_odds,
                kinds,
                unworthy,
            )

    def _keep(
        self,
        w: int,
        depths: np.ndarray,
        depth: int,
        trees: tuple[np.ndarray, ...],
        log_odds: np.ndarray,
        kinds: np.ndarray,
        unworthy: float,
    ) -> None:
        paths, scores, is_of, is_text = trees
        K, N = self.paths_WQRKN.shape[3:]
        self.brought[w] *= MEMORY
        self.grown_from[w] *= MEMORY
        places = []
        for kind in kinds.tolist():
            places.append((w, kind, int(self.num_seen_WQ[w, kind]) % NUM_TREES))
            self.num_seen_WQ[w, kind] += 1
            self.reached_WQR[places[-1]] = depth
        before = 0.0
        for level in range(K):
            there = np.where(is_text | (is_of & (depths <= level + 1)), paths, 0.0)
            within = -np.sort(-there, axis=1)[:, :N]
            value = float(np.maximum(within - unworthy, 0).sum())
            if 0 < level < depth:
                own = np.where(is_of & (depths == level), scores, -np.inf)
                frontier = np.exp(own.max(1).astype(np.float64))
                self.brought[w, level - 1] += value - before
                self.grown_from[w, level - 1] += np.maximum(frontier - unworthy, 0).sum()
            before = value
            usual = shifted(within, -log_odds)
            for place, row in zip(places, usual, strict=True):
                self.paths_WQRKN[place][level] = 0.0
                self.paths_WQRKN[place][level, : len(row)] = row


def of_best_path(parents: np.ndarray, scores: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Which candidates [B, C] would be there if each level had grown from its best one alone."""
    found = np.zeros(parents.shape, dtype=bool)
    for line in range(len(parents)):
        best = -1
        for depth in range(1, int(depths[-1]) + 1):
            own = np.flatnonzero((depths == depth) & (parents[line] == best))
            if not len(own):
                break
            found[line, own] = True
            best = int(own[scores[line, own].argmax()])
    return found


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known before a round. All ms are the cost table's.

    num_requests: B. usual_WQRKN, reached_WQR: of `ExpectedTrees`; num_seen_Q: of its wide trees.
    kind_S: int64. text_SN: path probabilities of text's candidates, which need no drafting; 0 for
    none. known_S, hoped_S:
    log-odds by which each request differs, as known and as hoped. due_S: int64, entries made with
    its root's. late_S: ms of those that it lacks besides, by round. forwards: [S * N + 1], by
    nodes. extends: by entries. steps: [W, S + 1], one level of trees of so many requests.
    known_factor, hoped_factor: by which drafting rounds take longer than the table says, against
    plain ones.
    """

    num_requests: int
    usual_WQRKN: np.ndarray
    reached_WQR: np.ndarray
    num_seen_Q: np.ndarray
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

    def may_be_narrow(self, which: np.ndarray) -> bool:
        """Whether narrow trees are cheaper, and known: wide ones of all these kinds have told what
        they would be.
        """
        count, seen_S = len(which), self.num_seen_Q[self.kind_S[which]]
        return bool(self.steps[1, count] < self.steps[0, count] and seen_S.min() >= NUM_TREES)


@dataclass(frozen=True, slots=True)
class WhoDrafts:
    """drafting: bool [S], whose trees the head grows. rate: tokens by ms of the table that a node
    must bring. unworthy: the path probability that is not worth a node's time. w: the width's
    place.
    """

    drafting: np.ndarray
    num_drafting: int
    rate: float
    unworthy: float = 0.0
    w: int = 0


def who_drafts(outlook: Outlook) -> WhoDrafts:
    """The best of drafting for nobody, for the one request that gains most, the two, the four ...
    that do, each to every depth and at every width.

    What is not known is hoped to be better where it is decided who drafts, so that it is tried; it
    is taken as known for what a node must be worth.
    """
    S = len(outlook.kind_S)
    best = plain = text_rate(outlook)
    found: tuple[np.ndarray, int, int] | None = None
    for w, usual_QRKN in enumerate(outlook.usual_WQRKN):
        deepest = int(outlook.reached_WQR[w, outlook.kind_S].max())
        for depth in range(1 + w, deepest + 1):  # of one level all widths are the same
            mean_SN = usual_QRKN[:, :, depth - 1].mean(1)[outlook.kind_S]
            of_S = np.maximum(shifted(mean_SN, outlook.hoped_S), outlook.text_SN)
            gain_S = (of_S - outlook.text_SN).sum(1) - outlook.late_S * plain
            order_S = np.argsort(-gain_S, kind="stable")
            for count in counts(S):
                which = order_S[:count]
                if w > 0 and not outlook.may_be_narrow(which):
                    continue
                rate, _ = rate_of(
                    outlook, which, (depth, w), outlook.hoped_S, outlook.hoped_factor, best
                )
                if rate > best:
                    best, found = rate, (which, depth, w)
    drafting = np.zeros(S, dtype=bool)
    if found is None:
        return WhoDrafts(drafting, 0, plain)
    which, depth, w = found
    drafting[which] = True
    rate, unworthy = plain, 0.0
    for _ in range(3):  # Dinkelbach: the best trees for a rate, then the rate of these trees
        known, unworthy = rate_of(
            outlook, which, (depth, w), outlook.known_S, outlook.known_factor, rate
        )
        rate = max(plain, known)
    return WhoDrafts(drafting, len(which), rate * outlook.known_factor, unworthy, w)


def rate_of(
    outlook: Outlook,
    which: np.ndarray,
    shape: tuple[int, int],
    log_odds_S: np.ndarray,
    factor: float,
    least: float,
) -> tuple[float, float]:
    """Tokens/ms of rounds in which the head drafts for `which` and text for all, and every node is
    worth `least`: the trees of late are dealt out to them, until all were. And the best path that
    is not verified, mean over these rounds. shape: depth, and the width's place.
    """
    depth, w = shape
    count, R = len(which), outlook.usual_WQRKN.shape[2]
    kinds = outlook.kind_S[which]
    before_ms = float(outlook.extends[outlook.due_S[which].sum()] + outlook.late_S[which].sum())
    has_text = outlook.text_SN[:, 0] > 0
    has_text[which] = False
    of_others, tokens, ms, unworthy = outlook.text_SN[has_text], 0.0, 0.0, []
    for start in range(0, R, count):
        trees = (start + np.arange(count)) % R
        levels = min(depth, int(outlook.reached_WQR[w, kinds, trees].max()))
        own = shifted(outlook.usual_WQRKN[w, kinds, trees, depth - 1], log_odds_S[which])
        paths = np.concatenate((np.maximum(own, outlook.text_SN[which]), of_others))
        choice = choose(
            paths,
            outlook.forwards,
            outlook.num_requests,
            before_ms + (levels - 1) * float(outlook.steps[w, count]),
            paths.shape[1],
            least * factor,
        )
        # a round that drafts in vain is not hoped to be faster than a plain one
        taken = factor if choice.num_nodes else max(1.0, factor)
        tokens, ms = tokens + choice.expected_tokens, ms + choice.predicted_ms * taken
        unworthy.append(float(np.where(choice.kept, 0.0, paths).max()))
    return tokens / ms, sum(unworthy) / len(unworthy)


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


def tree_kinds(requests: Sequence[RequestAcceptance], text_SN: np.ndarray) -> np.ndarray:
    """What trees are to be expected of each request, int64 [S]: sampled or greedy, and how much
    text there is already, which the head's trees can only add to.
    """
    greedy_S = np.array([one.greedy for one in requests], dtype=np.int64)
    text_S = np.searchsorted(TEXT_BOUNDS, text_SN.sum(1), side="right")
    kinds_S: np.ndarray = greedy_S + 2 * text_S
    return kinds_S
