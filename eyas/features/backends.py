"""Backends of `generate`: the engine in this process, or servers of the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from eyas.artifact import VERSION
from eyas.chat import Chat
from eyas.client import RequestFailure, unbroken
from eyas.engine.engine import Engine
from eyas.engine.request import Request
from eyas.errors import TemplateError
from eyas.features.conversation import Sampling, TurnAnswer, TurnRequest
from eyas.features.fleet import ClientConfig, FleetServer, PromptMismatch, refused_is_unfit
from eyas.model.library import build
from eyas.records import Message

ENGINE = f"eyas {VERSION}"
# do servers see the tokens of the target's template?
PROBES: tuple[tuple[Message, ...], ...] = (
    ({"role": "user", "content": "Name a colour."},),
    (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Another one?"},
    ),
)


class EngineBackend:
    """capacity: concurrent requests that keep the engine busy."""

    def __init__(self, engine: Engine, head: str | None) -> None:
        self.capacity = engine.config.max_batch
        self._engine, self._head = engine, head
        self._running: dict[str, tuple[float, list[int]]] = {}  # start, tokens

    def add(self, request: TurnRequest) -> None:
        """Raises InputError for a request that does not fit."""
        self._engine.add(Request(request.id, request.prompt_ids, request.params))
        self._running[request.id] = time.perf_counter(), []

    def wait(self) -> list[TurnAnswer]:
        done: list[TurnAnswer] = []
        while self._running and not done:
            for update in self._engine.step():
                started, ids = self._running[update.request_id]
                ids += update.token_ids
                if reason := update.finish_reason:
                    del self._running[update.request_id]
                    ms = 1000 * (time.perf_counter() - started)
                    made = TurnAnswer(update.request_id, tuple(ids), None, reason, ENGINE, None, ms)
                    done.append(made)
        return done

    def status(self) -> str:
        return ""

    def facts(self) -> dict[str, Any]:
        return {"engine": ENGINE, "computed_by": self.computed_by()["here"], "head": self._head}

    def computed_by(self) -> dict[str, str]:
        return {"here": f"{ENGINE}, decoder {build()}"}

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TargetProof:
    """What a server must match: fingerprint, room, our prompt tokens of each probe."""

    fingerprint: str
    max_length: int
    probes: tuple[TurnRequest, ...]
    end_ids: tuple[int, ...]


class TargetServer(FleetServer[TurnRequest, TurnAnswer]):
    def __init__(self, url: str, config: ClientConfig, proof: TargetProof) -> None:
        super().__init__(url, config)
        self._sends_tokens, self._proof = config.send == "tokens", proof

    async def check(self) -> None:
        card, proof = await self.describe(), self._proof
        own = card.get("eyas")
        served = own.get("target_fingerprint") if isinstance(own, dict) else None
        if served and served != proof.fingerprint:
            what = f"serves another target ({served}, not {proof.fingerprint})"
            raise RequestFailure("unfit", what)
        room = card.get("max_model_len")
        if isinstance(room, int) and room < proof.max_length:
            what = f"holds {room} tokens a request, fewer than max_length {proof.max_length}"
            raise RequestFailure("unfit", what)
        for probe in proof.probes:
            with refused_is_unfit("one token"):
                await self.reply(probe)

    async def reply(self, request: TurnRequest) -> TurnAnswer:
        started, params = time.perf_counter(), request.params
        body: dict[str, Any] = {
            "model": self.model,
            "return_token_ids": True,
            "temperature": params.temperature,
            "max_tokens": params.max_tokens,
        }
        if params.temperature > 0:  # no field without effect: not every server knows it
            body["seed"] = params.seed
            body |= {"top_p": params.top_p} if params.top_p < 1 else {}
            body |= {"top_k": params.top_k} if params.top_k > 0 else {}
        if self._sends_tokens:
            content = await self.post("/completions", {**body, "prompt": list(request.prompt_ids)})
        else:
            messages = list(request.messages)
            content = await self.post("/chat/completions", {**body, "messages": messages})
        answer_ids, choice = self._read(content, request)
        message = None if choice.message is None else choice.message.parts()
        latency_ms = 1000 * (time.perf_counter() - started)
        reason: Literal["stop", "length"] = "length" if choice.finish_reason == "length" else "stop"
        return TurnAnswer(
            request.id, answer_ids, message, reason, self.engine, self.url, latency_ms
        )

    def _read(self, content: Any, request: TurnRequest) -> tuple[tuple[int, ...], AnswerChoice]:
        """The answer's tokens. Raises RequestFailure, also where the server saw another prompt."""
        try:
            body = AnswerBody.model_validate(unbroken(content))
        except (ValidationError, RecursionError) as error:
            raise RequestFailure("broken", "answers what is no completion") from error
        choice = body.choices[0]
        seen = choice.prompt_token_ids or body.prompt_token_ids
        if seen is None or choice.token_ids is None:
            raise RequestFailure(
                "unfit",
                "gives no token ids: it has to know `return_token_ids`, as vLLM, SGLang and "
                "`eyas serve` do",
            )
        if tuple(seen) != request.prompt_ids:
            raise PromptMismatch(seen, request.prompt_ids)
        is_truncated = choice.finish_reason == "length"
        if not is_truncated and not set(choice.token_ids[-1:]) & set(self._proof.end_ids):
            raise RequestFailure("unfit", "leaves out the token that ended an answer")
        if not choice.token_ids:
            raise RequestFailure("broken", "answers without a token")
        return tuple(choice.token_ids), choice


class AnswerMessage(BaseModel):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def parts(self) -> dict[str, Any]:
        given = self.model_dump(exclude_none=True)
        return {"role": "assistant", "content": "", **{k: v for k, v in given.items() if v}}


class AnswerChoice(BaseModel):
    """prompt_token_ids: here in completions and in SGLang's chats."""

    finish_reason: Literal["stop", "length", "tool_calls"]
    message: AnswerMessage | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class AnswerBody(BaseModel):
    """prompt_token_ids: here in vLLM's chats."""

    choices: list[AnswerChoice] = Field(min_length=1, max_length=1)
    prompt_token_ids: list[int] | None = None


def probes(chat: Chat, samplings: Sequence[Sampling]) -> tuple[TurnRequest, ...]:
    """The first requests to servers: every sampling, and several turns."""
    first, *others = PROBES
    asked = [(first, one) for one in samplings] + [(probe, samplings[0]) for probe in others]
    found: list[TurnRequest] = []
    for messages, sampling in asked:
        with suppress(TemplateError):  # some templates take no system prompt
            ids = tuple(chat.prompt_ids(messages))
            params = sampling.params(max_tokens=1, seed=1)
            found.append(TurnRequest(f"probe-{len(found)}", messages, ids, params))
    return tuple(found)
