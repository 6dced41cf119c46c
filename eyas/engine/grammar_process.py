"""Processes that follow clients' grammars, each under a budget of time and memory.

Neither compiling nor a mask can be interrupted, and llguidance's limits do not bound all of it:
some grammars take minutes, or overflow the stack and end the process. So each grammar has a process
of its own, whose end ends only the answers under this grammar.

    engine's process               the first process         a grammar's process
    GrammarProcess ─ a tokenizer ─▶ main
        .begin     ─ a socket ────▶ forks ─────────────────▶ follow
                   ─ {"kind", "source"} ───────────────────▶ compile
                   ◀─ an error, or the first mask ───────────
    GrammarMatcher ─ answer, token ────────────────────────▶ consume, mask
                   ◀─ answer, mask ───────────────────────── or the process has ended
"""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from eyas.engine.schemas import lark, plain_schema
from eyas.errors import InputError

Kind = Literal["json_schema", "regex", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # fields of SamplingParams; one at most is given

# To compile a grammar: CPU seconds, seconds by the clock, added memory. Usual ones take up to 60 ms
# and 3 MiB (docs/decisions/server.md).
BUDGET_S, CLOCK_S, BUDGET_MIB = 0.5, 5.0, 8
# CPU seconds of an answer's token, and the most it may save; it begins with as many. Usual grammars
# take .5 ms a token over a vocabulary of 150,000, at most 8 ms.
TOKEN_S, SAVED_S = 0.01, 0.25
_GROWTH = 256 << 20  # bytes of address space beyond the tokenizer's
_WAIT_S = 60.0  # for the first process to start, and for one that was stopped
_NICENESS = 5  # requests without grammars come first
# between parts of a JSON text: some targets write blanks without an end
BLANKS = r"[ \t\n\r]{0,20}"
# the library's units of work; its defaults are five, two and four times as much
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    max_lexer_states=64_000,  # 1.5 KiB each, kept as answers reach them
    verbose_errors=False,
)
ASK, ANSWER = struct.Struct("<II"), struct.Struct("<I")  # answer and token; answer
FORGET = 2**32 - 1  # as a token: the answer has ended
ACCEPTS, STOPPED, FAILED = 1, 2, 4  # before a mask; FAILED: before the reason


def grammar_text(kind: Kind, source: str) -> str:
    """A grammar in the library's form. Raises ValueError."""
    if kind == "grammar":
        return lark(source)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    with suppress(ValueError, RecursionError):  # the library says why it is no schema
        source = json.dumps(plain_schema(json.loads(source)))
    return LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": BLANKS})


def compiled(tokenizer: LLTokenizer, kind: Kind, source: str) -> LLMatcher:
    """A matcher at the start of a grammar. Raises InputError for one that cannot be followed."""
    try:
        text = grammar_text(kind, source)
    except ValueError as error:
        raise InputError(
            f"the {kind} cannot be read: {error}",
            "give a JSON schema, or a grammar in GBNF or Lark's form",
        ) from error
    start = LLMatcher(tokenizer, text, log_level=0, limits=PARSER_LIMITS)
    start.compute_bitmask()  # finds what is too large to be followed, and what allows nothing
    if not start.is_error():
        return start
    reason = reason_of(start)
    if reason == "NoExtensionBias" or reason.startswith("Unsatisfiable schema"):
        detail = reason.partition(": ")[2]
        raise InputError(
            f"the {kind} allows no answer at all{detail and f': {detail}'}",
            "change the part that contradicts itself, or that refers to itself without an end",
        )
    raise InputError(
        f"the {kind} cannot be followed: {reason}",
        "leave out what is not supported; regular expressions are Rust's, without look-around",
    )


def reason_of(matcher: LLMatcher) -> str:
    """The line of the library's message that says what is wrong."""
    lines = matcher.get_error().splitlines()
    return next(
        (line for line in lines if line.startswith("error: ")),
        lines[0] if lines else str(matcher.stop_reason()),
    )


def state_of(matcher: LLMatcher) -> bytes:
    """A byte of flags, then a bit for each token that may come next."""
    bits = b"" if matcher.is_stopped() else matcher.compute_bitmask()
    if matcher.is_error():
        return bytes([FAILED]) + reason_of(matcher).encode()
    return bytes([ACCEPTS * matcher.is_accepting() + STOPPED * (not bits)]) + bits


