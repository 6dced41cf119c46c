"""Trees on answers whose hidden states are there: no target runs, and nothing is drawn.

Verification draws a token at the root and at each accepted node, and the answer says which they
were. So the head's tree grows at each round's root as in serving, and is walked along the answer:

    answer   [y0] [y1 y2 y3] [y4]        rounds that accept 2 and 0 drafts
              |    |     |
              root accepted, and the token that the target added: the next root

These are the rounds of serving, one by one, where a draft does not follow from the random numbers
that the target draws with: greedy answers, and sampled ones of servers that draft the likeliest
tokens (SGLang, vLLM). Our own engine guesses the draws, and accepts more at temperatures above 0.

A sampled answer is one of many. What is accepted in expectation over all that could be drawn at its
nodes follows from the last hidden states: the chance that the target draws a child of a node.

Letters: B samples, T the longest of them, C candidates, H target hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.engine.costs import AT_ONCE
from eyas.engine.draft import Draft, check_branches
from eyas.engine.tree import Speculation, Tree, most_probable, tree_of
from eyas.engine.verify import accept
from eyas.errors import ConfigError
from eyas.evaluate.breakdown import AnswerCounts, prompt_of, tree_entry
from eyas.model.arrays import FLOAT32, Array
from eyas.model.checkpoint import read_head
from eyas.model.config import TargetShape
from eyas.model.rows import FeatureCache, Growth, PagedCache, Roots
from eyas.model.target import PAGE_SIZE
from eyas.operators.chain import runs
from eyas.operators.tensors import array_of
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Sample
from eyas.tau import RoundCounts

ROWS_AT_ONCE = 256  # of logits over the target's vocabulary
END = -1  # behind an answer: no draft's token


class TargetMatrices(NamedTuple):
    """A target without its layers, as `Draft` takes it."""

    config: TargetShape
    lm_head_sha256: str
    embed_tokens: Array
    lm_head: Array
    dtype: np.dtype[Any]

    @property
    def embeddings(self) -> Array:
        """As a `Target` has them."""
        return self.embed_tokens

    @classmethod
    def of(cls, vocabulary: TargetVocabulary) -> TargetMatrices:
        embed_tokens, lm_head = map(array_of, (vocabulary.embed_tokens, vocabulary.lm_head))
        own = vocabulary.config, vocabulary.lm_head_sha256
        return cls(*own, embed_tokens, lm_head, embed_tokens.dtype)


@dataclass(frozen=True, slots=True)
class WalkedRound:
    """A round on a sample's tokens. root: the column of its root; left: tokens of the answer behind
    it; path: the accepted nodes, those that the answer's end cuts off among them.
    """

    root: int
    left: int
    tree: Tree
    path: list[int]

    @property
    def num_accepted_drafts(self) -> int:
        """An accepted draft that ends the answer takes the place of the target's token."""
        return min(len(self.path), self.left - 1)


class AnswerWalk:
    """Where the rounds of one sample stand: `root`, None behind the last one, and `draft_len`, the
    first column without an entry of the draft.
    """

    def __init__(self, sample: Sample) -> None:
        self.tokens = sample.token_ids.tolist()
        # a first token without a feature before it is no root
        spans = ((max(first, 1), end) for first, end in runs(sample.loss_mask.tolist()))
        self._spans = [span for span in spans if span[1] - span[0] > 1]
        self.rounds: list[list[WalkedRound]] = [[] for _ in self._spans]
        self._number, self.draft_len = 0, 1
        self.root = self._spans[0][0] if self._spans else None

    def go_on(self, tree: Tree) -> None:
        """Walk a tree of the root, and move the root behind it."""
        root, end = self.root, self._spans[self._number][1]
        assert root is not None
        following = iter([*self.tokens[root + 1 : end], END])
        path, _ = accept(tree.tokens, tree.parents, lambda _: next(following))
        one = WalkedRound(root, end - 1 - root, tree, path)
        self.rounds[self._number].append(one)
        self.draft_len, self.root = root + 1, root + one.num_accepted_drafts + 1
        if self.root == end - 1:
            self._number += 1
            more = self._number < len(self._spans)
            self.root = self._spans[self._number][0] if more else None


