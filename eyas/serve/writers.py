"""The answer to one HTTP request: the engine's updates -> text, calls, counts -> JSON, whole or in
server-sent events. Each sample of each prompt is a choice, in prompt order.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from eyas.engine.request import FinishReason, Request, TokenLogprob, Update
from eyas.serve.fields import CompletionRequest, StreamOptions
from eyas.serve.protocol import ChatRequest, TextRequest
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import Call, CallReader, readable, whole_calls
from eyas.tau import count_round, tau_of

Ending = FinishReason | Literal["tool_calls"]
DONE = "data: [DONE]\n\n"
TOKEN_ID = "token_id:{}"  # vLLM's name of a token by its id


@dataclass(frozen=True, slots=True)
class Delta:
    """What an update adds to a choice. text: its words; parts: words and pieces of calls in order.
    is_first: the choice begins. token_texts: for include_rounds, the text of each token, stop
    strings and calls included.
    """

    update: Update
    text: str
    parts: list[str | Call]
    ending: Ending | None
    is_first: bool
    token_texts: list[str] | None

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


class Choice:
    """The answer of one sample so far. kept: its deltas, where it is not streamed."""

    def __init__(
        self, number: int, request: Request, tokenizer: Tokenizer, body: CompletionRequest
    ) -> None:
        self.number, self.request = number, request
        self.ending: Ending | None = None
        self.num_tokens = 0
        self.kept: list[Delta] = []
        self._has_begun = False
        self._stream = tokenizer.stream(body.skip_special_tokens)
        self._by_token = tokenizer.stream() if body.includes_rounds else None
        self._calls = None
        if isinstance(body, ChatRequest) and body.offered_tools:
            # a required call's prompt ends with the call's opening
            self._calls = CallReader(bool(body.required_tools), not body.parallel_tool_calls)

    def push(self, update: Update) -> Delta:
        """What the update adds; sets `ending` when the sample ends."""
        assert self.ending is None, "an update after the end"
        self.num_tokens += len(update.token_ids)
        is_last, is_first = update.finish_reason is not None, not self._has_begun
        self._has_begun = True
        text = update.text
        if text is None:  # else the engine decodes, where it searches for stop strings
            # an end token is not part of the text
            is_ended = update.finish_reason == "stop"
            text = self._stream.push(update.token_ids[:-1] if is_ended else update.token_ids)
            text += self._stream.finish() if is_last else ""
        parts: list[str | Call] = [text]
        self.ending = update.finish_reason
        if self._calls is not None:
            parts = self._calls.push(text) + (self._calls.finish() if is_last else [])
            text = "".join(part for part in parts if isinstance(part, str))
            if self._calls.is_over or (self._calls.num_calls and self.ending == "stop"):
                self.ending = "tool_calls"
        token_texts = None
        if self._by_token is not None:
            token_texts = [self._by_token.push([token]) for token in update.token_ids]
            if is_last and token_texts:
                token_texts[-1] += self._by_token.finish()
        return Delta(update, text, parts, self.ending, is_first, token_texts)

    def whole(self) -> Delta:
        """The kept deltas as one."""
        first, last = self.kept[0].update, self.kept[-1].update
        logprobs = [one for delta in self.kept for one in delta.update.logprobs or ()]
        update = replace(
            last,
            token_ids=[token for delta in self.kept for token in delta.update.token_ids],
            logprobs=None if last.logprobs is None else logprobs,
            prompt_logprobs=first.prompt_logprobs,
        )
        parts = whole_calls([part for delta in self.kept for part in delta.parts])
        parts = [
            part if self.ending == "length" and part is parts[-1] else readable(part)
            for part in parts
        ]
        text = "".join(part for part in parts if isinstance(part, str))
        if self.ending == "tool_calls" and not any(isinstance(one, Call) for one in parts):
            self.ending = "stop"
        return Delta(update, text, parts, self.ending, True, None)


class CompletionWriter(ABC):
    """The answer to one HTTP request, streamed (`chunk`, `end`) or whole (`keep`, `whole`).

    requests: the engine's. first_at, last_at: perf_counter of the first and last update, seconds.
    """

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, body: CompletionRequest
    ) -> None:
        self.requests = requests
        self.num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.num_reused_tokens = 0
        self.accept_hist: list[int] = []
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.tokenizer = tokenizer
        self.may_call = isinstance(body, ChatRequest) and bool(body.offered_tools)
        samples = [(request, index) for request in requests for index in range(request.params.n)]
        self.choices = [
            Choice(number, request, tokenizer, body) for number, (request, _) in enumerate(samples)
        ]
        self._by_sample = {
            (request.id, index): choice
            for (request, index), choice in zip(samples, self.choices, strict=True)
        }

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    @property
    def num_written(self) -> int:
        """Tokens in the answer: its own, and those of prompts with logprobs."""
        echoes = any(one.params.prompt_logprobs is not None for one in self.requests)
        return self.num_tokens + (self.num_prompt_tokens if echoes else 0)

    @property
    def is_over(self) -> bool:
        return all(choice.ending is not None for choice in self.choices)

    def chunk(self, update: Update) -> str:
        """The server-sent events of an update."""
        choice, delta = self.push(update)
        return self.write(choice, delta) if delta is not None else ""

    def keep(self, update: Update) -> None:
        """Take an update of a whole answer."""
        choice, delta = self.push(update)
        if delta is not None:
            choice.kept.append(delta)

    def push(self, update: Update) -> tuple[Choice, Delta | None]:
        """The choice of an update, and what it adds: None where a call has already ended it."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        if update.num_accepted_drafts is not None:
            count_round(self.accept_hist, update.num_accepted_drafts)
        if update.index == 0:  # others find what this one computed
            self.num_reused_tokens += update.num_reused_tokens
        choice = self._by_sample[update.request_id, update.index]
        return choice, choice.push(update) if choice.ending is None else None

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts, and under `eyas` those of the head's rounds, with tau."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_reused_tokens},
            "eyas": {
                "rounds": sum(self.accept_hist),
                "accept_hist": self.accept_hist,
                "tau": tau_of(self.accept_hist),
            },
        }

    @abstractmethod
    def write(self, choice: Choice, delta: Delta) -> str:
        """The events of a delta, its ending included."""

    @abstractmethod
    def end(self) -> str:
        """The events that follow the last update."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer in one object, after all updates."""


