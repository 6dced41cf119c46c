"""Rounds for a device that need not wait for its host.

A round is launched before the outcome of the one before is known. Between rounds a sample's state
lies in the `FutureMap` by slot (root, length, the draft's output), and a round is one piece of work
of fixed shape, on CUDA a graph: propose -> choose -> verify -> walk -> move -> extend. The host
gives upper bounds (page tables), the draws' parameters and the size of the trees, which follows
from past rounds; it learns the tokens when it waits for the outcomes, and updates `RunningSample`
as the rounds of the host do, so either may follow the other.

    host      launch 1 . launch 2 . wait 1 . launch 3 . wait 2      one thread; one stream
    device             [ round 1 ][ round 2 ][ round 3 ]

A sample that ends in round N has one more round in flight: it writes behind its own tokens, into
its own pages, and its result is dropped. Prefill, and rounds of samples that need the host between
two tokens (`job_needs_host`: penalties, bias, grammar, min_tokens, logprobs), are the host's
rounds, done when `launch` returns; the latter only with nothing in flight.

Letters: B lines of a round, N nodes of all trees, D depth, k tree_topk, P pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec

import numpy as np
import torch

from eyas.engine.cuda.device import DeviceTrace, FutureMap, Graphs, HostCopies, JobEvents
from eyas.engine.cuda.sampling import Cuts, draw_keys, sampled
from eyas.engine.cuda.tree import (
    AcceptedPaths,
    BatchLines,
    Foresight,
    TensorProposals,
    TensorTrees,
    choose,
    grow,
    move_accepted,
    num_candidates,
    roots,
    trees_of,
    walk,
)
from eyas.engine.draft import Draft, to_device
from eyas.engine.entries import DraftError, Entries, check_scores
from eyas.engine.request import DraftedTree
from eyas.engine.rounds import Rounds, outcome_of
from eyas.engine.scheduler import Job, Outcome, RunningSample
from eyas.engine.steps import RoundPlan
from eyas.engine.tree import Speculation, drafted_tree
from eyas.model.rows import Proposals, TargetOutput
from eyas.model.target import Target

GREEDY, SAMPLED, CUT = range(3)
LEAST_PAGES = 8  # of a page table: the tree of a void line fits
NUM_INTEGERS, NUM_FLOATS = 9, 3
QUARTERS = 4

# Of a round's lines: integers [NUM_INTEGERS, B], floats [NUM_FLOATS, B], page_table int32 [B+1, P]
LineArrays = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class RoundShape:
    """The key of a round's graph. depth 0: a plain round; drawing: the most that a line needs."""

    num_lines: int
    num_pages: int
    depth: int
    num_nodes: int
    drawing: int


@dataclass(frozen=True, slots=True)
class RoundInFlight:
    """A launched round. alive: the samples with a line, by their place in the job; drafting: those
    that have a tree.
    """

    job: Job
    alive: list[int]
    drafting: list[int]
    plan: RoundPlan
    shape: RoundShape
    copies: HostCopies
    took: JobEvents | float  # on a CPU ms: it is over when the launch returns


