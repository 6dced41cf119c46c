"""The answer to one HTTP request: the engine's updates become text, tool calls and counts. Knows no
HTTP and no endpoint's JSON (writers.py has the three kinds).

One HTTP request may have several prompts, each of several samples: a choice for each, in the order
of the prompts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eyas.engine.request import DraftedTree, FinishReason, Request, TokenLogprob, Update
from eyas.serve.fields import UsageIn
from eyas.serve.tokenizer import Tokenizer
from eyas.serve.tools import Call, CallReader
from eyas.tau import count_round, tau_of

Ending = FinishReason | Literal["tool_calls"]
Usage = dict[str, Any]
DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class RoundTrace:
    """A round for `include_rounds`: the text that each token adds (the last of an answer with what
    was held back), and the tree; None for a prefill or a plain round. Stop strings and calls are in
    the texts.
    """

    texts: list[str]
    tree: DraftedTree | None


@dataclass(frozen=True, slots=True)
class Delta:
    """What an update adds to a choice. parts: its words and calls in their order. logprobs: of the
    update's tokens; prompt_logprobs: of the prompt's, with the first update. They and round are
    None unless the client asks for them.
    """

    choice: int
    text: str
    token_ids: list[int]
    parts: list[str | Call]
    logprobs: list[TokenLogprob] | None
    ending: Ending | None
    round: RoundTrace | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

    @property
    def calls(self) -> list[Call]:
        return [part for part in self.parts if isinstance(part, Call)]


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """How an answer is written. reads_calls: tool calls are taken out of the text; requires_call:
    the prompt ends with the opening of one.
    """

    model: str
    usage_in: UsageIn = "none"
    reads_calls: bool = False
    requires_call: bool = False
    include_rounds: bool = False


class Choice:
    """The answer of one sample so far."""

    def __init__(self, number: int, tokenizer: Tokenizer, options: CompletionOptions) -> None:
        self.ending: Ending | None = None
        self.num_tokens = 0
        self._number = number
        self._stream = tokenizer.stream()
        self._by_token = tokenizer.stream() if options.include_rounds else None
        self._calls = CallReader(options.requires_call) if options.reads_calls else None

    def push(self, update: Update) -> Delta:
        """What the update adds; sets `ending` when the sample ends."""
        assert self.ending is None, "an update after the end"
        self.num_tokens += len(update.token_ids)
        is_last = update.finish_reason is not None
        text, parts = update.text, list[str | Call]()
        if text is None:  # else the engine decodes, where it searches for stop strings
            text = self._stream.push(update.token_ids)
            text += self._stream.finish() if is_last else ""
        if self._calls is not None:
            parts = self._calls.push(text) + (self._calls.finish() if is_last else [])
            text = "".join(part for part in parts if isinstance(part, str))
        else:
            parts = [text]
        called = self._calls is not None and self._calls.num_calls > 0
        self.ending = update.finish_reason
        if called and self.ending == "stop":
            self.ending = "tool_calls"
        trace = None
        if self._by_token is not None:
            texts = [self._by_token.push([token]) for token in update.token_ids]
            if is_last and texts:
                texts[-1] += self._by_token.finish()
            trace = RoundTrace(texts, update.tree)
        return Delta(
            self._number,
            text,
            update.token_ids,
            parts,
            update.logprobs,
            self.ending,
            trace,
            update.prompt_logprobs,
        )


class CompletionWriter(ABC):
    """The answer to one HTTP request, streamed (`chunk`, `end`) or whole (`keep`, `whole`).

    requests: what the engine has to do for it. first_at, last_at: when the first and the last
    update came (perf_counter, seconds).
    """

    def __init__(
        self, requests: Sequence[Request], tokenizer: Tokenizer, options: CompletionOptions
    ) -> None:
        self.requests = requests
        self.num_prompt_tokens = sum(len(request.prompt_ids) for request in requests)
        self.accept_hist: list[int] = []
        self.first_at: float | None = None
        self.last_at: float | None = None
        self.options, self.tokenizer = options, tokenizer
        keys = [(request.id, index) for request in requests for index in range(request.params.n)]
        self._choices = {key: Choice(number, tokenizer, options) for number, key in enumerate(keys)}
        self._kept: dict[int, list[Delta]] = {number: [] for number in range(len(keys))}

    @property
    def num_samples(self) -> int:
        return len(self._choices)

    @property
    def num_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices.values())

    @property
    def num_written(self) -> int:
        """Tokens that the answer names: its own, and a prompt's that are scored."""
        echoes = any(one.params.prompt_logprobs is not None for one in self.requests)
        return self.num_tokens + (self.num_prompt_tokens if echoes else 0)

    @property
    def is_over(self) -> bool:
        return all(choice.ending is not None for choice in self._choices.values())

    @property
    def endings(self) -> list[Ending | None]:
        return [choice.ending for choice in self._choices.values()]

    def chunk(self, update: Update) -> str:
        """The server-sent events of an update."""
        delta = self._push(update)
        return self.write(delta, self.usage() if self.options.usage_in == "all" else None)

    def end(self) -> str:
        """The events that follow the last update."""
        usage = self.write_usage(self.usage()) if self.options.usage_in != "none" else ""
        return usage + DONE

    def keep(self, update: Update) -> None:
        """Take an update of an answer that is not streamed."""
        delta = self._push(update)
        self._kept[delta.choice].append(delta)

    def whole(self) -> Any:
        """The JSON of the answer, when all updates have been kept."""
        return self.write_whole(self._kept, self.usage())

    def usage(self) -> Usage:
        """OpenAI's counts, and under `eyas` rounds (propose + verify), accept_hist and tau."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_tokens,
            "eyas": {
                "rounds": sum(self.accept_hist),
                "accept_hist": self.accept_hist,
                "tau": tau_of(self.accept_hist),
            },
        }

    @abstractmethod
    def write(self, delta: Delta, usage: Usage | None) -> str:
        """The events of a delta, its ending included."""

    @abstractmethod
    def write_usage(self, usage: Usage) -> str:
        """The event that holds usage alone."""

    @abstractmethod
    def write_whole(self, deltas: dict[int, list[Delta]], usage: Usage) -> Any:
        """The answer in one object. deltas: by choice."""

    def _push(self, update: Update) -> Delta:
        self.last_at = time.perf_counter()
        self.first_at = self.first_at or self.last_at
        if update.num_accepted_drafts is not None:
            count_round(self.accept_hist, update.num_accepted_drafts)
        return self._choices[update.request_id, update.index].push(update)
