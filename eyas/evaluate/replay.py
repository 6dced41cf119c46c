"""Recorded answers played back at any load: the engine's own scheduler, pages, entries and policy,
on a clock that is counted.

Only what a device does is left out: a prefill and a verification take what the costs say and give
what was recorded. So the same decisions are taken as on a server, about the same candidates, with
the times of any machine whose costs are known.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from eyas.engine.costs import CostTable
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine
from eyas.engine.entries import Entries
from eyas.engine.policy import Policy, RoundPlan
from eyas.engine.request import Request, SamplingParams
from eyas.engine.rounds import Rounds
from eyas.engine.running import Outcome, Running
from eyas.engine.scheduler import Job
from eyas.engine.trace import Trace
from eyas.engine.tree import Speculation, Tree, tree_of
from eyas.engine.verify import accept
from eyas.evaluate.decoding import Models
from eyas.evaluate.overheads import Overheads
from eyas.evaluate.recording import Recording
from eyas.model.rows import Chosen, Proposals, Roots
from eyas.model.target import PAGE_SIZE, Target


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take: the cost table, what real rounds take besides, and what a server adds.

    chunk_ms: to hand over the tokens of one request's round; arrival_ms: from an answer's end until
    the next request of the same client is in the engine.
    """

    costs: CostTable
    overheads: Overheads
    chunk_ms: float = 0.0
    arrival_ms: float = 0.0

    def prefill_ms(self, num_rows: int, num_entries: int) -> float:
        """A stretch of prompts, and the draft's entries that were made with it."""
        return (
            self.costs.target(num_rows) + self.costs.enter(num_entries)
        ) * self.overheads.prefill

    def plain_ms(self, num_requests: int) -> float:
        """A round without trees."""
        own_ms = self.costs.forward(num_requests, num_requests) * self.overheads.ratio(
            "plain", num_requests
        )
        return own_ms + num_requests * self.chunk_ms

    def tree_ms(self, num_requests: int, table_ms: float) -> float:
        """A round with trees that the table says takes so long. It is never shorter than a plain
        one of the same requests, whose rows it holds: what is measured in two moments may say
        so."""
        own_ms = (
            table_ms * self.overheads.ratio("tree", num_requests) + num_requests * self.chunk_ms
        )
        return max(own_ms, self.plain_ms(num_requests))


class PlayedPolicy(Policy):
    """A policy that is told the time that a round takes by its pace, whatever the clock says."""

    pace: Pace
    clock_ms = 0.0
    # of rounds with trees: what they took, and plain ones of the same requests would have
    tree_ms = as_plain_ms = 0.0

    def observe(self, round_: RoundPlan, emitted: Sequence[Sequence[int]], real_ms: float) -> None:
        ms = plain_ms = self.pace.plain_ms(round_.num_requests)
        if emitted:
            ms = self.pace.tree_ms(round_.num_requests, round_.predicted_ms)
            self.tree_ms, self.as_plain_ms = self.tree_ms + ms, self.as_plain_ms + plain_ms
        self.clock_ms += ms
        super().observe(round_, emitted, ms)