class TensorRounds(Rounds):
    """Rounds with `launch`. Its caches have a page, and its `FutureMap` a slot, that no sample is
    given: the void's.
    """

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        speculation: Speculation,
        max_batch: int,
        num_pages: int,
    ) -> None:
        assert not target.is_native, "rounds in tensors take the models in PyTorch operators"
        super().__init__(target, draft, speculation, max_batch + 1, num_pages + 1)
        self._void_slot, self._void_page = max_batch, num_pages
        width = draft.config.hidden_size if draft is not None else 0
        self.futures = FutureMap(max_batch + 1, width, target.dtype, target.device)
        # whose state a slot of the FutureMap holds
        self._owners: list[RunningSample | None] = [None] * max_batch
        self.num_in_flight = 0
        self._foresight = Foresight(speculation.num_draft_steps)
        # Without the kernel attention plans on the host: it works, but neither as a graph nor
        # without waiting.
        self._graphs = Graphs(target.device.startswith("cuda") and find_spec("triton") is not None)
        self._device_trace = DeviceTrace() if target.device.startswith("cuda") else None
        if self._device_trace is not None:
            self.trace = self._device_trace

    @staticmethod
    def job_needs_host(job: Job) -> bool:
        """Whether the host must look at each token before the next is drawn. Such a round may be
        launched only when the results of all before are known."""
        return job.chunks is None and any(
            sample.sampler.needs_host for sample in job.samples if not sample.finish_reason
        )

    def run(self, job: Job) -> list[Outcome]:
        """Launch a job and wait for it."""
        return self.launch(job)()

    @torch.inference_mode()
    def launch(self, job: Job) -> Callable[[], list[Outcome]]:
        """Start a job behind those launched before; what is returned waits for its outcomes. Call
        them in the order of the launches, each once.

        Waits for the device only where the host has a part in the job: in a prefill that draws a
        first token, and in a round that needs the host.
        """
        needs_host = self.job_needs_host(job)
        if needs_host or job.chunks is not None:
            assert not (needs_host and self.num_in_flight), (
                "a round that needs the host has to wait for the results before"
            )
            for sample in job.samples:
                if self._owners[sample.slot] is sample:
                    self._owners[sample.slot] = None
            outcomes = super().run(job)
            return lambda: outcomes
        alive = [b for b, sample in enumerate(job.samples) if sample.finish_reason is None]
        if not alive:
            return lambda: [outcome_of(sample, []) for sample in job.samples]
        able, missing = self._able(job, alive)
        due = [self._num_due(job.samples[b], count) for b, count in zip(able, missing, strict=True)]
        requests = [job.samples[b].acceptance for b in able]
        plan = self.policy.plan(due, requests, len(alive) - len(able))
        drafting = [b for b, drafts in zip(able, plan.drafting, strict=True) if drafts]
        shape = self._shape(job, alive, len(drafting), plan)
        fresh = [b for b in alive if self._owners[job.samples[b].slot] is not job.samples[b]]
        arrays = self._arrays(job, alive, (fresh, drafting), shape)
        copies, took = self._enqueue(job, shape, fresh, arrays)
        for b in alive:
            self._owners[job.samples[b].slot] = job.samples[b]
        self.num_in_flight += 1
        flight = RoundInFlight(job, alive, drafting, plan, shape, copies, took)
        return lambda: self._settle(flight)

    # Launching

    def _enqueue(
        self, job: Job, shape: RoundShape, fresh: list[int], arrays: LineArrays
    ) -> tuple[HostCopies, JobEvents | float]:
        """All of the device's work for a round: what it emits, on its way to the host, and how long
        it takes.
        """
        work = partial(self._round, shape)
        self._graphs.prepare(shape, work, partial(self._void_inputs, shape))
        started = time.perf_counter()
        with self.trace.job():
            if self.entries is not None and fresh:
                slots = to_device(np.array([job.samples[b].slot for b in fresh]), self._device)
                self.futures.h[slots] = self.entries.extend(job, fresh)
            copies = HostCopies(self._graphs(shape, work, self._to_device(arrays)))
        if self._device_trace is not None and self._device_trace.newest is not None:
            return copies, self._device_trace.newest
        return copies, (time.perf_counter() - started) * 1e3

    def _num_due(self, sample: RunningSample, num_missing: int) -> int:
        """Entries to make for a sample in this round."""
        is_ours = self._owners[sample.slot] is sample
        return self.speculation.num_draft_steps + 1 if is_ours else num_missing

    def _shape(self, job: Job, alive: list[int], num_drafting: int, plan: RoundPlan) -> RoundShape:
        drawing = max(_drawing(job.samples[b]) for b in alive)
        num_lines = _power_of_2(len(alive))
        num_pages = max(LEAST_PAGES, _power_of_2(job.page_table.shape[1]))
        if not num_drafting:
            return RoundShape(num_lines, num_pages, 0, 0, drawing)
        depth = self._foresight.depth(plan.thresholds, num_drafting)
        most = min(num_candidates(depth, self.speculation.tree_topk), self._max_nodes)
        wanted = min(self._foresight.num_nodes(num_drafting, self._max_nodes), num_drafting * most)
        quarters = -(-wanted * QUARTERS // (num_lines * most))
        return RoundShape(
            num_lines, num_pages, depth, -(-quarters * num_lines * most // QUARTERS), drawing
        )

    @property
    def _max_nodes(self) -> int:
        """Of a sample's tree, besides the root."""
        return self.policy.speculation.num_verify_tokens - 1

    def _arrays(
        self, job: Job, alive: list[int], marked: tuple[list[int], list[int]], shape: RoundShape
    ) -> LineArrays:
        """marked: which samples are fresh (their state is the host's) and which draft."""
        integers, floats, page_table = self._void_arrays(shape)
        fresh, drafting = map(set, marked)
        for line, b in enumerate(alive):
            sample = job.samples[b]
            params, sampler = sample.request.params, sample.sampler
            integers[:, line] = (
                sample.slot,
                b in fresh,
                sample.root,
                sample.num_cached,
                b in drafting,
                len(sample.request.prompt_ids),
                sampler.seed,
                params.temperature == 0,
                params.top_k,
            )
            floats[:, line] = params.temperature, params.top_p, params.min_p
            # Behind its own pages a sample has the void's, so that it can never write to those of
            # another.
            count = len(sample.pages)
            page_table[line, :count] = job.page_table[b, :count]
        return integers, floats, page_table

    def _void_inputs(self, shape: RoundShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._to_device(self._void_arrays(shape))

    def _void_arrays(self, shape: RoundShape) -> LineArrays:
        """BatchLines that run and change nothing: as if fresh, with one column."""
        integers = np.zeros((NUM_INTEGERS, shape.num_lines), dtype=np.int64)
        integers[:] = np.array([self._void_slot, 1, 0, 1, 0, 0, 0, 1, 0])[:, None]
        floats = np.zeros((NUM_FLOATS, shape.num_lines))
        floats[1] = 1.0
        page_table = np.full(
            (shape.num_lines + 1, shape.num_pages), self._void_page, dtype=np.int32
        )
        return integers, floats, page_table

    def _to_device(self, arrays: LineArrays) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        integers, floats, page_table = (to_device(array, self._device) for array in arrays)
        return integers, floats, page_table

    # The device's part: from here to the next heading nothing looks at a value

    def _round(
        self,
        shape: RoundShape,
        integers: torch.Tensor,
        floats: torch.Tensor,
        page_table: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Emitted tokens [B, D + 1] and how many of them hold [B]; after drafting all candidates:
        tokens, scores, parents.
        """
        slot, fresh, root, length, drafts, prompt_len, seed, greedy, top_k = integers.unbind(0)
        futures, is_fresh = self.futures, fresh > 0
        root = torch.where(is_fresh, root, futures.root[slot])
        length = torch.where(is_fresh, length, futures.length[slot])
        lines = BatchLines(root, length, page_table, self.cache.page_size)
        trees, candidates = self._propose_on_device(shape, lines, futures.h[slot], drafts > 0)
        rows = trees.rows(lines)
        output = self.target.forward(rows, self.cache, self._taps)
        cuts = Cuts(floats[0], floats[1], floats[2], top_k)

        def draw(row: torch.Tensor, place: int) -> torch.Tensor:
            best = output.best[row]
            if shape.drawing == GREEDY:
                return best
            key = draw_keys(seed, length + 1 - prompt_len + place)
            return torch.where(
                greedy > 0, best, sampled(output.logits[row], key, cuts, shape.drawing == CUT)
            )

        walked = self._walk(trees, shape.depth, draw)
        move_accepted(self.cache, rows, lines, walked)
        if self.entries is not None:
            self._follow(self.entries, slot, lines, walked, output)
        futures.root[slot], futures.length[slot] = walked.last(walked.tokens), length + walked.count
        proposed = (
            (candidates.tokens, candidates.scores, candidates.parents)
            if candidates is not None
            else ()
        )
        return walked.tokens, walked.count, *proposed

    def _propose_on_device(
        self, shape: RoundShape, lines: BatchLines, h_BH: torch.Tensor, drafts: torch.Tensor
    ) -> tuple[TensorTrees, TensorProposals | None]:
        if shape.depth == 0:
            return roots(lines), None
        assert self.draft is not None
        assert self.entries is not None
        candidates = grow(
            self.draft, self.entries.cache, lines, h_BH, (shape.depth, self.speculation.tree_topk)
        )
        chosen = choose(candidates.scores, drafts, self._max_nodes, shape.num_nodes)
        return trees_of(lines, candidates, chosen, shape.depth), candidates

    def _walk(
        self, trees: TensorTrees, depth: int, draw: Callable[[torch.Tensor, int], torch.Tensor]
    ) -> AcceptedPaths:
        return walk(trees, depth, draw)

    def _follow(
        self,
        made: Entries,
        slot: torch.Tensor,
        lines: BatchLines,
        walked: AcceptedPaths,
        output: TargetOutput,
    ) -> None:
        """The features of the accepted path, the draft's entries up to the new root's, and its
        output there.
        """
        assert output.aux_hidden is not None
        B, places = walked.rows.shape
        taken, index = walked.taken().flatten(), lines.indices()
        line = index.repeat_interleave(places)
        column = (lines.length[:, None] + torch.arange(places, device=index.device)).flatten()
        features = output.aux_hidden[walked.rows.flatten()]
        entries = lines.entries(walked.tokens.flatten(), line, column + 1, taken)
        own = torch.where(
            taken,
            lines.slots(line, torch.where(taken, column, 0)),
            self._void_page * self.cache.page_size,
        )
        made.features.write(own, features)
        h = made.draft.extend(entries, features, made.cache).view(B, places, -1)
        self.futures.h[slot] = h[index, walked.count - 1]

    # Results

    @torch.inference_mode()
    def _settle(self, flight: RoundInFlight) -> list[Outcome]:
        """Wait for a round and bring its samples up to date. One that ended before it is left as it
        was.
        """
        arrays = flight.copies.wait()
        self.num_in_flight -= 1
        emitted: dict[int, list[int]] = {}
        for line, b in enumerate(flight.alive):
            sample = flight.job.samples[b]
            if sample.finish_reason is not None:
                continue
            emitted[b] = sample.take(arrays[0][line, : arrays[1][line]].tolist(), self._end_tokens)
            for token in emitted[b]:
                sample.sampler.take(token)
            sample.num_cached += len(emitted[b])
            if self.entries is not None:
                self.entries.made(flight.job, b, sample.num_cached)
        self._observe(flight, arrays, emitted)
        trees = self._trees(flight, arrays, emitted)
        return [
            outcome_of(
                sample,
                emitted[b],
                len(emitted[b]) - 1 if b in flight.drafting else None,
                trees.get(b),
            )
            if b in emitted
            else outcome_of(sample, [])
            for b, sample in enumerate(flight.job.samples)
        ]

    def _trees(
        self, flight: RoundInFlight, arrays: Sequence[np.ndarray], emitted: dict[int, list[int]]
    ) -> dict[int, DraftedTree]:
        """The trees of samples whose requests want them. The host repeats the device's choice of
        candidates from its scores.
        """
        reported = [
            b
            for b in flight.drafting
            if b in emitted and flight.job.samples[b].request.returns_trees
        ]
        if not reported:
            return {}
        line_of = {b: line for line, b in enumerate(flight.alive)}
        tokens, scores, parents = arrays[2:]
        drafts_B = torch.zeros(len(scores), dtype=torch.bool)
        drafts_B[[line_of[b] for b in flight.drafting]] = True
        chosen_N = choose(
            torch.from_numpy(scores), drafts_B, self._max_nodes, flight.shape.num_nodes
        ).numpy()
        kept = np.zeros(scores.size + 1, dtype=bool)  # the last place is the void's
        kept[chosen_N] = True
        kept_BC = kept[:-1].reshape(scores.shape)
        depths = _depths(flight.shape.depth, self.speculation.tree_topk)
        proposals = Proposals(tokens, scores, parents.astype(np.int32), depths)
        return {
            b: drafted_tree(proposals, line_of[b], kept_BC[line_of[b]], emitted[b])
            for b in reported
        }

    def _observe(
        self, flight: RoundInFlight, arrays: Sequence[np.ndarray], emitted: dict[int, list[int]]
    ) -> None:
        """Tell the policy what came. It chooses nodes afterwards, to learn how many it would have
        wanted.
        """
        if self._device_trace is not None:
            self._device_trace.add_up()
        if not emitted:
            return
        plan, drafting = flight.plan, flight.drafting
        if drafting:
            lines = [flight.alive.index(b) for b in drafting]
            depths = _depths(flight.shape.depth, self.speculation.tree_topk)
            tokens, scores, parents = (array[lines] for array in arrays[2:])
            proposals = Proposals(tokens, scores, parents.astype(np.int32), depths)
            try:
                check_scores(scores)
            except DraftError as error:
                self.switch_off(error)
                return  # there is nothing to learn from such a round
            self.policy.choose(
                plan, proposals, [flight.job.samples[b].acceptance for b in drafting]
            )
            self._foresight.observe(proposals, plan.num_nodes, plan.thresholds[-1])
            self._charge(plan, flight.shape.num_nodes)
        self.policy.observe(
            plan, [emitted.get(b, []) for b in drafting], max(_ms(flight.took), 1e-6)
        )

    def _charge(self, plan: RoundPlan, num_nodes: int) -> None:
        """The round had its own number of nodes, whatever the policy would have wanted."""
        if self.policy.costs is not None:
            target, rows = self.policy.costs.target, plan.num_requests
            plan.predicted_ms += target(rows + num_nodes) - target(rows + plan.num_nodes)
        plan.num_nodes = num_nodes


def _drawing(sample: RunningSample) -> int:
    params = sample.request.params
    if params.temperature == 0:
        return GREEDY
    return CUT if params.top_k or params.top_p < 1 or params.min_p > 0 else SAMPLED


def _ms(took: JobEvents | float) -> float:
    if isinstance(took, float):
        return took
    start, end = took
    end.synchronize()
    return float(start.elapsed_time(end))


def _depths(depth: int, topk: int) -> np.ndarray:
    """int32 [C]: the depth of each candidate."""
    return np.repeat(np.arange(1, depth + 1, dtype=np.int32), [topk] + [topk * topk] * (depth - 1))


def _power_of_2(count: int) -> int:
    return 1 << (count - 1).bit_length()
