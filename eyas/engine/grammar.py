"""Answers that must follow a JSON schema or a regular expression: which tokens may come next. Knows
no logits.

llguidance does the work (docs/decisions/grammar.md); it refuses what it cannot honour instead of
ignoring it. Each token that is drawn must be passed to `advance`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from eyas.engine.request import SamplingParams
from eyas.errors import InputError

_CACHED_GRAMMARS = 64
_MAX_SOURCE_LENGTH = 65536  # characters of a schema or a regular expression
# between the parts of a JSON text: some targets never leave off where blanks may go on
_BLANKS = r"[ \t\n\r]{0,20}"


class Grammars:
    """Compiles the grammars of requests for a target, each once."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, end_tokens: Iterable[int]
    ) -> None:
        self._target_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        self._cached = lru_cache(maxsize=_CACHED_GRAMMARS)(self._compile)

    def matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        """A matcher at the start of the grammar that the params ask for, if any.

        Raises InputError for a grammar that cannot be followed.
        """
        if not params.has_grammar:
            return None
        start = self._cached(params.json_schema, params.regex)
        return GrammarMatcher(start.deep_copy(), self._vocab_size, self._end_tokens)

    def _compile(self, json_schema: str | None, regex: str | None) -> LLMatcher:
        if not self._end_tokens:
            raise InputError(
                "the target names no end token",
                "set eos_token_id in its config.json: a grammar ends by it",
            )
        name, source = ("regex", regex) if regex is not None else ("json_schema", json_schema)
        assert source is not None
        if len(source) > _MAX_SOURCE_LENGTH:
            raise InputError(
                f"the {name} has {len(source)} characters", f"give {_MAX_SOURCE_LENGTH} or fewer"
            )
        if regex is not None:
            text = LLMatcher.grammar_from_regex(regex)
        else:
            try:
                text = LLMatcher.grammar_from_json_schema(
                    source, defaults={"whitespace_pattern": _BLANKS}
                )
            except ValueError as error:
                raise InputError(
                    f"the json_schema cannot be read: {error}",
                    "give a JSON schema, an object, as a string of JSON",
                ) from error
        start = LLMatcher(self._tokenizer, text, log_level=0)
        start.compute_bitmask()  # finds what is too large to be followed
        if start.is_error():
            raise InputError(
                f"the {name} cannot be followed: {_reason(start)}",
                "leave out what is not supported; regular expressions are Rust's, without "
                "look-around",
            )
        return start

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The library's form of the target's: made for the first grammar, as it takes a second."""
        tokenizer = self._target_tokenizer
        size = max(self._vocab_size, len(tokenizer))
        return LLTokenizer(
            tokenizer.backend_tokenizer.to_str(), n_vocab=size, eos_token=self._end_tokens
        )


class GrammarMatcher:
    """The place of one answer in its grammar. `failure` says why the library gave up on the way, or
    None.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_tokens: list[int]) -> None:
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, end_tokens
        self.is_over = False

    @property
    def failure(self) -> str | None:
        return _reason(self._matcher) if self._matcher.is_error() else None

    def mask(self) -> NDArray[np.bool_]:
        """[V]: the tokens that may come next. End tokens where the grammar may stop; only they
        where nothing else may come.
        """
        if self.is_over or self._matcher.is_stopped():
            allowed_V = np.zeros(self._vocab_size, dtype=bool)
            allowed_V[self._end_tokens] = True
            return allowed_V
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed_V = np.unpackbits(bits, bitorder="little")[: self._vocab_size].view(bool)
        allowed_V[self._end_tokens] = self._matcher.is_accepting() or not allowed_V.any()
        return allowed_V

    def advance(self, token: int) -> None:
        """Take note of the token drawn: one that the mask allowed."""
        if token in self._end_tokens:
            self.is_over = True
        elif not self.is_over:
            self._matcher.consume_token(token)


def _reason(matcher: LLMatcher) -> str:
    """The line of the library's message that says what is wrong."""
    lines = matcher.get_error().splitlines()
    return next(
        (line for line in lines if line.startswith("error: ")),
        lines[0] if lines else str(matcher.stop_reason()),
    )