class _OpenAIWriter(CompletionWriter):
    kind, chunk_kind, prefix = "", "", ""

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, body: CompletionRequest
    ) -> None:
        super().__init__(requests, tokenizer, body)
        self._returns_ids = body.return_token_ids
        self._names_ids = body.return_tokens_as_token_ids
        self._shared = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
        }
        self._head = (
            f'data: {json.dumps({**self._shared, "object": self.chunk_kind})[:-1]}, "choices": ['
        )
        options = body.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._always_has_usage = self._has_usage and options.continuous_usage_stats
        self._tail = '], "usage": null}\n\n' if self._has_usage else "]}\n\n"

    def end(self) -> str:
        usage = f'{self._head}], "usage": {json.dumps(self.usage())}}}\n\n'
        return (usage if self._has_usage else "") + DONE

    def _event(self, choice: dict[str, Any], **fields: Any) -> str:
        tail = self._tail
        if self._always_has_usage:
            tail = f'], "usage": {json.dumps(self.usage())}}}\n\n'
        if fields:
            tail = f"], {json.dumps(fields)[1:-1]}{tail[1:]}"
        return f"{self._head}{json.dumps(choice)}{tail}"

    def _round(self, delta: Delta) -> dict[str, Any]:
        """For include_rounds: each token's origin (a draft of head or text, the target's bonus, or
        plain: no draft was judged), the tree (None without drafts), whether the head drafted.
        """
        if delta.token_texts is None:
            return {}
        tree, nodes = delta.update.tree, None
        origins, others = list[str](), "plain"
        if tree is not None:
            others = "bonus" if tree.token_ids else "plain"
            origins = ["text" if tree.sources[n] == "text" else "drafted" for n in tree.accepted]
            drafted = zip(
                tree.token_ids, tree.parents, tree.probabilities, tree.sources, strict=True
            )
            nodes = [
                {
                    "parent": parent,
                    "text": self.tokenizer.piece(token).decode(errors="replace"),
                    "probability": None if probability is None else round(probability, 4),
                    "source": source,
                    "accepted": node in tree.accepted,
                }
                for node, (token, parent, probability, source) in enumerate(drafted)
            ]
        origins += [others] * (len(delta.token_texts) - len(origins))
        tokens = [
            {"text": text, "origin": origin}
            for text, origin in zip(delta.token_texts, origins, strict=True)
        ]
        is_by_head = delta.update.num_accepted_drafts is not None
        return {"eyas": {"round": {"tokens": tokens, "tree": nodes, "head": is_by_head}}}

    def _object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._shared, "object": self.kind, "choices": choices, "usage": self.usage()}


