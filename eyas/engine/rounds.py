"""The device's work: a prefill, or one round of propose -> verify -> extend, for a job's samples.

Knows the models, their caches and what a job's samples have emitted. Does not know which samples
wait, who owns a page or why the scheduler made the job. One thread runs the jobs, in the order of
their launch.

    target    [ x_0 ..... x_{n-1} ]  verify writes [ root n_1 .. n_{N-1} ], moves accepted nodes
    features  column 0 ... n-1       of every column in the target's cache, in the same pages
    draft     [ e_1 .. e_{m-1} ]     `entries.py`: made of features where a sample drafts

A sample that does not draft is a tree of its root alone: plain decoding is the same round. Text's
candidates are looked up in the tokens and grafted into the head's tree, or are a tree without it.

Letters: b a sample's place in the job, B samples of the job, B' samples that draft, C candidates.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from eyas.engine.draft import Draft, to_device
from eyas.engine.entries import HEAD_FAULTS, DraftError, Entries, check_scores
from eyas.engine.graft import graft
from eyas.engine.memory import TextMemory
from eyas.engine.policy import Policy
from eyas.engine.request import DraftedTree, Update
from eyas.engine.sampling import host_logits, token_logprob, token_logprob_natively
from eyas.engine.scheduler import Job, Outcome, RunningSample
from eyas.engine.steps import RoundPlan
from eyas.engine.text import RecentAnswers, TextChain
from eyas.engine.tree import Speculation, Tree, drafted_tree, tree_of_line
from eyas.engine.verify import accept
from eyas.model.library import one_torch_thread
from eyas.model.rows import (
    FeatureCache,
    Growth,
    NodesToVerify,
    Proposals,
    Roots,
    Rows,
    prompt_rows,
    rows_of,
    slots_of,
)
from eyas.model.target import Target

log = logging.getLogger("eyas.engine")

# called with the ids of the requests that draft, and what the draft proposes to each
Recorder = Callable[[list[str], Proposals], None]


NOTHING = Proposals(  # of a round in which no sample drafts
    np.empty((0, 0), dtype=np.int64),
    np.empty((0, 0), dtype=np.float32),
    np.empty((0, 0), dtype=np.int32),
    np.empty(0, dtype=np.int32),
)


class Trace:
    """Seconds busy in jobs, and idle between jobs while there is work."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._ended: float | None = None

    @contextmanager
    def job(self) -> Iterator[None]:
        """Around one job, on the thread that runs it."""
        started = time.perf_counter()
        if self._ended is not None:
            self.idle_s += started - self._ended
        try:
            yield
        finally:
            self._ended = time.perf_counter()
            self.busy_s += self._ended - started

    def rest(self) -> None:
        """Call when there is no work: the time until the next job does not count as idle."""
        self._ended = None