@torch.inference_mode()
def walk(draft: Draft, tree: Speculation, samples: Sequence[Sample]) -> list[AnswerWalk]:
    """All rounds of the samples' answers, with trees of a fixed size."""
    columns = max(len(one.token_ids) for one in samples)
    columns += max(tree.num_verify_tokens, 1 + tree.num_columns)
    num_pages = -(-columns // PAGE_SIZE)
    table = np.arange(len(samples) * num_pages, dtype=np.int32).reshape(len(samples), num_pages)
    cache = draft.new_cache(table.size)
    features = feature_cache(draft, samples, num_pages * PAGE_SIZE)
    growth = Growth(tree.num_draft_steps, tree.tree_topk, tree.tree_topk)
    walks = [AnswerWalk(sample) for sample in samples]
    while under_way := [b for b, one in enumerate(walks) if one.root is not None]:
        enter_prompts(draft, [walks[b] for b in under_way], table[under_way], cache, features)
        roots = _missing([walks[b] for b in under_way], table[under_way], 0)
        thresholds = [0.0] * tree.num_draft_steps
        ends = np.cumsum(np.array(roots.lens) + 1 - np.array(roots.starts)) - 1
        proposals = draft.grow(roots, cache, features, growth, thresholds)
        kept = most_probable(proposals.scores, tree.num_verify_tokens - 1)
        for line, b in enumerate(under_way):
            nodes = kept[line].nonzero()[0].tolist()
            walks[b].go_on(tree_of(roots.tokens[ends[line]], proposals, line, nodes))
    return walks


def feature_cache(draft: Draft, samples: Sequence[Sample], num_slots: int) -> FeatureCache:
    """The samples' features, num_slots for each."""
    width = samples[0].aux_hidden.shape[-1]
    features = FeatureCache(len(samples) * num_slots, width, FLOAT32)
    for b, sample in enumerate(samples):
        slots = np.arange(len(sample.token_ids)) + b * num_slots
        features.write(slots, array_of(sample.aux_hidden.float()))
    return features


def enter_prompts(
    draft: Draft,
    walks: Sequence[AnswerWalk],
    table: np.ndarray,
    cache: PagedCache,
    features: FeatureCache,
) -> None:
    """Make the entries of long stretches before the roots, without outputs, as serving does."""
    far = [b for b, one in enumerate(walks) if (one.root or 0) - one.draft_len >= AT_ONCE]
    if far:
        ahead = [walks[b] for b in far]
        draft.enter(_missing(ahead, table[far], 1), cache, features)
        for one in ahead:
            one.draft_len = one.root or 0


def _missing(walks: Sequence[AnswerWalk], table: np.ndarray, before: int) -> Roots:
    """The columns that lack entries, up to so many before the root."""
    lens, starts, tokens = list[int](), list[int](), list[int]()
    for one in walks:
        assert one.root is not None
        lens.append(one.root - before)
        starts.append(one.draft_len)
        tokens += one.tokens[one.draft_len : one.root - before + 1]
    return Roots(lens, starts, tokens, table)


def expected_drafts(
    rounds: Sequence[WalkedRound],
    last_hidden_TH: Tensor,
    vocabulary: TargetVocabulary,
    temperature: float,
) -> float:
    """The drafts that these rounds of a sample accept in expectation, its answer drawn at this
    temperature from the whole vocabulary.

    A node that the answer reached is reached with its own probability, over all answers; so what is
    summed is the chance of its children alone. The answer's last token is no draft: see
    WalkedRound.
    """
    nodes = [
        (one, depth, node)
        for one in rounds
        for depth, node in enumerate([0, *one.path])
        if depth + 1 < one.left
    ]
    total = 0.0
    for first in range(0, len(nodes), ROWS_AT_ONCE):
        part = nodes[first : first + ROWS_AT_ONCE]
        columns = [one.root + depth for one, depth, _ in part]
        logits_RV = vocabulary.logits(last_hidden_TH[columns])
        chances_RV = (logits_RV / temperature).softmax(-1)
        for (one, _, node), chances_V in zip(part, chances_RV, strict=True):
            drafts = zip(one.tree.tokens, one.tree.parents, strict=True)
            total += float(chances_V[[token for token, parent in drafts if parent == node]].sum())
    return total


# Figures


@dataclass(slots=True)
class TreeCounts:
    """What is counted of one tree. expected: the sum of `expected_drafts`."""

    tree: Speculation
    expected: float = 0.0
    answers: list[AnswerCounts] = field(default_factory=list)


class TreeWalks:
    """Counts of a head's trees on answers, sample by sample."""

    def __init__(
        self,
        draft: Draft,
        t2d_V: np.ndarray,
        vocabulary: TargetVocabulary,
        trees: Sequence[Speculation],
        temperature: float = 0.0,
    ) -> None:
        """t2d_V bool: in the draft vocabulary. temperature: what the answers are drawn at, from the
        whole vocabulary; 0 as well where that is not so.
        """
        self._draft, self._t2d_V, self._vocabulary = draft, t2d_V, vocabulary
        self._temperature = temperature
        self._counts = [TreeCounts(tree) for tree in trees]
        self._is_known: list[list[bool]] = []  # as of Chains

    @classmethod
    def load(cls, vocabulary: TargetVocabulary, head: Path, trees: Sequence[str]) -> TreeWalks:
        """Raises what reading a head raises, MismatchError for one that does not fit, and
        ConfigError for a tree without a size.
        """
        config, tensors = read_head(head, vocabulary.config)
        parsed = [Speculation.parse(tree) for tree in trees]
        for tree in parsed:
            if tree.mode != "fixed":
                raise ConfigError(
                    f"{tree} has no size of its own: it follows from what a round costs in our "
                    "engine, which does not run here",
                    "give trees such as fixed(6,3,12)",
                )
            check_branches(config, tree)
        draft = Draft(config, tensors, TargetMatrices.of(vocabulary))
        return cls(draft, tensors["t2d"], vocabulary, parsed)

    def of(self, temperature: float) -> TreeWalks:
        """The same without counts, for answers of this temperature."""
        trees = [counts.tree for counts in self._counts]
        return TreeWalks(self._draft, self._t2d_V, self._vocabulary, trees, temperature)

    def add(self, samples: Sequence[Sample], languages: Sequence[str]) -> None:
        """Walk these samples' answers. languages: of each sample's."""
        for counts in self._counts:
            walks = walk(self._draft, counts.tree, samples)
            for sample, language, one in zip(samples, languages, walks, strict=True):
                for rounds in one.rounds:
                    tally = RoundCounts(counts.tree.num_draft_steps)
                    tally.add_rounds([round.num_accepted_drafts for round in rounds])
                    of = prompt_of(sample.key), sample.source, language
                    counts.answers.append(AnswerCounts(*of, tally))
                    if self._temperature > 0:
                        states = sample.last_hidden, self._vocabulary
                        counts.expected += expected_drafts(rounds, *states, self._temperature)
        for sample in samples:
            is_known = self._t2d_V[sample.token_ids.numpy()].tolist()
            spans = runs(sample.loss_mask.tolist())
            self._is_known += [is_known[first:end] for first, end in spans]

    def entries(self, temperature: float | None, **facts: Any) -> list[dict[str, Any]]:
        """Entries of eval.json's `trees`. temperature: of the answers; None: of several.

        expected_tau: over all that could have been drawn in these rounds.
        """
        made = []
        for counts in self._counts:
            entry = tree_entry(counts.tree, temperature, counts.answers, self._is_known, **facts)
            if self._temperature > 0:
                entry["expected_tau"] = 1 + counts.expected / max(entry["rounds"], 1)
            made.append(entry)
        return made

    def answers(self) -> list[AnswerCounts]:
        """The counts of each answer, by the first tree."""
        return self._counts[0].answers
