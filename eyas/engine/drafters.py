"""Who proposes tokens: the head, and text that has the same last tokens.

    TextDrafter.propose(sample) -> chains           a free look-up, before a round is planned
    HeadDrafter.propose(samples, plan) -> trees     a model, where the plan says that it pays
    merged(trees, chains) -> trees                  what both propose, each candidate once

The head keeps an entry, its key and value, for each column of the target's cache:

    target    [ x_0 ..... x_{n-1} ]  the columns in the target's cache, n = num_cached
    features  column 0 ... n-1       of every column there, in the same pages
    draft     [ e_1 .. e_{m-1} ]     m = draft_len; a tree needs those up to column n, the root's

The entry of column c is computed from the feature of column c - 1 and the token of column c. After
a verify the head lacks the entries m .. n; one forward makes them and proposes the next tree.

Letters: B samples, C candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eyas.engine.costs import AT_ONCE
from eyas.engine.draft import Draft
from eyas.engine.pages import PagePool
from eyas.engine.policy import RoundPlan
from eyas.engine.scheduler import RunningSample, page_table
from eyas.engine.text import RecentAnswers, TextChain
from eyas.engine.tree import Speculation
from eyas.model.rows import HEAD, TEXT, FeatureCache, Growth, Proposals, Roots

NOTHING = Proposals(  # no sample drafts
    np.empty((0, 0), dtype=np.int64),
    np.empty((0, 0), dtype=np.float32),
    np.empty((0, 0), dtype=np.int32),
    np.empty(0, dtype=np.int32),
)


class DraftError(Exception):
    """The head gave something that is no draft."""


# What a head may raise; any other error is a fault of the engine.
HEAD_FAULTS = (DraftError, ArithmeticError, MemoryError, RuntimeError, ValueError)


class HeadDrafter:
    """The head's trees, its cache of entries, and the target's features that they are made of.

    Entries of a full page belong to its tokens (`PagePool.is_drafted`): a reused prefix has them
    too.
    """

    def __init__(
        self, draft: Draft, sizes: Speculation, features: FeatureCache, pool: PagePool
    ) -> None:
        self.draft, self.features = draft, features
        self.cache = draft.new_cache(pool.num_pages, pool.page_size)
        self._sizes, self._pool = sizes, pool

    def propose(self, samples: Sequence[RunningSample], plan: RoundPlan) -> Proposals:
        """Extend the draft over accepted tokens and roots, and grow trees (`Draft.grow`). Raises
        HEAD_FAULTS, among them DraftError for scores that are no numbers.
        """
        if not samples:
            return NOTHING
        # many missing entries are made without outputs, in half the time
        self.extend([sample for sample in samples if sample.num_missing > AT_ONCE])
        roots = self._missing(samples, [sample.num_cached for sample in samples])
        growth = Growth(self._sizes.num_draft_steps, self._sizes.tree_topk, plan.width)
        draws = [sample.sampler.draw_state() for sample in samples]
        proposals = self.draft.grow(
            roots, self.cache, self.features, growth, plan.thresholds, draws
        )
        if not math.isfinite(proposals.scores.sum(dtype=np.float64)):
            bad = int((~np.isfinite(proposals.scores)).sum())
            raise DraftError(
                f"{bad} of {proposals.scores.size} log-probabilities are NaN or infinite"
            )
        return proposals

    def extend(self, samples: Sequence[RunningSample]) -> None:
        """Make the entries of all columns before the roots', without outputs."""
        samples = [sample for sample in samples if sample.num_missing > 1]
        if samples:
            roots = self._missing(samples, [sample.num_cached - 1 for sample in samples])
            self.draft.enter(roots, self.cache, self.features)

    def _missing(self, samples: Sequence[RunningSample], lasts: list[int]) -> Roots:
        """Columns draft_len .. last of each sample, counted as made: the caller makes them."""
        size, starts, tokens = self._pool.page_size, list[int](), list[int]()
        for sample, last in zip(samples, lasts, strict=True):
            missing = sample.enter(last)
            starts.append(missing.start)
            tokens += sample.tokens[missing.start : missing.stop]
            for page in sample.pages[missing.start // size : missing.stop // size]:
                self._pool.is_drafted[page] = True
        return Roots(lasts, starts, tokens, page_table(samples))


class TextDrafter:
    """What followed the last tokens before: in a sample's own text, and in recent answers."""

    def __init__(self) -> None:
        self.recent = RecentAnswers()

    def propose(self, sample: RunningSample) -> list[TextChain]:
        """Chains of candidates, the more reliable first."""
        if not sample.request.text_drafts:
            return []
        sample.text.extend(sample.tokens[len(sample.text.tokens) :])
        recent = self.recent.chain(sample.request.cache_salt, sample.tokens)
        return [chain for chain in (sample.text.chain(), recent) if chain is not None]

    def remember(self, sample: RunningSample) -> None:
        """Keep an ended answer for requests of the same salt."""
        if sample.request.text_drafts:
            answer = sample.tokens[len(sample.request.prompt_ids) :]
            self.recent.add(sample.request.cache_salt, answer)


def merged(
    head: Proposals, lines: Sequence[int], chains: Sequence[Sequence[TextChain]]
) -> Proposals:
    """The head's proposals and text's chains: one trie of candidates for each sample.

    lines: the head's line of each of the B samples, -1 for none. chains: of each sample; the
    earlier one decides a candidate's kind.
    """
    C, num_chains = head.tokens.shape[1], max(map(len, chains))
    depth = max((len(chain.tokens) for own in chains for chain in own), default=0)
    shape = len(lines), C + depth * num_chains
    tokens, scores = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
    parents, kinds = np.full(shape, -1, dtype=np.int32), np.zeros(shape, dtype=np.int32)
    sources = np.zeros(shape, dtype=np.int8)
    for b, (line, own) in enumerate(zip(lines, chains, strict=True)):
        nodes: dict[tuple[int, int], int] = {}  # by parent and token
        if line >= 0:
            tokens[b, :C], parents[b, :C] = head.tokens[line], head.parents[line]
            scores[b, :C], sources[b, :C] = head.scores[line], HEAD
            of_head = zip(head.parents[line].tolist(), head.tokens[line].tolist(), strict=True)
            nodes = {node: c for c, node in enumerate(of_head)}
        for number, chain in enumerate(own):
            parent, score = -1, 0.0
            for level, (token, kind) in enumerate(zip(chain.tokens, chain.kinds, strict=True)):
                free = C + level * num_chains + number
                c = nodes.setdefault((parent, token), free)
                if c == free:
                    tokens[b, c], parents[b, c], scores[b, c] = token, parent, score
                if not sources[b, c] & TEXT:
                    sources[b, c], kinds[b, c] = sources[b, c] | TEXT, kind
                parent, score = c, float(scores[b, c])
    levels = np.arange(1, depth + 1, dtype=np.int32).repeat(num_chains)
    depths = np.concatenate((head.depths, levels))
    return Proposals(tokens, scores, parents, depths, sources, kinds)


def with_text(
    able: Sequence[RunningSample],
    chains: Sequence[Sequence[TextChain]],
    growing: Sequence[RunningSample],
    head: Proposals,
) -> tuple[list[RunningSample], Proposals]:
    """The samples with candidates of the head or of text, and all these candidates. chains: of each
    sample in `able`. growing: the samples of the head's proposals.
    """
    lines = {sample: line for line, sample in enumerate(growing)}
    both = [
        (sample, own) for sample, own in zip(able, chains, strict=True) if own or sample in lines
    ]
    of_head = [lines.get(sample, -1) for sample, _ in both]
    return [sample for sample, _ in both], merged(head, of_head, [own for _, own in both])