class Rounds:
    """Runs jobs on a target, with the draft's proposals where there is a draft."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        speculation: Speculation,
        max_batch: int,
        num_pages: int,
    ) -> None:
        """Drafts nothing until it is given another policy."""
        self.trace = Trace()
        self.target, self.draft, self.speculation = target, draft, speculation
        self.policy = Policy(Speculation("off"))
        # where the engine says so
        self.text_drafts = False
        self.memory: TextMemory | None = None
        self.recent = RecentAnswers()
        # If set, it gets the proposals of every round, and no node is verified: a token a round.
        self.recorder: Recorder | None = None
        self.draft_failure: str | None = None  # why the head is off since; None while it drafts
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._device = target.device
        self.cache = target.new_cache(num_pages)
        self._taps = draft.config.taps if draft is not None else None
        self._features, self.entries = None, None
        if draft is not None:
            size, width = self.cache.page_size, 3 * target.config.hidden_size
            self._features = FeatureCache(num_pages * size, width, target.dtype, target.device)
            self.entries = Entries(draft, num_pages, size, self._features)

    def run(self, job: Job) -> list[Outcome]:
        """Do a job: prefill if it has chunks, else a round. The outcome of each of its samples."""
        with torch.inference_mode(), self.trace.job(), one_torch_thread(self.target.is_native):
            return self._decode(job) if job.chunks is None else self._prefill(job, job.chunks)

    # Prefill

    def _prefill(self, job: Job, chunks: list[range]) -> list[Outcome]:
        """Run a chunk of each prompt; draw the first token of each prompt that ends with it, and
        score the prompt's own tokens where their log-probabilities are wanted.
        """
        tokens = [
            sample.tokens[chunk.start : chunk.stop]
            for sample, chunk in zip(job.samples, chunks, strict=True)
        ]
        starts = [chunk.start for chunk in chunks]
        rows = prompt_rows(tokens, starts, job.page_table, self.cache.page_size, self._device)
        begins = np.cumsum([0, *map(len, chunks)])[:-1]
        judged = [
            (b, column)
            for b, (sample, chunk) in enumerate(zip(job.samples, chunks, strict=True))
            for column in _judged_columns(sample, chunk)
        ]
        asked_R = [begins[b] + column - chunks[b].start for b, column in judged]
        asked = to_device(np.array(asked_R, dtype=np.int64), self._device)
        output = self.target.forward(rows, self.cache, self._taps, asked, self._features)
        emitted: dict[int, list[int]] = {}
        best = output.best.tolist() if judged else []
        for place, (b, column) in enumerate(judged):
            sample = job.samples[b]
            if column + 1 < len(sample.tokens):
                _score(sample, column + 1, output.logits[place], self.target.is_native)
            else:
                token = _draw(sample, best, output.logits, place, self.target.is_native)
                emitted[b] = sample.take([token], self._end_tokens)
        for sample, chunk in zip(job.samples, chunks, strict=True):
            sample.num_cached = chunk.stop
            if sample.max_tokens == 0 and chunk.stop == sample.prefill_end:
                sample.finish_reason = "length"
        if self.entries is not None:
            self.entries.begin_pages(job, {b: len(chunk) for b, chunk in enumerate(chunks)})
            self._enter_prompts(self.entries, job)
        return [outcome_of(sample, emitted.get(b, [])) for b, sample in enumerate(job.samples)]

    def _enter_prompts(self, entries: Entries, job: Job) -> None:
        """Make the prompts' entries now if the policy expects to draft."""
        if not self.policy.expects_drafts:
            return
        able = [b for b, sample in enumerate(job.samples) if sample.request.speculation]
        try:
            entries.enter(job, able)
        except HEAD_FAULTS as error:
            self.switch_off(error)

    # Rounds

    def _decode(self, job: Job) -> list[Outcome]:
        """One round: propose, verify, and report to the policy.

        alive: without the samples that have ended since the job was planned, as under overlap.
        """
        started = time.perf_counter()
        alive = [b for b, sample in enumerate(job.samples) if sample.finish_reason is None]
        if not alive:
            return [outcome_of(sample, []) for sample in job.samples]
        able, missing = self._able(job, alive)
        chains = [self._chains(job.samples[b]) for b in able]
        requests = [job.samples[b].acceptance for b in able]
        plan = self.policy.plan(missing, requests, len(alive) - len(able), chains)
        drafting = [b for b, drafts in zip(able, plan.drafting, strict=True) if drafts]
        try:
            proposals = self._propose(job, drafting, plan)
        except HEAD_FAULTS as error:
            # Nothing of the target's has been touched: the same round without drafts is plain.
            self.switch_off(error)
            started = time.perf_counter()
            plan, drafting, proposals = self.policy.plan([], [], len(alive)), [], NOTHING
            chains = []
        if any(chains):
            drafting, proposals = with_text(able, chains, drafting, proposals)
        kept = self._choose(job, drafting, plan, proposals)
        lines = {b: line for line, b in enumerate(drafting)}
        chosen = NodesToVerify([lines.get(b, -1) for b in alive], proposals, kept)
        emitted = self._verify(job, alive, chosen)
        real_ms = (time.perf_counter() - started) * 1e3
        self.policy.observe(plan, [emitted[b] for b in drafting], real_ms)
        outcomes = []
        for b, sample in enumerate(job.samples):
            tokens, accepted, tree = emitted.get(b, []), None, None
            if b in lines and self.recorder is None:
                accepted = len(tokens) - 1
                if sample.request.returns_trees:
                    tree = drafted_tree(proposals, lines[b], kept[lines[b]], tokens)
            if tokens and sample.finish_reason and self.text_drafts and sample.request.text_drafts:
                answer = sample.tokens[len(sample.request.prompt_ids) :]
                self.recent.add(sample.request.cache_salt, answer)
            outcomes.append(outcome_of(sample, tokens, accepted, tree))
        return outcomes

    def _able(self, job: Job, alive: list[int]) -> tuple[list[int], list[int]]:
        """The samples whose requests may draft, and the num_missing of each."""
        if self.entries is None and not self.text_drafts:
            return [], []
        able = [b for b in alive if job.samples[b].request.speculation]
        return able, [job.samples[b].num_missing for b in able]

    def _chains(self, sample: RunningSample) -> list[TextChain]:
        """What text proposes to a sample."""
        if not (self.text_drafts and sample.request.text_drafts):
            return []
        sample.text.extend(sample.tokens[len(sample.text.tokens) :])
        salt = sample.request.cache_salt
        chains = [sample.text.chain(), self.recent.chain(salt, sample.tokens)]
        if self.memory is not None:
            chains.append(self.memory.chain(sample.tokens))
        return [chain for chain in chains if chain is not None]

    def _propose(self, job: Job, drafting: list[int], plan: RoundPlan) -> Proposals:
        """The draft's proposals to the B' samples in `drafting`. Raises DraftError for scores that
        are no numbers, and whatever the draft raises.
        """
        if not drafting:
            return NOTHING
        assert self.entries is not None
        sizes = self.speculation
        growth = Growth(sizes.num_draft_steps, sizes.tree_topk, plan.width)
        proposals = self.entries.grow(job, drafting, growth, plan.thresholds)
        check_scores(proposals.scores)
        return proposals

    def _choose(
        self, job: Job, drafting: list[int], plan: RoundPlan, proposals: Proposals
    ) -> np.ndarray:
        """Which proposals to verify, bool [B', C]."""
        if not drafting:
            return np.empty((0, 0), dtype=bool)
        acceptances = [job.samples[b].acceptance for b in drafting]
        kept = self.policy.choose(plan, proposals, acceptances)
        if self.recorder is not None:
            self.recorder([job.samples[b].request.id for b in drafting], proposals)
            kept = np.zeros_like(kept)
        return kept

    def switch_off(self, error: Exception) -> None:
        """Decode plainly from now on: the head has failed, and would again.

        What runs goes on, and emits what plain decoding emits: a tree decides how many tokens a
        round emits, never which. The target's keys and values are those of plain decoding anyway.
        """
        # of other errors the type alone: who asks for the server's health need not see more
        self.draft_failure = str(error) if isinstance(error, DraftError) else type(error).__name__
        self.entries = self._taps = self._features = None
        self.policy.has_head = False
        log.warning(
            "the head failed and is off, requests are decoded without it until a restart: %s: %s",
            type(error).__name__,
            error,
        )

    def _verify(self, job: Job, alive: list[int], chosen: NodesToVerify) -> dict[int, list[int]]:
        """One target forward over all trees; returns the emitted tokens by place b.

        A row is the accepted nodes' tokens and the bonus token, cut where the sample ends. The
        accepted nodes' keys, values and features are moved behind the sample's prefix.
        """
        samples = [job.samples[b] for b in alive]
        if self.target.is_native:
            lens, root_tokens = [one.num_cached for one in samples], [one.root for one in samples]
            table = job.page_table if len(alive) == len(job.samples) else job.page_table[alive]
            roots = Roots(lens, lens, root_tokens, table)  # starts = lens: the roots alone
            states = [one.sampler.draw_state() for one in samples]
            verified = self.target.verify(
                roots, chosen, self.cache, self._taps, self._features, states
            )
            drawn = verified.tokens
            for sample, row in zip(samples, drawn, strict=True):
                sample.sampler.take_drawn(row)
            for place, logits in verified.logits.items():
                drawn[place] = self._walk_by_grammar(
                    samples[place], chosen, place, logits, table[place]
                )
        else:
            drawn = self._verify_step_by_step(job, alive, chosen)
        emitted: dict[int, list[int]] = {}
        for b, sample, row in zip(alive, samples, drawn, strict=True):
            emitted[b] = sample.take(row, self._end_tokens)
            # The caches hold the root and the emitted accepted nodes, but not the last token.
            sample.num_cached += len(emitted[b])
        if self.entries is not None:
            self.entries.begin_pages(job, {b: len(taken) for b, taken in emitted.items()})
        return emitted

    def _walk_by_grammar(
        self,
        sample: RunningSample,
        chosen: NodesToVerify,
        place: int,
        logits: torch.Tensor,
        pages: np.ndarray,
    ) -> list[int]:
        """The tokens of a tree whose nodes have logits [N, V]: a grammar's masks are drawn under in
        Python. place: the request's in `chosen`.
        """
        tree = tree_of_line(sample.root, chosen, place)
        path, tokens = accept(
            tree.tokens, tree.parents, lambda node: sample.sampler.draw(logits[node], native=True)
        )
        columns = np.array([path, range(1, len(path) + 1)], dtype=np.int64) + sample.num_cached
        request = np.zeros_like(columns)
        self._move(*slots_of(pages[None], request, columns, self.cache.page_size).tolist())
        return tokens

    def _move(self, sources: list[int], destinations: list[int]) -> None:
        """Accepted nodes' keys, values and features from slots to slots."""
        if sources != destinations:
            self.cache.move(sources, destinations)
            if self._features is not None:
                self._features.move(sources, destinations)

    def _verify_step_by_step(
        self, job: Job, alive: list[int], chosen: NodesToVerify
    ) -> list[list[int]]:
        """The same in Python: forward, walk of each tree, move."""
        trees = {
            b: tree_of_line(job.samples[b].root, chosen, place) for place, b in enumerate(alive)
        }
        rows, starts = self._rows_of_trees(job, trees)
        output = self.target.forward(rows, self.cache, self._taps, None, self._features)
        best, slots = output.best.tolist(), rows.slot.tolist()
        emitted: list[list[int]] = []
        sources: list[int] = []
        destinations: list[int] = []
        for (b, tree), start in zip(trees.items(), starts, strict=True):

            def draw(node: int, sample: RunningSample = job.samples[b], start: int = start) -> int:
                return _draw(sample, best, output.logits, start + node)

            path, tokens = accept(tree.tokens, tree.parents, draw)
            emitted.append(tokens)
            sources += [slots[start + node] for node in path]
            destinations += slots[start + 1 : start + 1 + len(path)]
        self._move(sources, destinations)
        return emitted

    def _rows_of_trees(self, job: Job, trees: dict[int, Tree]) -> tuple[Rows, list[int]]:
        """The nodes of all trees, tree after tree, as rows, and the row of each tree's root."""
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
            prefix += [job.samples[b].num_cached] * len(tree)
        arrays = np.empty((6, len(token)), dtype=np.int64)
        arrays[0], arrays[1], arrays[2], arrays[4] = token, request, depth, prefix
        arrays[2] += arrays[4]
        column = np.add(prefix, node)
        arrays[3] = slots_of(job.page_table, arrays[1], column, self.cache.page_size)
        arrays[5].view(np.uint64)[:] = seen
        return rows_of(arrays, job.page_table, self._device), starts


