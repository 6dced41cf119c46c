"""Answers as SGLang's /generate gives them: the whole text so far in every event. Knows no HTTP and
no engine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.request import TokenLogprob
from eyas.serve.completion import Ending, Piece
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.writer import Usage


@dataclass(slots=True)
class _Said:
    """One choice so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.logprobs += piece.logprobs or []
        self.ending = piece.ending


class GenerateWriter:
    """/generate. prompt_lengths: tokens of each choice's prompt; is_many: whether the answer is a
    list; rid: its id.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_lengths: Sequence[int],
        is_many: bool,
        logprobs: bool,
        with_text: bool,
        rid: str | None = None,
    ) -> None:
        self._id = rid or uuid.uuid4().hex
        self._tokenizer = tokenizer
        self._prompt_lengths, self._is_many = prompt_lengths, is_many
        self._tells_logprobs, self._tells_text = logprobs, with_text
        self._said: dict[int, _Said] = {}

    def chunk(self, piece: Piece, usage: Usage | None = None) -> str:
        """The event of a piece."""
        said = self._said.setdefault(piece.choice, _Said())
        said.add(piece)
        answer = self._answer(piece.choice, said)
        return (
            f"data: {json.dumps(answer | {'index': piece.choice} if self._is_many else answer)}\n\n"
        )

    def usage_chunk(self, usage: Usage) -> str:
        """Nothing: every event has its counts."""
        return ""

    def whole(self, pieces: Iterable[Piece], usage: Usage) -> Any:
        """The answer in one object, or a list of one for each choice."""
        for piece in pieces:
            self._said.setdefault(piece.choice, _Said()).add(piece)
        answers = [self._answer(number, said) for number, said in sorted(self._said.items())]
        if self._is_many:
            return answers
        answers[0]["meta_info"]["spec_verify_ct"] = usage["eyas"]["rounds"]
        return answers[0]

    def _answer(self, number: int, said: _Said) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._id if not self._is_many else f"{self._id}-{number}",
            "finish_reason": self._reason(said),
            "prompt_tokens": self._prompt_lengths[number],
            "completion_tokens": len(said.token_ids),
        }
        if self._tells_logprobs:
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                self._triple(one.logprob, one.token_id) for one in said.logprobs
            ]
            meta["output_top_logprobs"] = [
                [self._triple(logprob, token) for token, logprob in one.top]
                for one in said.logprobs
            ]
        return {"text": said.text, "output_ids": said.token_ids, "meta_info": meta}

    def _reason(self, said: _Said) -> dict[str, Any] | None:
        if said.ending is None:
            return None
        return (
            {"type": "length", "length": len(said.token_ids)}
            if said.ending == "length"
            else {"type": "stop"}
        )

    def _triple(self, logprob: float, token: int) -> list[Any]:
        text = self._tokenizer.piece(token).decode(errors="replace") if self._tells_text else None
        return [logprob, token, text]
