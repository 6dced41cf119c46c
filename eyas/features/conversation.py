"""Conversations and their turns: from a prompt to requests, from replies to rows."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from eyas.chat import Chat
from eyas.engine.request import FinishReason, SamplingParams
from eyas.errors import InputError, TemplateError
from eyas.features.answers import JournalEntry
from eyas.features.marks import mark
from eyas.privacy.detector import LeakDetector
from eyas.privacy.pii import RANK
from eyas.records import Answer, Message, Origin, Prompt
from eyas.settings import Settings

# marks that end a conversation, and the reason of its dropped turns (users go on after a refusal)
ENDS = {
    "truncated": "earlier_turn_cut",
    "looping": "earlier_turn_marked",
    "empty": "earlier_turn_marked",
}
SEED_BITS = 31  # what every server takes


class Sampling(Settings):
    """How a share of the conversations is sampled. temperature 0 is greedy; top_k 0 and top_p 1
    keep all tokens.
    """

    share: float = Field(default=1.0, gt=0, le=1)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @model_validator(mode="after")
    def _in_range(self) -> Sampling:
        try:
            self.params(1, None)
            return self
        except InputError as error:
            raise ValueError(f"{error.what}: {error.hint}") from error

    def params(self, max_tokens: int, seed: int | None) -> SamplingParams:
        if self.temperature == 0:
            return SamplingParams(max_tokens=max_tokens)
        share = self.temperature, self.top_k, self.top_p
        return SamplingParams(*share, seed=seed, max_tokens=max_tokens)


def sampling_of(
    prompt: Prompt, samplings: Sequence[Sampling], number: int = 0, of: int = 1
) -> Sampling:
    """The sampling of a conversation: shares are drawn by a hash of the prompt; the `of`
    conversations of one prompt spread evenly over them.
    """
    digest = hashlib.sha256(
        repr((prompt.system, prompt.turns)).encode("utf-8", "surrogatepass")
    ).digest()
    point = (int.from_bytes(digest[:8], "big") / 2**64 + number / of) % 1.0
    for one in samplings:
        point -= one.share
        if point < 0:
            return one
    return samplings[-1]


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One assistant turn to write: the messages so far, their tokens, and the answer row's key."""

    id: str
    messages: tuple[Message, ...]
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    key: str = ""


@dataclass(frozen=True, slots=True)
class TurnAnswer:
    """answer_ids: with the end token, if any. message: from a server's parsers. latency_ms: since
    the request was added.
    """

    id: str
    answer_ids: tuple[int, ...]
    message: dict[str, Any] | None
    finish_reason: FinishReason
    engine: str
    server: str | None
    latency_ms: float


@dataclass(frozen=True, slots=True)
class TurnFailure:
    id: str
    reason: Literal["server_refused", "server_failed", "server_saw_other_tokens"]
    detail: str