class GrammarProcess:
    """The first process. `start` starts it; so does a grammar, where it has ended."""

    def __init__(self, tokenizer: str, vocab_size: int, end_tokens: list[int]) -> None:
        """tokenizer: in JSON, as Hugging Face's tokenizers write it."""
        self._tokenizer = [tokenizer, vocab_size, end_tokens]
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def start(self) -> None:
        """It is ready within two seconds; only `begin` waits for it."""
        with self._lock:
            self._started()

    def begin(self, kind: Kind, source: str) -> tuple[Connection, bytes]:
        """The connection to a grammar's new process, and the state (`state_of`) at its start.
        Raises InputError for a grammar that cannot be compiled, or not within the budget.
        """
        ours, theirs = Pipe()
        with theirs:
            self._fork(theirs.fileno())
        answer: dict[str, Any] = {}
        with suppress(EOFError, OSError):
            ours.send_bytes(json.dumps({"kind": kind, "source": source}).encode())
            if ours.poll(_WAIT_S):
                answer = json.loads(ours.recv_bytes())
                if "error" not in answer:
                    return ours, ours.recv_bytes()
        ours.close()
        if "error" in answer:
            raise InputError(*answer["error"])
        raise InputError(
            f"the {kind} needs more than {BUDGET_S} s or {BUDGET_MIB} MiB to be compiled",
            "give smaller counts, fewer patterns for one value, or less nesting",
        )

    def _fork(self, end: int) -> None:
        with self._lock:
            try:
                socket.send_fds(self._started(), [b"f"], [end])
            except OSError:  # it was ended from outside
                self._socket = None
                socket.send_fds(self._started(), [b"f"], [end])

    def _started(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs, os.fdopen(os.memfd_create("tokenizer"), "r+", encoding="utf-8") as file:
                json.dump(self._tokenizer, file)
                file.seek(0)
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "eyas.engine.grammar_process", str(theirs.fileno())],
                    stdin=file,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,  # a panic's message may quote what a client wrote
                    pass_fds=[theirs.fileno()],
                )
            weakref.finalize(self, _end, self.process, self._socket)
        return self._socket


def _end(process: subprocess.Popen[bytes], own: socket.socket) -> None:
    own.close()
    process.kill()
    process.wait()


def main() -> None:
    """The first process: a tokenizer, and a process for each socket it gets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that have ended
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    given = socket.socket(fileno=int(sys.argv[1]))
    text, vocab_size, end_tokens = json.load(sys.stdin)
    tokenizer = LLTokenizer(text, n_vocab=vocab_size, eos_token=end_tokens)
    del text
    compiled(tokenizer, "regex", "a")
    size = _pages(0) * resource.getpagesize() + _GROWTH
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    os.nice(_NICENESS)
    while True:
        message, ends, _, _ = socket.recv_fds(given, 1, 1)
        if not message:
            return
        for end in ends:
            if os.fork() == 0:
                given.close()
                with suppress(EOFError, OSError):
                    follow(Connection(end), tokenizer)
                os._exit(0)
            os.close(end)


def follow(connection: Connection, tokenizer: LLTokenizer) -> None:
    """A grammar's process: compiles it, then answers tokens by masks until the other end closes."""
    question, before = json.loads(connection.recv_bytes()), _pages(1)
    # their signals end the process
    signal.setitimer(signal.ITIMER_PROF, BUDGET_S)
    signal.setitimer(signal.ITIMER_REAL, CLOCK_S)
    try:
        start = compiled(tokenizer, question["kind"], question["source"])
    except InputError as refused:
        connection.send_bytes(json.dumps({"error": [refused.what, refused.hint]}).encode())
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if (_pages(1) - before) * resource.getpagesize() > BUDGET_MIB << 20:
        return
    connection.send_bytes(b"{}")
    connection.send_bytes(state_of(start))
    answers: dict[int, tuple[LLMatcher, float]] = {}  # with the CPU seconds that it has left
    while True:
        answer, token = ASK.unpack(connection.recv_bytes())
        matcher, left = answers.pop(answer, (start, SAVED_S))
        if token == FORGET:
            continue
        began, left = time.thread_time(), min(SAVED_S, left + TOKEN_S)
        signal.setitimer(signal.ITIMER_PROF, left)
        if matcher is start:
            matcher = start.deep_copy()
        matcher.consume_token(token)
        state = state_of(matcher)
        signal.setitimer(signal.ITIMER_PROF, 0)
        left += began - time.thread_time()
        if left <= 0:
            return
        answers[answer] = matcher, left
        connection.send_bytes(ANSWER.pack(answer) + state)


def _pages(column: int) -> int:
    """Of this process: 0 its address space, 1 its resident memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[column])


if __name__ == "__main__":
    main()
