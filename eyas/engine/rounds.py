"""The work of a step: a prefill, or one round of propose -> verify -> extend, for a job's samples.

    propose   the drafters give trees of candidates; the policy chooses which nodes are verified
    verify    one forward of the target over all trees, and each sample's walk through its own
    extend    the head's entries of what was accepted; a part of its next propose (`drafters.py`)

    target    [ x_0 ..... x_{n-1} ]  verify writes [ root n_1 .. n_{N-1} ], moves accepted nodes
    features  column 0 ... n-1       of every column in the target's cache, in the same pages

A sample that does not draft is a tree of its root alone: plain decoding is the same round.

Letters: B samples of the job, B' samples with candidates, C candidates, R rows with logits.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np

from eyas.engine.costs import RoundWork, round_costs
from eyas.engine.draft import Draft
from eyas.engine.drafters import (
    HEAD_FAULTS,
    NOTHING,
    DraftError,
    HeadDrafter,
    TextDrafter,
    with_text,
)
from eyas.engine.pages import PagePool
from eyas.engine.policy import Policy, RoundPlan
from eyas.engine.request import DraftedTree, Update
from eyas.engine.sampling import Logits, token_logprob
from eyas.engine.scheduler import MASKS_S, Job, RunningSample, page_table
from eyas.engine.tree import Speculation, drafted_tree, tree_of_line
from eyas.engine.verify import accept
from eyas.model.config import Taps
from eyas.model.rows import (
    FeatureCache,
    NodesToVerify,
    Proposals,
    Roots,
    prompt_rows,
    slots_of,
)
from eyas.model.target import Target

log = logging.getLogger("eyas.engine")


class Trace:
    """Seconds busy in jobs, and idle between jobs while there is work."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.idle_s = 0.0
        self._ended: float | None = None

    @contextmanager
    def job(self) -> Iterator[None]:
        started = time.perf_counter()
        if self._ended is not None:
            self.idle_s += started - self._ended
        try:
            yield
        finally:
            self._ended = time.perf_counter()
            self.busy_s += self._ended - started

    def rest(self) -> None:
        """There is no work: the time until the next job is not idle time."""
        self._ended = None