def with_text(
    able: list[int],
    chains: list[list[TextChain]],
    growing: list[int],
    proposals: Proposals,
) -> tuple[list[int], Proposals]:
    """The places b of the samples that have candidates of the head or of text, and all of these.

    chains: by place in `able`. growing: the places b that the head's proposals are of.
    """
    by_sample, lines = dict(zip(able, chains, strict=True)), {b: n for n, b in enumerate(growing)}
    drafting = [b for b in able if b in lines or by_sample[b]]
    own = [by_sample[b] for b in drafting]
    return drafting, graft(proposals, [lines.get(b, -1) for b in drafting], own)


def _judged_columns(sample: RunningSample, chunk: range) -> range:
    """The columns of a prefill whose logits are wanted: the last one's for a draw, and those that
    score a token of the prompt, if they have not done so before a preemption.
    """
    num_known = len(sample.tokens)
    # A sample that was preempted has its root already: its tokens are longer than its prefill.
    draws = chunk.stop == sample.prefill_end == num_known and sample.max_tokens > 0
    stop = chunk.stop if draws else min(chunk.stop, num_known - 1)
    if sample.prompt_logprobs is None:
        return range(chunk.stop - draws, chunk.stop)
    return range(max(chunk.start, len(sample.prompt_logprobs)), stop)


