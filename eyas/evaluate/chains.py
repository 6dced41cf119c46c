"""Chains on stored features: quick, and all there is where nobody can run the target. Knows
features and `chain`.

Does not know an engine. Rounds are those of a chain that drafts in every round and is never cut
short, on the answers as they were given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eyas.errors import MismatchError
from eyas.evaluate.coverage import ceilings, share
from eyas.evaluate.slices import Unit, by_language, by_source, figures
from eyas.language import language
from eyas.model.batch import Batch
from eyas.model.chain import measure, runs
from eyas.model.config import HeadConfig
from eyas.model.head import Head
from eyas.model.vocab import TargetVocabulary
from eyas.shards import FeatureMeta, Sample
from eyas.tau import RoundCounts

ASSUMES = (
    "greedy answers; a chain of num_draft_steps drafts every round, never cut short; "
    "features in the precision served"
)


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
            f"the head taps layers {head.taps} of a target of hidden size "
            f"{head.target_hidden_size}, "
            f"the features are layers {meta.taps} of one of {meta.hidden_size}",
            "capture the features again, or train the head again",
        )


class Chains:
    """Counts of a head's chains on samples; text_of: tokens to text, to tell the language of an
    answer.
    """

    def __init__(
        self,
        head: Head,
        vocabulary: TargetVocabulary,
        num_draft_steps: int,
        text_of: Callable[[list[int]], str],
    ) -> None:
        self.units: list[Unit] = []
        self._head, self._vocabulary, self._text_of = head, vocabulary, text_of
        self._by_length = [RoundCounts(steps) for steps in range(1, num_draft_steps + 1)]
        self._drafted: list[list[bool]] = []
        self._num_greedy = 0

    @property
    def tau(self) -> float:
        return self._by_length[-1].tau

    @property
    def rounds(self) -> int:
        return self._by_length[-1].rounds

    def add(self, samples: Sequence[Sample]) -> None:
        """Count a batch of samples."""
        measured = measure(self._head, self._vocabulary, Batch.of(samples), len(self._by_length))
        self._num_greedy += measured.num_greedy
        for sample in samples:
            drafted = self._head.t2d[sample.token_ids.long()].tolist()
            self._drafted += [drafted[first:end] for first, end in runs(sample.loss_mask.tolist())]
        for number, matches in measured.spans:
            sample = samples[number]
            answer = self._text_of(sample.token_ids[sample.loss_mask].tolist())
            unit = Unit(sample.source, language(answer), RoundCounts(len(self._by_length)))
            for tally in (unit.tally, *self._by_length):
                tally.add_answer(matches)
            self.units.append(unit)

    def to_json(self) -> dict[str, Any]:
        """The part of eval.json that features give."""
        num_tokens, sources = sum(map(len, self._drafted)), by_source(self.units)
        return {
            **figures(self.units, len(self._by_length)),
            "num_draft_steps": len(self._by_length),
            "tau_by_num_draft_steps": [tally.tau for tally in self._by_length],
            "tau_by_source": {name: one["tau"] for name, one in sources.items()},
            "by_source": sources,
            "by_language": by_language(self.units),
            "language_of": "answers",
            "draft_vocabulary_coverage": share(self._drafted),
            **ceilings(self._drafted, len(self._by_length)),
            "greedy_share": self._num_greedy / num_tokens,
            "tokens": num_tokens,
            "assumes": ASSUMES,
        }
