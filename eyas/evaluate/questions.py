"""Held-out prompts as the engine takes them. Knows messages, the chat template and languages; no
file, no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams
from eyas.errors import EmptyInputError, TemplateError
from eyas.language import language
from eyas.records import Message


@dataclass(frozen=True)
class Question:
    """A prompt that the head was not trained on. `source` is the domain that tau is told for."""

    id: str
    source: str
    messages: tuple[Message, ...]

    @cached_property
    def language(self) -> str:
        """Of what users say in it."""
        return language(
            "\n".join(message["content"] for message in self.messages if message["role"] == "user")
        )


def questions_identity(questions: Sequence[Question]) -> str:
    """16 hex digits over all that is asked, in its order."""
    digest = hashlib.sha256()
    for one in questions:
        digest.update(
            json.dumps([one.id, one.source, one.messages], sort_keys=True).encode() + b"\n"
        )
    return digest.hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Asked:
    """Questions and the tokens of their prompts, but for those left out: too long, or refused by
    the template.
    """

    questions: list[Question]
    prompts: list[tuple[int, ...]]
    num_left_out: int

    @classmethod
    def of(cls, questions: Sequence[Question], chat: Chat, max_prompt_tokens: int) -> Asked:
        """Raises EmptyInputError when none is left."""
        kept, prompts = [], []
        for question in questions:
            try:
                ids = tuple(chat.prompt_ids(question.messages))
            except TemplateError:
                continue
            if len(ids) <= max_prompt_tokens:
                kept.append(question)
                prompts.append(ids)
        if not kept:
            raise EmptyInputError(
                f"none of the {len(questions)} held-out prompts can be asked: too long, or refused "
                "by the chat template",
                f"give prompts of {max_prompt_tokens} tokens or fewer, or a larger "
                "models.max_length",
            )
        return cls(kept, prompts, len(questions) - len(kept))

    def requests(self, max_tokens: int, temperature: float, seed: int) -> list[Request]:
        """One of each, by the question's id. All have the same seed, as `eyas bench` asks."""
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed)
        return [
            Request(question.id, ids, params)
            for question, ids in zip(self.questions, self.prompts, strict=True)
        ]
