"""Answers that must follow a schema, an expression or a grammar: which tokens may come next.

llguidance computes the masks in a process for each grammar (docs/decisions/server.md), the next one
while other work goes on.
"""

from __future__ import annotations

import itertools
import select
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from eyas.engine.grammar_process import (
    ACCEPTS,
    ANSWER,
    ASK,
    FAILED,
    FORGET,
    KINDS,
    STOPPED,
    TOKEN_S,
    GrammarProcess,
    Kind,
)
from eyas.engine.request import SamplingParams
from eyas.errors import InputError

_CACHED_GRAMMARS = 4  # answers make them grow, up to 100 MiB each (PARSER_LIMITS)
_MAX_SOURCE_LENGTH = 65536  # characters of a schema or a regular expression
_NAMED = 60  # characters of it that an error repeats


class Grammars:
    """Compiles each grammar of a target's requests once. Any thread may call it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_tokens: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._end_tokens = sorted(token for token in end_tokens if token < vocab_size)
        size = max(vocab_size, tokenizer.get_vocab_size())
        self._process = GrammarProcess(tokenizer.to_str(), size, self._end_tokens)
        self._lock = Lock()  # guards the cache; grammars compile in parallel
        self._cached: OrderedDict[tuple[Kind, str], Future[Grammar]] = OrderedDict()

    def prepare(self) -> None:
        """Start the first process now."""
        if self._end_tokens:
            self._process.start()

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar that the params ask for, if any. Raises InputError for one that cannot be
        followed, or not within the budget of `GrammarProcess`.
        """
        found = [(kind, text) for kind in KINDS if (text := getattr(params, kind)) is not None]
        if not found:
            return None
        (key,) = found
        with self._lock:
            made = self._cached.pop(key, None)
            is_new = made is None or (made.done() and made.result().has_ended)
            grammar = self._cached[key] = Future() if made is None or is_new else made
            if len(self._cached) > _CACHED_GRAMMARS:
                self._cached.popitem(last=False)
        if is_new:
            try:
                grammar.set_result(self._compiled(*key))
            except BaseException as error:
                with self._lock:
                    if self._cached.get(key) is grammar:
                        del self._cached[key]
                grammar.set_exception(error)
        return grammar.result()

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
        connection, start = self._process.begin(kind, source)
        name = source if len(source) <= _NAMED else f"{source[:_NAMED]}..."
        return Grammar(connection, start, f"the {kind} {name}", self._vocab_size, self._end_tokens)


class Grammar:
    """A compiled grammar, and the connection to its process. Its answers share what the library has
    computed, and its end: `failure`.
    """

    def __init__(
        self,
        connection: Connection,
        start: bytes,
        name: str,
        vocab_size: int,
        end_tokens: list[int],
    ) -> None:
        self.failure: InputError | None = None
        self.vocab_size, self.end_tokens, self.start = vocab_size, end_tokens, start
        self._connection, self._name = connection, name
        self._numbers = itertools.count()
        self._lock = Lock()  # guards what is sent: any thread may forget an answer
        self._poll = select.poll()
        self._poll.register(connection, select.POLLIN)
        self._matchers: weakref.WeakValueDictionary[int, GrammarMatcher] = (
            weakref.WeakValueDictionary()
        )
        weakref.finalize(self, connection.close)

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._connection, 0)
        return self.failure is not None or bool(poll.poll(0))

    def matcher(self) -> GrammarMatcher:
        number = next(self._numbers)
        matcher = self._matchers[number] = GrammarMatcher(self, number)
        weakref.finalize(matcher, self.send, number, FORGET)
        return matcher

    def send(self, number: int, token: int) -> None:
        """A matcher's token, or FORGET at its end."""
        with self._lock, suppress(OSError):  # a process that has ended is seen in `receive`
            self._connection.send_bytes(ASK.pack(number, token))

    def receive(self, seconds: float) -> None:
        """Take in one mask, if it comes within `seconds`; sets `failure` where none will."""
        if self.failure is not None or not self._poll.poll(1e3 * seconds):
            return
        try:
            reply = self._connection.recv_bytes()
        except (EOFError, OSError):
            self._fail(f"needs more than {1e3 * TOKEN_S:.0f} ms a token, or too much memory")
            return
        (number,) = ANSWER.unpack_from(reply)
        state = reply[ANSWER.size :]
        if state[0] & FAILED:
            self._fail(f"cannot be followed any further: {state[1:].decode(errors='replace')}")
        elif (matcher := self._matchers.get(number)) is not None:
            matcher.state = state

    def _fail(self, how: str) -> None:
        self.failure = InputError(
            f"{self._name} {how}",
            "give fewer alternatives that begin alike, smaller counts, or less nesting",
        )


class GrammarMatcher:
    """The place of one answer in its grammar. Each drawn token must be passed to `advance`. The
    matchers of a grammar share one thread.
    """

    def __init__(self, grammar: Grammar, number: int) -> None:
        self._grammar, self._number = grammar, number
        self.state: bytes | None = grammar.start  # see `grammar_process.state_of`; None: on its way
        self.is_over = self.is_late = False

    @property
    def failure(self) -> InputError | None:
        """Why the answer cannot go on."""
        return None if self.is_over else self._grammar.failure

    def wait(self, seconds: float) -> bool:
        """Whether the mask comes within `seconds`, or is known never to (`failure`)."""
        end = time.monotonic() + seconds
        while self.state is None and self.failure is None:
            left = end - time.monotonic()
            self._grammar.receive(max(0.0, left))
            if left <= 0:
                break
        self.is_late = self.state is None and self.failure is None
        return not self.is_late

    def mask(self) -> NDArray[np.bool_]:
        """bool [V]: the tokens that may come next; end tokens where the grammar may stop, only they
        where nothing else may come. Raises InputError (`failure`).
        """
        ends = self._grammar.end_tokens
        while not self.is_over and not self.wait(1.0):
            pass
        if (failure := self.failure) is not None:
            raise InputError(failure.what, failure.hint)
        allowed_V = np.zeros(self._grammar.vocab_size, dtype=bool)
        if self.is_over or self.state is None or self.state[0] & STOPPED:
            allowed_V[ends] = True
            return allowed_V
        bits = np.frombuffer(self.state, np.uint8, offset=1)
        allowed_V = np.unpackbits(bits, bitorder="little")[: len(allowed_V)].view(bool)
        # the library sets its own end token also where it gave up
        allowed_V[ends] = False
        allowed_V[ends] = bool(self.state[0] & ACCEPTS) or not allowed_V.any()
        return allowed_V

    def advance(self, token: int) -> None:
        """Note the drawn token, which the mask allowed."""
        if token in self._grammar.end_tokens:
            self.is_over = True
        elif not self.is_over:
            self.state = None
            self._grammar.send(self._number, token)
