"""Chains on stored features: quick, on a GPU where there is one, and without the target.

Rounds are those of a chain that drafts in every round and is never cut short, on the answers as
they were captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.chat import Chat
from eyas.errors import EmptyInputError, MismatchError
from eyas.evaluate.breakdown import (
    WAYS,
    AnswerCounts,
    figures,
    prompt_of,
    vocabulary_figures,
)
from eyas.evaluate.walks import TreeWalks
from eyas.language import language
from eyas.log import Track
from eyas.model.config import HeadConfig
from eyas.operators.batch import Batch, plan_batches
from eyas.operators.chain import measure, runs
from eyas.operators.head import Head, load_head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import FeatureMeta, FeatureSource, Sample
from eyas.tau import RoundCounts

BATCH_TOKENS = 8192  # of a batch, padding included: under a GB for a head of a 70 B target
# of answers' tokens that are the target's argmax by the features: below it they were sampled
GREEDY = 0.97
ASSUMES = (
    "a chain of num_draft_steps drafts every round, never cut short; features in the precision "
    "served"
)


def samplings(source: FeatureSource) -> list[dict[str, Any]]:
    """How `generate` was asked to draw the answers of features; nothing where that is not known."""
    answers = source.inputs["features"].inputs.get("answers")
    return answers.config.get("sampling", []) if answers is not None else []


def drawn_at(source: FeatureSource) -> float:
    """The temperature at which all answers were drawn from the whole vocabulary; 0 for others."""
    kinds = {(one["temperature"], one["top_p"], one["top_k"]) for one in samplings(source)}
    ((temperature, *cut),) = kinds if len(kinds) == 1 else {(0.0, 1, 0)}
    return temperature if cut == [1, 0] else 0.0


def answers_temperature(source: FeatureSource, greedy_share: float) -> float | None:
    """What the answers were drawn at: as `generate` was asked, or greedy by their tokens; None for
    several temperatures, or one that is not known.
    """
    stated = {one["temperature"] for one in samplings(source)}
    if stated:
        return stated.pop() if len(stated) == 1 else None
    return 0.0 if greedy_share >= GREEDY else None


def check_belongs(head: HeadConfig, meta: FeatureMeta, vocabulary: TargetVocabulary) -> None:
    """Raise MismatchError unless head, features and target are of one target."""
    ours = vocabulary.config
    if meta.lm_head_sha256 != vocabulary.lm_head_sha256 or head.target_lm_head_sha256 not in (
        "",
        meta.lm_head_sha256,
    ):
        raise MismatchError(
            "head, features and target are not of one target (their hashes of its lm_head differ)",
            "give the target and features that the head was trained on",
        )
    if head.taps != meta.taps or (meta.hidden_size, meta.vocab_size) != (
        ours.hidden_size,
        ours.vocab_size,
    ):
        raise MismatchError(
            f"the head taps layers {head.taps} of hidden size {head.target_hidden_size}, the "
            f"features are layers {meta.taps} of {meta.hidden_size}",
            "capture the features again, or train the head again",
        )


class Chains:
    """Counts of a head's chains of 1 to K drafts on a source of features."""

    def __init__(
        self, head: Head, vocabulary: TargetVocabulary, source: FeatureSource, num_draft_steps: int
    ) -> None:
        self._head, self._vocabulary, self._source = head, vocabulary, source
        self._by_length = [RoundCounts(steps) for steps in range(1, num_draft_steps + 1)]
        self._answers: list[AnswerCounts] = []
        self._is_known: list[list[bool]] = []  # of each answer's tokens: in the draft vocabulary
        self._num_greedy = 0

    @classmethod
    def load(
        cls, vocabulary: TargetVocabulary, head: Path, source: FeatureSource, num_draft_steps: int
    ) -> Chains:
        """Raises what loading raises, and MismatchError for what is not of one target."""
        loaded = load_head(head, vocabulary.config, vocabulary.lm_head)
        check_belongs(loaded.config, source.meta, vocabulary)
        return cls(loaded.to(vocabulary.lm_head.device), vocabulary, source, num_draft_steps)

    def measure(
        self, chat: Chat, track: Track, walks: TreeWalks | None
    ) -> tuple[dict[str, Any], list[AnswerCounts]]:
        """What eval.json says of features, and the counts of each answer; chat: to read the
        answers' language. walks: trees that are walked along the same answers.

        Raises EmptyInputError where no answer has two tokens.
        """
        walks = walks.of(drawn_at(self._source)) if walks is not None else None
        done, longest = 0, self._by_length[-1]
        batches = plan_batches(self._source.lengths, BATCH_TOKENS, "eval")
        for samples in self._source.batches(batches):
            texts = (chat.decode(one.token_ids[one.loss_mask].tolist()) for one in samples)
            languages = [language(text) for text in texts]
            self._add(samples, languages)
            if walks is not None:
                walks.add(samples, languages)
            done += len(samples)
            track(done, len(self._source), f"tau {longest.tau:.3f}")
        if not longest.rounds:
            raise EmptyInputError(
                "the held-out features hold no answer of two tokens or more",
                "capture with more prompts",
            )
        K, num_tokens = len(self._by_length), sum(map(len, self._is_known))
        greedy_share = self._num_greedy / num_tokens
        temperature = answers_temperature(self._source, greedy_share)
        kind = "greedy" if temperature == 0 else "sampled"
        result: dict[str, Any] = {
            **figures(self._answers, K),
            "num_draft_steps": K,
            "tau_by_num_draft_steps": [counts.tau for counts in self._by_length],
            "language_of": "answers",
            **vocabulary_figures(self._is_known, K),
            "greedy_share": greedy_share,
            "answers_temperature": temperature,
            "tokens": num_tokens,
            "assumes": f"{kind} answers; {ASSUMES}",
            "ways": {"chain": WAYS["features"]},
        }
        if walks is not None:
            result["trees"] = walks.entries(temperature, language_of="answers", by="features")
            result["ways"]["trees"] = WAYS["features"]
        return result, self._answers

    def _add(self, samples: Sequence[Sample], languages: Sequence[str]) -> None:
        K, vocabulary = len(self._by_length), self._vocabulary
        batch = Batch.of(samples).to(str(vocabulary.lm_head.device))
        measured = measure(self._head, vocabulary, batch, K)
        self._num_greedy += measured.num_greedy
        for sample in samples:
            is_known = self._head.t2d[sample.token_ids.long()].tolist()
            spans = runs(sample.loss_mask.tolist())
            self._is_known += [is_known[first:end] for first, end in spans]
        for number, matches in measured.spans:
            sample, counts = samples[number], RoundCounts(K)
            prompt = prompt_of(sample.key)
            answer = AnswerCounts(prompt, sample.source, languages[number], counts)
            for one in (counts, *self._by_length):
                one.add_answer(matches)
            self._answers.append(answer)
