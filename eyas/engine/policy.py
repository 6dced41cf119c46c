"""How much to speculate, decided every round: whether, for which requests, how deep, which nodes.

Knows costs, acceptance and past rounds; no model and no clock: the caller gives real times. The
same inputs give the same choices, and a choice looks at the draft's proposals and at past rounds
only, never at what the target is about to draw: outputs stay exact.

    plan      before drafting: who drafts, and when to stop going deeper         -> RoundPlan
    choose    after drafting: which candidates the target verifies               -> kept
    observe   after the round: what was emitted and how long it took

Requests here are the samples of a job. Letters: S requests that may speculate, B' of them that
draft, B all that decode (S and the plain ones), K draft steps, k tree_topk, C candidates, D levels
drafted.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from eyas.engine.acceptance import Acceptance, Calibration, RequestAcceptance, levels
from eyas.engine.costs import AT_ONCE, CostTable
from eyas.engine.forecast import FIRST_PERIOD, TRIALS, Correction, Forecast, LoadState
from eyas.engine.tree import (
    Speculation,
    choose,
    choose_natively,
    most_probable,
    values_by_depth,
)
from eyas.model.rows import Proposals

_HOPELESS = 0.7  # a forecast that spares the trials of trees
_EXPLORED_SHARE = 0.005  # of all time, for rounds that are expected to lose
_REFRESH = 64  # rounds from one forecast of a load to the next
# a round that takes longer than so many times its prediction was held up by something else
_BELIEVED = 1.5
_MEMORY = 1024  # tokens over which prompts are compared with answers
_HORIZON = 64  # tokens left to a request, for what catching up its draft may cost
_WELL_KNOWN = 256  # trees after which only one in _KEEP_EVERY is judged
_MANY = 64  # entries of a prompt, for what one of them costs
# every so many trees: keep one to forecast; learn what depth brings; go deeper
_KEEP_EVERY, _LEARN_DEPTH, _DEEPER = 4, 8, 64
# tokens that a level brings for a frontier of probability 1, before it is learned
_GAIN, _GAIN_WEIGHT = 0.4, 0.4
_NUM_RECORDS = 1024


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round: what was chosen, expected and observed. tokens and ms are of the whole batch."""

    num_requests: int
    num_drafting: int
    depth: int
    num_nodes: int
    explores: bool
    expected_tokens: float
    tokens: int
    predicted_ms: float
    real_ms: float


