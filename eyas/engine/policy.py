"""How much to speculate, decided every round: for which requests, how deep, which nodes.

    plan      before drafting: who drafts, and when to stop going deeper          -> RoundPlan
    choose    after drafting: which candidates the target verifies                -> kept
    observe   after the round: what was emitted, and how long it took

One rule: the most emitted tokens per millisecond over all requests of the round; drafting nothing
is one of the choices. The policy knows costs (`costs.py`) and acceptance (`acceptance.py`),
proposals and past rounds, never the target's coming draws: outputs stay exact.

The expected tree is two tables [K, G], means over the last trees: how many nodes of depth d or less
have a path probability of GRID[g] or more, and the sum of these, the tokens they bring. A plan is a
depth, a least path probability, a number of requests and a width; all plans are compared at once.
While no tree is drafted, the tables move back to the first belief, so that a head that did not pay
is tried again. Text's candidates exist before planning and cost nothing.

Letters: S requests that may speculate, B all that decode, B' those with candidates, K draft steps,
C candidates, G path probabilities, W widths, Q numbers of requests that may draft.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import mul

import numpy as np

from eyas.engine.acceptance import SOURCES, Acceptance, Calibration
from eyas.engine.costs import AT_ONCE, CostTable
from eyas.engine.text import TextChain
from eyas.engine.tree import Speculation, choose, most_probable
from eyas.model.rows import HEAD, TEXT, Proposals

GRID = np.array([0.02, 0.04, 0.07, 0.1, 0.14, 0.19, 0.25, 0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
_LEASTS = GRID.tolist()
FIRST_PATH = 0.85  # a good head's acceptance: the first expected tree, a chain, is tried
FIRST_TREES = 5.0  # its weight, in trees
RECENT, AT_REST = 0.96, 0.9999  # decay of the tables in a round with trees, and without
NARROW = 0.96  # a tree grown from one candidate a level gives .96 times the tokens
LEVEL_GAIN = 0.75  # tokens of a further level for a path of probability 1
ROUNDS_TO_PAY = 32  # rounds over which making missing entries has to pay
# Variances of the logs of slowness and factor: at first, of a round's drift; of one round's time.
# Errors are clipped (Huber 1964): a pause of the machine says little.
_FIRST, _DRIFT, _NOISE, _MOST_ERROR = (0.01, 0.0016), (1e-4, 1e-6), 0.01, 0.2
_FACTOR_MEMORY = 0.9995
# what plain rounds cost now and then where trees gain, as a share of the time
LOOKS, LEAST_APART = 0.0025, 16
_MOST_LOADS = 256  # cached


@dataclass(slots=True)
class _Slowness:
    """Means of two logs, their covariance, and rounds with trees since the last plain one."""

    machine: float = 0.0
    trees: float = 0.0
    machine_variance: float = _FIRST[0]
    covariance: float = 0.0
    trees_variance: float = _FIRST[1]
    num_unseen: int = 0


class Correction:
    """The cost table against real times: how much longer rounds take, and rounds with trees longer
    still.

    log(real / predicted) of a round is the machine's slowness, plus a factor in rounds with trees;
    only the factor decides who drafts. A filter (Kalman 1960) follows both, for each load (an
    octave of requests): a plain round shows the first, one with trees their sum, so now and then a
    round is plain (`is_due`). A new load begins with the last one's values. The factor decays while
    nothing is drafted, so that drafting is tried again.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Slowness] = {}
        self._latest = _Slowness()

    def _of(self, num_requests: int) -> _Slowness:
        load = num_requests.bit_length()
        if load not in self._loads:
            self._loads[load] = replace(self._latest, num_unseen=0)
        return self._loads[load]

    def factor(self, num_requests: int) -> float:
        """Time of rounds with trees over plain ones."""
        return math.exp(max(0.0, self._of(num_requests).trees))

    def is_due(self, num_requests: int, gain: float) -> bool:
        """Whether a plain round should show how slow the machine is. gain: of trees, by table and
        factor.
        """
        return self._of(num_requests).num_unseen >= max(LEAST_APART, (gain - 1.0) / LOOKS)

    def observe(
        self, num_requests: int, drafted: bool, predicted_ms: float, real_ms: float
    ) -> float:
        """Learn from a round; returns the expected time in real ms."""
        self._latest = of = self._of(num_requests)
        expected = of.machine + of.trees * drafted
        error = math.log(real_ms / predicted_ms) - expected
        error = max(-_MOST_ERROR, min(_MOST_ERROR, error))
        of.machine_variance += _DRIFT[0]
        # bounded, or after a long rest one round would decide
        of.trees_variance = min(of.trees_variance + _DRIFT[1], _FIRST[1])
        # of what is seen, with either log
        with_machine = of.machine_variance + of.covariance * drafted
        with_trees = of.covariance + of.trees_variance * drafted
        seen = with_machine + with_trees * drafted + _NOISE
        of.machine += with_machine / seen * error
        of.trees += with_trees / seen * error
        of.machine_variance -= with_machine**2 / seen
        of.trees_variance -= with_trees**2 / seen
        of.covariance -= with_machine * with_trees / seen
        if drafted:
            of.num_unseen += 1
        else:
            of.trees, of.num_unseen = _FACTOR_MEMORY * of.trees, 0
        return predicted_ms * math.exp(expected)


