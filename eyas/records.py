"""The rows that stages hand to each other, as JSON lines on disk. Knows no stage."""

from __future__ import annotations

import dataclasses
from typing import Any, Self, TypedDict


class Message(TypedDict):
    """One turn of a conversation in OpenAI's form."""

    role: str
    content: str


class _Row:
    """JSON in and out for the dataclasses below."""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Self:
        fields = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in row.items() if name in fields}
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
    """One assistant turn written by the target: `messages` is what the server saw plus the answer as its last.

    finish_reason: "stop" (the target ended its turn) or "length" (cut at max_tokens).
    """

    key: str
    prompt_id: str
    source: str
    licence: str
    turn: int
    messages: tuple[Message, ...]
    finish_reason: str
    temperature: float
    num_prompt_tokens: int
    num_answer_tokens: int