class Rounds:
    """Runs jobs on a target, with the head's and text's proposals where there are any."""

    def __init__(
        self,
        target: Target,
        draft: Draft | None,
        speculation: Speculation,
        pool: PagePool,
        drafts_text: bool = False,
    ) -> None:
        """In auto mode measures the costs of rounds on this machine, or loads earlier measurements.
        drafts_text: text is drafted, with or without a head.
        """
        self.target, self.trace = target, Trace()
        self.text = TextDrafter() if drafts_text else None
        self.head: HeadDrafter | None = None
        self.draft_failure: str | None = None  # why the head is off since; None while it drafts
        self._end_tokens = frozenset(target.config.eos_token_ids)
        self._cache = target.new_cache(pool.num_pages)
        if draft is not None:
            num_slots, width = pool.num_pages * pool.page_size, 3 * target.config.hidden_size
            features = FeatureCache(num_slots, width, target.dtype)
            self.head = HeadDrafter(draft, speculation, features, pool)
        costs = None
        if speculation.mode == "auto":
            entries = (self.head.cache, self.head.features) if self.head is not None else None
            work = RoundWork(target, draft, speculation.tree_topk, self._cache, entries)
            costs = round_costs(work)
        self.policy = Policy(speculation, costs)
        self.policy.has_head = self.head is not None

    def run(self, job: Job) -> list[Update]:
        """Do a job: prefill if it has chunks, else a round. Returns the update of each sample."""
        with self.trace.job():
            if job.chunks is None:
                return self._round(job.samples)
            return self._prefill(job.samples, job.chunks)

    def _taps_and_features(self) -> tuple[Taps | None, FeatureCache | None]:
        head = self.head
        return (None, None) if head is None else (head.draft.config.taps, head.features)

    # Prefill

    def _prefill(self, samples: list[RunningSample], chunks: list[range]) -> list[Update]:
        """Run a chunk of each prompt. Draw the first token of prompts that end with it, and score
        the prompt's tokens where log-probabilities are asked for.
        """
        tokens = [
            sample.tokens[chunk.start : chunk.stop]
            for sample, chunk in zip(samples, chunks, strict=True)
        ]
        starts, size = [chunk.start for chunk in chunks], self._cache.page_size
        rows = prompt_rows(tokens, starts, page_table(samples), size)
        begins = np.cumsum([0, *map(len, chunks)]).tolist()
        judged = [
            (sample, column, begin + column - chunk.start)
            for sample, chunk, begin in zip(samples, chunks, begins, strict=False)
            for column in _judged_columns(sample, chunk)
        ]
        asked_R = np.array([row for _, _, row in judged], dtype=np.int64)
        taps, features = self._taps_and_features()
        logits = self.target.forward(rows, self._cache, taps, asked_R, features).logits
        emitted: dict[RunningSample, list[int]] = {}
        for r, (sample, column, _) in enumerate(judged):
            if column + 1 < len(sample.tokens):
                assert sample.prompt_logprobs is not None
                assert len(sample.prompt_logprobs) == column, "a token of the prompt was left out"
                token, num_top = sample.tokens[column + 1], sample.request.params.prompt_logprobs
                sample.prompt_logprobs.append(token_logprob(logits[r], token, num_top or 0))
            else:
                first = _draw(sample, logits, 0.0, r)
                emitted[sample] = sample.take([] if first is None else [first], self._end_tokens)
        for sample, chunk in zip(samples, chunks, strict=True):
            sample.read(chunk.stop)
        if self.head is not None and self.policy.expects_drafts:
            try:
                self.head.extend([sample for sample in samples if sample.request.speculation])
            except HEAD_FAULTS as error:
                self.switch_off(error)
        return [update_of(sample, emitted.get(sample, [])) for sample in samples]

    # Rounds

    def _round(self, samples: list[RunningSample]) -> list[Update]:
        started = time.perf_counter()
        plan, growing, drafting, proposals = self._propose(samples)
        kept = np.empty((0, 0), dtype=bool)
        if drafting:
            kept = self.policy.choose(plan, proposals)
        lines = {sample: line for line, sample in enumerate(drafting)}
        chosen = NodesToVerify([lines.get(sample, -1) for sample in samples], proposals, kept)
        emitted = dict(zip(samples, self._verify(samples, chosen), strict=True))
        real_ms = (time.perf_counter() - started) * 1e3
        self.policy.observe(plan, [emitted[sample] for sample in drafting], real_ms)
        updates, grown = [], set(growing)
        for sample, tokens in emitted.items():
            accepted = tree = None
            if sample in lines and sample.request.returns_trees:
                line = lines[sample]
                tree = drafted_tree(proposals, line, kept[line], tokens)
            if tokens and sample in grown:
                accepted = len(tokens) - 1
            if sample.finish_reason is not None and self.text is not None:
                self.text.remember(sample)
            updates.append(update_of(sample, tokens, accepted, tree))
        return updates

    def _propose(
        self, samples: list[RunningSample]
    ) -> tuple[RoundPlan, list[RunningSample], list[RunningSample], Proposals]:
        """The plan, the samples with a tree of the head, those with candidates of head or text, and
        all these candidates.
        """
        able = [
            sample
            for sample in samples
            if sample.request.speculation and (self.head is not None or self.text is not None)
        ]
        chains = [self.text.propose(sample) if self.text is not None else [] for sample in able]
        missing = [sample.num_missing for sample in able]
        plan = self.policy.plan(missing, len(samples) - len(able), chains)
        growing = [sample for sample, drafts in zip(able, plan.drafting, strict=True) if drafts]
        proposals = NOTHING
        try:
            if self.head is not None:
                proposals = self.head.propose(growing, plan)
        except HEAD_FAULTS as error:
            # the target's state is untouched: the same round without drafts is plain
            self.switch_off(error)
            return self.policy.plan([], len(samples)), [], [], NOTHING
        if not any(chains):
            return plan, growing, growing, proposals
        return plan, growing, *with_text(able, chains, growing, proposals)

    def switch_off(self, error: Exception) -> None:
        """Decode without the head from now on: it has failed, and would again. Running samples emit
        what plain decoding emits: a tree decides how many tokens a round emits, never which.
        """
        # the server's health shows this: of other errors the type only
        self.draft_failure = str(error) if isinstance(error, DraftError) else type(error).__name__
        self.head = None
        self.policy.has_head = False
        log.warning(
            "the head failed and is off, requests are decoded without it until a restart: %s: %s",
            type(error).__name__,
            error,
        )

    # Verification

    def _verify(self, samples: list[RunningSample], chosen: NodesToVerify) -> list[list[int]]:
        """One target forward over all trees; returns each sample's emitted tokens: accepted nodes
        and the bonus token, cut where the sample ends. Accepted nodes' keys, values and features
        move behind the sample's prefix.

        All of it is one call of the native library. Under a grammar Python draws, as far as masks
        come in time.
        """
        lens, table = [sample.num_cached for sample in samples], page_table(samples)
        roots = Roots(lens, lens, [sample.root for sample in samples], table)
        states = [sample.sampler.draw_state() for sample in samples]
        taps, features = self._taps_and_features()
        verified = self.target.verify(roots, chosen, self._cache, taps, features, states)
        deadline = time.monotonic() + MASKS_S
        for b, sample in enumerate(samples):
            if (logits := verified.logits.get(b)) is None:
                sample.sampler.take_drawn(verified.tokens[b])
                continue
            tree = tree_of_line(sample.root, chosen, b)
            draw = partial(_draw, sample, logits, deadline)
            path, verified.tokens[b] = accept(tree.tokens, tree.parents, draw)
            columns = np.array([path, range(1, len(path) + 1)], dtype=np.int64) + lens[b]
            at = slots_of(table, np.full_like(columns, b), columns, self._cache.page_size)
            sources, destinations = at.tolist()
            if sources != destinations:
                self._cache.move(sources, destinations)
                if features is not None:
                    features.move(sources, destinations)
        walks = zip(samples, verified.tokens, strict=True)
        return [sample.advance(drawn, self._end_tokens) for sample, drawn in walks]


