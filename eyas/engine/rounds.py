"""The device's work: a prefill, or one round of propose -> verify -> extend, for the samples of a job.

Knows the models, their caches and what a job's samples have emitted. Does not know who waits, who
owns a page or why the job is as it is. One thread runs the jobs, in the order of their launch.

    target's cache   [ x_0 ........ x_{n-1} ] verify writes [ root n_1 .. n_{N-1} ], accepted nodes are moved together
    draft's cache    [ e_1 ........ e_n ]     propose writes behind it; extend writes [ e_{n+1} .. ] from the target's features

A sample that does not draft is a tree of its root alone: plain decoding is the same round. The
target's features lie in pages of their own until the draft needs an entry, so where nothing is
drafted a head costs next to nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from eyas.engine.draft import Draft
from eyas.engine.entries import Entries
from eyas.engine.futures import to_device
from eyas.engine.policy import Policy, RoundPlan
from eyas.engine.request import DraftedTree
from eyas.engine.running import Outcome, Running
from eyas.engine.scheduler import Job
from eyas.engine.trace import Trace
from eyas.engine.tree import Speculation, Tree, drafted_tree, tree_of
from eyas.engine.verify import accept
from eyas.model.rows import (
    Chosen,
    FeatureCache,
    Proposals,
    Roots,
    Rows,
    prompt_rows,
    rows_of,
    slots_of,
)
from eyas.model.target import Target

# ids of the samples' requests, and what the draft proposes to each
Recorder = Callable[[list[str], Proposals], None]
NOTHING = Proposals(
    np.empty((0, 0), dtype=np.int64),
    np.empty((0, 0), dtype=np.float32),
    np.empty((0, 0), dtype=np.int32),
    np.empty(0, dtype=np.int32),
)


@contextmanager
def one_torch_thread(enabled: bool) -> Iterator[None]:
    """Keep PyTorch's small operators on one thread while the native path's own threads are at work
    beside them: two pools on the same cores wait for each other, and a copy of a few kilobytes
    takes milliseconds."""
    threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Rounds:
    """Runs jobs on a target, with the draft's proposals where there is a draft."""

    def __init__(
        self, target: Target, draft: Draft | None, speculation: Speculation, sizes: tuple[int, int]
    ) -> None:
        """sizes: (max_batch, num_pages). Drafts nothing until it is given another policy."""
        _, num_pages = sizes
        self.trace = Trace()
        self.target, self.draft, self.speculation = target, draft, speculation
        self.policy = Policy(Speculation("off"))
        # Gets the proposals of every round; nothing is verified then, so every token is a root.
        self.recorder: Recorder | None = None
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._device = target.device
        self.cache = target.new_cache(num_pages)
        self._taps = draft.config.taps if draft is not None else None
        self._features, self.entries = None, None
        if draft is not None:
            size, width = self.cache.page_size, 3 * target.config.hidden_size
            self._features = FeatureCache(num_pages * size, width, target.dtype, target.device)
            self.entries = Entries(draft, num_pages, size, self._features)

    @torch.inference_mode()
    def run(self, job: Job) -> list[Outcome]:
        """Do a job; the outcome of each of its samples."""
        with self.trace.job(), one_torch_thread(self.target.is_native):
            return self._decode(job) if job.chunks is None else self._prefill(job, job.chunks)

    # Prefill

    def _prefill(self, job: Job, chunks: list[range]) -> list[Outcome]:
        """A stretch of each prompt through target and draft; the first token of those whose prompt
        ends with it.
        """
        size = self.cache.page_size
        tokens = [
            running.tokens[chunk.start : chunk.stop]
            for running, chunk in zip(job.runnings, chunks, strict=True)
        ]
        rows = prompt_rows(
            tokens, [chunk.start for chunk in chunks], job.page_table, size, self._device
        )
        ends = np.cumsum([len(chunk) for chunk in chunks])
        # A sample that was preempted has drawn its root long ago.
        draws = [
            b
            for b, (running, chunk) in enumerate(zip(job.runnings, chunks, strict=True))
            if chunk.stop == running.prefill_end == len(running.tokens)
        ]
        output = self.target.forward(
            rows, self.cache, self._taps, self._index((ends[draws] - 1).tolist()), self._features
        )
        emitted: dict[int, list[int]] = {}
        best = output.best.tolist() if draws else []
        for place, b in enumerate(draws):
            running = job.runnings[b]
            token = self._draw(running, best, output.logits, place)
            emitted[b] = running.take([token], self._end_tokens)
        for running, chunk in zip(job.runnings, chunks, strict=True):
            running.num_cached = chunk.stop
        if self.entries is not None:
            self.entries.begin_pages(job, {b: len(chunk) for b, chunk in enumerate(chunks)})
            self._enter_prompts(job, chunks)
        return [
            self._outcome(running, emitted.get(b, [])) for b, running in enumerate(job.runnings)
        ]

    def _enter_prompts(self, job: Job, chunks: list[range]) -> None:
        """Make the prompts' entries at once if they are likely to be drafted from; tell the policy
        how many they are.
        """
        assert self.entries is not None
        able = [b for b, running in enumerate(job.runnings) if running.request.speculation]
        if not self.policy.expects_drafts:
            able = [b for b in able if chunks[b].stop == job.runnings[b].prefill_end]
        for b in able:
            self.entries.check(job, b)
        self.policy.prefilled(sum(job.runnings[b].num_missing for b in able))
        if self.policy.expects_drafts:
            self.entries.enter(job, able)

    # Rounds

    def _decode(self, job: Job) -> list[Outcome]:
        """One round. A sample that has ended in the meantime, which only overlap can bring about,
        is left alone.
        """
        started = time.perf_counter()
        alive = [b for b, running in enumerate(job.runnings) if running.finish_reason is None]
        if not alive:
            return [self._outcome(running, []) for running in job.runnings]
        able, missing = self._able(job, alive)
        plan = self.policy.plan(missing, len(alive) - len(able))
        drafting = [b for b, drafts in zip(able, plan.drafting, strict=True) if drafts]
        proposals, kept = self._propose(job, drafting, plan)
        if self.recorder is not None:
            self.recorder([job.runnings[b].request.id for b in drafting], proposals)
            kept = np.zeros_like(kept)
        lines = {b: line for line, b in enumerate(drafting)}
        emitted = self._verify(
            job, alive, Chosen([lines.get(b, -1) for b in alive], proposals, kept)
        )
        self.policy.observe(
            plan, [emitted[b] for b in drafting], (time.perf_counter() - started) * 1e3
        )
        trees = {
            b: drafted_tree(proposals, line, kept[line], emitted[b])
            for b, line in lines.items()
            if job.runnings[b].request.tells_trees
        }
        return [
            self._outcome(
                running,
                emitted.get(b, []),
                len(emitted[b]) - 1 if b in lines and self.recorder is None else None,
                trees.get(b),
            )
            for b, running in enumerate(job.runnings)
        ]

    def _able(self, job: Job, alive: list[int]) -> tuple[list[int], list[int]]:
        """The samples that may draft, and how many entries each of them lacks."""
        if self.entries is None:
            return [], []
        able = [b for b in alive if job.runnings[b].request.speculation]
        return able, [job.runnings[b].num_missing for b in able]

    def _propose(
        self, job: Job, drafting: list[int], plan: RoundPlan
    ) -> tuple[Proposals, np.ndarray]:
        """What the draft proposes to the samples that draft, and which of it is to be judged."""
        if not drafting:
            return NOTHING, np.empty((0, 0), dtype=bool)
        assert self.entries is not None
        proposals = self.entries.grow(job, drafting, self.speculation, plan.thresholds)
        return proposals, self.policy.choose(
            plan, proposals, [job.runnings[b].acceptance for b in drafting]
        )

    def _verify(self, job: Job, alive: list[int], chosen: Chosen) -> dict[int, list[int]]:
        """One target forward over all trees: the tokens of each sample, as many as it takes, the
        last of them the bonus token or the end. Accepted nodes stand behind their prefix then, with
        their features."""
        is_greedy = all(job.runnings[b].sampler.is_plain_greedy for b in alive)
        drawn = (self._judge_in_one_call if self.target.is_native and is_greedy else self._judge)(
            job, alive, chosen
        )
        emitted: dict[int, list[int]] = {}
        for b, tokens in zip(alive, drawn, strict=True):
            running = job.runnings[b]
            emitted[b] = running.take(tokens, self._end_tokens)
            # Columns of the caches hold the root and the accepted nodes that were emitted, but for
            # the last token.
            running.num_cached += len(emitted[b])
        if self.entries is not None:
            self.entries.begin_pages(job, {b: len(taken) for b, taken in emitted.items()})
        return emitted

    def _judge_in_one_call(self, job: Job, alive: list[int], chosen: Chosen) -> list[list[int]]:
        """All of it in one call."""
        lens, tokens = (
            [job.runnings[b].num_cached for b in alive],
            [job.runnings[b].root for b in alive],
        )
        table = job.page_table if len(alive) == len(job.runnings) else job.page_table[alive]
        emitted = self.target.verify(
            Roots(lens, lens, tokens, table), chosen, self.cache, self._taps, self._features
        )
        for b, row in zip(alive, emitted, strict=True):
            for token in row:
                job.runnings[b].sampler.take(token)
        return emitted

    def _judge(self, job: Job, alive: list[int], chosen: Chosen) -> list[list[int]]:
        """Part by part; whatever the samples' parameters."""
        trees = {
            b: tree_of(
                job.runnings[b].root,
                chosen.proposals,
                line,
                chosen.kept[line].nonzero()[0].tolist(),
            )
            if line >= 0
            else Tree.of_root(job.runnings[b].root)
            for b, line in zip(alive, chosen.line, strict=True)
        }
        rows, starts = self._rows_of_trees(job, trees)
        output = self.target.forward(rows, self.cache, self._taps, None, self._features)
        best, slots = output.best.tolist(), rows.slot.tolist()
        emitted: list[list[int]] = []
        moves: list[tuple[int, int]] = []
        for (b, tree), start in zip(trees.items(), starts, strict=True):

            def draw(node: int, running: Running = job.runnings[b], start: int = start) -> int:
                return self._draw(running, best, output.logits, start + node)

            path, tokens = accept(tree.tokens, tree.parents, draw)
            emitted.append(tokens)
            moves += [
                (slots[start + node], slots[start + place])
                for place, node in enumerate(path, start=1)
                if node != place
            ]
        if moves:
            sources, destinations = map(list, zip(*moves, strict=True))
            self.cache.move(sources, destinations)
            if self._features is not None:
                self._features.move(sources, destinations)
        return emitted

    def _rows_of_trees(self, job: Job, trees: dict[int, Tree]) -> tuple[Rows, list[int]]:
        """The nodes of all trees beside each other, and where each tree starts."""
        token: list[int] = []
        request: list[int] = []
        depth: list[int] = []
        node: list[int] = []
        seen: list[int] = []
        prefix: list[int] = []
        starts: list[int] = []
        for b, tree in trees.items():
            starts.append(len(token))
            token += tree.tokens
            depth += tree.depths
            seen += tree.seen
            node += range(len(tree))
            request += [b] * len(tree)
            prefix += [job.runnings[b].num_cached] * len(tree)
        arrays = np.empty((6, len(token)), dtype=np.int64)
        arrays[0], arrays[1], arrays[2], arrays[4], column = (
            token,
            request,
            depth,
            prefix,
            np.add(prefix, node),
        )
        arrays[2] += arrays[4]
        arrays[3] = slots_of(job.page_table, arrays[1], column, self.cache.page_size)
        arrays[5].view(np.uint64)[:] = seen
        rows = rows_of(arrays, job.page_table, self._device)
        return rows, starts

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return to_device(np.array(numbers, dtype=np.int64), self._device)

    def _draw(self, running: Running, best: list[int], logits: torch.Tensor, row: int) -> int:
        """The target's next token at a row. Asked for along the accepted path only, in its order."""
        if running.sampler.is_plain_greedy:
            running.sampler.take(best[row])
            return best[row]
        return running.sampler.draw(logits[row])

    def _outcome(
        self,
        running: Running,
        tokens: list[int],
        num_accepted_drafts: int | None = None,
        tree: DraftedTree | None = None,
    ) -> Outcome:
        logprobs = running.sampler.logprobs
        first = len(running.tokens) - len(running.request.prompt_ids) - len(tokens)
        return Outcome(
            running,
            tokens,
            running.finish_reason if tokens else None,
            running.num_cached,
            num_accepted_drafts,
            None if logprobs is None else logprobs[first : first + len(tokens)],
            tree,
            None if running.stops is None or not tokens else running.stops.take_text(),
        )