@dataclass(slots=True)
class RoundPlan:
    """A round: its plan, then its results.

    pending: int64 [S], entries that each request lacks. num_requests: B. drafting: bool [S],
    requests for which the head grows trees. width: candidates of a request from which a level
    grows. thresholds: [K], of `tree.goes_on`. rate: tokens/ms of the table that a node must bring.
    """

    pending: np.ndarray
    num_requests: int
    drafting: np.ndarray
    width: int = 0
    thresholds: list[float] = field(default_factory=list)
    rate: float = 0.0
    proposals: Proposals | None = None
    calibration: Calibration | None = None
    num_drafting: int = 0  # requests with candidates, of the head or of text
    depth: int = 0  # levels that the head has drafted
    num_nodes: int = 0
    expected_tokens: float = 0.0  # in auto; of all B requests
    predicted_ms: float = 0.0  # in auto, by the table; of a round that is done, corrected
    tokens: int = 0  # emitted by all B requests once the round is done
    real_ms: float = 0.0

    @property
    def drafts(self) -> bool:
        return any(self.drafting.tolist())  # faster than an array operation for few numbers


@dataclass(frozen=True, slots=True)
class Load:
    """Milliseconds that depend on the number of requests only. forwards: of the target with
    nodes_axis (0, 1, ..) verified nodes. of_Q: numbers of requests that may draft, less one.
    steps_WQ1: of one level of the head for that many.
    """

    forwards: np.ndarray
    nodes_axis: np.ndarray
    of_Q: np.ndarray
    steps_WQ1: np.ndarray


