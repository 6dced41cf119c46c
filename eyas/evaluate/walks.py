"""A head along stored answers with their hidden states: no target runs, and nothing is drawn.

The head's tree grows at each round's root as in serving, and is walked along the answer, whose
tokens are what verification drew:

    answer   [y0] [y1 y2 y3] [y4]        rounds that accept 2 and 0 drafts
              |    |     |
              root accepted, and the token that the target added: the next root

These are serving's rounds for greedy answers, and for sampled ones of servers that draft the
likeliest tokens (SGLang, vLLM). Our own engine guesses the draws, and accepts more when sampling.
The last hidden states give the expected acceptance over all draws at the nodes of the answer.

Chains (trees of one branch) are unrolled from all places of an answer at once (`operators.chain`).

Letters: B samples, T the longest of them, H target hidden size, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.chat import Chat
from eyas.engine.costs import AT_ONCE
from eyas.engine.draft import Draft, check_branches
from eyas.engine.tree import Speculation, Tree, most_probable, tree_of
from eyas.engine.verify import accept
from eyas.errors import ConfigError, EmptyInputError, MismatchError
from eyas.evaluate.breakdown import (
    WAYS,
    AnswerCounts,
    figures,
    prompt_of,
    tree_entry,
    vocabulary_figures,
)
from eyas.language import language
from eyas.log import Track
from eyas.model.arrays import FLOAT32, Array
from eyas.model.config import TargetShape, check_head
from eyas.model.dialects import LM_HEAD
from eyas.model.rows import FeatureCache, Growth, Roots
from eyas.model.target import PAGE_SIZE
from eyas.operators.batch import Batch, plan_batches
from eyas.operators.chain import matched_spans, runs
from eyas.operators.head import Head, head_of
from eyas.operators.tensors import array_of, arrays_of, read_head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import FeatureSource, Sample
from eyas.tau import RoundCounts

ROWS_AT_ONCE = 256  # of logits over the target's vocabulary
BATCH_TOKENS = 8192  # padding included: under a GB for a head of a 70 B target
GREEDY = 0.97  # least share of argmax tokens in greedy answers
ASSUMES = (
    "a chain of num_draft_steps drafts every round, never cut short; features in the precision "
    "served"
)
END = -1  # after an answer: no draft's token


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
    """A round on a sample's tokens. root: its column; left: tokens of the answer after it; path:
    the accepted nodes, also those that the answer's end cuts off.
    """

    root: int
    left: int
    tree: Tree
    path: list[int]

    @property
    def num_accepted_drafts(self) -> int:
        """A draft that ends the answer counts as the target's token."""
        return min(len(self.path), self.left - 1)


