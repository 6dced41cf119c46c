"""The three forms of an answer, whole or in server-sent events.

OpenAI's chat completions and text completions, and SGLang's /generate.

What all chunks of an answer share is written once: a chunk costs one small json.dumps.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

from eyas.engine.request import Request, TokenLogprob
from eyas.serve.completion import (
    CompletionOptions,
    CompletionWriter,
    Delta,
    RoundTrace,
    Usage,
)
from eyas.serve.protocol import GenerateRequest
from eyas.serve.tokenizer import Tokenizer


class _OpenAIWriter(CompletionWriter):
    """What the chunks and objects of both OpenAI forms share."""

    kind, chunk_kind, prefix = "", "", ""

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, options: CompletionOptions
    ) -> None:
        super().__init__(requests, tokenizer, options)
        self._shared = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": options.model,
        }
        self._head = (
            f'data: {json.dumps({**self._shared, "object": self.chunk_kind})[:-1]}, "choices": ['
        )
        self._tail = "]}\n\n" if options.usage_in == "none" else '], "usage": null}\n\n'

    def write_usage(self, usage: Usage) -> str:
        return self._event("", usage)

    def _event(self, choice: str, usage: Usage | None, trace: RoundTrace | None = None) -> str:
        tail = self._tail if usage is None else f'], "usage": {json.dumps(usage)}}}\n\n'
        if trace is not None:
            tail = f'], "eyas": {json.dumps(_round(trace, self.tokenizer))}{tail[1:]}'
        return f"{self._head}{choice}{tail}"

    def _object(self, choices: list[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        return {**self._shared, "object": self.kind, "choices": choices, "usage": usage}


class ChatWriter(_OpenAIWriter):
    """The answer of /v1/chat/completions.

    The first chunk of a choice holds the role too, so that no chunk comes before the first token.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, options: CompletionOptions
    ) -> None:
        super().__init__(requests, tokenizer, options)
        self._begun: set[int] = set()
        self._num_calls: dict[int, int] = {}

    def write(self, delta: Delta, usage: Usage | None) -> str:
        # clients open a text at the first content that is not null, where a call alone may follow
        is_void = not delta.text and self.options.reads_calls
        fields = f'"content": {"null" if is_void else json.dumps(delta.text)}'
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            fields = f'"role": "assistant", {fields}'
        if delta.calls:
            fields += f', "tool_calls": {json.dumps(self._numbered(delta))}'
        logprobs = (
            ""
            if delta.logprobs is None
            else f', "logprobs": {json.dumps(self._logprobs(delta.logprobs))}'
        )
        head = f'{{"index": {delta.choice}, "delta": {{'
        choice = f'{head}{fields}}}{logprobs}, "finish_reason": null}}'
        event = self._event(choice, usage, delta.round)
        if delta.ending is None:
            return event
        return event + self._event(f'{head}}}, "finish_reason": "{delta.ending}"}}', usage)

    def write_whole(self, deltas: dict[int, list[Delta]], usage: Usage) -> dict[str, Any]:
        return self._object([self._choice(number, deltas[number]) for number in deltas], usage)

    def _choice(self, number: int, deltas: list[Delta]) -> dict[str, Any]:
        text = _joined_text(deltas)
        calls = [call for delta in deltas for call in delta.calls]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.to_json() for call in calls]}
        logprobs = _joined_logprobs(deltas)
        return {
            "index": number,
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
            "finish_reason": deltas[-1].ending,
        }

    def _numbered(self, delta: Delta) -> list[dict[str, Any]]:
        """Clients put the chunks of a call together by its index."""
        first = self._num_calls.get(delta.choice, 0)
        self._num_calls[delta.choice] = first + len(delta.calls)
        return [
            {"index": first + number, **call.to_json()} for number, call in enumerate(delta.calls)
        ]

    def _logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        return {"content": chat_logprobs(self.tokenizer, logprobs), "refusal": None}