@dataclass(slots=True)
class RoundPlan:
    """A round between `plan` and `observe`. Several may be under way: the policy holds none.

    pending: int64 [S], `RunningSample.num_missing` of each request that may speculate.
    num_requests: B. drafting: bool [S]. thresholds: [K - 1], for `Draft.propose`. `plan` sets the
    fields up to rate, `choose` the others.
    """

    pending: np.ndarray
    num_requests: int
    load: tuple[int, int]  # octaves of S and B
    drafting: np.ndarray
    thresholds: list[float] = field(default_factory=list)
    plain_ms: float = 0.0  # of a plain round of these requests, corrected
    explores: bool = False
    rate: float = 0.0  # tokens/ms that a node must beat
    proposals: Proposals | None = None
    calibration: Calibration | None = None
    requests: Sequence[RequestAcceptance] = ()
    depth: int = 0
    num_nodes: int = 0
    expected_tokens: float = 0.0
    predicted_ms: float = 0.0  # by the table, uncorrected
    # the part of it that is paid once, for tokens of rounds without drafting
    catch_up_ms: float = 0.0

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
        self._forecast = Forecast(speculation.num_verify_tokens - 1)
        self._loads: dict[tuple[int, int], LoadState] = {}
        self._credit = 0.0  # ms that may be spent on exploring
        self._num_trees = 0
        self._drafted_last, self._native = True, native
        # lately: a head has entries to make of the first for the second
        self._prompt_rows, self._answer_tokens = 0.0, 32.0
        self._accept_length = 2.0  # of the last drafting requests
        K = speculation.num_draft_steps
        self._gains, self._frontiers = [_GAIN * _GAIN_WEIGHT] * (K - 1), [_GAIN_WEIGHT] * (K - 1)
        self._sums: defaultdict[str, float] = defaultdict(float)

    # Before drafting

    @property
    def expects_drafts(self) -> bool:
        """Whether a request that comes now is likely to draft in its first rounds."""
        return self.speculation.mode != "off" and self._drafted_last

    def prefilled(self, num_rows: int) -> None:
        """Count entries that prompts lack: they have to be made before anything is drafted."""
        self._prompt_rows += num_rows

    def plan(self, pending: Sequence[int], num_plain: int = 0) -> RoundPlan:
        """Decide who drafts, and when to stop going deeper.

        pending: [S], the entries that each request lacks (`RunningSample.num_missing`). num_plain:
        requests that may not speculate.
        """
        waiting = np.asarray(pending, dtype=np.int64)
        S, B = len(pending), len(pending) + num_plain
        plan = RoundPlan(waiting, B, (_octave(S), _octave(B)), np.zeros(S, dtype=bool))
        if self.speculation.mode == "fixed":
            plan.drafting[:] = True
            plan.thresholds = [0.0] * (self.speculation.num_draft_steps - 1)
        elif self.speculation.mode == "auto" and len(waiting):
            self._plan(plan)
        if not plan.drafts:
            plan.expected_tokens = plan.num_requests
            plan.predicted_ms = self._table.forward(B, B) if self.costs else 0.0
        return plan

    def _plan(self, plan: RoundPlan) -> None:
        B = plan.num_requests
        load = self._load(plan)
        plan.plain_ms = plain_ms = self._table.forward(B, B) * self._ratio("plain", plan)
        refresh_after = min(_REFRESH, max(FIRST_PERIOD, load.num_rounds // 2))
        if load.forecast is None or load.age >= refresh_after:
            self._refresh(load, plan)
        load.age += 1
        load.num_rounds += 1
        load.since += 1
        if self.correction.count("plain", plan.load[1]) < TRIALS:
            return
        speedup = self._speedup(plan)
        is_trial = self.correction.count("tree", plan.load[1]) < TRIALS and speedup > _HOPELESS
        self._drafted_last = speculates = load.decide(speedup) or is_trial
        if speculates:
            plan.drafting = plan.pending <= self._worth_catching_up(speedup, plan)
        # Explore when the credit pays for what the round loses by it.
        if load.since >= load.period:
            if speculates and self._credit >= plain_ms * (speedup - 1):
                plan.explores, plan.drafting = True, np.zeros_like(plan.drafting)
            elif not speculates:
                self._explore(plan)
            if plan.explores:
                load.explored()
        plan.rate = plan.num_requests / plain_ms * (max(1.0, speedup) if speculates else 1.0)
        if plan.drafts:
            plan.thresholds = self._thresholds(plan)

    def _worth_catching_up(self, speedup: float, plan: RoundPlan) -> float:
        """The most entries that a request may lack and still gain by drafting."""
        S = len(plan.pending)
        saved_ms = _HORIZON * plan.plain_ms * max(0.0, 1 - 1 / speedup) / S
        row_ms = self._entry_ms * self._ratio("tree", plan)
        return max(
            self.speculation.num_draft_steps + 1, saved_ms / row_ms if row_ms > 0 else math.inf
        )

    @property
    def _entry_ms(self) -> float:
        """The table's ms for one entry, made among many."""
        return self._table.enter(_MANY) / _MANY

    def _explore(self, plan: RoundPlan) -> None:
        """Draft for the four or one requests that lack the fewest entries, as an experiment.

        Only if the credit pays for it even when nothing is accepted.
        """
        ratio, B = self._ratio("tree", plan), plan.num_requests
        K, k, N = self._sizes
        nearest = np.argsort(plan.pending, kind="stable")
        for count in (4, 1):
            few = nearest[:count]
            ms = self._catch_up_ms(plan.pending[few].tolist()) + (K - 1) * self._table.step(
                len(few) * k
            )
            ms += self._table.target(B + len(few) * (N - 1)) - self._table.target(B)
            if ms * ratio <= self._credit:
                plan.explores = True
                plan.drafting[few] = True
                return

    def _thresholds(self, plan: RoundPlan) -> list[float]:
        """The probability, [K - 1], that a frontier must have for its next level to be drafted.

        A level is worth drafting while the tokens that it brings (the frontier's probability times
        what a level has brought for it so far) are worth its time at the rate of the average round.
        """
        num_drafting = int(np.count_nonzero(plan.drafting))
        rows = num_drafting * self.speculation.tree_topk
        step_ms = self._table.step(rows) * self.correction.drift
        deeper = 0.25 if self._num_trees % _DEEPER == _DEEPER - 1 else 1.0
        cost = deeper * plan.rate * step_ms
        return [
            cost / max(gain / frontier, 1e-3)
            for gain, frontier in zip(self._gains, self._frontiers, strict=True)
        ]

    # After drafting

    def choose(
        self, plan: RoundPlan, proposals: Proposals, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        """Which candidates the target verifies: kept, bool [B', C].

        proposals, requests: of the B' drafting requests, in their order.
        """
        plan.proposals, plan.requests = proposals, requests
        plan.depth = int(proposals.depths[-1]) if len(proposals.depths) else 0
        kept = (
            self._choose(plan, proposals)
            if self.speculation.mode == "auto"
            else self._fixed(plan, proposals)
        )
        self._num_trees += 1
        return kept

    def _fixed(self, plan: RoundPlan, proposals: Proposals) -> np.ndarray:
        """`choose` for trees of the configured size.

        The expected tokens are for the metrics only, so they are computed for some rounds and
        estimated for the others.
        """
        B, C = proposals.scores.shape
        most = self.speculation.num_verify_tokens - 1
        kept = most_probable(proposals.scores, most) if most < C else np.ones((B, C), dtype=bool)
        plan.num_nodes = B * min(C, most)
        if self._num_trees % _KEEP_EVERY == 0:
            plan.calibration = self.acceptance.calibrate(proposals, plan.requests)
            plan.expected_tokens = plan.num_requests + float(plan.calibration.paths[kept].sum())
        else:
            plan.expected_tokens = plan.num_requests + B * (self._accept_length - 1)
        if self.costs is not None:
            before_ms, _ = self._before(plan)
            rows = plan.num_requests + plan.num_nodes
            plan.predicted_ms = before_ms + self.costs.forward(plan.num_requests, rows)
        return kept

    def _choose(self, plan: RoundPlan, proposals: Proposals) -> np.ndarray:
        """`choose` by calibrated probabilities and measured costs."""
        plan.calibration = self.acceptance.calibrate(proposals, plan.requests)
        paths = plan.calibration.paths
        max_nodes = self.speculation.num_verify_tokens - 1
        before_ms, plan.catch_up_ms = self._before(plan)
        B = plan.num_requests
        ms_of_nodes = self._table.forwards(B, len(paths) * max_nodes)
        rate = plan.rate * self._ratio("tree", plan)  # of the table's ms
        pick = choose_natively if self._native else choose
        choice = pick(paths, ms_of_nodes, B, before_ms, max_nodes, rate)
        plan.num_nodes, plan.expected_tokens, plan.predicted_ms = (
            choice.num_nodes,
            choice.expected_tokens,
            choice.predicted_ms,
        )
        if self._num_trees % _KEEP_EVERY == 0 or self._forecast.num_seen < _KEEP_EVERY**2:
            self._forecast.add(paths, proposals.depths)
        if self._num_trees % (_LEARN_DEPTH if self._num_trees < _DEEPER else 2 * _LEARN_DEPTH) == 0:
            self._learn_depth(
                proposals, values_by_depth(paths, proposals.depths, ms_of_nodes, rate, max_nodes)
            )
        return choice.kept

    def _before(self, plan: RoundPlan) -> tuple[float, float]:
        """The table's ms of extend and draft steps, and the part of it that is catching up.

        Catching up: entries that are missing because rounds before did not draft.
        """
        # Lists: of few numbers they take a fraction of the time of arrays.
        behind, most = (
            plan.pending[plan.drafting].tolist(),
            self.speculation.num_draft_steps + 1,
        )
        extend_ms = self._catch_up_ms(behind)
        step_ms = self._table.step(len(behind) * self.speculation.tree_topk)
        usual_ms = (
            self._catch_up_ms([min(tokens, most) for tokens in behind])
            if max(behind) > most
            else extend_ms
        )
        return extend_ms + max(0, plan.depth - 1) * step_ms, extend_ms - usual_ms

    def _catch_up_ms(self, behind: list[int]) -> float:
        """The table's ms to make the missing entries: see `costs.AT_ONCE`.

        behind: how many each drafting request lacks.
        """
        far = [tokens for tokens in behind if tokens > AT_ONCE]
        return self._table.extend(sum(behind) - sum(far) + len(far)) + self._table.enter(sum(far))

    def _learn_depth(self, proposals: Proposals, values: np.ndarray) -> None:
        """Learn what each level brings, in proportion to its frontier's probability.

        values: [D + 1], what the best tree of each depth is worth (`values_by_depth`).
        """
        B = len(proposals.scores)
        self._gains = [0.98 * gain + 0.02 * _GAIN * _GAIN_WEIGHT for gain in self._gains]
        self._frontiers = [0.98 * frontier + 0.02 * _GAIN_WEIGHT for frontier in self._frontiers]
        for level, frontier in enumerate(levels(proposals.depths)[:-1]):
            self._gains[level] += float(values[level + 2] - values[level + 1]) / B
            self._frontiers[level] += float(np.exp(proposals.scores[:, frontier].max(1)).sum()) / B

    # After the round

    def observe(self, plan: RoundPlan, emitted: Sequence[Sequence[int]], real_ms: float) -> None:
        """Learn from a round that is done.

        emitted: the tokens of the drafting requests, in the order of `choose`; the others have
        emitted one each. real_ms: how long the round took.
        """
        assert len(emitted) == np.count_nonzero(plan.drafting)
        assert real_ms > 0
        tokens = sum(map(len, emitted)) + plan.num_requests - len(emitted)
        if emitted:
            self._accept_length += 0.05 * (
                sum(map(len, emitted)) / len(emitted) - self._accept_length
            )
        is_judged = self._num_trees < _WELL_KNOWN or self._num_trees % _KEEP_EVERY == 0
        if plan.proposals is not None and plan.calibration is not None and is_judged:
            self.acceptance.observe(plan.proposals, plan.calibration, emitted, plan.requests)
        self._answer_tokens += tokens
        if self._answer_tokens > _MEMORY:
            self._prompt_rows, self._answer_tokens = self._prompt_rows / 2, self._answer_tokens / 2
        kind = "tree" if emitted else "plain"
        predicted_ms = plan.predicted_ms * (self._ratio(kind, plan) if self.costs else 1.0)
        if plan.predicted_ms > 0:
            self.correction.observe(kind, plan.load[1], plan.predicted_ms, real_ms)
            self._account(plan, kind, tokens, min(real_ms, _BELIEVED * predicted_ms))
        record = RoundRecord(
            plan.num_requests,
            len(emitted),
            plan.depth,
            plan.num_nodes,
            plan.explores,
            plan.expected_tokens,
            tokens,
            predicted_ms,
            real_ms,
        )
        self.records.append(record)
        self._count(kind, record)

    def _account(self, plan: RoundPlan, kind: str, tokens: int, real_ms: float) -> None:
        """Charge the credit for exploring, and measure the speed-up at this load."""
        if self.speculation.mode != "auto":
            return
        self._credit += _EXPLORED_SHARE * real_ms
        if plan.explores:
            plain_ms = plan.plain_ms
            worth_ms = tokens * plain_ms / plan.num_requests
            fair_ms = worth_ms if kind == "tree" else plain_ms / max(1.0, self._speedup(plan))
            if real_ms < fair_ms:  # it may be the better way after all: look again soon
                self._load(plan).period = FIRST_PERIOD
            self._credit -= max(0.0, real_ms - fair_ms)
            self._sums["explored_ms"] += max(0.0, real_ms - fair_ms)
        # The first trees of a load meet cold caches and code that never ran: they say little of
        # those to come.
        is_warm = self.correction.count("tree", plan.load[1]) > TRIALS
        if kind == "tree" and is_warm and plan.drafting.all():
            usual_ms = real_ms * (1 - plan.catch_up_ms / plan.predicted_ms)
            plain_table_ms = (
                self._table.forward(plan.num_requests, plan.num_requests) * self.correction.drift
            )
            self._load(plan).measured(tokens / plan.num_requests, usual_ms / plain_table_ms)
        elif kind == "plain":
            self._load(plan).rested()

    def _count(self, kind: str, record: RoundRecord) -> None:
        self._sums[f"{kind}_rounds"] += 1
        self._sums[f"{kind}_tokens"] += record.tokens
        self._sums[f"{kind}_expected_tokens"] += record.expected_tokens
        self._sums[f"{kind}_predicted_ms"] += record.predicted_ms
        self._sums[f"{kind}_real_ms"] += record.real_ms
        self._sums["explored_rounds"] += record.explores
        self._sums["verified_nodes"] += record.num_nodes
        self._sums["draft_steps"] += max(0, record.depth - 1)

    def metrics(self) -> dict[str, float]:
        """Sums since the start (rounds, tokens, ms), and the current speed-up of each load."""
        names = ("rounds", "tokens", "expected_tokens", "predicted_ms", "real_ms")
        sums = {f"{kind}_{name}": 0.0 for kind in ("plain", "tree") for name in names}
        sums |= dict.fromkeys(
            ("explored_rounds", "explored_ms", "verified_nodes", "draft_steps"), 0.0
        )
        sums |= self._sums
        held = {
            f"speedup_{_first(S)}_of_{_first(B)}": load.speedup(self.correction.offset("plain", B))
            for (S, B), load in sorted(self._loads.items())
        }
        return sums | held

    # What is known

    @property
    def _table(self) -> CostTable:
        assert self.costs is not None
        return self.costs

    @property
    def _sizes(self) -> tuple[int, int, int]:
        return (
            self.speculation.num_draft_steps,
            self.speculation.tree_topk,
            self.speculation.num_verify_tokens,
        )

    def _load(self, plan: RoundPlan) -> LoadState:
        return self._loads.setdefault(plan.load, LoadState())

    def _ratio(self, kind: str, plan: RoundPlan) -> float:
        return self.correction.ratio(kind, plan.load[1])

    def _speedup(self, plan: RoundPlan) -> float:
        """The expected speed-up of speculation over plain rounds at this load.

        The cost of making prompts' entries is included, by the tokens of an answer.
        """
        of_rounds = self._load(plan).speedup(self.correction.offset("plain", plan.load[1]))
        token_ms = plan.plain_ms / plan.num_requests
        entries_ms = (
            self._prompt_rows / self._answer_tokens * self._entry_ms * self.correction.drift
        )
        return 1 / (1 / of_rounds + entries_ms / token_ms)

    def _refresh(self, load: LoadState, plan: RoundPlan) -> None:
        """Forecast this load from the trees seen last."""
        load.age = 0
        if not self._forecast.num_seen:
            return
        K, k, N = self._sizes
        S, B = len(plan.pending), plan.num_requests
        ms_of_nodes = self._table.forwards(B, S * (N - 1))
        step_ms = self._table.step(S * k)
        ms_of_depth = self._table.extend(round(S * self._accept_length)) + step_ms * np.arange(K)
        tokens, ms = self._forecast.predict(S, B, ms_of_nodes, ms_of_depth)
        load.forecast = (
            tokens
            / B
            * self._table.forward(B, B)
            / (ms * self.correction.offset("tree", plan.load[1]))
        )


def _octave(count: int) -> int:
    """Half octaves: 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ..."""
    return int(2 * math.log2(count)) if count > 0 else -1


def _first(octave: int) -> int:
    """The smallest count of a half octave."""
    return math.ceil(2 ** (octave / 2)) if octave >= 0 else 0