class AnswerWalk:
    """The rounds of one sample. root: the next one's column, None after the last; draft_len: the
    first column without an entry in the draft's cache.
    """

    def __init__(self, sample: Sample) -> None:
        self.tokens = sample.token_ids.tolist()
        # a first token has no feature before it
        spans = ((max(first, 1), end) for first, end in runs(sample.loss_mask.tolist()))
        self._spans = [span for span in spans if span[1] - span[0] > 1]
        self.rounds: list[list[WalkedRound]] = [[] for _ in self._spans]
        self._number, self.draft_len = 0, 1
        self.root = self._spans[0][0] if self._spans else None

    @property
    def missing(self) -> int:
        """Number of columns before the root without an entry."""
        return (self.root or 0) - self.draft_len

    def go_on(self, tree: Tree) -> None:
        """Walk the root's tree, and move the root to the next round."""
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
    """All rounds of the samples' answers, with trees of one size."""
    columns = max(len(one.token_ids) for one in samples)
    columns += max(tree.num_verify_tokens, 1 + tree.num_columns)
    num_pages = -(-columns // PAGE_SIZE)
    table = np.arange(len(samples) * num_pages, dtype=np.int32).reshape(len(samples), num_pages)
    cache = draft.new_cache(table.size)
    num_slots, width = num_pages * PAGE_SIZE, samples[0].aux_hidden.shape[-1]
    features = FeatureCache(len(samples) * num_slots, width, FLOAT32)
    for b, sample in enumerate(samples):
        slots = np.arange(len(sample.token_ids)) + b * num_slots
        features.write(slots, array_of(sample.aux_hidden.float()))
    growth = Growth(tree.num_draft_steps, tree.tree_topk, tree.tree_topk)
    walks = [AnswerWalk(sample) for sample in samples]
    while under_way := [b for b, one in enumerate(walks) if one.root is not None]:
        far = [b for b in under_way if walks[b].missing >= AT_ONCE]
        if far:  # as in serving, a prompt's entries need no outputs
            draft.enter(_missing(walks, far, table, 1), cache, features)
            for b in far:
                walks[b].draft_len = walks[b].root or 0
        roots = _missing(walks, under_way, table, 0)
        thresholds = [0.0] * tree.num_draft_steps
        proposals = draft.grow(roots, cache, features, growth, thresholds)
        kept = most_probable(proposals.scores, tree.num_verify_tokens - 1)
        for line, b in enumerate(under_way):
            nodes = kept[line].nonzero()[0].tolist()
            walks[b].go_on(tree_of(walks[b].tokens[roots.lens[line]], proposals, line, nodes))
    return walks


def _missing(
    walks: Sequence[AnswerWalk], lines: Sequence[int], table: np.ndarray, before: int
) -> Roots:
    ahead = [walks[b] for b in lines]
    lens, starts = [(one.root or 0) - before for one in ahead], [one.draft_len for one in ahead]
    spans = zip(ahead, starts, lens, strict=True)
    tokens = [token for one, start, end in spans for token in one.tokens[start : end + 1]]
    return Roots(lens, starts, tokens, table[lines])


def expected_drafts(
    rounds: Sequence[WalkedRound],
    last_hidden_TH: Tensor,
    vocabulary: TargetVocabulary,
    temperature: float,
) -> float:
    """Expected accepted drafts of a sample's rounds, its answer drawn at this temperature from the
    whole vocabulary.

    The sum of the probabilities of the reached nodes' children: over all answers, a node is reached
    with its own probability. The answer's last token is no draft (see WalkedRound).
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


@dataclass(slots=True)
class TreeCounts:
    """Counts of one tree. expected: the sum of `expected_drafts`."""

    tree: Speculation
    expected: float = 0.0
    answers: list[AnswerCounts] = field(default_factory=list)


@dataclass
class AnswerWalks:
    """Counts of a head's trees, and of its chains of 1 to K drafts.

    draft: for trees; head: for chains. t2d_V bool: in the draft vocabulary. num_draft_steps: K.
    temperature: of answers drawn from the whole vocabulary; 0 for all others.
    """

    vocabulary: TargetVocabulary
    draft: Draft | None
    head: Head
    t2d_V: Tensor
    trees: Sequence[Speculation]
    num_draft_steps: int
    temperature: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [TreeCounts(tree) for tree in self.trees]
        self.by_length = [RoundCounts(steps + 1) for steps in range(self.num_draft_steps)]
        self.of_chain: list[AnswerCounts] = []
        self.is_known: list[list[bool]] = []  # of each answer's tokens: in the draft vocabulary
        self.num_greedy = 0

    @classmethod
    def load(
        cls,
        vocabulary: TargetVocabulary,
        head: Path,
        trees: Sequence[str],
        num_draft_steps: int = 1,
        source: FeatureSource | None = None,
    ) -> AnswerWalks:
        """source: the features. Raises what reading a head raises, MismatchError for inputs of
        different targets, ConfigError for a tree without a size.
        """
        config, tensors = read_head(head, vocabulary.config)
        if source is not None:
            meta, ours = source.meta, vocabulary.config
            found = meta.lm_head_sha256, meta.taps, meta.hidden_size, meta.vocab_size
            wanted = vocabulary.lm_head_sha256, config.taps, ours.hidden_size, ours.vocab_size
            if found != wanted:
                raise MismatchError(
                    "head, features and target are not of one target: the features are of layers "
                    f"{meta.taps} of a target of hidden size {meta.hidden_size} whose lm_head is "
                    f"{meta.lm_head_sha256[:12]}, the head is of layers {config.taps} of "
                    f"{config.target_hidden_size}, the target's lm_head is "
                    f"{vocabulary.lm_head_sha256[:12]}",
                    "give the target and features that the head was trained on",
                )
        check_head(config, vocabulary.config, vocabulary.lm_head_sha256)
        parsed = [Speculation.parse(tree) for tree in trees]
        for tree in parsed:
            if tree.mode != "fixed":
                raise ConfigError(
                    f"{tree} has no size of its own: it follows from what a round costs in our "
                    "engine, which does not run here",
                    "give trees such as fixed(6,3,12)",
                )
            check_branches(config, tree)
        matrices = TargetMatrices.of(vocabulary) if trees else None
        draft = Draft(config, arrays_of(tensors), matrices) if matrices else None
        device = vocabulary.lm_head.device
        tensors.setdefault(LM_HEAD, vocabulary.lm_head)
        unrolled = head_of(config, tensors).to(device)
        return cls(vocabulary, draft, unrolled, tensors["t2d"], parsed, num_draft_steps)

    def add(self, samples: Sequence[Sample], languages: Sequence[str]) -> None:
        """Walk these samples' answers. languages: of the answers."""
        for sample in samples:
            is_known = self.t2d_V[sample.token_ids.long()].tolist()
            spans = runs(sample.loss_mask.tolist())
            self.is_known += [is_known[first:end] for first, end in spans]
        self._add_chains(samples, languages)
        for counts in self.counts:
            assert self.draft is not None
            walks = walk(self.draft, counts.tree, samples)
            for sample, name, one in zip(samples, languages, walks, strict=True):
                for rounds in one.rounds:
                    tally = RoundCounts(counts.tree.num_draft_steps)
                    tally.add_rounds([round.num_accepted_drafts for round in rounds])
                    of = prompt_of(sample.key), sample.source, name
                    counts.answers.append(AnswerCounts(*of, tally))
                    if self.temperature > 0:
                        states = sample.last_hidden, self.vocabulary
                        counts.expected += expected_drafts(rounds, *states, self.temperature)

    def _add_chains(self, samples: Sequence[Sample], languages: Sequence[str]) -> None:
        K, vocabulary = len(self.by_length), self.vocabulary
        batch = Batch.of(samples).to(str(vocabulary.lm_head.device))
        for number, matches in matched_spans(self.head, vocabulary.embed_tokens, batch, K):
            sample, counts = samples[number], RoundCounts(K)
            for one in (counts, *self.by_length):
                one.add_answer(matches)
            of = prompt_of(sample.key), sample.source, languages[number]
            self.of_chain.append(AnswerCounts(*of, counts))
        self.num_greedy += num_greedy(vocabulary, batch)

    def entries(self, temperature: float | None, **facts: Any) -> list[dict[str, Any]]:
        """Entries of eval.json's `trees`. temperature: of the answers; None: of several.

        expected_tau: over all that could have been drawn in these rounds.
        """
        made = []
        for counts in self.counts:
            entry = tree_entry(counts.tree, temperature, counts.answers, self.is_known, **facts)
            if self.temperature > 0:
                entry["expected_tau"] = 1 + counts.expected / max(entry["rounds"], 1)
            made.append(entry)
        return made

    def measure(self, source: FeatureSource, chat: Chat, track: Track) -> dict[str, Any]:
        """eval.json's content for features; chat: to tell the answers' language. Raises
        EmptyInputError if no answer has two tokens.
        """
        done, longest, self.temperature = 0, self.by_length[-1], drawn_at(source)
        for samples in source.batches(plan_batches(source.lengths, BATCH_TOKENS, "eval")):
            texts = (chat.decode(one.token_ids[one.loss_mask].tolist()) for one in samples)
            self.add(samples, [language(text) for text in texts])
            done += len(samples)
            track(done, len(source), f"tau {longest.tau:.3f}")
        if not longest.rounds:
            raise EmptyInputError(
                "the held-out features hold no answer of two tokens or more",
                "capture with more prompts",
            )
        K, num_tokens = len(self.by_length), sum(map(len, self.is_known))
        greedy_share = self.num_greedy / num_tokens
        temperature = answers_temperature(source, greedy_share)
        result: dict[str, Any] = {
            **figures(self.of_chain, K),
            "num_draft_steps": K,
            "tau_by_num_draft_steps": [counts.tau for counts in self.by_length],
            "language_of": "answers",
            **vocabulary_figures(self.is_known, K),
            "greedy_share": greedy_share,
            "answers_temperature": temperature,
            "tokens": num_tokens,
            "assumes": f"{'greedy' if temperature == 0 else 'sampled'} answers; {ASSUMES}",
            "ways": {"chain": WAYS["features"]},
        }
        if self.counts:
            result["trees"] = self.entries(temperature, language_of="answers", by="features")
            result["ways"]["trees"] = WAYS["features"]
        return result


@torch.inference_mode()
def num_greedy(vocabulary: TargetVocabulary, batch: Batch) -> int:
    """The number of the answers' tokens that are the target's argmax, stored or by the features."""
    mask_BT = batch.loss_mask_BT[:, 1:]
    own_P = batch.argmax_BT[:, :-1][mask_BT]
    if (own_P < 0).any():
        hidden_PH = batch.last_hidden_BTH[:, :-1][mask_BT]
        parts = torch.split(hidden_PH, 2 * ROWS_AT_ONCE)
        own_P = torch.cat([vocabulary.best(rows) for rows in parts])
    return int((own_P == batch.tokens_BT[:, 1:][mask_BT]).sum())


def samplings(source: FeatureSource) -> list[dict[str, Any]]:
    """The sampling that `generate` was asked for; empty if unknown."""
    answers = source.inputs["features"].inputs.get("answers")
    return answers.config.get("sampling", []) if answers is not None else []


def drawn_at(source: FeatureSource) -> float:
    """The temperature at which all answers were drawn from the whole vocabulary; 0 for others."""
    kinds = {(one["temperature"], one["top_p"], one["top_k"]) for one in samplings(source)}
    ((temperature, *cut),) = kinds if len(kinds) == 1 else {(0.0, 1, 0)}
    return temperature if cut == [1, 0] else 0.0


def answers_temperature(source: FeatureSource, greedy_share: float) -> float | None:
    """The answers' temperature, as asked of `generate`, or 0 by their tokens; None for several, or
    an unknown one.
    """
    stated = {one["temperature"] for one in samplings(source)}
    if stated:
        return stated.pop() if len(stated) == 1 else None
    return 0.0 if greedy_share >= GREEDY else None