class Conversation:
    """A prompt with its answered and dropped turns."""

    def __init__(self, prompt: Prompt, part: int, at: int, number: int = 0) -> None:
        """at: the place in the part. number: among the prompt's conversations."""
        self.prompt, self.part, self.at, self.number = prompt, part, at, number
        self.messages: list[Message] = (
            [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
        )
        self.turn = 0  # the next one
        self._num_dropped = 0
        self._entry = JournalEntry(at)

    @property
    def is_over(self) -> bool:
        return self.turn + self._num_dropped == len(self.prompt.turns)

    def add(self, answer: Answer, origin: Origin) -> None:
        assert self._entry.answer is None, "an answer is written before the next request"
        self._entry.answer, self._entry.origin = answer, origin
        self.messages = list(answer.messages)
        self.turn += 1

    def drop_rest(self, reason: str, detail: str = "", later: str | None = None) -> None:
        """Drop all remaining turns, a row each. later: the reason for all but the first."""
        for turn in range(self.turn + self._num_dropped, len(self.prompt.turns)):
            where = {"prompt_id": self.prompt.id, "conversation": self.number, "turn": turn}
            self._entry.dropped.append({**where, "reason": reason, "detail": detail})
            self._num_dropped += 1
            if later is not None:
                reason, detail = later, ""

    def take_entry(self) -> JournalEntry:
        """What is new since the last call, for the journal."""
        entry, self._entry = self._entry, JournalEntry(self.at)
        return entry

    def restore(self, entry: JournalEntry) -> None:
        if entry.answer is not None:
            assert (entry.answer.prompt_id, entry.answer.turn) == (self.prompt.id, self.turn)
            self.messages = list(entry.answer.messages)
            self.turn += 1
        self._num_dropped += len(entry.dropped)


@dataclass(frozen=True)
class TurnRules:
    """How conversations become requests, and replies rows.

    target: fingerprint. max_tokens: of an answer; max_length: with its prompt. sends_messages:
    servers render the template, so control tokens in messages would act.
    """

    chat: Chat
    target: str
    samplings: Sequence[Sampling]
    max_tokens: int
    max_length: int
    leaks: LeakDetector
    sends_messages: bool
    answers_per_prompt: int

    def request(self, conversation: Conversation) -> TurnRequest | None:
        """The request for the next turn, or None. Drops turns that do not fit."""
        prompt = conversation.prompt
        if conversation.is_over:
            return None
        messages: list[Message] = [
            *conversation.messages,
            {"role": "user", "content": prompt.turns[conversation.turn]},
        ]
        try:
            control = self.chat.control_text(messages) if self.sends_messages else []
            prompt_ids = self.chat.prompt_ids(messages)
        except TemplateError as error:
            conversation.drop_rest("template_refused", error.what)
            return None
        if control:
            conversation.drop_rest("control_text", ", ".join(control))
            return None
        if len(prompt_ids) >= self.max_length:
            detail = f"{len(prompt_ids)} tokens, the limit is {self.max_length - 1}"
            conversation.drop_rest("context_full", detail)
            return None
        number = conversation.number
        sampling = sampling_of(prompt, self.samplings, number, self.answers_per_prompt)
        key = self._key(prompt_ids, sampling, number)
        limit = min(self.max_tokens, self.max_length - len(prompt_ids))
        return TurnRequest(
            f"{prompt.id}/{number}/{conversation.turn}",
            tuple(messages),
            tuple(prompt_ids),
            sampling.params(limit, seed=int(key, 16) % 2**SEED_BITS),
            key,
        )

    def accept(
        self, conversation: Conversation, request: TurnRequest, reply: TurnAnswer | TurnFailure
    ) -> None:
        """Add the answer as a row, or drop the turn: no answer, or personal data that its prompt
        lacked. Ends conversations whose next prompt cannot hold the answer.
        """
        if isinstance(reply, TurnFailure):
            conversation.drop_rest(reply.reason, reply.detail, later="earlier_turn_dropped")
            return
        written = reply.answer_ids[: -1 if reply.finish_reason == "stop" else None]
        text = self.chat.decode(written)
        found = self.leaks([message["content"] for message in request.messages], text)
        if found:
            gravest = min((one.type for one in found), key=RANK.__getitem__)
            places = ", ".join(f"{one.type} at {one.start}-{one.end}" for one in found)
            reason = f"pii.{gravest.lower()}"
            conversation.drop_rest(reason, places, later="earlier_turn_dropped")
            return
        prompt, params = conversation.prompt, request.params
        message: Any = reply.message or {"role": "assistant", "content": text}
        answer = Answer(
            key=request.key,
            prompt_id=prompt.id,
            source=prompt.source,
            licence=prompt.licence,
            turn=conversation.turn,
            messages=(*request.messages, message),
            prompt_ids=request.prompt_ids,
            answer_ids=reply.answer_ids,
            finish_reason=reply.finish_reason,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            seed=params.seed,
            # without thoughts, where a server's parser removed them
            marked=mark(message.get("content") or text, reply.finish_reason),
        )
        origin = Origin(
            key=answer.key,
            prompt_id=prompt.id,
            turn=answer.turn,
            engine=reply.engine,
            server=reply.server,
            latency_ms=round(reply.latency_ms, 1),
        )
        conversation.add(answer, origin)
        if answer.marked in ENDS:
            conversation.drop_rest(ENDS[answer.marked])
        elif message.get("tool_calls"):
            conversation.drop_rest("earlier_turn_called", "it calls a tool, and has no result")
        elif reply.message is None and self.chat.has_control(written):
            conversation.drop_rest(
                "earlier_turn_in_parts",
                "control tokens separate its parts: servers with parsers tell them apart",
            )

    def _key(self, prompt_ids: Sequence[int], sampling: Sampling, number: int) -> str:
        """Equal for the same target, prompt tokens, sampling and conversation number."""
        params = sampling.params(self.max_tokens, None)
        what = (
            self.target,
            list(prompt_ids),
            params.temperature,
            params.top_p,
            params.top_k,
            params.max_tokens,
            *([number] if number else []),
        )
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]
