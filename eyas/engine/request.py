"""What goes into the engine and what comes out of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

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


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


def _option(about: str = "", **bounds: Any) -> Any:
    return Field(description=about or None, **bounds)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The table of sampling options: how the next token is drawn from the target's distribution,
    and where the answer ends. A new option is one entry; requests (serve/fields.py) and
    /openapi.json take it from here.

    logprobs: None gives none, 0 those of the answer's tokens, n also the n best at each place;
    prompt_logprobs: the same of the prompt from its second token on. max_tokens 0 reads the prompt
    only. grammar: Lark's form, or llama.cpp's GBNF. Raises InputError for values out of range and
    options that contradict each other.
    """

    temperature: Annotated[
        float, _option(f"0, and what is below {MIN_TEMPERATURE}, is greedy", ge=0, le=2)
    ] = 0.0
    top_k: Annotated[int, _option("how many tokens are kept; 0 and -1: all", ge=0)] = 0
    top_p: Annotated[float, _option("share of the probability that is kept", gt=0, le=1)] = 1.0
    min_p: Annotated[
        float, _option("tokens below this share of the best one's probability go", ge=0, le=1)
    ] = 0.0
    seed: Annotated[
        int | None,
        _option(
            "The same seed, prompt and options give the same answer. The draws depend on the seed "
            "and a token's place, not on the prompt: one seed for many prompts correlates their "
            "draws. For independent draws mix the prompt into it, e.g. the first 8 bytes of "
            "sha256(seed + prompt) as a signed integer, or leave it out.",
            ge=-(2**63),
            lt=2**63,
        ),
    ] = None
    repetition_penalty: Annotated[float, _option("1 is off", ge=0.01, le=100)] = 1.0
    frequency_penalty: Annotated[float, _option("by occurrence in the answer", ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, _option("of tokens in the answer", ge=-2, le=2)] = 0.0
    logit_bias: Annotated[Mapping[TokenId, Bias], _option("by token id, added to its logit")] = (
        field(default_factory=dict)
    )
    stop: Annotated[
        tuple[Stop, ...],
        _option("an answer ends before one of these strings", max_length=MAX_STOPS, strict=False),
    ] = ()
    stop_token_ids: Annotated[
        tuple[TokenId, ...],
        _option("they end an answer as the target's own do", max_length=MAX_STOPS, strict=False),
    ] = ()
    min_tokens: Annotated[
        int, _option("before an answer may end, by a stop string either", ge=0)
    ] = 0
    max_tokens: Annotated[int, _option(ge=0)] = 256
    ignore_eos: Annotated[bool, _option("the target's end tokens end no answer")] = False
    n: Annotated[int, _option("samples of each prompt", ge=1, le=MAX_SAMPLES)] = 1
    logprobs: Annotated[int | None, _option(ge=0, le=MAX_LOGPROBS)] = None
    prompt_logprobs: Annotated[int | None, _option(ge=0, le=MAX_LOGPROBS)] = None
    json_schema: str | None = None
    regex: str | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        try:
            _bounds().model_validate(self, from_attributes=True)
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            what = f"{'.'.join(map(str, wrong['loc']))} {wrong['input']!r:.64} is out of range"
            raise InputError(what, wrong["msg"].replace("Input", "it")) from None
        for is_wrong, what, hint in (
            (
                0 < self.temperature < MIN_TEMPERATURE,
                f"temperature {self.temperature} is nearly 0",
                f"give 0 (greedy) or {MIN_TEMPERATURE} or more",
            ),
            (
                self.min_tokens > self.max_tokens,
                f"min_tokens {self.min_tokens} is out of range",
                f"give a number from 0 to max_tokens, {self.max_tokens}",
            ),
            (
                sum(getattr(self, kind) is not None for kind in KINDS) > 1,
                f"several of {', '.join(KINDS)} are given",
                "give one",
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


@functools.cache
def _bounds() -> type[BaseModel]:
    made: type[BaseModel] = create_model(  # type: ignore
        "SamplingOptions", __config__=ConfigDict(strict=True), **sampling_options()
    )
    return made


@functools.cache
def sampling_options() -> dict[str, tuple[Any, Any]]:
    """By name: an option's type with bounds and meaning, and its default."""
    hints = get_type_hints(SamplingParams, include_extras=True)
    defaults = {one.name: one for one in fields(SamplingParams)}
    return {
        name: (hint, {} if name == "logit_bias" else defaults[name].default)
        for name, hint in hints.items()
    }


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt to continue.

    id: unique among waiting and running requests. speculation: False decodes plainly, to the same
    tokens. text_drafts: False leaves drafting to the head, and keeps the answer out of drafts for
    others. returns_trees: updates have what was drafted. cache_salt: prefixes and recent answers
    are shared only between requests of one salt.
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

    top: the best tokens there with theirs, best first. text: the token's, where the reader has a
    tokenizer.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""


@dataclass(frozen=True, slots=True)
class DraftedTree:
    """The nodes that the target judged in a sample's round, parents first, without the root.

    parents: each node's parent, -1 for the root. probabilities: the head's, of a node after its
    parent; None for nodes of text alone. accepted: nodes, in the order of their tokens. sources:
    who proposed each node.
    """

    token_ids: list[int]
    parents: list[int]
    probabilities: list[float | None]
    accepted: list[int]
    sources: list[Source]


@dataclass(frozen=True, slots=True)
class Update:
    """What one job emitted for one sample.

    num_accepted_drafts: of a round that the head drafted in, else None. index: which of the
    request's n samples. logprobs: one entry a token; prompt_logprobs: from the prompt's second
    token on, with the sample's first update; tree: of a round with candidates; each if requested.
    text: of a request with stop strings, the new certain text; None: decode the tokens. error: why
    the sample ended early. num_reused_tokens: of the prompt, found computed; with the first update.
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
    num_reused_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """A finished sample of a request.

    token_ids includes what ended it if finish_reason is "stop": an end or stop token, or the token
    that completes a stop string. accept_hist[a] counts the rounds with a accepted drafts of the
    head.
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
        logprobs = [one for update in updates for one in update.logprobs or []]
        return cls(
            last.request_id,
            token_ids,
            last.finish_reason,
            accept_hist,
            last.index,
            None if last.logprobs is None else logprobs,
            updates[0].prompt_logprobs,
        )