class Policy:
    """Decides for one engine. `costs`: needed in auto."""

    def __init__(self, speculation: Speculation, costs: CostTable | None = None) -> None:
        assert costs is not None or speculation.mode != "auto", "auto speculation needs the costs"
        self.speculation, self.costs = speculation, costs
        self.has_head = True  # set by the rounds
        self.expects_drafts = speculation.mode != "off"  # whether a new request will draft
        self.correction = Correction()
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._max_nodes = speculation.num_verify_tokens - 1
        self._widths = np.array(sorted({speculation.tree_topk, 1}, reverse=True))
        narrow = NARROW if len(self._widths) > 1 else 1.0
        self._quality_W = np.where(self._widths > 1, 1.0, narrow)[:, None, None, None]
        self._loads: dict[tuple[int, int], Load] = {}
        # sums: tokens and nodes of the expected tree, and levels drafted, at most d
        self._depths = np.arange(1.0, speculation.num_draft_steps + 1)
        chain = FIRST_PATH**self._depths
        is_above = chain[:, None] >= GRID
        tables = FIRST_TREES * np.stack((is_above * chain[:, None], is_above)).cumsum(1)
        self._first = tables, FIRST_TREES * self._depths
        self.forget()

    def forget(self) -> None:
        """Return to the first belief about trees and drafts: another head drafts."""
        self.acceptance = Acceptance(len(self._depths))
        self._tables, self._reached = (of.copy() for of in self._first)
        self._num_trees = FIRST_TREES

    # Before drafting

    def plan(
        self,
        pending: Sequence[int],
        num_plain: int = 0,
        chains: Sequence[Sequence[TextChain]] = (),
    ) -> RoundPlan:
        """Decide whose trees the head grows, and when to stop going deeper.

        pending: [S], entries that each request lacks (`RunningSample.num_missing`). num_plain:
        requests that may not speculate. chains: [S], text's proposals to each; empty without text.
        """
        S, mode = len(pending), self.speculation.mode
        plan = RoundPlan(np.array(pending), S + num_plain, np.zeros(S, dtype=bool))
        if mode == "fixed":
            plan.drafting[:], plan.width = True, self.speculation.tree_topk
            plan.thresholds = [0.0] * self.speculation.num_draft_steps
        elif mode == "auto" and S:
            texts = self._text_paths(chains) if any(chains) else None
            self.expects_drafts = self._plan(plan, texts)
        if self.costs is not None and not plan.drafts:
            plan.expected_tokens = plan.num_requests
            plan.predicted_ms = self.costs.forward(plan.num_requests, plan.num_requests)
        return plan

    def _plan(self, plan: RoundPlan, text_S2G: np.ndarray | None) -> bool:
        """Take the best plan: width of a level (W), number of requests that draft (Q), levels (K),
        and least path probability of verified nodes (G). Returns whether drafting pays, also where
        this round is plain to show how slow the machine is.

        text_S2G: the expected tree's tables of text's candidates; the head's gains and costs are
        counted beside these.
        """
        B, S = plan.num_requests, len(plan.pending)
        load = self._load(B, S)
        trees_2KG, text_2G = self._tables / self._num_trees, None
        gain_S2KG = trees_2KG[None] if S == 1 else np.broadcast_to(trees_2KG, (S, *trees_2KG.shape))
        plan.rate = B / float(load.forwards[0])  # plain decoding
        if text_S2G is not None:
            text_2G = text_S2G[0] if S == 1 else text_S2G.sum(0)
            rates = (B + text_2G[0]) / np.interp(text_2G[1], load.nodes_axis, load.forwards)
            plan.rate = max(plan.rate, float(rates.max()))
            gain_S2KG = np.maximum(trees_2KG - text_S2G[:, :, None], 0.0)
        if not self.has_head:
            return False
        # the first q + 1 in this order draft
        order, before_Q = self._caught_up(plan, load, gain_S2KG[:, 0, -1, 0])
        sums_Q2KG = gain_S2KG if S == 1 else gain_S2KG[order].cumsum(0)[load.of_Q]
        if text_2G is not None:
            sums_Q2KG = sums_Q2KG + text_2G[:, None]
        verify_QKG = np.interp(sums_Q2KG[:, 1], load.nodes_axis, load.forwards)
        grow_WQK = load.steps_WQ1 * (self._reached / self._num_trees - 1)
        ms_WQKG = verify_QKG + before_Q[:, None, None] + grow_WQK[..., None]
        tokens_WQKG = B + sums_Q2KG[:, 0] * self._quality_W
        factor = self.correction.factor(B)
        rates_WQKG = tokens_WQKG / (ms_WQKG * factor)
        best = int(rates_WQKG.argmax())
        gain = float(rates_WQKG.flat[best]) / plan.rate
        if gain <= 1.0:
            return False
        if text_2G is None and self.correction.is_due(B, gain):
            return True
        w, q, _, g = np.unravel_index(best, rates_WQKG.shape)
        plan.rate = float(rates_WQKG.flat[best]) * factor
        plan.drafting[order[: load.of_Q[q] + 1]] = True
        plan.width = int(self._widths[w])
        # in the draft's own path probabilities, as the levels' frontiers are
        ratios = self.acceptance.ratios().cumprod()
        level = plan.rate * float(load.steps_WQ1[w, q, 0]) / LEVEL_GAIN
        plan.thresholds = [*(level / ratios[:-1]).tolist(), float(GRID[g] / ratios[0])]
        return True

    def _caught_up(
        self, plan: RoundPlan, load: Load, gain_S: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The requests in the order of what drafting is worth (gain_S: tokens), and the ms [Q]
        until the first of them have all their entries. Many missing entries are paid once for all
        later rounds.
        """
        assert self.costs is not None
        costs, pending = self.costs, plan.pending.tolist()
        late = [costs.enter(n) / ROUNDS_TO_PAY if n > AT_ONCE else 0.0 for n in pending]
        if len(late) == 1:
            ms = costs.extend(min(pending[0], AT_ONCE)) + late[0]
            return np.zeros(1, dtype=np.intp), np.array([ms])
        late_S = np.array(late)
        order = (late_S * plan.rate - gain_S).argsort(kind="stable")
        due_Q = np.minimum(plan.pending, AT_ONCE)[order].cumsum()[load.of_Q]
        extend_Q = costs.extend.span(0, len(late) * AT_ONCE + 1)[due_Q]
        return order, extend_Q + late_S[order].cumsum()[load.of_Q]

    def _load(self, B: int, S: int) -> Load:
        """The costs of rounds of B requests, S of which may speculate; cached."""
        if (found := self._loads.get((B, S))) is None:
            assert self.costs is not None
            if len(self._loads) >= _MOST_LOADS:
                self._loads.clear()
            forwards = self.costs.forwards(B, S * self._max_nodes)
            counts_Q = np.array(sorted({S, *(2**n for n in range(S.bit_length()))}))
            of_step = self.costs.step.span(0, S * int(self._widths[0]) + 1)
            steps_WQ = of_step[np.outer(self._widths, counts_Q)]
            found = Load(forwards, np.arange(len(forwards)), counts_Q - 1, steps_WQ[:, :, None])
            self._loads[B, S] = found
        return found

    def _text_paths(self, chains: Sequence[Sequence[TextChain]]) -> np.ndarray:
        """Nodes and tokens of text without the head, [S, 2, G]: of each request's chain with the
        most expected tokens.
        """
        conditional = self.acceptance.of_text().tolist()
        of_requests = []
        for own in chains:
            best: list[float] = []
            for chain in own:
                paths = list(accumulate((conditional[kind] for kind in chain.kinds), mul))
                if sum(paths) > sum(best):
                    best = paths
            tokens, nodes, count = [0.0, *accumulate(best)], [], len(best)
            for least in _LEASTS:  # they ascend, and paths descend
                while count and best[count - 1] < least:
                    count -= 1
                nodes.append(count)
            of_requests.append(([tokens[count] for count in nodes], nodes))
        return np.array(of_requests, dtype=np.float64)

    # After drafting

    def choose(self, plan: RoundPlan, proposals: Proposals) -> np.ndarray:
        """The candidates that the target verifies: kept, bool [B', C]."""
        # the head's levels; chains of text may be longer
        is_heads = proposals.proposed_by(HEAD).any(axis=0)
        plan.proposals, plan.depth = proposals, int(proposals.depths[is_heads].max(initial=0))
        plan.num_drafting = len(proposals.tokens)
        if self.speculation.mode == "fixed":
            assert proposals.sources is None, "a tree of fixed size is the head's"
            kept = most_probable(proposals.scores, self._max_nodes)
            plan.num_nodes = int(np.count_nonzero(kept))
            return kept
        assert self.costs is not None
        plan.calibration = self.acceptance.calibrate(proposals)
        paths, B, costs = plan.calibration.paths, plan.num_requests, self.costs
        # before the target's forward
        missing = plan.pending[plan.drafting].tolist()
        far = [tokens for tokens in missing if tokens > AT_ONCE]
        before_ms = costs.extend(sum(missing) - sum(far) + len(far)) + costs.enter(sum(far))
        before_ms += max(0, plan.depth - 1) * costs.step(len(missing) * plan.width)
        forwards = self._load(B, len(paths)).forwards
        choice = choose(paths, forwards, B, before_ms, self._max_nodes, plan.rate)
        plan.num_nodes, plan.expected_tokens = choice.num_nodes, choice.expected_tokens
        plan.predicted_ms = choice.predicted_ms
        return choice.kept

    # After the round

    def observe(self, plan: RoundPlan, emitted: Sequence[Sequence[int]], real_ms: float) -> None:
        """Learn from a finished round of real_ms.

        emitted: tokens of the requests with candidates, in the order of `choose`; each other
        request emitted one.
        """
        assert real_ms > 0
        if self.speculation.mode == "auto":
            self._learn_trees(plan)
            plan.predicted_ms = self.correction.observe(
                plan.num_requests, plan.drafts, plan.predicted_ms, real_ms
            )
        accepted = [sum(len(row) - 1 for row in emitted if row), 0, 0]
        if plan.calibration is not None:
            assert plan.proposals is not None
            accepted = self.acceptance.observe(plan.proposals, plan.calibration, emitted)
        for source, count in zip(SOURCES, accepted, strict=True):
            self._sums[f"accepted_{source}"] += count
        plan.tokens = sum(map(len, emitted)) + plan.num_requests - len(emitted)
        plan.real_ms, kind = real_ms, "tree" if plan.num_drafting else "plain"
        self._sums[f"{kind}_rounds"] += 1
        for name in ("tokens", "expected_tokens", "predicted_ms", "real_ms"):
            self._sums[f"{kind}_{name}"] += getattr(plan, name)
        self._sums["verified_nodes"] += plan.num_nodes
        self._sums["draft_steps"] += max(0, plan.depth - 1)

    def _learn_trees(self, plan: RoundPlan) -> None:
        if not plan.drafts:
            tables, reached = self._first
            self._tables += (1 - AT_REST) * (tables - self._tables)
            self._reached += (1 - AT_REST) * (reached - self._reached)
            self._num_trees += (1 - AT_REST) * (FIRST_TREES - self._num_trees)
            return
        assert plan.proposals is not None
        assert plan.calibration is not None
        proposals, paths, K = plan.proposals, plan.calibration.paths, len(self._depths)
        levels = np.minimum(proposals.depths, K) - 1
        if proposals.sources is not None:
            # text is there at any depth of the head's tree
            levels = np.where(proposals.proposed_by(TEXT), 0, levels)
            is_grown = proposals.proposed_by(HEAD).any(axis=1)
            levels, paths = levels[is_grown], paths[is_grown]
        places = levels * (len(GRID) + 1) + GRID.searchsorted(paths, side="right")
        size = K * (len(GRID) + 1)
        both, places = np.empty((2, size)), places.ravel()
        both[0], both[1] = np.bincount(places, paths.ravel(), size), np.bincount(places, None, size)
        if 1 == plan.width < self._widths[0]:
            both[0] /= NARROW
        num_trees = int(np.count_nonzero(plan.drafting))
        self._tables *= RECENT
        above = both.reshape(2, K, -1)[..., 1:]
        self._tables += above[..., ::-1].cumsum(2)[..., ::-1].cumsum(1)
        self._reached = RECENT * self._reached + num_trees * np.minimum(self._depths, plan.depth)
        self._num_trees = RECENT * self._num_trees + num_trees

    def metrics(self) -> dict[str, float]:
        """Sums since the start: rounds, tokens, ms; accepted drafts by source."""
        names = ("rounds", "tokens", "expected_tokens", "predicted_ms", "real_ms")
        sums = {f"{kind}_{name}": 0.0 for kind in ("plain", "tree") for name in names}
        rest = ("verified_nodes", "draft_steps", *(f"accepted_{source}" for source in SOURCES))
        return sums | dict.fromkeys(rest, 0.0) | self._sums
