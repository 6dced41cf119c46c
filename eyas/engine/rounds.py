"""The device's work: a prefill, or one round of propose -> verify -> extend, for the samples of a job.

Knows the models, their caches and what a job's samples have emitted. Does not know who waits, who owns a page or why the job
is as it is. One thread runs the jobs, in the order of their launch.

    target's cache   [ x_0 ........ x_{n-1} ] verify writes [ root n_1 .. n_{N-1} ], accepted nodes are moved together
    draft's cache    [ e_1 ........ e_n ]     propose writes behind it; extend writes [ e_{n+1} .. ] from the target's features

A sample that does not draft is a tree of its root alone: plain decoding is the same round. Features wait until the draft
needs their entries: when the sample drafts, when its pages are to be kept, or when there is no room for more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from eyas.engine.draft import Draft, Growth
from eyas.engine.futures import MAX_PENDING, FutureMap
from eyas.engine.policy import Policy, Round, Speculation
from eyas.engine.running import Outcome, Running
from eyas.engine.scheduler import Job
from eyas.engine.trace import Trace
from eyas.engine.tree import Tree, tree_of
from eyas.engine.verify import accept
from eyas.model.rows import Rows, prompt_rows, rows_of, slots_of
from eyas.model.target import Target


@contextmanager
def one_torch_thread(enabled: bool) -> Iterator[None]:
    """Keep PyTorch's small operators on one thread while the native path's own threads are at work beside them: two pools on
    the same cores wait for each other, and a copy of a few kilobytes takes milliseconds."""
    threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass(slots=True)
class Verified:
    """What verify found for one sample: its tokens, and the rows of the forward that its accepted path went through."""

    token_ids: list[int]
    path_rows: list[int]
    num_accepted_drafts: int


class Rounds:
    """Runs jobs on a target, with the draft's proposals where there is a draft."""

    def __init__(self, target: Target, draft: Draft | None, growth: Growth, sizes: tuple[int, int]) -> None:
        """sizes: (max_batch, num_pages). Drafts nothing until it is given another policy."""
        max_batch, num_pages = sizes
        self.trace = Trace()
        self.target, self.draft, self.growth = target, draft, growth
        self.policy = Policy(Speculation("off"))
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._device = target.device
        self.cache = target.new_cache(num_pages)
        self._taps = draft.config.taps if draft is not None else None
        if draft is not None:
            self.draft_cache = draft.new_cache(num_pages)
            widths = (draft.config.hidden_size, 3 * target.config.hidden_size)
            self.futures = FutureMap(max_batch, num_pages, widths, target.dtype, target.device)

    @torch.inference_mode()
    def run(self, job: Job) -> list[Outcome]:
        """Do a job; the outcome of each of its samples."""
        with self.trace.job(), one_torch_thread(self.target.is_native):
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
        emitted: dict[int, list[int]] = {}
        best = output.best.tolist() if draws else []
        for place, b in enumerate(draws):
            running = job.runnings[b]
            token = self._draw(running, best, output.logits, place)
            emitted[b] = running.take([token], self._end_tokens)
        if output.aux_hidden is not None:
            self._load_boundaries(job, chunks)
        for running, chunk in zip(job.runnings, chunks, strict=True):
            running.num_cached = chunk.stop
        if output.aux_hidden is not None:
            seen = {b: list(range(end - len(chunks[b]), end)) for b, end in enumerate(ends.tolist())}
            self._take_features(job, seen, output.aux_hidden, list(seen))
        return [self._outcome(running, emitted.get(b, [])) for b, running in enumerate(job.runnings)]

    def _load_boundaries(self, job: Job, chunks: list[range]) -> None:
        """The first entry behind a reused prefix needs the feature of the prefix's last column."""
        for b, (running, chunk) in enumerate(zip(job.runnings, chunks, strict=True)):
            if chunk.start == running.num_reused > 0:
                page = job.page_table[b, chunk.start // self.cache.page_size - 1]
                self.futures.pending[running.slot, 0] = self.futures.boundary[page]

    # Rounds

    def _decode(self, job: Job) -> list[Outcome]:
        """One round. A sample that has ended in the meantime, which only overlap can bring about, is left alone."""
        started = time.perf_counter()
        alive = [b for b, running in enumerate(job.runnings) if running.finish_reason is None]
        if not alive:
            return [self._outcome(running, []) for running in job.runnings]
        able = [b for b in alive if job.runnings[b].request.speculation] if self.draft is not None else []
        plan = self.policy.plan([job.runnings[b].num_pending for b in able], len(alive) - len(able))
        drafting = [b for b, drafts in zip(able, plan.drafting, strict=True) if drafts]
        trees: dict[int, Tree] = {b: Tree.of_root(job.runnings[b].root) for b in alive}
        if drafting:
            trees |= self._propose(job, drafting, plan)
        verified, aux_hidden = self._verify(job, trees)
        if aux_hidden is not None:
            due = [b for b in alive if self._is_due(job.runnings[b])]
            self._take_features(job, {b: verified[b].path_rows for b in alive}, aux_hidden, due)
        self.policy.observe(plan, [verified[b].token_ids for b in drafting], (time.perf_counter() - started) * 1e3)
        return [
            self._outcome(running, verified[b].token_ids, verified[b].num_accepted_drafts if b in drafting else None)
            if b in verified
            else self._outcome(running, [])
            for b, running in enumerate(job.runnings)
        ]

    def _propose(self, job: Job, drafting: list[int], plan: Round) -> dict[int, Tree]:
        """The draft's entries up to the root's, and the trees that grow from there."""
        assert self.draft is not None
        runnings = [job.runnings[b] for b in drafting]
        h = self._extend(job, drafting)
        proposals = self.draft.propose(
            [running.num_cached for running in runnings],
            h,
            self.draft.proposals(h, self.growth.tree_topk),
            job.page_table[drafting],
            self.draft_cache,
            self.growth,
            plan.thresholds,
        )
        kept = self.policy.choose(plan, proposals, [running.acceptance for running in runnings])
        return {
            b: tree_of(job.runnings[b].root, proposals, place, kept[place].nonzero()[0].tolist())
            for place, b in enumerate(drafting)
        }

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
            self.cache.move(sources, destinations)
        return verified, output.aux_hidden

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
        arrays[0], arrays[1], arrays[2], arrays[4], column = token, request, depth, prefix, np.add(prefix, node)
        arrays[2] += arrays[4]
        arrays[3] = slots_of(job.page_table, arrays[1], column, self.cache.page_size)
        arrays[5].view(np.uint64)[:] = seen
        rows = rows_of(arrays, job.page_table, self._device)
        return rows, starts

    def _draw(self, running: Running, best: list[int], logits: torch.Tensor, row: int) -> int:
        """The target's next token at a row. Asked for along the accepted path only, in its order."""
        if running.sampler.is_plain_greedy:
            running.sampler.take(best[row])
            return best[row]
        return running.sampler.draw(logits[row])

    # Features and the draft's entries

    def _is_due(self, running: Running) -> bool:
        """Whether a sample's entries are to be made now: it leaves pages that another may use, or there is no room for the
        features of another round."""
        if running.finish_reason is not None:
            size = self.cache.page_size
            return running.num_cached // size * size > running.draft_end
        return running.num_pending + self.growth.num_draft_steps + 1 > MAX_PENDING

    def _take_features(self, job: Job, seen: dict[int, list[int]], aux_hidden: torch.Tensor, due: list[int]) -> None:
        """Note the features of each sample's newest columns, at its rows of aux_hidden. Those of `due` become entries, but
        for the last: its entry is the root's, which comes first when a tree grows."""
        self._save_boundaries(job, seen, aux_hidden)
        if due:
            self._make_entries(job, due, seen, aux_hidden)
        slots: list[int] = []
        places: list[int] = []
        rows: list[int] = []
        for b, own in seen.items():
            running = job.runnings[b]
            new = own[-1:] if b in due else own
            rows += new
            slots += [running.slot] * len(new)
            places += range(running.num_pending - len(new), running.num_pending)
        self.futures.note_pending(slots, places, aux_hidden, rows)

    def _make_entries(self, job: Job, due: list[int], seen: dict[int, list[int]], aux_hidden: torch.Tensor) -> None:
        """The entries of all columns before the root's."""
        assert self.draft is not None
        due = [b for b in due if job.runnings[b].num_pending > 1]
        before = [(job.runnings[b].slot, job.runnings[b].num_pending - len(seen[b])) for b in due]
        features = aux_hidden.index_select(0, self.futures.index([row for b in due for row in seen[b][:-1]]))
        if any(count for _, count in before):
            new = torch.split(features, [len(seen[b]) - 1 for b in due])
            old = torch.split(self.futures.pending_of(before), [count for _, count in before])
            features = torch.cat([part for pair in zip(old, new, strict=True) for part in pair])
        if due:
            rows = self._entry_rows(job, due, [job.runnings[b].num_cached for b in due])
            self.draft.enter(rows, features, self.draft_cache)

    def _extend(self, job: Job, who: list[int]) -> torch.Tensor:
        """The draft's entries up to the roots' from the pending features; its outputs [B, H] there."""
        assert self.draft is not None
        counts = [(job.runnings[b].slot, job.runnings[b].num_pending) for b in who]
        rows = self._entry_rows(job, who, [job.runnings[b].num_cached + 1 for b in who])
        h = self.draft.extend(rows, self.futures.pending_of(counts), self.draft_cache)
        return h.index_select(0, self.futures.index([end - 1 for end in accumulate(count for _, count in counts)]))

    def _entry_rows(self, job: Job, who: list[int], ends: list[int]) -> Rows:
        """The draft's rows of columns draft_end .. ends[b] - 1, which count as made from here on."""
        runnings = [job.runnings[b] for b in who]
        tokens = [running.tokens[running.draft_end : end] for running, end in zip(runnings, ends, strict=True)]
        starts = [running.draft_end for running in runnings]
        for running, end in zip(runnings, ends, strict=True):
            running.draft_end = end
        return prompt_rows(tokens, starts, job.page_table[who], self.cache.page_size, self._device, first_column=1)

    def _save_boundaries(self, job: Job, seen: dict[int, list[int]], aux_hidden: torch.Tensor) -> None:
        """Keep the features of columns at the ends of pages."""
        size = self.cache.page_size
        pages: list[int] = []
        rows: list[int] = []
        for b, own in seen.items():
            end = job.runnings[b].num_cached
            for column in range((end - len(own) + size) // size * size - 1, end, size):
                pages.append(int(job.page_table[b, column // size]))
                rows.append(own[column - end])
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
