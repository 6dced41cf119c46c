"""Conversations on their way: the next turn to ask for, and what becomes of its answer.

Knows prompts, the target's template and the rules of the data. Does not know who answers or how
rows lie on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.chat import Chat
from eyas.engine.request import SamplingParams
from eyas.errors import ConfigError, InputError, TemplateError
from eyas.features.backend import Asked, Replied, Unanswered
from eyas.features.marks import mark
from eyas.features.parts import Entry
from eyas.privacy.finding import Finding
from eyas.privacy.leaks import Leaks
from eyas.privacy.policy import RANK
from eyas.records import Answer, Message, Origin, Prompt

# Of turns without an answer. "pii.<type>" for an answer with what was not in its prompt, and what
# `backend.Failure` lists.
Reason = Literal[
    "context_full",
    "template_refused",
    "control_text",
    "earlier_turn_cut",
    "earlier_turn_marked",
    "earlier_turn_dropped",
]
# After a refusal users do go on, and the target's words in that context are its own. From the
# others nobody goes on.
ENDS: dict[str, Reason] = {
    "truncated": "earlier_turn_cut",
    "looping": "earlier_turn_marked",
    "empty": "earlier_turn_marked",
}
SEED_BITS = 31  # what every server takes


class Sampling(BaseModel):
    """How a share of the conversations is sampled. temperature 0 is greedy; top_k 0 and top_p 1
    keep the whole vocabulary.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(default=1.0, gt=0, le=1)
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    @model_validator(mode="after")
    def _in_range(self) -> Sampling:
        try:
            self.params(1, None)
        except InputError as error:
            raise ValueError(f"{error.what}: {error.hint}") from error
        return self

    def params(self, max_tokens: int, seed: int | None) -> SamplingParams:
        """In the engine's terms: of a greedy answer nothing else matters."""
        if self.temperature == 0:
            return SamplingParams(max_tokens=max_tokens)
        return SamplingParams(
            self.temperature, self.top_k, self.top_p, seed=seed, max_tokens=max_tokens
        )


def check_shares(samplings: Sequence[Sampling]) -> None:
    """Raises ConfigError unless the shares are all there is."""
    total = sum(one.share for one in samplings)
    if abs(total - 1) > 1e-6:
        raise ConfigError(
            f"sampling: the shares sum to {total:g}", "let them sum to 1, e.g. 0.7 and 0.3"
        )


def sampling_of(prompt: Prompt, samplings: Sequence[Sampling]) -> Sampling:
    """The share that a conversation falls into: by a hash of what its user says, whatever else
    there is and whoever asks.
    """
    digest = hashlib.sha256(
        repr((prompt.system, prompt.turns)).encode("utf-8", "surrogatepass")
    ).digest()
    point = int.from_bytes(digest[:8], "big") / 2**64
    for one in samplings:
        point -= one.share
        if point < 0:
            return one
    return samplings[-1]


