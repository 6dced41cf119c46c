"""Held-out prompts for a target that our own engine does not run: transformers answers them, and
the head's trees are walked along the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from eyas.errors import MismatchError
from eyas.evaluate.trees import ModelsConfig, PromptSet
from eyas.log import Track
from eyas.model.config import TargetShape
from eyas.model.target import Dtype, stored_dtype
from eyas.operators.decoder import HookedDecoder
from eyas.records import mixed_seed
from eyas.shards import Sample

AT_ONCE = 8  # answers, of which the hidden states are computed in one forward


def hooked_dtype(dtype: Dtype, shape: TargetShape) -> Dtype:
    """`dtype` without "auto". Raises MismatchError for what transformers' models are not run in."""
    if dtype == "packed":
        raise MismatchError(
            "transformers runs this target, and has no dtype packed",
            "take models.dtype=bfloat16, or auto",
        )
    return stored_dtype(shape) if dtype == "auto" else dtype


@dataclass(frozen=True, slots=True)
class HookedAnswers:
    """transformers' model of a target, and what it is asked."""

    decoder: HookedDecoder
    prompts: PromptSet
    max_tokens: int
    seed: int

    @classmethod
    def load(
        cls, folder: str, config: ModelsConfig, prompts: PromptSet, max_tokens: int, seed: int
    ) -> HookedAnswers:
        """Raises MismatchError, with what measures without the model, MissingInputError,
        CorruptError.
        """
        try:
            decoder = HookedDecoder.load(folder, config.dtype)
        except MismatchError as error:
            hint = (
                "`eyas generate` and `eyas capture` by a server, then --features without --prompts"
            )
            raise MismatchError(error.what, f"{error.hint}; {hint}") from error
        return cls(decoder, prompts, max_tokens, seed)

    def samples(self, temperature: float, track: Track) -> Iterator[list[Sample]]:
        """Answers with their hidden states, in the prompts' order."""
        asked = list(zip(self.prompts.prompts, self.prompts.prompt_ids, strict=True))
        for first in range(0, len(asked), AT_ONCE):
            part, rows, masks = asked[first : first + AT_ONCE], list[list[int]](), []
            for number, (prompt, ids) in enumerate(part):
                seed = mixed_seed(self.seed, prompt.id)
                answer = self.decoder.answer(ids, self.max_tokens, temperature, seed)
                rows.append([*ids, *answer])
                masks.append(torch.arange(len(rows[-1])) >= len(ids))
                track(first + number + 1, len(asked))
            states = self.decoder.states(rows)
            yield [
                Sample(
                    prompt.id,
                    torch.tensor(row, dtype=torch.int32),
                    mask,
                    states.aux_hidden[b, : len(row)].cpu(),
                    states.last_hidden[b, : len(row)].cpu(),
                    prompt.source,
                )
                for b, ((prompt, _), row, mask) in enumerate(zip(part, rows, masks, strict=True))
            ]
