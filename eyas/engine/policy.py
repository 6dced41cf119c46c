"""How much to speculate, decided every round: for which requests, how deep, which nodes.

One rule: the most emitted tokens per millisecond over all requests of the round, nothing drafted
included. Before drafting it is asked of the trees that are to be expected, after drafting of those
that came. Knows costs, acceptance and past rounds; no model and no clock: the caller gives real
times. The same inputs give the same choices, and a choice looks at the draft's proposals and at
past rounds only, never at what the target is about to draw: outputs stay exact.

    plan      before drafting: who drafts, and when to stop going deeper         -> RoundPlan
    choose    after drafting: which candidates the target verifies               -> kept
    observe   after the round: what was emitted and how long it took

Candidates come from the head and from text (`text.py`, `graft.py`). Text's are there before a round
is planned and cost nothing, so the plan is whose trees the head grows beside them.

Requests here are the samples of a job. Letters: S requests that may speculate, B' of them that have
candidates, B all that decode (S and the plain ones), K draft steps, k tree_topk, C candidates, N
nodes of a tree, D levels drafted, Q kinds of requests.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.engine.acceptance import (
    Acceptance,
    Calibration,
    ExpectedTrees,
    RequestAcceptance,
)
from eyas.engine.costs import AT_ONCE, Correction, CostTable
from eyas.engine.graft import SOURCES, accepted_by_source
from eyas.engine.outlook import Outlook, text_rate, who_drafts, who_drafts_natively
from eyas.engine.text import TextChain
from eyas.engine.text_acceptance import TextAcceptance
from eyas.engine.tree import Speculation, choose, choose_natively, most_probable
from eyas.model.rows import Proposals

# Standard deviations by which what is not known is hoped to be better: who has not drafted for a
# while, and a load that has not, are tried again.
HOPE = 0.3
ROUNDS_TO_PAY = 32  # rounds of a request over which catching up its draft may pay
_LEARN_EVERY = 4  # trees, once _WELL_KNOWN have been seen: learning takes longer than choosing
_WELL_KNOWN = 256
_NUM_RECORDS = 1024
_TEXT_BOUNDS = (1e-9, 0.4, 1.2)  # of the tokens that text is expected to bring
NUM_KINDS = 2 * (len(_TEXT_BOUNDS) + 1)


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round: what was chosen, expected and observed. tokens and ms are of the whole batch."""

    num_requests: int
    num_drafting: int
    depth: int
    num_nodes: int
    expected_tokens: float
    tokens: int
    predicted_ms: float
    real_ms: float


@dataclass(slots=True)
class RoundPlan:
    """A round between `plan` and `observe`. Several may be under way: the policy holds none.

    pending: int64 [S], `RunningSample.num_missing` of each request that may speculate.
    num_requests: B. drafting: bool [S], whose trees the head grows. kinds: int64 [S], of
    `ExpectedTrees`. thresholds: [K - 1], for `Draft.propose`. `plan` sets the fields up to rate,
    `choose` the others.
    """

    pending: np.ndarray
    num_requests: int
    drafting: np.ndarray
    kinds: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    thresholds: list[float] = field(default_factory=list)
    rate: float = 0.0  # tokens/ms of the table that a node must beat
    proposals: Proposals | None = None
    calibration: Calibration | None = None  # by the head's counts
    weighed: Calibration | None = None  # with text's
    requests: Sequence[RequestAcceptance] = ()
    depth: int = 0
    num_nodes: int = 0
    expected_tokens: float = 0.0
    predicted_ms: float = 0.0  # by the table, uncorrected

    @property
    def drafts(self) -> bool:
        return any(self.drafting.tolist())  # of few numbers, faster than an array operation


