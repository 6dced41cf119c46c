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
from dataclasses import dataclass

import numpy as np

from eyas.engine.acceptance import RequestAcceptance
from eyas.engine.costs import Correction, CostTable
from eyas.engine.graft import SOURCES
from eyas.engine.steps import HOPE, NativeSteps, RoundPlan, Steps
from eyas.engine.text import TextChain
from eyas.engine.tree import Speculation
from eyas.model.rows import Proposals

_NUM_RECORDS = 1024


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


class Policy:
    """Decides for one engine. `costs` are needed in auto only."""

    def __init__(
        self,
        speculation: Speculation,
        costs: CostTable | None = None,
        native: bool = False,
        narrow: bool = True,
    ) -> None:
        """native: compute in the native library, which must be available. narrow: rounds can grow a
        level from one candidate of a request.
        """
        assert costs is not None or speculation.mode != "auto", "auto speculation needs the costs"
        self.speculation = speculation
        self.records: deque[RoundRecord] = deque(maxlen=_NUM_RECORDS)
        self.steps = (NativeSteps if native else Steps)(speculation, costs, narrow)
        self.correction = Correction()
        self.has_head = True  # the rounds say when it has none, or no longer
        self.expects_drafts = speculation.mode != "off"  # of a request that comes now
        self._sums: defaultdict[str, float] = defaultdict(float)

    @property
    def costs(self) -> CostTable | None:
        return self.steps.costs

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
        waiting, B = np.array(pending, dtype=np.int64), len(pending) + num_plain
        plan = RoundPlan(waiting, B, np.zeros(len(pending), dtype=bool))
        if self.speculation.mode == "fixed":
            plan.drafting[:], plan.width = True, self.speculation.tree_topk
            plan.thresholds = [0.0] * self.speculation.num_draft_steps
        elif self.speculation.mode == "auto" and len(waiting):
            factors = self.correction.factor(B, 0.0), self.correction.factor(B, HOPE)
            self.steps.plan(plan, requests, chains, factors, self.has_head)
            self.expects_drafts = plan.drafts
        if not plan.drafts:
            plan.expected_tokens = B
            plan.predicted_ms = self.costs.forward(B, B) if self.costs else 0.0
        return plan

    # After drafting

    def choose(
        self, plan: RoundPlan, proposals: Proposals, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        """Which candidates the target verifies: kept, bool [B', C].

        proposals, requests: of the B' requests with candidates, in their order.
        """
        assert self.speculation.mode == "auto" or proposals.text is None, (
            "a tree of fixed size is the head's"
        )
        return self.steps.choose(plan, proposals, requests)

    # After the round

    def observe(self, plan: RoundPlan, emitted: Sequence[Sequence[int]], real_ms: float) -> None:
        """Learn from a round that is done.

        emitted: the tokens of the requests with candidates, in the order of `choose`; the others
        have emitted one each. real_ms: how long the round took.
        """
        assert len(emitted) == len(plan.requests)
        assert real_ms > 0
        if plan.proposals is not None:
            for source, count in self.steps.learn(plan, emitted).items():
                self._sums[f"accepted_{source}"] += count
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
