"""The device's work: a prefill, or one round of propose -> verify -> extend, for the samples of a job.

Knows the models, their caches and what a job's samples have emitted. Does not know who waits, who owns a page or why the job
is as it is. One thread runs the jobs, in the order of their launch.

    target's cache   [ x_0 ........ x_{n-1} ] verify writes [ root n_1 .. n_{N-1} ], accepted nodes are moved together
    draft's cache    [ e_1 ........ e_n ]     propose writes behind it; extend writes [ e_{n+1} .. ] from the target's features

A sample without speculation is a tree of its root alone: plain decoding is the same round. Its draft entries are made
later, many at a time: when it speculates again, when its pages are to be kept, or when MAX_PENDING is near.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from eyas.engine.draft import Draft, Growth
from eyas.engine.futures import MAX_PENDING, FutureMap
from eyas.engine.policy import Policy
from eyas.engine.running import Outcome, Running
from eyas.engine.scheduler import Job
from eyas.engine.trace import Trace
from eyas.engine.tree import Tree, tree_of
from eyas.engine.verify import accept
from eyas.model.cache import PagedCache
from eyas.model.rows import Rows, prompt_rows, rows_of, slots_of
from eyas.model.target import Target


@dataclass(slots=True)
class Verified:
    """What verify found for one sample: its tokens, and the rows of the forward that its accepted path went through."""

    token_ids: list[int]
    path_rows: list[int]
    num_accepted_drafts: int


class Rounds:
    """Runs jobs on a target, with the draft's proposals where there is a draft."""

    def __init__(self, target: Target, draft: Draft | None, growth: Growth, policy: Policy, sizes: tuple[int, int]) -> None:
        """sizes: (max_batch, num_pages)."""
        max_batch, num_pages = sizes
        self.trace = Trace()
        self.target, self.draft, self._growth, self._policy = target, draft, growth, policy
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._device = target.device
        self.cache = target.new_cache(num_pages)
        self._taps = draft.config.taps if draft is not None else None
        if draft is not None:
            self.draft_cache = draft.new_cache(num_pages)
            widths = (draft.config.hidden_size, 3 * target.config.hidden_size, growth.tree_topk)
            self.futures = FutureMap(max_batch, num_pages, widths, target.dtype, target.device)

    @torch.inference_mode()
    def run(self, job: Job) -> list[Outcome]:
        """Do a job; the outcome of each of its samples."""
        with self.trace.job():
            return self._decode(job) if job.chunks is None else self._prefill(job, job.chunks)

    # Prefill

    def _prefill(self, job: Job, chunks: list[range]) -> list[Outcome]:
        """A stretch of each prompt through target and draft; the first token of those whose prompt ends with it."""
        size = self.cache.page_size
        tokens = [running.tokens[chunk.start : chunk.stop] for running, chunk in zip(job.runnings, chunks, strict=True)]
        rows = prompt_rows(tokens, [chunk.start for chunk in chunks], job.page_table, size, self._device)
        ends = np.cumsum([len(chunk) for chunk in chunks])
        # A sample that was preempted has drawn its root long ago.
        draws = [
            b
            for b, (running, chunk) in enumerate(zip(job.runnings, chunks, strict=True))
            if chunk.stop == running.prefill_end == len(running.tokens)
        ]
        output = self.target.forward(rows, self.cache, self._taps, torch.from_numpy(ends[draws] - 1).to(self._device))
        if self.draft is not None:
            self._load_boundaries(job, chunks)
        emitted: dict[int, list[int]] = {}
        best = output.best.tolist() if draws else []
        for place, b in enumerate(draws):
            running = job.runnings[b]
            token = self._draw(running, best, output.logits, place)
            emitted[b] = running.take([token], self._end_tokens)
        for running, chunk in zip(job.runnings, chunks, strict=True):
            running.num_cached = chunk.stop
        if self.draft is not None:
            assert output.aux_hidden is not None
            path_rows = [list(range(end - len(chunk), end)) for end, chunk in zip(ends.tolist(), chunks, strict=True)]
            self._save_boundaries(job, list(range(len(chunks))), path_rows, output.aux_hidden)
            self._extend(job, list(range(len(chunks))), path_rows, output.aux_hidden)
        return [self._outcome(running, emitted.get(b, [])) for b, running in enumerate(job.runnings)]

    def _load_boundaries(self, job: Job, chunks: list[range]) -> None:
        """The first entry behind a reused prefix needs the feature of the prefix's last column."""
        for b, (running, chunk) in enumerate(zip(job.runnings, chunks, strict=True)):
            if running.draft_end == chunk.start > 0:
                page = job.page_table[b, chunk.start // self.cache.page_size - 1]
                self.futures.pending[running.slot, 0] = self.futures.boundary[page]
                running.num_pending = 1

    # Rounds

    def _decode(self, job: Job) -> list[Outcome]:
        """One round. A sample that has ended in the meantime, which only overlap can bring about, is left alone."""
        started = time.perf_counter()
        alive = [b for b, running in enumerate(job.runnings) if running.finish_reason is None]
        speculating = [b for b in alive if job.runnings[b].request.speculation] if self.draft is not None else []
        plan = self._policy.plan(len(speculating), len(alive) - len(speculating))
        trees: dict[int, Tree] = {b: Tree.of_root(job.runnings[b].root) for b in alive}
        if plan.drafts:
            trees |= self._propose(job, speculating, plan.thresholds)
        verified, aux_hidden = self._verify(job, trees)
        if aux_hidden is not None:
            self._follow(job, verified, speculating if plan.drafts else [], aux_hidden)
        drafted = {b: verified[b].num_accepted_drafts for b in speculating} if plan.drafts else {}
        self._policy.observe(
            [(trees[b], verified[b].num_accepted_drafts) for b in alive], (time.perf_counter() - started) * 1e3
        )
        return [
            self._outcome(job.runnings[b], verified[b].token_ids, drafted.get(b))
            if b in verified
            else self._outcome(job.runnings[b], [])
            for b in range(len(job.runnings))
        ]

    def _propose(self, job: Job, speculating: list[int], thresholds: list[float]) -> dict[int, Tree]:
        """The trees of those that speculate."""
        assert self.draft is not None
        behind = [b for b in speculating if job.runnings[b].num_pending]
        if behind:
            self._extend(job, behind, [[] for _ in behind], None)
        slots = self.futures.index([job.runnings[b].slot for b in speculating])
        proposals = self.draft.propose(
            [job.runnings[b].num_cached for b in speculating],
            self.futures.h[slots],
            (self.futures.first_ids[slots], self.futures.first_log_probs[slots]),
            job.page_table[speculating],
            self.draft_cache,
            self._growth,
            thresholds,
        )
        kept = self._policy.choose(proposals, [job.runnings[b] for b in speculating])
        return {b: tree_of(job.runnings[b].root, proposals, place, kept[place]) for place, b in enumerate(speculating)}

    def _verify(self, job: Job, trees: dict[int, Tree]) -> tuple[dict[int, Verified], torch.Tensor | None]:
        """One target forward over all trees; accepted nodes are moved behind their prefix."""
        rows, starts = self._rows_of_trees(job, trees)
        output = self.target.forward(rows, self.cache, self._taps)
        best = output.best.tolist()
        slots = rows.slot.tolist()
        verified: dict[int, Verified] = {}
        sources: list[int] = []
        destinations: list[int] = []
        for (b, tree), start in zip(trees.items(), starts, strict=True):
            running = job.runnings[b]

            def draw(node: int, running: Running = running, start: int = start) -> int:
                return self._draw(running, best, output.logits, start + node)

            path, tokens = accept(tree.tokens, tree.parents, draw)
            taken = running.take(tokens, self._end_tokens)
            # Columns of the caches hold the root and the accepted nodes that were emitted, but for the last token.
            nodes = [0, *path][: len(taken)]
            running.num_cached += len(nodes)
            verified[b] = Verified(taken, [start + node for node in nodes], len(taken) - 1)
            for place, node in enumerate(nodes):
                if place != node:
                    sources.append(slots[start + node])
                    destinations.append(slots[start + place])
        if sources:
            self.cache.move(torch.tensor(sources, device=self._device), torch.tensor(destinations, device=self._device))
        return verified, output.aux_hidden

    def _rows_of_trees(self, job: Job, trees: dict[int, Tree]) -> tuple[Rows, list[int]]:
        """The nodes of all trees beside each other, and where each tree starts."""
        token: list[int] = []
        request: list[int] = []
        depth: list[int] = []
        node: list[int] = []
        seen: list[int] = []
        starts: list[int] = []
        for b, tree in trees.items():
            starts.append(len(token))
            token += tree.tokens
            depth += tree.depths
            seen += tree.seen
            node += range(len(tree))
            request += [b] * len(tree)
        lens = np.fromiter((running.num_cached for running in job.runnings), dtype=np.int64, count=len(job.runnings))
        request_M = np.asarray(request, dtype=np.int64)
        prefix_M = lens[request_M]
        column_M = prefix_M + np.asarray(node, dtype=np.int64)
        rows = rows_of(
            np.asarray(token, dtype=np.int64),
            request_M,
            prefix_M + np.asarray(depth, dtype=np.int64),
            slots_of(job.page_table, request_M, column_M, self.cache.page_size),
            prefix_M,
            np.asarray(seen, dtype=np.int64),
            job.page_table,
            self._device,
        )
        return rows, starts

    def _draw(self, running: Running, best: list[int], logits: torch.Tensor, row: int) -> int:
        """The target's next token at a row. Asked for along the accepted path only, in its order."""
        if running.sampler.is_plain_greedy:
            running.sampler.take(best[row])
            return best[row]
        return running.sampler.draw(logits[row])

    # The draft's catch-up

    def _follow(self, job: Job, verified: dict[int, Verified], drafted: list[int], aux_hidden: torch.Tensor) -> None:
        """Make the draft's entries of those that speculate on or must not wait; note the features of the others."""
        everyone = list(verified)
        self._save_boundaries(job, everyone, [verified[b].path_rows for b in everyone], aux_hidden)
        due = [b for b in everyone if self._is_due(job.runnings[b], b in drafted)]
        if due:
            self._extend(job, due, [verified[b].path_rows for b in due], aux_hidden)
        waiting = [b for b in everyone if b not in due and job.runnings[b].finish_reason is None]
        slots: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        for b in waiting:
            running, path_rows = job.runnings[b], verified[b].path_rows
            rows += path_rows
            slots += [running.slot] * len(path_rows)
            places += range(running.num_pending, running.num_pending + len(path_rows))
            running.num_pending += len(path_rows)
        if rows:
            index = self.futures.index
            self.futures.pending[index(slots), index(places)] = aux_hidden[index(rows)]

    def _is_due(self, running: Running, drafted: bool) -> bool:
        """Whether a sample's entries are to be made now: it goes on speculating, it leaves pages that another may use, or
        there is no room for another round's features."""
        if running.finish_reason is not None:
            size = self.cache.page_size
            return running.num_cached // size * size > running.draft_end
        behind = running.num_cached + 1 - running.draft_end
        return drafted or behind + self._growth.num_draft_steps + 1 > MAX_PENDING

    def _extend(self, job: Job, who: list[int], path_rows: list[list[int]], aux_hidden: torch.Tensor | None) -> None:
        """Entries up to the root's from the pending features and those at `path_rows`, and the proposals that follow."""
        assert self.draft is not None
        runnings = [job.runnings[b] for b in who]
        tokens = [running.tokens[running.draft_end : running.num_cached + 1] for running in runnings]
        starts = [running.draft_end for running in runnings]
        rows = prompt_rows(tokens, starts, job.page_table[who], self.cache.page_size, self._device, first_column=1)
        h = self.draft.extend(rows, self._features(runnings, path_rows, aux_hidden), self.draft_cache)
        last = h[self.futures.index((np.cumsum([len(row) for row in tokens]) - 1).tolist())]
        slots = self.futures.index([running.slot for running in runnings])
        ids, log_probs = self.draft.proposals(last, self._growth.tree_topk)
        self.futures.h[slots], self.futures.first_ids[slots], self.futures.first_log_probs[slots] = last, ids, log_probs
        for running in runnings:
            running.draft_end, running.num_pending = running.num_cached + 1, 0

    def _features(self, runnings: list[Running], path_rows: list[list[int]], aux_hidden: torch.Tensor | None) -> torch.Tensor:
        """[M, 3 * Ht]: of each sample its pending features, then those at its rows of aux_hidden."""
        if aux_hidden is not None and not any(running.num_pending for running in runnings):
            return aux_hidden[self.futures.index([row for rows in path_rows for row in rows])]
        parts = []
        for running, rows in zip(runnings, path_rows, strict=True):
            parts.append(self.futures.pending[running.slot, : running.num_pending])
            if aux_hidden is not None:
                parts.append(aux_hidden[self.futures.index(rows)])
        return torch.cat(parts)

    def _save_boundaries(self, job: Job, who: list[int], path_rows: list[list[int]], aux_hidden: torch.Tensor) -> None:
        """Keep the features of columns at the ends of pages: `who` have num_cached columns, the last of them path_rows."""
        size = self.cache.page_size
        pages: list[int] = []
        rows: list[int] = []
        for b, path in zip(who, path_rows, strict=True):
            end = job.runnings[b].num_cached
            for column in range((end - len(path) + size) // size * size - 1, end, size):
                pages.append(int(job.page_table[b, column // size]))
                rows.append(path[column - end + len(path)])
        if pages:
            self.futures.boundary[self.futures.index(pages)] = aux_hidden[self.futures.index(rows)]

    def _outcome(self, running: Running, tokens: list[int], num_accepted_drafts: int | None = None) -> Outcome:
        logprobs = running.sampler.logprobs
        first = len(running.tokens) - len(running.request.prompt_ids) - len(tokens)
        return Outcome(
            running,
            tokens,
            running.finish_reason if tokens else None,
            running.num_cached,
            running.draft_end,
            num_accepted_drafts,
            None if logprobs is None else logprobs[first : first + len(tokens)],
        )
