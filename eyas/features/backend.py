"""What answers turns: requests in, answers out, in whatever order they are ready. The engine in
this process is one backend, a fleet of servers is the other.

Knows requests for one assistant turn and the engine. Does not know conversations, rows or HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from eyas.artifact import VERSION
from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.engine.request import FinishReason, Request, SamplingParams
from eyas.records import Message

ENGINE = f"eyas {VERSION}"


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One assistant turn to be written. messages: the conversation so far; prompt_ids: its tokens
    by the target's template.
    """

    id: str
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """What the target wrote, without the end token, which num_tokens counts. latency_ms: since the
    request was added.
    """

    id: str
    text: str
    finish_reason: FinishReason
    num_tokens: int
    engine: str
    server: str | None
    latency_ms: float
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class TurnFailure:
    """A turn without an answer, for good, and why."""

    id: str
    reason: Literal["server_refused", "server_failed", "server_saw_other_tokens"]
    detail: str


class Backend(Protocol):
    """Answers turns. capacity: requests at once that keep it busy."""

    capacity: int

    def add(self, request: TurnRequest) -> None:
        """Ask for a turn."""
        ...

    def wait(self) -> Sequence[TurnAnswer | TurnFailure]:
        """What is ready; after a second at most without anything an empty list."""
        ...

    def status(self) -> str:
        """Its health in a few words, for the progress line; empty when there is nothing to say."""
        ...

    def facts(self) -> dict[str, Any]:
        """What answered and how it went, for the manifest."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


@dataclass(slots=True)
class _PartialAnswer:
    started: float
    token_ids: list[int] = field(default_factory=list)


class EngineBackend:
    """The engine in this process."""

    def __init__(self, engine: Engine, chat: Chat, head: str | None) -> None:
        self.capacity = engine.config.max_batch
        self._engine, self._chat, self._head = engine, chat, head
        self._running: dict[str, _PartialAnswer] = {}

    def add(self, request: TurnRequest) -> None:
        """Ask for a turn. Raises InputError when it does not fit into the engine."""
        self._engine.add(Request(request.id, request.prompt_ids, request.params))
        self._running[request.id] = _PartialAnswer(time.perf_counter())

    def wait(self) -> list[TurnAnswer]:
        """Step until an answer is whole."""
        done: list[TurnAnswer] = []
        while self._running and not done:
            for update in self._engine.step():
                partial = self._running[update.request_id]
                partial.token_ids += update.token_ids
                if update.finish_reason is not None:
                    done.append(self._answer(update.request_id, update.finish_reason))
        return done

    def _answer(self, request_id: str, finish_reason: FinishReason) -> TurnAnswer:
        partial = self._running.pop(request_id)
        ids = partial.token_ids
        text = self._chat.decode(ids[:-1] if finish_reason == "stop" else ids)
        latency_ms = 1000 * (time.perf_counter() - partial.started)
        return TurnAnswer(request_id, text, finish_reason, len(ids), ENGINE, None, latency_ms)

    def status(self) -> str:
        """Nothing: the engine works or the process ends."""
        return ""

    def facts(self) -> dict[str, Any]:
        """The engine and its head; neither changes an answer."""
        return {"engine": ENGINE, "head": self._head}

    def close(self) -> None:
        """Nothing is held that Python does not release."""