def _score(sample: RunningSample, column: int, logits_V: torch.Tensor, is_native: bool) -> None:
    """Append the log-probability of a token of the prompt under the logits before it."""
    assert sample.prompt_logprobs is not None
    assert len(sample.prompt_logprobs) == column - 1, "a token of the prompt was left out"
    num_top = sample.request.params.prompt_logprobs or 0
    if is_native:
        scored = token_logprob_natively(logits_V, sample.tokens[column], num_top)
    else:
        scored = token_logprob(host_logits(logits_V), sample.tokens[column], num_top)
    sample.prompt_logprobs.append(scored)


def _draw(
    sample: RunningSample, best: list[int], logits: torch.Tensor, row: int, native: bool = False
) -> int:
    """The target's next token at a row of best [R] and logits [R, V].

    It advances the sampler, so it is called along the accepted path only, in its order.
    """
    if sample.sampler.is_plain_greedy:
        sample.sampler.take(best[row])
        return best[row]
    return sample.sampler.draw(logits[row], native)


def outcome_of(
    sample: RunningSample,
    tokens: list[int],
    num_accepted_drafts: int | None = None,
    tree: DraftedTree | None = None,
) -> Outcome:
    """What a job did for a sample. tokens: those it appended to the sample, maybe none."""
    logprobs, of_prompt = sample.sampler.logprobs, None
    first = sample.num_emitted - len(tokens)
    has_news = bool(tokens) or (sample.max_tokens == 0 and sample.finish_reason is not None)
    if has_news:
        of_prompt, sample.prompt_logprobs = sample.prompt_logprobs, None
    update = Update(
        request_id=sample.request.id,
        token_ids=tokens,
        finish_reason=sample.finish_reason if has_news else None,
        num_accepted_drafts=num_accepted_drafts,
        index=sample.index,
        logprobs=None if logprobs is None else logprobs[first : first + len(tokens)],
        tree=tree,
        text=None if sample.stops is None or not tokens else sample.stops.take_text(),
        prompt_logprobs=of_prompt,
    )
    return Outcome(sample, sample.num_cached, update)