class Conversation:
    """A prompt on its way: what has been said, and what came of its turns since they were last
    written down.
    """

    def __init__(self, prompt: Prompt, part: int, at: int) -> None:
        """part, at: its place in the artifact, and in that part."""
        self.prompt, self.part, self.at = prompt, part, at
        self.messages: list[Message] = (
            [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
        )
        self.turn = 0  # the next one, which is the number of those answered
        self._num_dropped = 0
        self._news = Entry(at)

    @property
    def is_over(self) -> bool:
        return self.turn + self._num_dropped == len(self.prompt.turns)

    def add(self, answer: Answer, origin: Origin) -> None:
        """Go on behind an answer."""
        assert self._news.answer is None, "an answer is written down before the next is asked for"
        self._news.answer, self._news.origin = answer, origin
        self.messages = list(answer.messages)
        self.turn += 1

    def drop_rest(self, reason: str, detail: str = "") -> None:
        """Give up the turns that are left, each as a row of its own."""
        for turn in range(self.turn + self._num_dropped, len(self.prompt.turns)):
            self._drop(turn, reason, detail)

    def drop_turn(self, reason: str, detail: str) -> None:
        """Leave out the answer to this turn, and give up the rest, which would stand on it."""
        self._drop(self.turn, reason, detail)
        self.drop_rest("earlier_turn_dropped")

    def news(self) -> Entry:
        """What is to be written down; it is forgotten here."""
        news, self._news = self._news, Entry(self.at)
        return news

    def restore(self, entry: Entry) -> None:
        """Take it that this has happened."""
        if entry.answer is not None:
            assert (entry.answer.prompt_id, entry.answer.turn) == (self.prompt.id, self.turn)
            self.messages = list(entry.answer.messages)
            self.turn += 1
        self._num_dropped += len(entry.dropped)

    def _drop(self, turn: int, reason: str, detail: str) -> None:
        row: dict[str, Any] = {
            "prompt_id": self.prompt.id,
            "turn": turn,
            "reason": reason,
            "detail": detail,
        }
        self._news.dropped.append(row)
        self._num_dropped += 1


class Questioner:
    """Turns conversations into requests and answers into rows."""

    def __init__(
        self,
        chat: Chat,
        target: str,
        samplings: Sequence[Sampling],
        limits: tuple[int, int],
        leaks: Leaks,
        is_templated: bool,
    ) -> None:
        """target: its fingerprint, part of each row's key. limits: tokens of an answer, and of
        prompt and answer together.

        is_templated: who answers is sent messages and renders them itself, and so obeys control
        tokens in them."""
        self._chat, self._target, self._samplings, self._leaks = chat, target, samplings, leaks
        self._max_tokens, self._max_length = limits
        self._is_templated = is_templated

    def ask(self, conversation: Conversation) -> Asked | None:
        """The request for the next turn; None when there is none, with what is left counted as
        dropped.
        """
        prompt = conversation.prompt
        if conversation.is_over:
            return None
        messages: list[Message] = [
            *conversation.messages,
            {"role": "user", "content": prompt.turns[conversation.turn]},
        ]
        try:
            control = self._chat.control_text(messages) if self._is_templated else []
            prompt_ids = self._chat.prompt_ids(messages)
        except TemplateError as error:
            conversation.drop_rest("template_refused", error.what)
            return None
        if control:
            conversation.drop_rest("control_text", ", ".join(control))
            return None
        if len(prompt_ids) >= self._max_length:
            conversation.drop_rest(
                "context_full", f"{len(prompt_ids)} tokens, the limit is {self._max_length - 1}"
            )
            return None
        sampling = sampling_of(prompt, self._samplings)
        seed = int(self._key(prompt_ids, sampling), 16) % 2**SEED_BITS
        params = sampling.params(min(self._max_tokens, self._max_length - len(prompt_ids)), seed)
        return Asked(f"{prompt.id}/{conversation.turn}", tuple(messages), tuple(prompt_ids), params)

    def take(self, conversation: Conversation, asked: Asked, reply: Replied | Unanswered) -> None:
        """Add the answer as a row, marked or not, or drop it for what it holds or for not being
        there.
        """
        if isinstance(reply, Unanswered):
            conversation.drop_turn(reply.reason, reply.detail)
            return
        if leaked := self._leaks([message["content"] for message in asked.messages], reply.text):
            conversation.drop_turn(*_told(leaked))
            return
        prompt, params = conversation.prompt, asked.params
        answer = Answer(
            key=self._key(asked.prompt_ids, sampling_of(prompt, self._samplings)),
            prompt_id=prompt.id,
            source=prompt.source,
            licence=prompt.licence,
            turn=conversation.turn,
            messages=(*asked.messages, {"role": "assistant", "content": reply.text}),
            finish_reason=reply.finish_reason,
            temperature=params.temperature,
            num_prompt_tokens=len(asked.prompt_ids),
            num_answer_tokens=reply.num_tokens,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            seed=params.seed,
            marked=mark(reply.text, reply.finish_reason),
        )
        origin = Origin(
            key=answer.key,
            prompt_id=prompt.id,
            turn=answer.turn,
            engine=reply.engine,
            server=reply.server,
            latency_ms=round(reply.latency_ms, 1),
            attempts=reply.attempts,
        )
        conversation.add(answer, origin)
        if answer.marked in ENDS:
            conversation.drop_rest(ENDS[answer.marked])

    def _key(self, prompt_ids: Sequence[int], sampling: Sampling) -> str:
        """Equal keys are equal work: the same target, the same tokens before the answer by its
        template, the same sampling.
        """
        params = sampling.params(self._max_tokens, None)
        what = (
            self._target,
            list(prompt_ids),
            params.temperature,
            params.top_p,
            params.top_k,
            params.max_tokens,
        )
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _told(found: Sequence[Finding]) -> tuple[str, str]:
    """Reason and detail of an answer left out for what was found in it: by type and place."""
    gravest = min((one.type for one in found), key=RANK.__getitem__)
    return f"pii.{gravest.lower()}", ", ".join(
        f"{one.type} at {one.start}-{one.end}" for one in found
    )