def _draw(sample: RunningSample, logits_NV: Logits, deadline: float, node: int) -> int | None:
    """The next token at a node; None where its mask does not come before the deadline, or never:
    the sample's `error`.
    """
    if not sample.sampler.wait(max(0.0, deadline - time.monotonic())):
        return None
    if sample.sampler.failure is not None:
        sample.error = sample.sampler.failure
        return None
    return sample.sampler.draw(logits_NV[node])


def _judged_columns(sample: RunningSample, chunk: range) -> range:
    """The columns of a prefill whose logits are computed: the last for a draw, and those that score
    a prompt token, unless they did before a preemption.
    """
    num_known = len(sample.tokens)
    # a preempted sample has its root already: its tokens are longer than its prefill
    draws = chunk.stop == sample.prefill_end == num_known and sample.max_tokens > 0
    stop = chunk.stop if draws else min(chunk.stop, num_known - 1)
    if sample.prompt_logprobs is None:
        return range(chunk.stop - draws, chunk.stop)
    return range(max(chunk.start, len(sample.prompt_logprobs)), stop)


def update_of(
    sample: RunningSample,
    tokens: list[int],
    num_accepted_drafts: int | None = None,
    tree: DraftedTree | None = None,
) -> Update:
    """A job's update of a sample. tokens: those appended to the sample, possibly none."""
    logprobs, of_prompt = sample.sampler.logprobs, None
    first = sample.num_emitted - len(tokens)
    if tokens or sample.finish_reason is not None:
        of_prompt, sample.prompt_logprobs = sample.prompt_logprobs, None
    num_reused, sample.num_reused = sample.num_reused, 0
    return Update(
        request_id=sample.request.id,
        token_ids=tokens,
        finish_reason=sample.finish_reason,
        num_accepted_drafts=num_accepted_drafts,
        index=sample.index,
        logprobs=None if logprobs is None else logprobs[first : first + len(tokens)],
        tree=tree,
        text=None if sample.stops is None or not tokens else sample.stops.take_text(),
        prompt_logprobs=of_prompt,
        error=sample.error,
        num_reused_tokens=num_reused,
    )