class PlayedDraft:
    """What `Entries` asks of a draft: entries are counted, and proposals are those of the
    recording.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.num_entered = 0
        self.roots: list[tuple[str, int]] = []  # whose proposals are asked for next

    def new_cache(self, num_pages: int, page_size: int) -> None:
        """There is nothing to keep."""

    def enter(self, roots: Roots, *caches: object) -> None:
        self.num_entered += len(roots.tokens)

    def grow(
        self,
        roots: Roots,
        cache: object,
        features: object,
        speculation: Speculation,
        thresholds: Sequence[float],
    ) -> Proposals:
        """As far as a draft would have gone: level l while the best paths sum up to thresholds[l]
        or more.
        """
        whole = self.recording.proposals(self.roots, speculation.num_draft_steps)
        return self.recording.proposals(self.roots, depth_reached(whole, thresholds))


def depth_reached(proposals: Proposals, thresholds: Sequence[float]) -> int:
    """The levels that `Draft.propose` would have drafted of these proposals, the first included."""
    depth = 1
    for least in thresholds:
        at = proposals.depths == depth
        if float(np.exp(proposals.scores[:, at].max(axis=1)).sum()) < least:
            break
        depth += 1
    return depth


class PlayedRounds(Rounds):
    """Rounds without models: the jobs' outcomes are those of a recording. Requests are named
    "<arm>/<recorded id>".
    """

    recording: Recording
    pace: Pace

    def __init__(
        self, target: Target, draft: Draft | None, speculation: Speculation, sizes: tuple[int, int]
    ) -> None:
        assert draft is not None
        self.trace = Trace()
        self.target, self.draft, self.speculation = target, draft, speculation
        self.policy = Policy(Speculation("off"))
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._num_pages = sizes[1]

    def play(self, recording: Recording, pace: Pace, policy: PlayedPolicy) -> None:
        """Take what is to be played."""
        self.recording, self.pace, self.policy, policy.pace = recording, pace, policy, pace
        self.player = PlayedDraft(recording)
        self.entries = Entries(
            cast(Draft, self.player), self._num_pages, PAGE_SIZE, cast(Any, None)
        )

    def run(self, job: Job) -> list[Outcome]:
        return self._decode(job) if job.chunks is None else self._prefill(job, job.chunks)

    def _prefill(self, job: Job, chunks: list[range]) -> list[Outcome]:
        assert isinstance(self.policy, PlayedPolicy)
        assert self.entries is not None
        emitted: dict[int, list[int]] = {}
        for b, (running, chunk) in enumerate(zip(job.runnings, chunks, strict=True)):
            if chunk.stop == running.prefill_end == len(running.tokens):
                emitted[b] = running.take(self._answer(running)[:1], self._end_tokens)
            running.num_cached = chunk.stop
        self.entries.begin_pages(job, {b: len(chunk) for b, chunk in enumerate(chunks)})
        self.player.num_entered = 0
        self._enter_prompts(job, chunks)
        self.policy.clock_ms += self.pace.prefill_ms(sum(map(len, chunks)), self.player.num_entered)
        return [
            self._outcome(running, emitted.get(b, [])) for b, running in enumerate(job.runnings)
        ]

    def _propose(self, job: Job, drafting: list[int], plan: RoundPlan) -> tuple[Proposals, Any]:
        self.player.roots = [
            (_name(job.runnings[b]), job.runnings[b].num_emitted - 1) for b in drafting
        ]
        return super()._propose(job, drafting, plan)

    def _verify(self, job: Job, alive: list[int], chosen: Chosen) -> dict[int, list[int]]:
        emitted: dict[int, list[int]] = {}
        for b, line in zip(alive, chosen.line, strict=True):
            running = job.runnings[b]
            left = self._answer(running)[running.num_emitted :]
            tree = Tree.of_root(running.root)
            if line >= 0:
                tree = tree_of(
                    running.root, chosen.proposals, line, chosen.kept[line].nonzero()[0].tolist()
                )
            emitted[b] = running.take(walked(tree, left), self._end_tokens)
            running.num_cached += len(emitted[b])
        assert self.entries is not None
        self.entries.begin_pages(job, {b: len(taken) for b, taken in emitted.items()})
        return emitted

    def _answer(self, running: Running) -> list[int]:
        return self.recording.answers[_name(running)].token_ids


def walked(tree: Tree, left: Sequence[int]) -> list[int]:
    """What a round emits whose target goes on with the tokens `left`; it ends with them."""
    tokens = iter((*left, -1))
    return [
        token
        for token in accept(tree.tokens, tree.parents, lambda _: next(tokens))[1]
        if token >= 0
    ]


def _name(running: Running) -> str:
    return running.request.id.partition("/")[2]


class PlayedEngine(Engine):
    """An engine whose rounds are played."""

    @staticmethod
    def kind_of_rounds(target: Target) -> type[Rounds]:
        return PlayedRounds


@dataclass(slots=True)
class Played:
    """One answer as a client sees it; accepted: the drafts of its rounds that had any."""

    first_ms: float
    last_ms: float
    num_tokens: int = 0
    num_pieces: int = 0
    accepted: list[int] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float | None:
        """None where nothing came after the first piece."""
        if self.num_tokens < 2 or self.last_ms == self.first_ms:
            return None
        return (self.last_ms - self.first_ms) / (self.num_tokens - 1)

    @property
    def tokens_per_round(self) -> float:
        """The first token, which comes with the prefill, aside."""
        return (self.num_tokens - 1) / max(self.num_pieces - 1, 1)


class Theatre:
    """An engine that plays a recording with one speculation at one pace. Cache, policy and clock go
    on from part to part.
    """

    def __init__(
        self,
        models: Models,
        recording: Recording,
        speculation: Speculation,
        pace: Pace,
        max_batch: int,
    ) -> None:
        self._engine = models.engine(
            str(replace(speculation, mode="fixed")), PlayedEngine, max_batch
        )
        self._policy = PlayedPolicy(speculation, pace.costs, native=models.target.is_native)
        assert isinstance(self._engine.rounds, PlayedRounds)
        self._engine.rounds.play(recording, pace, self._policy)
        self._engine.policy = self._policy
        self._recording, self._pace = recording, pace

    def ask(
        self, arm: str, names: Sequence[str], concurrency: int, speculates: bool
    ) -> dict[str, Played]:
        """So many clients, each asking for the next answer when it has its own; the answers by
        name.

        arm: of a name that no request under way has; what it asks is in the cache for itself alone.
        """
        waiting, free = deque(names), [self._policy.clock_ms] * concurrency
        played: dict[str, Played] = {}
        done: dict[str, Played] = {}
        while waiting or self._engine.has_work:
            if waiting and not self._engine.has_work:
                self._policy.clock_ms = max(self._policy.clock_ms, free[0])
            while waiting and free and free[0] <= self._policy.clock_ms:
                heapq.heappop(free)
                self._engine.add(self._request(arm, waiting.popleft(), speculates))
            for update in self._engine.step():
                now = self._policy.clock_ms
                answer = played.setdefault(update.request_id, Played(now, now))
                answer.last_ms = now
                answer.num_tokens += len(update.token_ids)
                answer.num_pieces += 1
                if update.num_accepted_drafts is not None:
                    answer.accepted.append(update.num_accepted_drafts)
                if update.finish_reason is not None:
                    done[update.request_id.partition("/")[2]] = played.pop(update.request_id)
                    heapq.heappush(free, now + self._pace.arrival_ms)
        return done

    def round_cost(self) -> float | None:
        """What a round with trees took, in plain rounds of the same requests; None without any.
        Counts from here anew.
        """
        tree_ms, as_plain_ms = self._policy.tree_ms, self._policy.as_plain_ms
        self._policy.tree_ms = self._policy.as_plain_ms = 0.0
        return tree_ms / as_plain_ms if as_plain_ms else None

    def _request(self, arm: str, name: str, speculates: bool) -> Request:
        answer = self._recording.answers[name]
        params = SamplingParams(
            temperature=self._recording.temperature, max_tokens=len(answer.token_ids)
        )
        return Request(f"{arm}/{name}", answer.prompt_ids, params, speculates, cache_salt=arm)