class ChatWriter(_OpenAIWriter):
    """The answer of /v1/chat/completions. The first chunk of a choice also holds the role: no chunk
    comes before the first token.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, body: ChatRequest
    ) -> None:
        super().__init__(requests, tokenizer, body)
        self._num_calls = [0] * len(self.choices)

    def write(self, choice: Choice, delta: Delta) -> str:
        # clients begin a text at the first content that is not null, though only a call may follow
        message: dict[str, Any] = {"role": "assistant"} if delta.is_first else {}
        message["content"] = None if self.may_call and not delta.text else delta.text
        for one in delta.calls:  # clients put the chunks of a call together by its index
            self._num_calls[choice.number] += one.name is not None
            index = self._num_calls[choice.number] - 1
            message.setdefault("tool_calls", []).append({"index": index, **one.to_json()})
        written: dict[str, Any] = {"index": choice.number, "delta": message}
        if delta.update.logprobs is not None:
            written["logprobs"] = self._logprobs(delta.update.logprobs)
        written["finish_reason"] = None
        fields = self._round(delta)
        if self._returns_ids:
            written["token_ids"] = delta.update.token_ids
            if delta.is_first:
                fields["prompt_token_ids"] = choice.request.prompt_ids
        event = self._event(written, **fields)
        if delta.ending is None:
            return event
        last = {"index": choice.number, "delta": {}, "finish_reason": delta.ending}
        return event + self._event(last)

    def whole(self) -> dict[str, Any]:
        answer = self._object([self._choice(choice) for choice in self.choices])
        if self._returns_ids:
            answer["prompt_token_ids"] = list(self.requests[0].prompt_ids)
        return answer

    def _choice(self, choice: Choice) -> dict[str, Any]:
        answer = choice.whole()
        text, logprobs = answer.text, answer.update.logprobs
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls := answer.calls:
            message |= {"content": text or None, "tool_calls": [call.to_json() for call in calls]}
        written = {
            "index": choice.number,
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
            "finish_reason": choice.ending,
        }
        return {**written, "token_ids": answer.update.token_ids} if self._returns_ids else written

    def _logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        content = chat_logprobs(self.tokenizer, logprobs, self._names_ids)
        return {"content": content, "refusal": None}


class TextWriter(_OpenAIWriter):
    """The answer of /v1/completions. The last chunk of a choice also holds its ending. With echo,
    the prompt comes before the text, and its tokens before the logprobs; the first has none.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, body: TextRequest
    ) -> None:
        super().__init__(requests, tokenizer, body)
        self._offsets = [0] * len(self.choices)
        self._echoes = [
            ("" if not body.echo else one if isinstance(one, str) else tokenizer.decode(one))
            for one in body.prompts
            for _ in range(body.n)
        ]

    def write(self, choice: Choice, delta: Delta) -> str:
        return self._event(self._choice(choice, delta), **self._round(delta))

    def whole(self) -> dict[str, Any]:
        return self._object([self._choice(choice, choice.whole()) for choice in self.choices])

    def _choice(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        written: dict[str, Any] = {
            "index": choice.number,
            "text": self._echoes[choice.number] + delta.text if delta.is_first else delta.text,
            "logprobs": self._logprobs(choice, delta.update),
            "finish_reason": delta.ending,
        }
        if self._returns_ids:
            written["token_ids"] = delta.update.token_ids
            if delta.is_first:
                written["prompt_token_ids"] = list(choice.request.prompt_ids)
        return written

    def _logprobs(self, choice: Choice, update: Update) -> dict[str, Any] | None:
        if update.logprobs is None:
            return None
        known = [*(update.prompt_logprobs or ()), *update.logprobs]
        logprobs: list[TokenLogprob | None] = [*known]
        token_ids = [one.token_id for one in known]
        if update.prompt_logprobs is not None:
            logprobs.insert(0, None)
            token_ids.insert(0, choice.request.prompt_ids[0])
        offsets = [self._offsets[choice.number]]
        for token in token_ids:
            offsets.append(offsets[-1] + self.tokenizer.num_characters(token))
        self._offsets[choice.number] = offsets.pop()
        return {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [one and one.logprob for one in logprobs],
            "top_logprobs": [
                one and {self._name(token): logprob for token, logprob in one.top}
                for one in logprobs
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """A token's text; its bytes where it is part of a character: names are unique."""
        if self._names_ids:
            return TOKEN_ID.format(token)
        piece = self.tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(
    tokenizer: Tokenizer, logprobs: list[TokenLogprob], names_ids: bool = False
) -> list[dict[str, Any]]:
    """Log-probabilities in OpenAI's form. names_ids: tokens by their ids."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token)
        name = TOKEN_ID.format(token) if names_ids else piece.decode(errors="replace")
        return {"token": name, "logprob": logprob, "bytes": list(piece)}

    return [
        {**named(one.token_id, one.logprob), "top_logprobs": [named(*pair) for pair in one.top]}
        for one in logprobs
    ]
