"""The arithmetic of the policy: three operations a round, each one call of the native library.

    plan     who drafts, what a node must be worth, and when to stop going deeper
    choose   how likely the candidates are accepted, and which of them are verified
    learn    which of them came true: counts, each request's own shifts, the trees of late

`Steps` is the plain version, in NumPy; `NativeSteps` the same in the library (`cpp/choice.h` and
`cpp/outlook.h`): a round has few candidates, and array operations take longer there than the
arithmetic. What is learned lies in the same NumPy arrays for both.

Letters: S requests that may speculate, B' of them that have candidates, B all that decode, K draft
steps, C candidates, N nodes of a tree.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from eyas.engine.acceptance import (
    BELIEF,
    BINS_PER_UNIT,
    FIRST_OF_BINS,
    FIRST_OF_TEXT,
    HEAD,
    LARGEST,
    MEMORY,
    NUM_BINS,
    NUM_DEPTHS,
    OPINION_LIFT,
    OPINION_SCALE,
    REQUEST_MEMORY,
    TEXT,
    Acceptance,
    Calibration,
    RequestAcceptance,
)
from eyas.engine.costs import AT_ONCE, CostTable, Curve
from eyas.engine.graft import NUM_OPINIONS, SOURCES, UNPROPOSED, accepted_by_source
from eyas.engine.outlook import (
    FIRST_GAIN,
    NUM_KINDS,
    NUM_TREES,
    TEXT_BOUNDS,
    ExpectedTrees,
    Outlook,
    WhoDrafts,
    text_rate,
    tree_kinds,
    who_drafts,
)
from eyas.engine.text import TextChain
from eyas.engine.tree import Speculation, choose, most_probable
from eyas.model.library import address, library
from eyas.model.rows import Proposals

# Standard deviations by which what is not known is hoped to be better: who has not drafted for a
# while, and a load that has not, are tried again.
HOPE = 0.2
ROUNDS_TO_PAY = 32  # rounds of a request over which catching up its draft may pay


@dataclass(slots=True)
class RoundPlan:
    """A round from its plan to what came of it. Several may be under way: the policy holds none.

    pending: int64 [S], `RunningSample.num_missing` of each request that may speculate.
    num_requests: B. drafting: bool [S], whose trees the head grows. kinds: int64 [S], of
    `ExpectedTrees`. width: candidates of a request that a level grows from. thresholds: [K], of
    `tree.goes_on`. `plan` sets the fields up to rate, `choose` the others.
    """

    pending: np.ndarray
    num_requests: int
    drafting: np.ndarray
    kinds: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    width: int = 0
    thresholds: list[float] = field(default_factory=list)
    rate: float = 0.0  # tokens/ms of the table that a node must beat
    proposals: Proposals | None = None
    calibration: Calibration | None = None
    requests: Sequence[RequestAcceptance] = ()
    depth: int = 0  # levels that the head has drafted
    num_nodes: int = 0
    expected_tokens: float = 0.0
    predicted_ms: float = 0.0  # by the table, uncorrected
    native: _Round | None = None  # the same as the library knows it

    @property
    def drafts(self) -> bool:
        return any(self.drafting.tolist())  # of few numbers, faster than an array operation


class Steps:
    """The three operations in NumPy."""

    def __init__(
        self, speculation: Speculation, costs: CostTable | None, narrow: bool = True
    ) -> None:
        """Without costs trees are of a fixed size, and nothing is predicted. narrow: a level may
        grow from one candidate of a request.
        """
        self.speculation, self.costs = speculation, costs
        self.acceptance = Acceptance()
        k = speculation.tree_topk
        widths = (k, 1) if narrow and k > 1 else (k,)
        self.trees = ExpectedTrees(speculation.num_draft_steps, self._most, widths)

    def plan(
        self,
        plan: RoundPlan,
        requests: Sequence[RequestAcceptance],
        chains: Sequence[Sequence[TextChain]],
        factors: tuple[float, float],
        has_head: bool,
    ) -> None:
        """Who drafts in a round of one or more `requests` [S]. chains: what text proposes to each;
        nothing at all for nobody. factors: by which drafting rounds take longer than the table
        says, as known and as hoped.
        """
        for request in requests:
            request.forget()
        outlook = self._outlook(plan, requests, chains, factors)
        plan.kinds = outlook.kind_S
        if not has_head:
            plan.rate = text_rate(outlook)
            return
        who: WhoDrafts = who_drafts(outlook)
        plan.rate = who.rate
        if who.num_drafting:
            plan.drafting, plan.width = who.drafting, self.trees.widths[who.w]
            ms = float(outlook.steps[who.w, who.num_drafting])
            least = plan.rate * ms / self.trees.gains(who.w)
            plan.thresholds = [*least.tolist(), who.unworthy]

    def _outlook(
        self,
        plan: RoundPlan,
        requests: Sequence[RequestAcceptance],
        chains: Sequence[Sequence[TextChain]],
        factors: tuple[float, float],
    ) -> Outlook:
        assert self.costs is not None
        table, B, S = self.costs, plan.num_requests, len(requests)
        text_SN = np.zeros((S, self._most))
        for row, request, own in zip(text_SN, requests, chains, strict=False):
            paths = self.acceptance.text_paths(own, request, self._most)
            row[: len(paths)] = paths
        variance = float(self.acceptance.variance[HEAD])
        known_S = self.acceptance.log_odds(HEAD, requests)
        deviation_S = np.array([one.deviation(HEAD, variance) for one in requests])
        # entries that are missing because a request did not draft are paid once, and serve all its
        # rounds
        late_ms = [
            table.enter(missing) / ROUNDS_TO_PAY if missing > AT_ONCE else 0.0
            for missing in plan.pending.tolist()
        ]
        return Outlook(
            num_requests=B,
            usual_WQRKN=self.trees.paths_WQRKN,
            reached_WQR=self.trees.reached_WQR,
            num_seen_Q=self.trees.num_seen_WQ[0],
            kind_S=tree_kinds(requests, text_SN),
            text_SN=text_SN,
            known_S=known_S,
            hoped_S=known_S + HOPE * deviation_S,
            due_S=np.minimum(plan.pending, AT_ONCE),
            late_S=np.array(late_ms),
            forwards=table.forwards(B, S * self._most),
            extends=table.extend.span(0, S * AT_ONCE + 1),
            steps=np.stack([table.step.span(0, S * w + 1)[::w] for w in self.trees.widths]),
            known_factor=factors[0],
            hoped_factor=factors[1],
        )

    def choose(
        self, plan: RoundPlan, proposals: Proposals, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        """Which candidates the target verifies: kept, bool [B', C].

        proposals, requests: of the B' requests with candidates, in their order.
        """
        plan.proposals, plan.requests = proposals, requests
        plan.depth = head_depth(proposals)
        plan.calibration = self.acceptance.calibrate(proposals, requests)
        paths, B = plan.calibration.paths, plan.num_requests
        before_ms = self._before_ms(plan)
        if self.speculation.mode == "auto":
            assert self.costs is not None
            costs = self.costs.forwards(B, len(paths) * self._most)
            choice = choose(paths, costs, B, before_ms, self._most, plan.rate)
            plan.num_nodes, plan.expected_tokens = choice.num_nodes, choice.expected_tokens
            plan.predicted_ms = choice.predicted_ms
            return choice.kept
        kept = most_probable(proposals.scores, self._most)
        plan.num_nodes = int(np.count_nonzero(kept))
        plan.expected_tokens = B + float(paths[kept].sum())
        if self.costs is not None:
            plan.predicted_ms = before_ms + self.costs.forward(B, B + plan.num_nodes)
        return kept

    def _before_ms(self, plan: RoundPlan) -> float:
        """The table's ms of what precedes the target's forward."""
        if self.costs is None:
            return 0.0
        missing = plan.pending[plan.drafting].tolist()
        far = [tokens for tokens in missing if tokens > AT_ONCE]
        ms = self.costs.extend(sum(missing) - sum(far) + len(far)) + self.costs.enter(sum(far))
        return ms + max(0, plan.depth - 1) * self.costs.step(len(missing) * plan.width)

    def learn(self, plan: RoundPlan, emitted: Sequence[Sequence[int]]) -> dict[str, int]:
        """From the tokens of the requests with candidates, in the order of `choose`. Returns how
        many of the accepted drafts were of each of SOURCES.
        """
        proposals, known = plan.proposals, plan.calibration
        assert proposals is not None
        assert known is not None
        if self.speculation.mode == "auto" and plan.drafts:
            log_odds = self.acceptance.log_odds(HEAD, plan.requests)
            kinds = plan.kinds[plan.drafting]
            least = plan.thresholds[-1]
            self.trees.observe(proposals, known.paths, log_odds, kinds, least, plan.width)
        self.acceptance.observe(proposals, known, emitted, plan.requests)
        return accepted_by_source(proposals, emitted)

    @property
    def _most(self) -> int:
        """Nodes of a tree, its root excluded."""
        return self.speculation.num_verify_tokens - 1


def head_depth(proposals: Proposals) -> int:
    """Levels that the head has drafted."""
    if proposals.text is not None:
        return proposals.text.head_depth
    return int(proposals.depths[-1]) if len(proposals.depths) else 0


# The same in the native library

_BOTH = ctypes.c_void_p * 2  # by source
_Integers = ctypes.POINTER(ctypes.c_int64)


class _CurveData(ctypes.Structure):
    _fields_ = (("ms", ctypes.c_void_p), ("count", ctypes.c_int64), ("slope", ctypes.c_double))


def _integers(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_int64) for name in names)


def _doubles(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_double) for name in names)


def _arrays(*names: str) -> tuple[tuple[str, type], ...]:
    return tuple((name, ctypes.c_void_p) for name in names)


class _Experience(ctypes.Structure):
    """`Experience` of cpp/choice.h, where the fields are explained."""

    _fields_ = (
        *_integers("K", "k", "N", "is_fixed", "depths", "bins", "groups", "opinions", "R", "Q"),
        *_integers("W", "num_bounds", "at_once", "rounds_to_pay"),
        *_doubles("bins_per_unit", "belief", "largest", "memory", "request_memory", "first_gain"),
        *_doubles("hope", "unproposed"),
        ("judged", _BOTH),
        ("drawn", _BOTH),
        *_arrays("variance"),
        ("first", _BOTH),
        *_arrays("opinion_scale", "opinion_lift", "text_bounds"),
        *_arrays("trees", "reached", "num_seen", "brought", "grown_from"),
        *((name, _CurveData) for name in ("target", "decode", "step", "extend", "enter")),
    )


class _Round(ctypes.Structure):
    """`Round` of cpp/choice.h. An array's memory is kept by the round's `RoundPlan`."""

    _fields_ = (
        *_integers("B", "S", "has_head"),
        *_doubles("known_factor", "hoped_factor"),
        *_arrays("pending"),
        ("able", ctypes.POINTER(ctypes.c_void_p)),
        *((name, _Integers) for name in ("num_chains", "chain_lens")),
        *((name, _Integers) for name in ("chain_tokens", "chain_kinds")),
        *_arrays("drafting", "kinds"),
        ("thresholds", ctypes.POINTER(ctypes.c_double)),
        *_doubles("rate"),
        *_integers("num_drafting", "width", "L", "C", "depth"),
        ("requests", ctypes.POINTER(ctypes.c_void_p)),
        *_arrays("tokens", "scores", "parents", "depths", "text_cells", "grown"),
        *_arrays("conditional", "weighed", "paths", "cells", "kept"),
        *_integers("num_nodes"),
        *_doubles("expected_tokens", "predicted_ms"),
        *((name, _Integers) for name in ("emitted", "num_emitted")),
        ("by_source", ctypes.c_int64 * len(SOURCES)),
    )


class NativeSteps(Steps):
    """The three operations in the native library, which must be available."""

    def __init__(
        self, speculation: Speculation, costs: CostTable | None, narrow: bool = True
    ) -> None:
        super().__init__(speculation, costs, narrow)
        self._library, trees, counts = library(), self.trees, self.acceptance
        self._first = FIRST_OF_BINS, np.ascontiguousarray(FIRST_OF_TEXT)
        self._known = _Experience(
            K=speculation.num_draft_steps,
            k=speculation.tree_topk,
            N=self._most,
            is_fixed=speculation.mode != "auto",
            depths=NUM_DEPTHS,
            bins=NUM_BINS,
            groups=FIRST_OF_TEXT.size,
            opinions=NUM_OPINIONS,
            R=NUM_TREES,
            Q=NUM_KINDS,
            W=len(self.trees.widths),
            num_bounds=len(TEXT_BOUNDS),
            at_once=AT_ONCE,
            rounds_to_pay=ROUNDS_TO_PAY,
            bins_per_unit=BINS_PER_UNIT,
            belief=BELIEF,
            largest=LARGEST,
            memory=MEMORY,
            request_memory=REQUEST_MEMORY,
            first_gain=FIRST_GAIN,
            hope=HOPE,
            unproposed=UNPROPOSED,
            judged=_BOTH(address(counts.judged[HEAD]), address(counts.judged[TEXT])),
            drawn=_BOTH(address(counts.drawn[HEAD]), address(counts.drawn[TEXT])),
            variance=address(counts.variance),
            first=_BOTH(*map(address, self._first)),
            opinion_scale=address(OPINION_SCALE),
            opinion_lift=address(OPINION_LIFT),
            text_bounds=address(TEXT_BOUNDS),
            trees=address(trees.paths_WQRKN),
            reached=address(trees.reached_WQR),
            num_seen=address(trees.num_seen_WQ),
            brought=address(trees.brought),
            grown_from=address(trees.grown_from),
        )
        if costs is not None:
            for name in ("target", "decode", "step", "extend", "enter"):
                setattr(self._known, name, _curve(getattr(costs, name)))

    def plan(
        self,
        plan: RoundPlan,
        requests: Sequence[RequestAcceptance],
        chains: Sequence[Sequence[TextChain]],
        factors: tuple[float, float],
        has_head: bool,
    ) -> None:
        plan.kinds = np.empty(len(requests), dtype=np.int64)
        plan.native = round_ = self._begun(plan)
        round_.has_head = has_head
        round_.known_factor, round_.hoped_factor = factors
        round_.able = _places(requests)
        if any(chains):
            flat = list(chain.from_iterable(chains))
            round_.num_chains = _row([len(own) for own in chains])
            round_.chain_lens = _row([len(one.tokens) for one in flat])
            round_.chain_tokens = _row([token for one in flat for token in one.tokens])
            round_.chain_kinds = _row([kind for one in flat for kind in one.kinds])
        round_.kinds = address(plan.kinds)
        self._library.eyas_plan(ctypes.byref(self._known), ctypes.byref(round_))
        plan.rate = round_.rate
        if round_.num_drafting:
            plan.width = round_.width
            plan.thresholds = round_.thresholds[: self._known.K]

    def _begun(self, plan: RoundPlan) -> _Round:
        round_ = _Round(B=plan.num_requests, S=len(plan.pending), width=plan.width)
        round_.pending, round_.drafting = address(plan.pending), address(plan.drafting)
        round_.thresholds = (ctypes.c_double * self.speculation.num_draft_steps)()
        return round_

    def choose(
        self, plan: RoundPlan, proposals: Proposals, requests: Sequence[RequestAcceptance]
    ) -> np.ndarray:
        round_, text = plan.native or self._begun(plan), proposals.text
        L, C = proposals.tokens.shape
        conditional, weighed, paths = np.empty((3, L, C))
        cells, kept = np.empty((L, C), dtype=np.int64), np.empty((L, C), dtype=bool)
        proposals = _contiguous(proposals)
        plan.native, plan.proposals, plan.requests = round_, proposals, requests
        plan.depth = head_depth(proposals)
        round_.L, round_.C, round_.depth = L, C, plan.depth
        round_.requests = _places(requests)
        round_.tokens, round_.scores = address(proposals.tokens), address(proposals.scores)
        round_.parents, round_.depths = address(proposals.parents), address(proposals.depths)
        if text is not None:
            round_.text_cells, round_.grown = address(text.cells), address(text.grown)
        else:
            weighed = conditional
        start, size = address(conditional), 8 * L * C
        round_.conditional, round_.weighed = start, start + (text is not None) * size
        round_.paths, round_.cells, round_.kept = start + 2 * size, address(cells), address(kept)
        plan.calibration = Calibration(conditional, weighed, paths, cells)
        self._library.eyas_choose(ctypes.byref(self._known), ctypes.byref(round_))
        plan.num_nodes, plan.expected_tokens = round_.num_nodes, round_.expected_tokens
        plan.predicted_ms = round_.predicted_ms if self.costs is not None else 0.0
        return kept

    def learn(self, plan: RoundPlan, emitted: Sequence[Sequence[int]]) -> dict[str, int]:
        assert plan.native is not None
        plan.native.emitted = _row([token for row in emitted for token in row])
        plan.native.num_emitted = _row(list(map(len, emitted)))
        self._library.eyas_learn(ctypes.byref(self._known), ctypes.byref(plan.native))
        return dict(zip(SOURCES, plan.native.by_source, strict=True))


def _curve(curve: Curve) -> _CurveData:
    return _CurveData(address(curve.dense), len(curve.dense), curve.slope)


def _places(requests: Sequence[RequestAcceptance]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(requests))(*map(ctypes.addressof, requests))


def _row(values: list[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def _contiguous(proposals: Proposals) -> Proposals:
    """The library reads rows that stand one behind the other; a tree that was not drafted to the
    end is a part of larger arrays.
    """
    arrays = proposals.tokens, proposals.scores, proposals.parents, proposals.depths
    if all(array.flags.c_contiguous for array in arrays):
        return proposals
    tokens, scores, parents, depths = map(np.ascontiguousarray, arrays)
    return Proposals(tokens, scores, parents, depths, proposals.text)
