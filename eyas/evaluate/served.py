"""Held-out prompts through the engine, tree by tree and temperature by temperature: tau as serving
will have it.

Knows engines and what the figures are of. No clock: what a tree takes is `prediction`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from eyas.engine.tree import Speculation
from eyas.evaluate.coverage import ceilings, share
from eyas.evaluate.decoding import Decoded, Models, decode, stretch
from eyas.evaluate.questions import Asked
from eyas.evaluate.slices import Unit, by_language, by_source, figures
from eyas.log import Track


@dataclass(frozen=True, slots=True)
class Served:
    """What one way to speculate did at one temperature."""

    speculation: Speculation
    temperature: float
    answers: list[Decoded]

    def to_json(self, asked: Asked, t2d_V: Tensor) -> dict[str, Any]:
        """An entry of eval.json's `trees`. Rounds without drafts, which only auto has, are not
        counted.
        """
        steps = self.speculation.num_draft_steps
        units = [
            Unit(question.source, question.language, answer.tally(steps))
            for question, answer in zip(asked.questions, self.answers, strict=True)
        ]
        drafted: list[list[bool]] = [t2d_V[answer.token_ids].tolist() for answer in self.answers]
        return {
            "speculation": str(self.speculation),
            "temperature": self.temperature,
            "num_draft_steps": steps,
            **figures(units, steps),
            "draft_vocabulary_coverage": share(drafted),
            **ceilings(drafted, steps),
            "tokens": sum(len(answer.token_ids) for answer in self.answers),
            "by_source": by_source(units),
            "by_language": by_language(units),
            "language_of": "prompts",
        }


def serve(
    models: Models,
    asked: Asked,
    ways: Sequence[tuple[Speculation, float]],
    limits: tuple[int, int],
    track: Track,
) -> list[Served]:
    """All questions in every one of the ways (speculation, temperature). limits: max_tokens, and
    the seed of all requests.
    """
    max_tokens, seed = limits
    served = []
    for number, (speculation, temperature) in enumerate(ways):
        requests = asked.requests(max_tokens, temperature, seed)
        bar = stretch(track, number * len(requests), len(ways) * len(requests))
        served.append(
            Served(speculation, temperature, decode(models.engine(str(speculation)), requests, bar))
        )
    return served
