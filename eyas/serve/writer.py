"""Answers as OpenAI's JSON, whole or in server-sent events. Knows no HTTP, no engine and no text
but what it is given.

What all chunks of an answer share is written once: a chunk costs one small json.dumps.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from eyas.engine.request import TokenLogprob
from eyas.serve.completion import Piece, Round
from eyas.serve.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
Usage = dict[str, Any]


class Writer(Protocol):
    """Writes one answer."""

    def chunk(self, piece: Piece, usage: Usage | None = None) -> str:
        """The events of a piece, its end included."""
        ...

    def usage_chunk(self, usage: Usage) -> str: ...

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> Any: ...


def error_event(body: dict[str, Any]) -> bytes:
    """An error after the first chunk is sent: the status is gone, so it comes as an event."""
    return f"data: {json.dumps(body)}\n\n".encode()


class _Events:
    """Events that share a head; `told` says whether chunks have a field for usage at all."""

    def __init__(self, kind: str, prefix: str, model: str, told: bool) -> None:
        self.shared = {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._head = f'data: {json.dumps({**self.shared, "object": kind})[:-1]}, "choices": ['
        self._tail = '], "usage": null}\n\n' if told else "]}\n\n"

    def event(
        self, choice: str, usage: Usage | None = None, told: dict[str, Any] | None = None
    ) -> str:
        """told: what is added under `eyas`."""
        tail = self._tail if usage is None else f'], "usage": {json.dumps(usage)}}}\n\n'
        if told is not None:
            tail = f'], "eyas": {json.dumps(told)}{tail[1:]}'
        return f"{self._head}{choice}{tail}"


class ChatWriter:
    """/v1/chat/completions. The first chunk of a choice brings the role along, so that none comes
    before the first token.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, tells_usage: bool = False) -> None:
        self._events = _Events("chat.completion.chunk", "chatcmpl", model, tells_usage)
        self._tokenizer = tokenizer
        self._begun: set[int] = set()
        self._num_calls: dict[int, int] = {}

    def chunk(self, piece: Piece, usage: Usage | None = None) -> str:
        """The events of a piece, its end included."""
        delta = f'"content": {json.dumps(piece.text)}'
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            delta = f'"role": "assistant", {delta}'
        if piece.calls:
            delta += f', "tool_calls": {json.dumps(self._numbered(piece))}'
        logprobs = (
            ""
            if piece.logprobs is None
            else f', "logprobs": {json.dumps(self._logprobs(piece.logprobs))}'
        )
        head = f'{{"index": {piece.choice}, "delta": {{'
        told = None if piece.round is None else _round(piece.round, self._tokenizer)
        event = self._events.event(
            f'{head}{delta}}}{logprobs}, "finish_reason": null}}', usage, told
        )
        if piece.ending is None:
            return event
        return event + self._events.event(f'{head}}}, "finish_reason": "{piece.ending}"}}', usage)

    def usage_chunk(self, usage: Usage) -> str:
        return self._events.event("", usage)

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        choices = [self._choice(number, of_choice) for number, of_choice in _by_choice(pieces)]
        return {
            **self._events.shared,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage,
        }

    def _choice(self, number: int, pieces: list[Piece]) -> dict[str, Any]:
        text, calls = (
            "".join(piece.text for piece in pieces),
            [call for piece in pieces for call in piece.calls],
        )
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message |= {"content": text or None, "tool_calls": [call.to_json() for call in calls]}
        logprobs = _joined(pieces)
        return {
            "index": number,
            "message": message,
            "logprobs": None if logprobs is None else self._logprobs(logprobs),
            "finish_reason": pieces[-1].ending,
        }

    def _numbered(self, piece: Piece) -> list[dict[str, Any]]:
        """Clients put the chunks of a call together by its index."""
        first = self._num_calls.get(piece.choice, 0)
        self._num_calls[piece.choice] = first + len(piece.calls)
        return [
            {"index": first + number, **call.to_json()} for number, call in enumerate(piece.calls)
        ]

    def _logprobs(self, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        content = [
            {
                **self._token(one.token_id, one.logprob),
                "top_logprobs": [self._token(*pair) for pair in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token)
        return {"token": piece.decode(errors="replace"), "logprob": logprob, "bytes": list(piece)}


class TextWriter:
    """/v1/completions. The last chunk of a choice brings its end along. echoed: what stands before
    each choice's text.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        tells_usage: bool = False,
        echoed: Sequence[str] | None = None,
    ) -> None:
        self._events = _Events("text_completion", "cmpl", model, tells_usage)
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}
        self._echoed = dict(enumerate(echoed or ()))  # of choices that have not begun

    def chunk(self, piece: Piece, usage: Usage | None = None) -> str:
        """The event of a piece."""
        logprobs = (
            "null"
            if piece.logprobs is None
            else json.dumps(self._logprobs(piece.choice, piece.logprobs))
        )
        ending = "null" if piece.ending is None else f'"{piece.ending}"'
        said = self._echoed.pop(piece.choice, "") + piece.text
        text = f'"index": {piece.choice}, "text": {json.dumps(said)}'
        told = None if piece.round is None else _round(piece.round, self._tokenizer)
        return self._events.event(
            f'{{{text}, "logprobs": {logprobs}, "finish_reason": {ending}}}', usage, told
        )

    def usage_chunk(self, usage: Usage) -> str:
        return self._events.event("", usage)

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> dict[str, Any]:
        """The answer in one object."""
        choices = []
        for number, of_choice in _by_choice(pieces):
            logprobs = _joined(of_choice)
            choices.append(
                {
                    "index": number,
                    "text": self._echoed.pop(number, "")
                    + "".join(piece.text for piece in of_choice),
                    "logprobs": None if logprobs is None else self._logprobs(number, logprobs),
                    "finish_reason": of_choice[-1].ending,
                }
            )
        return {
            **self._events.shared,
            "object": "text_completion",
            "choices": choices,
            "usage": usage,
        }

    def _logprobs(self, choice: int, logprobs: list[TokenLogprob]) -> dict[str, Any]:
        offsets = [self._offsets.get(choice, 0)]
        for one in logprobs:
            offsets.append(
                offsets[-1] + len(self._tokenizer.piece(one.token_id).decode(errors="replace"))
            )
        self._offsets[choice] = offsets.pop()
        return {
            "tokens": [self._name(one.token_id) for one in logprobs],
            "token_logprobs": [one.logprob for one in logprobs],
            "top_logprobs": [
                {self._name(token): logprob for token, logprob in one.top} for one in logprobs
            ],
            "text_offset": offsets,
        }

    def _name(self, token: int) -> str:
        """Its text; of a part of a character its bytes, or two such tokens would have one name."""
        piece = self._tokenizer.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _round(one: Round, tokenizer: Tokenizer) -> dict[str, Any]:
    """Where the tokens of a round come from (drafted and accepted, the target's bonus, or decoded
    plainly), and its tree.
    """
    tree, others = one.tree, "plain" if one.tree is None else "bonus"
    num_drafted = 0 if tree is None else len(tree.accepted)
    tokens = [
        {"text": text, "origin": "drafted" if place < num_drafted else others}
        for place, text in enumerate(one.texts)
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


def _by_choice(pieces: Iterable[Piece]) -> list[tuple[int, list[Piece]]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.choice, []).append(piece)
    return sorted(found.items())


def _joined(pieces: list[Piece]) -> list[TokenLogprob] | None:
    if pieces[-1].logprobs is None:
        return None
    return [one for piece in pieces for one in piece.logprobs or ()]
