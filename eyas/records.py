"""The rows that stages hand to each other, as JSON lines on disk."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any, Protocol, Self, TypedDict


class Message(TypedDict):
    """One turn of a conversation in OpenAI's form."""

    role: str
    content: str


RECORD = 2  # version of `Answer`: 2 holds tokens


class _Row:
    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in row.items()
            if name in fields
        }
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt(_Row):
    """The user turns of one conversation, cleaned. `id` is unique within an artifact."""

    id: str
    source: str
    licence: str
    turns: tuple[str, ...]
    system: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Answer(_Row):
    """One assistant turn written by the target: `prompt_ids` that it read, `answer_ids` that it
    wrote, with its end token if it ended the turn. The loss mask covers `answer_ids`; the first is
    never judged, since a head drafts from the second on. `messages` is the same as text.

    key: of equal prompt, number of the conversation with it, target and sampling. finish_reason:
    "stop" or "length" (max_tokens). temperature to seed: how it was sampled; top_p 1 and top_k 0
    keep the whole vocabulary. marked: "truncated", "empty", "refused", "looping", or None. An
    answer with personal data that its prompt lacks is never written. Nothing here depends on when,
    where or in which order rows were answered: that is `Origin`.
    """

    key: str
    prompt_id: str
    source: str
    licence: str
    turn: int
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    finish_reason: str
    temperature: float
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 0
    seed: int | None = None
    marked: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Origin(_Row):
    """How an answer was made; differs between runs. engine: name and version ("vllm 0.11.2").
    server: its address; None for this process. latency_ms: from the first request to the answer.
    """

    key: str
    prompt_id: str
    turn: int
    engine: str
    server: str | None
    latency_ms: float


def mixed_seed(seed: int, prompt_id: str) -> int:
    """A seed for one prompt's draws, below 2**31: one seed for all prompts would correlate them."""
    digest = hashlib.sha256(f"{seed}/{prompt_id}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], "big") >> 1


class RowStore(Protocol):
    """An artifact, as far as rows are read from it."""

    def manifest(self, stage: str) -> Any:
        """The manifest. Raises EyasError for another stage, or an unfinished artifact."""

    def read_rows(self, stem: str) -> Iterator[dict[str, Any]]:
        """The rows of all files of a name, in order."""


def read_answers(answers: RowStore) -> Iterator[Answer]:
    """All rows of a finished `generate` artifact, marked ones too, a conversation's turns in order.
    Raises EyasError.
    """
    answers.manifest("generate")
    return map(Answer.from_json, answers.read_rows("answers"))


def read_origins(answers: RowStore) -> Iterator[Origin]:
    """The origins of these rows, in the same order."""
    answers.manifest("generate")
    return map(Origin.from_json, answers.read_rows("origins"))