class TextWriter(_OpenAIWriter):
    """/v1/completions. The last chunk of a choice holds its ending too. echoes: the text in front
    of each choice's own, whose tokens stand in front of its logprobs; nothing foretells the first.
    """

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        options: CompletionOptions,
        echoes: Sequence[str] = (),
    ) -> None:
        super().__init__(requests, tokenizer, options)
        self._offsets: dict[int, int] = {}
        self._echoes = dict(enumerate(echoes))  # of choices that have not begun
        self._first_ids = [one.prompt_ids[0] for one in requests for _ in range(one.params.n)]

    def write(self, delta: Delta, usage: Usage | None) -> str:
        logprobs = "null"
        if delta.logprobs is not None:
            logprobs = json.dumps(self._logprobs(delta, delta.logprobs))
        ending = "null" if delta.ending is None else f'"{delta.ending}"'
        text = json.dumps(self._echoes.pop(delta.choice, "") + delta.text)
        choice = (
            f'{{"index": {delta.choice}, "text": {text}, "logprobs": {logprobs}, '
            f'"finish_reason": {ending}}}'
        )
        return self._event(choice, usage, delta.round)

    def write_whole(self, deltas: dict[int, list[Delta]], usage: Usage) -> dict[str, Any]:
        choices = []
        for number, of_choice in deltas.items():
            logprobs = _joined_logprobs(of_choice)
            choices.append(
                {
                    "index": number,
                    "text": self._echoes.pop(number, "") + _joined_text(of_choice),
                    "logprobs": None
                    if logprobs is None
                    else self._logprobs(of_choice[0], logprobs),
                    "finish_reason": of_choice[-1].ending,
                }
            )
        return self._object(choices, usage)

    def _logprobs(self, first: Delta, answered: list[TokenLogprob]) -> dict[str, Any]:
        """Of a choice's delta, or of a whole choice; first: the delta, or the choice's first."""
        known = [*(first.prompt_logprobs or ()), *answered]
        logprobs: list[TokenLogprob | None] = [*known]
        token_ids = [one.token_id for one in known]
        if first.prompt_logprobs is not None:
            logprobs.insert(0, None)
            token_ids.insert(0, self._first_ids[first.choice])
        offsets = [self._offsets.get(first.choice, 0)]
        for token in token_ids:
            offsets.append(offsets[-1] + self.tokenizer.num_characters(token))
        self._offsets[first.choice] = offsets.pop()
        return {
            "tokens": [self._name(token) for token in token_ids],
            "token_logprobs": [one and one.logprob for one in logprobs],
            "top_logprobs": [one and self._top(one) for one in logprobs],
            "text_offset": offsets,
        }

    def _top(self, logprob: TokenLogprob) -> dict[str, float]:
        return {self._name(token): each for token, each in logprob.top}

    def _name(self, token: int) -> str:
        """A token's text; its bytes where it is a part of a character, or two tokens would share a
        name.
        """
        piece = self.tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class GenerateWriter(CompletionWriter):
    """SGLang's /generate: every event holds the whole text so far, and its counts."""

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: Tokenizer,
        options: CompletionOptions,
        body: GenerateRequest,
    ) -> None:
        super().__init__(requests, tokenizer, options)
        self._body, self._id = body, body.rid or uuid.uuid4().hex
        self._prompt_lengths = [
            len(request.prompt_ids) for request in requests for _ in range(request.params.n)
        ]
        self._deltas: list[list[Delta]] = [[] for _ in self._prompt_lengths]

    def write(self, delta: Delta, usage: Usage | None) -> str:
        self._deltas[delta.choice].append(delta)
        answer = self._answer(delta.choice)
        if self._body.is_many:
            answer["index"] = delta.choice
        return f"data: {json.dumps(answer)}\n\n"

    def write_usage(self, usage: Usage) -> str:
        """Nothing: every event has its counts."""
        return ""

    def write_whole(self, deltas: dict[int, list[Delta]], usage: Usage) -> Any:
        """The answer in one object, or a list of one for each choice."""
        self._deltas = list(deltas.values())
        answers = [self._answer(number) for number in deltas]
        if self._body.is_many:
            return answers
        answers[0]["meta_info"]["spec_verify_ct"] = usage["eyas"]["rounds"]
        return answers[0]

    def _answer(self, number: int) -> dict[str, Any]:
        deltas = self._deltas[number]
        token_ids = [token for delta in deltas for token in delta.token_ids]
        num_tokens, ending = len(token_ids), deltas[-1].ending
        reason: dict[str, Any] | None = None
        if ending is not None:
            is_cut = ending == "length"
            reason = {"type": "length", "length": num_tokens} if is_cut else {"type": "stop"}
        meta: dict[str, Any] = {
            "id": f"{self._id}-{number}" if self._body.is_many else self._id,
            "finish_reason": reason,
            "prompt_tokens": self._prompt_lengths[number],
            "completion_tokens": num_tokens,
        }
        if self._body.return_logprob:
            logprobs = _joined_logprobs(deltas) or []
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                self._triple(one.logprob, one.token_id) for one in logprobs
            ]
            meta["output_top_logprobs"] = [
                [self._triple(logprob, token) for token, logprob in one.top] for one in logprobs
            ]
        return {"text": _joined_text(deltas), "output_ids": token_ids, "meta_info": meta}

    def _triple(self, logprob: float, token: int) -> list[Any]:
        text = None
        if self._body.return_text_in_logprobs:
            text = self.tokenizer.piece(token).decode(errors="replace")
        return [logprob, token, text]


def chat_logprobs(tokenizer: Tokenizer, logprobs: list[TokenLogprob]) -> list[dict[str, Any]]:
    """As chat completions and responses have them."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}

    return [
        {
            **named(one.token_id, one.logprob),
            "top_logprobs": [named(*pair) for pair in one.top],
        }
        for one in logprobs
    ]


def _round(trace: RoundTrace, tokenizer: Tokenizer) -> dict[str, Any]:
    """The origin of each token of a round (drafted and accepted, the target's bonus, or decoded
    plainly), and its tree.
    """
    tree, others = trace.tree, "plain" if trace.tree is None else "bonus"
    num_drafted = 0 if tree is None else len(tree.accepted)
    tokens = [
        {"text": text, "origin": "drafted" if place < num_drafted else others}
        for place, text in enumerate(trace.texts)
    ]
    if tree is None:
        return {"round": {"tokens": tokens, "tree": None}}
    nodes = [
        {
            "parent": parent,
            "text": tokenizer.piece(token).decode(errors="replace"),
            "probability": round(probability, 4),
            "accepted": node in tree.accepted,
        }
        for node, (token, parent, probability) in enumerate(
            zip(tree.token_ids, tree.parents, tree.probabilities, strict=True)
        )
    ]
    return {"round": {"tokens": tokens, "tree": nodes}}


def _joined_text(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def _joined_logprobs(deltas: list[Delta]) -> list[TokenLogprob] | None:
    if deltas[-1].logprobs is None:
        return None
    return [one for delta in deltas for one in delta.logprobs or ()]