class Policy:
    """Decides for one engine. `costs` are needed in auto only."""

    def __init__(
        self, speculation: Speculation, costs: CostTable | None = None, native: bool = False
    ) -> None:
        """native: compute in the native library, which must be available."""
        assert costs is not None or speculation.mode != "auto", "auto speculation needs the costs"
        self.speculation, self.costs = speculation, costs
        self.records: deque[RoundRecord] = deque(maxlen=_NUM_RECORDS)
        self.acceptance, self.correction = Acceptance(native=native), Correction()
        self.text = TextAcceptance(native=native)
        self.has_head = True  # the rounds say when it has none, or no longer
        self.expected = ExpectedTrees(
            speculation.num_draft_steps, speculation.num_verify_tokens - 1, NUM_KINDS
        )
        self.expects_drafts = speculation.mode != "off"  # of a request that comes now
        self._pick = choose_natively if native else choose
        self._who = who_drafts_natively if native else who_drafts
        self._num_trees = 0
        self._sums: defaultdict[str, float] = defaultdict(float)

    # Before drafting

    def plan(
        self,
        pending: Sequence[int],
        requests: Sequence[RequestAcceptance],
        num_plain: int = 0,
        chains: Sequence[Sequence[TextChain]] = (),
    ) -> RoundPlan:
        """Decide whose trees the head grows, and when to stop going deeper.

        pending: [S], the entries that each request lacks (`RunningSample.num_missing`). requests:
        [S], what is known of each. num_plain: requests that may not speculate. chains: [S], what
        text proposes to each; nothing at all for nobody.
        """
        waiting, B = np.asarray(pending, dtype=np.int64), len(pending) + num_plain
        plan = RoundPlan(waiting, B, np.zeros(len(pending), dtype=bool))
        if self.speculation.mode == "fixed":
            plan.drafting[:] = True
            plan.thresholds = [0.0] * (self.speculation.num_draft_steps - 1)
        elif self.speculation.mode == "auto" and len(waiting):
            self._plan(plan, requests, chains)
            self.expects_drafts = plan.drafts
        if not plan.drafts:
            plan.expected_tokens = B
            plan.predicted_ms = self._table.forward(B, B) if self.costs else 0.0
        return plan

    def _plan(
        self,
        plan: RoundPlan,
        requests: Sequence[RequestAcceptance],
        chains: Sequence[Sequence[TextChain]],
    ) -> None:
        for request in requests:
            request.forget(self.acceptance.variance)
        table, B, S, K = self._table, plan.num_requests, len(requests), self._steps
        text_SN = np.zeros((S, self._most))
        for row, request, own in zip(text_SN, requests, chains, strict=False):
            paths = self.text.paths(own, request, self._most)
            row[: len(paths)] = paths
        plan.kinds = tree_kinds(requests, text_SN)
        known_S = np.array([one.log_odds for one in requests])
        deviation_S = np.array([one.deviation for one in requests])
        outlook = Outlook(
            num_requests=B,
            usual_QRKN=self.expected.paths_QRKN,
            reached_QR=self.expected.reached_QR,
            kind_S=plan.kinds,
            text_SN=text_SN,
            known_S=known_S,
            hoped_S=known_S + HOPE * deviation_S,
            due_S=np.minimum(plan.pending, AT_ONCE),
            late_S=np.array([self._late_ms(one) for one in plan.pending.tolist()]),
            forwards=table.forwards(B, S * self._most),
            extends=table.extend.span(0, S * AT_ONCE + 1),
            steps=table.step.span(0, S * self.speculation.tree_topk + 1)[
                :: self.speculation.tree_topk
            ],
            known_factor=self.correction.factor(B, 0.0),
            hoped_factor=self.correction.factor(B, HOPE),
        )
        if not self.has_head:
            plan.rate = text_rate(outlook)
            return
        who = self._who(outlook)
        plan.rate = who.rate
        if who.num_drafting:
            plan.drafting = who.drafting
            step_ms = float(outlook.steps[who.num_drafting])
            plan.thresholds = [
                plan.rate * step_ms / gain for gain in self.expected.gains()[: K - 1]
            ]

    def _late_ms(self, missing: int) -> float:
        """The table's ms, by round, of a request's entries that are missing because it did not
        draft: they are paid once and serve all its rounds.
        """
        return self._table.enter(missing) / ROUNDS_TO_PAY if missing > AT_ONCE else 0.0

    # After drafting

    def choose(
        self, plan: RoundPlan, proposals: Proposals, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        """Which candidates the target verifies: kept, bool [B', C].

        proposals, requests: of the B' requests with candidates, in their order.
        """
        plan.proposals, plan.requests, text = proposals, requests, proposals.text
        plan.depth = int(proposals.depths[-1]) if len(proposals.depths) else 0
        plan.calibration = plan.weighed = self.acceptance.calibrate(proposals, requests)
        if text is not None:
            plan.depth = text.head_depth
            plan.weighed = self.text.weigh(proposals, plan.calibration, requests)
        paths, most = plan.weighed.paths, self._most
        B = plan.num_requests
        before_ms = self._before_ms(plan) if self.costs else 0.0
        if self.speculation.mode == "auto":
            costs = self._table.forwards(B, len(paths) * most)
            choice = self._pick(paths, costs, B, before_ms, most, plan.rate)
            plan.num_nodes, plan.expected_tokens, plan.predicted_ms = (
                choice.num_nodes,
                choice.expected_tokens,
                choice.predicted_ms,
            )
            kept = choice.kept
            if self._learns and plan.drafts:
                least = float(np.where(kept, 0.0, paths).max())
                kinds = plan.kinds[plan.drafting]
                self.expected.observe(proposals, paths, requests, kinds, least)
        else:
            assert text is None, "a tree of fixed size is the head's"
            kept = most_probable(proposals.scores, most)
            plan.num_nodes = int(np.count_nonzero(kept))
            plan.expected_tokens = B + float(paths[kept].sum())
            if self.costs is not None:
                plan.predicted_ms = before_ms + self.costs.forward(B, B + plan.num_nodes)
        self._num_trees += 1
        return kept

    def _before_ms(self, plan: RoundPlan) -> float:
        """The table's ms of what precedes the target's forward."""
        missing = plan.pending[plan.drafting].tolist()
        far = [tokens for tokens in missing if tokens > AT_ONCE]
        ms = self._table.extend(sum(missing) - sum(far) + len(far)) + self._table.enter(sum(far))
        return ms + max(0, plan.depth - 1) * self._table.step(
            len(missing) * self.speculation.tree_topk
        )

    # After the round

    def observe(self, plan: RoundPlan, emitted: Sequence[Sequence[int]], real_ms: float) -> None:
        """Learn from a round that is done.

        emitted: the tokens of the requests with candidates, in the order of `choose`; the others
        have emitted one each. real_ms: how long the round took.
        """
        assert len(emitted) == len(plan.requests)
        assert real_ms > 0
        if plan.proposals is not None and plan.calibration is not None and self._learns:
            if plan.drafts:
                self.acceptance.observe(plan.proposals, plan.calibration, emitted, plan.requests)
            if plan.proposals.text is not None and plan.weighed is not None:
                self.text.observe(plan.proposals, plan.weighed, emitted, plan.requests)
        predicted_ms = 0.0
        if plan.predicted_ms > 0:
            predicted_ms = self.correction.observe(
                plan.num_requests, plan.drafts, plan.predicted_ms, real_ms
            )
        record = RoundRecord(
            plan.num_requests,
            len(emitted),
            plan.depth,
            plan.num_nodes,
            plan.expected_tokens,
            sum(map(len, emitted)) + plan.num_requests - len(emitted),
            predicted_ms,
            real_ms,
        )
        self.records.append(record)
        self._count("tree" if emitted else "plain", record)
        if plan.proposals is not None:
            for source, count in accepted_by_source(plan.proposals, emitted).items():
                self._sums[f"accepted_{source}"] += count

    @property
    def _learns(self) -> bool:
        return self._num_trees < _WELL_KNOWN or self._num_trees % _LEARN_EVERY == 0

    def _count(self, kind: str, record: RoundRecord) -> None:
        self._sums[f"{kind}_rounds"] += 1
        self._sums[f"{kind}_tokens"] += record.tokens
        self._sums[f"{kind}_expected_tokens"] += record.expected_tokens
        self._sums[f"{kind}_predicted_ms"] += record.predicted_ms
        self._sums[f"{kind}_real_ms"] += record.real_ms
        self._sums["verified_nodes"] += record.num_nodes
        self._sums["draft_steps"] += max(0, record.depth - 1)

    def metrics(self) -> dict[str, float]:
        """Sums since the start: rounds, tokens, ms; accepted drafts by who proposed them."""
        names = ("rounds", "tokens", "expected_tokens", "predicted_ms", "real_ms")
        sums = {f"{kind}_{name}": 0.0 for kind in ("plain", "tree") for name in names}
        rest = ("verified_nodes", "draft_steps", *(f"accepted_{source}" for source in SOURCES))
        return sums | dict.fromkeys(rest, 0.0) | self._sums

    @property
    def _steps(self) -> int:
        return self.speculation.num_draft_steps

    @property
    def _most(self) -> int:
        """Nodes of a tree, its root excluded."""
        return self.speculation.num_verify_tokens - 1

    @property
    def _table(self) -> CostTable:
        assert self.costs is not None
        return self.costs


def tree_kinds(requests: Sequence[RequestAcceptance], text_SN: np.ndarray) -> np.ndarray:
    """What trees are to be expected of each request, int64 [S]: sampled or greedy, and how much
    text there is already, which the head's trees can only add to.
    """
    greedy_S = np.array([one.greedy for one in requests], dtype=np.int64)
    text_S = np.searchsorted(_TEXT_BOUNDS, text_SN.sum(1), side="right")
    kinds_S: np.ndarray = greedy_S + 2 * text_S
    return kinds_S
