"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from eyas.engine.grammar_process import KINDS
from eyas.errors import InputError
from eyas.tau import count_round

FinishReason = Literal["stop", "length"]
Source = Literal["head", "text", "both"]  # who proposes a token

MAX_SAMPLES = 128
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20
MIN_TEMPERATURE = 1e-5  # below it, but above 0, greedy is meant

# of a setting: the least, the most, and what to give
_RANGES: Mapping[str, tuple[float, float, str]] = {
    "temperature": (0, 100, "a number from 0 (greedy) to 100"),
    "top_k": (0, math.inf, "0 (off) or a positive number"),
    "top_p": (0, 1, "a number above 0, up to 1"),
    "min_p": (0, 1, "a number from 0 (off) to 1"),
    "seed": (-(2**63), 2**63 - 1, "a whole number of 64 bits, with its sign"),
    "repetition_penalty": (0.01, 100, "a number from 0.01 to 100; 1 is off"),
    "frequency_penalty": (-2, 2, "a number from -2 to 2; 0 is off"),
    "presence_penalty": (-2, 2, "a number from -2 to 2; 0 is off"),
    "max_tokens": (0, math.inf, "0 or more"),
    "n": (1, MAX_SAMPLES, f"a number from 1 to {MAX_SAMPLES}"),
    "logprobs": (0, MAX_LOGPROBS, f"a number from 0 to {MAX_LOGPROBS}, or none"),
    "prompt_logprobs": (0, MAX_LOGPROBS, f"a number from 0 to {MAX_LOGPROBS}, or none"),
}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn from the target's distribution, and where the answer ends.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep the whole vocabulary; the penalties'
    defaults change nothing. With the same seed a request gives the same tokens, with and without
    speculation; None takes one from the system. stop_token_ids end the answer as the target's own
    end tokens do, and also where ignore_eos is set. logprobs None gives none, 0 those of the
    answer's tokens, n those of the n best tokens at each place as well; prompt_logprobs is the same
    for the prompt's tokens from the second on. max_tokens 0 reads the prompt and answers nothing.
    grammar: Lark's form as llguidance reads it, or llama.cpp's GBNF.
    Raises InputError for values out of range and for options that contradict each other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    max_tokens: int = 256
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        for name, (least, most, hint) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise InputError(f"{name} {value} is out of range", f"give {hint}")
        token = next((token for token in self.logit_bias if token < 0), None)
        bias = next((one for one in self.logit_bias.items() if not -100 <= one[1] <= 100), None)
        for is_wrong, what, hint in (
            (
                0 < self.temperature < MIN_TEMPERATURE,
                f"temperature {self.temperature} is nearly 0",
                f"give 0 (greedy) or {MIN_TEMPERATURE} or more",
            ),
            (
                self.top_p == 0,
                f"top_p {self.top_p} is out of range",
                f"give {_RANGES['top_p'][2]}",
            ),
            (
                token is not None,
                f"logit_bias names token {token}",
                "give token ids of the target, 0 or more",
            ),
            (
                bias is not None,
                "logit_bias of token {} is {}".format(*(bias or (0, 0))),
                "give numbers from -100 to 100",
            ),
            (
                not 0 <= self.min_tokens <= self.max_tokens,
                f"min_tokens {self.min_tokens} is out of range",
                f"give a number from 0 to max_tokens, {self.max_tokens}",
            ),
            (
                len(self.stop) > MAX_STOPS,
                f"{len(self.stop)} stop strings are too many",
                f"give {MAX_STOPS} or fewer",
            ),
            (
                not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in self.stop),
                "a stop string is empty or too long",
                f"give 1 to {MAX_STOP_LENGTH} characters each",
            ),
            (
                len(self.stop_token_ids) > MAX_STOPS or min(self.stop_token_ids, default=0) < 0,
                f"stop_token_ids {self.stop_token_ids} are not usable",
                f"give {MAX_STOPS} or fewer, 0 or more each",
            ),
            (
                sum(getattr(self, kind) is not None for kind in KINDS) > 1,
                f"several of {', '.join(KINDS)} are given",
                "give one of them",
            ),
            (
                self.has_grammar and (self.ignore_eos or self.min_tokens > 0),
                "ignore_eos and min_tokens ask for tokens where a grammar may allow none",
                "leave them out, or what makes the grammar: a schema, an expression, tools",
            ),
        ):
            if is_wrong:
                raise InputError(what, hint)

    @property
    def has_grammar(self) -> bool:
        return any(getattr(self, kind) is not None for kind in KINDS)

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1
            or self.frequency_penalty != 0
            or self.presence_penalty != 0
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InputError if logit_bias or stop_token_ids name a token of vocab_size or more."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            wrong = next((token for token in ids if token >= vocab_size), None)
            if wrong is not None:
                raise InputError(
                    f"{name} names token {wrong}, the target has {vocab_size}",
                    "use the target's own tokenizer",
                )


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue, as the server builds it and the scheduler keeps it.

    id: unique among the requests that wait or run. speculation: False decodes plainly, to the same
    tokens, one per round. text_drafts: False leaves drafting to the head, and the answer is not
    kept for drafts of others. returns_trees: updates have what was drafted.
    cache_salt: computed prefixes and recent answers are shared only with requests of the same salt.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    speculation: bool = True
    returns_trees: bool = False
    cache_salt: str | None = None
    text_drafts: bool = True


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The natural log of a token's probability in the target's own distribution.

    top: the best tokens there with theirs, best first, as many as the request asked for.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """The nodes that the target judged in a round of one sample, parents first, without the root.

    parents: the number of each node's parent, -1 for the root. probabilities: the head's, of each
    node's token after its parent; None of what text alone proposed. accepted: the accepted nodes,
    in the order of their tokens. sources: who proposed each node.
    """

    token_ids: list[int]
    parents: list[int]
    probabilities: list[float | None]
    accepted: list[int]
    sources: list[Source]


@dataclass(frozen=True, slots=True)
class Update:
    """What one job emitted for one sample.

    token_ids: new tokens. num_accepted_drafts: of a round that the head drafted in, else None.
    index: which of the request's n samples. logprobs: one entry a token, if requested.
    prompt_logprobs: one entry for each token of the prompt behind the first, if requested, with the
    sample's first update. tree: of a round with candidates, if requested. text: of a request with
    stop strings, the new text that is certain; it ends before the first stop string. None: the text
    is that of the tokens. error: why the sample has ended before its end.
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_accepted_drafts: int | None = None
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    tree: DraftedTree | None = None
    text: str | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    error: InputError | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """A finished sample of a request.

    token_ids includes what ended it if finish_reason is "stop": an end token, a stop token, or the
    token that completes a stop string. accept_hist[a] counts the rounds that the head drafted in
    and that accepted a drafts (eyas.tau).
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason
    accept_hist: list[int]
    index: int = 0
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None

    @classmethod
    def of(cls, updates: Sequence[Update], num_draft_steps: int) -> Result:
        """All updates of one sample, the last of which ends it."""
        last = updates[-1]
        assert last.finish_reason is not None, "the sample has not ended"
        accept_hist = [0] * (num_draft_steps + 1)
        for update in updates:
            if update.num_accepted_drafts is not None:
                count_round(accept_hist, update.num_accepted_drafts)
        token_ids = [token for update in updates for token in update.token_ids]
        logprobs = None
        if last.logprobs is not None:
            logprobs = [one for update in updates for one in update.logprobs or []]
        return cls(
            last.request_id,
            token_ids,
            last.finish_reason,
            accept_hist,
            last.index,
            logprobs,
            updates[0].prompt_logprobs,
        )
