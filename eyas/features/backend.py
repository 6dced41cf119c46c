"""What answers: requests in, answers out, in whatever order they are ready. The engine in this
process is one; see `fleet`.

Knows requests for one assistant turn and the engine. Does not know conversations, rows or how
servers are spoken to.
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
Failure = Literal["server_refused", "server_failed", "server_saw_other_tokens"]


@dataclass(frozen=True, slots=True)
class Asked:
    """One assistant turn to be written. messages are what was said so far, prompt_ids their tokens
    by the target's template.
    """

    id: str
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Replied:
    """What the target wrote, end token left out of the text and counted in num_tokens. latency_ms:
    since it was asked for.
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
class Unanswered:
    """A turn that nobody answers, and why."""

    id: str
    reason: Failure
    detail: str


class Backend(Protocol):
    """Answers turns. capacity: how many are worth asking for at once."""

    capacity: int

    def add(self, asked: Asked) -> None:
        """Ask for a turn."""
        ...

    def wait(self) -> Sequence[Replied | Unanswered]:
        """What has been answered since: after a second at the latest where nothing is, then empty."""
        ...

    def status(self) -> str:
        """In a few words for people who watch; empty when there is nothing to say."""
        ...

    def facts(self) -> dict[str, Any]:
        """Who answers and how it went, for the manifest."""
        ...

    def close(self) -> None:
        """Give back what is held."""
        ...


@dataclass(slots=True)
class _Writing:
    """An answer on its way."""

    started: float
    token_ids: list[int] = field(default_factory=list)


class EngineBackend:
    """The engine in this process."""

    def __init__(self, engine: Engine, chat: Chat, head: str | None) -> None:
        self.capacity = engine.config.max_batch
        self._engine, self._chat, self._head = engine, chat, head
        self._running: dict[str, _Writing] = {}

    def add(self, asked: Asked) -> None:
        """Ask for a turn. Raises InputError when it does not fit into the engine."""
        self._engine.add(Request(asked.id, asked.prompt_ids, asked.params))
        self._running[asked.id] = _Writing(time.perf_counter())

    def wait(self) -> list[Replied]:
        """Step until an answer is whole."""
        done: list[Replied] = []
        while self._running and not done:
            for update in self._engine.step():
                writing = self._running[update.request_id]
                writing.token_ids += update.token_ids
                if update.finish_reason is not None:
                    done.append(self._reply(update.request_id, update.finish_reason))
        return done

    def _reply(self, request_id: str, finish_reason: FinishReason) -> Replied:
        writing = self._running.pop(request_id)
        ids = writing.token_ids
        text = self._chat.decode(ids[:-1] if finish_reason == "stop" else ids)
        latency_ms = 1000 * (time.perf_counter() - writing.started)
        return Replied(request_id, text, finish_reason, len(ids), ENGINE, None, latency_ms)

    def status(self) -> str:
        """The engine is well or the process is dead."""
        return ""

    def facts(self) -> dict[str, Any]:
        """The engine and the head it speculates with; neither changes an answer."""
        return {"engine": ENGINE, "head": self._head}

    def close(self) -> None:
        """Nothing is held that Python does not give back."""
