"""An answer on its way out: the engine's updates become words, calls and counts. Knows no HTTP and
no JSON.

One HTTP request may have several prompts, each of several samples: a choice for each, in the order
of the prompts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from eyas.chat import TextStream
from eyas.engine.request import DraftedTree, FinishReason, Request, TokenLogprob, Update
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import Call, CallReader
from eyas.tau import count_round, num_emitted, tau_of

Ending = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class Round:
    """A round as it is told: the text that each token adds, the last of an answer with what was
    held back, and the tree; None for a prefill or a plain round. Stop strings and calls are in the
    texts."""

    texts: list[str]
    tree: DraftedTree | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What an update adds to a choice. logprobs are those of the update's tokens; it and round, if
    they were asked for.
    """

    choice: int
    text: str
    token_ids: list[int]
    calls: list[Call]
    logprobs: list[TokenLogprob] | None
    ending: Ending | None
    round: Round | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How the text of an answer is to be read: as words and calls, or as words alone; by rounds as
    well.
    """

    reads_calls: bool = False
    demands_call: bool = False
    tells_rounds: bool = False


class Choice:
    """What one sample has given so far."""

    def __init__(
        self, number: int, text_streams: Callable[[], TextStream], reading: Reading
    ) -> None:
        self.ending: Ending | None = None
        self.num_tokens = 0
        self._number = number
        self._text_stream = text_streams()
        self._by_token = text_streams() if reading.tells_rounds else None
        self._calls = CallReader(reading.demands_call) if reading.reads_calls else None

    def push(self, update: Update) -> Piece:
        """What the update adds; sets `ending` when the sample ends."""
        assert self.ending is None, "an update after the end"
        self.num_tokens += len(update.token_ids)
        is_last = update.finish_reason is not None
        text, ending = self._text(update, is_last), update.finish_reason
        calls: list[Call] = []
        if self._calls is not None:
            text, calls = self._calls.push(text)
            if is_last:
                rest, more = self._calls.finish()
                text, calls = text + rest, calls + more
        called = self._calls is not None and self._calls.num_calls > 0
        self.ending = "tool_calls" if ending == "stop" and called else ending
        round_ = (
            None
            if self._by_token is None
            else Round(self._texts(self._by_token, update.token_ids, is_last), update.tree)
        )
        return Piece(
            self._number, text, update.token_ids, calls, update.logprobs, self.ending, round_
        )

    def _text(self, update: Update, is_last: bool) -> str:
        if update.text is not None:  # the engine decodes what it searches for stop strings
            return update.text
        text = self._text_stream.push(update.token_ids)
        return text + self._text_stream.finish() if is_last else text

    @staticmethod
    def _texts(stream: TextStream, token_ids: list[int], is_last: bool) -> list[str]:
        texts = [stream.push([token]) for token in token_ids]
        if is_last:
            texts[-1] += stream.finish()
        return texts


@dataclass
class Answer:
    """All choices of one HTTP request, and when they came (perf_counter, seconds). may_draft:
    whether the client lets it; plain_rounds: in which it does and nothing was drafted, the prompts'
    own left out."""

    num_prompt_tokens: int
    choices: dict[tuple[str, int], Choice]
    may_draft: bool = False
    plain_rounds: int = 0
    accept_hist: list[int] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None

    @classmethod
    def to(cls, requests: Sequence[Request], tokenizer: Tokenizer, reading: Reading) -> Answer:
        """An empty answer to the engine's requests of one HTTP request."""
        keys = [(request.id, index) for request in requests for index in range(request.params.n)]
        choices = {
            key: Choice(number, tokenizer.stream, reading) for number, key in enumerate(keys)
        }
        may_draft = any(request.speculation for request in requests)
        return cls(sum(len(request.prompt_ids) for request in requests), choices, may_draft)

    def push(self, update: Update) -> Piece:
        """What the update adds to its choice."""
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        choice = self.choices[update.request_id, update.index]
        if update.num_accepted_drafts is None:
            # a sample's first token is its prompt's
            self.plain_rounds += self.may_draft and choice.num_tokens > 0
        else:
            count_round(self.accept_hist, update.num_accepted_drafts)
        return choice.push(update)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices.values())

    @property
    def is_over(self) -> bool:
        return all(choice.ending is not None for choice in self.choices.values())

    @property
    def endings(self) -> list[Ending | None]:
        return [choice.ending for choice in self.choices.values()]

    @property
    def rounds_and_tokens(self) -> tuple[int, int]:
        """Of its speculative rounds."""
        return sum(self.accept_hist), num_emitted(self.accept_hist)

    @property
    def tau(self) -> float | None:
        """Emitted tokens a speculative round; None where there was none."""
        return tau_of(self.accept_hist)

    def usage(self) -> dict[str, Any]:
        """OpenAI's counts, and under `eyas` those that it has no place for: rounds (propose +
        verify), accept_hist, tau.
        """
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "eyas": {
                "rounds": sum(self.accept_hist),
                "accept_hist": self.accept_hist,
                "tau": self.tau,
            },
        }
