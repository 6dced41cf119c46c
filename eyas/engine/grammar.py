"""Answers that must follow a schema, an expression or a grammar: which tokens may come next.

llguidance does the work (docs/decisions/server.md); it refuses what it cannot honour instead of
ignoring it. Each token that is drawn must be passed to `advance`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from functools import cached_property
from threading import Lock

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from eyas.engine.grammar_process import KINDS, GrammarProcess, Kind, compiled, reason_of
from eyas.engine.request import SamplingParams
from eyas.errors import InputError

_CACHED_GRAMMARS = 4  # answers make them grow, up to 100 MiB each (PARSER_LIMITS)
_MAX_SOURCE_LENGTH = 65536  # characters of a schema or a regular expression


class Grammars:
    """Compiles the grammars of requests for a target, each once. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Iterable[int]) -> None:
        self._target_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        self._process = GrammarProcess()
        self._lock = Lock()
        self._cached: OrderedDict[tuple[Kind, str], Grammar] = OrderedDict()

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar that the params ask for, if any.

        Raises InputError for a grammar that cannot be followed, or not within the budget of
        `GrammarProcess`.
        """
        found = [(kind, text) for kind in KINDS if (text := getattr(params, kind)) is not None]
        if not found:
            return None
        ((kind, source),) = found
        with self._lock:
            grammar = self._cached.pop((kind, source), None)
            if grammar is None or grammar.matcher().is_spent:
                grammar = self._compiled(kind, source)
            self._cached[kind, source] = grammar
            if len(self._cached) > _CACHED_GRAMMARS:
                self._cached.popitem(last=False)
        return grammar

    def _compiled(self, kind: Kind, source: str) -> Grammar:
        if not self._end_tokens:
            raise InputError(
                "the target names no end token",
                "set eos_token_id in its config.json: a grammar ends by it",
            )
        if len(source) > _MAX_SOURCE_LENGTH:
            raise InputError(
                f"the {kind} has {len(source)} characters", f"give {_MAX_SOURCE_LENGTH} or fewer"
            )
        self._process.check(kind, source)
        start = compiled(self.tokenizer, kind, source)
        return Grammar(start, self._vocab_size, self._end_tokens)

    @cached_property
    def tokenizer(self) -> LLTokenizer:
        """The target's, in the library's form. It takes up to two seconds, in which no other thread
        runs: a server makes it before it serves.
        """
        tokenizer = self._target_tokenizer
        size = max(self._vocab_size, tokenizer.get_vocab_size())
        return LLTokenizer(tokenizer.to_str(), n_vocab=size, eos_token=self._end_tokens)


class Grammar:
    """A compiled grammar. Its matchers share what the library has computed of it, and that it has
    given up on it.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, end_tokens: list[int]) -> None:
        self._start, self._vocab_size, self._end_tokens = start, vocab_size, end_tokens

    def matcher(self) -> GrammarMatcher:
        """A matcher at its start."""
        return GrammarMatcher(self._start.deep_copy(), self._vocab_size, self._end_tokens)


class GrammarMatcher:
    """The place of one answer in its grammar. `failure` says why the library gave up on the way, or
    None.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, end_tokens: list[int]) -> None:
        self._matcher, self._vocab_size, self._end_tokens = matcher, vocab_size, end_tokens
        self.is_over = False

    @property
    def failure(self) -> str | None:
        return reason_of(self._matcher) if self._matcher.is_error() else None

    @property
    def is_spent(self) -> bool:
        """Whether there is no next token, because the library has given up."""
        self._matcher.compute_bitmask()
        return self._matcher.is_error()

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
        # the library's own end token says nothing: it is there where it has just given up, too
        allowed_V[self._end_tokens] = False
        allowed_V[self._end_tokens] = self._matcher.is_accepting() or not allowed_V.any()
        return allowed_V

    def advance(self, token: int) -> None:
        """Take note of the token drawn: one that the mask allowed."""
        if token in self._end_tokens:
            self.is_over = True
        elif not self.is_over:
            self._matcher.consume_token(token)
