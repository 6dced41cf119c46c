"""A process that compiles a client's grammar first, under a budget of time and memory.

Compiling cannot be interrupted, and llguidance's own limits do not bound all of it: to intersect
thirty patterns takes minutes, and a chain of a thousand references overflows the stack, which ends
the process. So a grammar is compiled here before it is compiled for the engine, and what ends this
process ends no answer. Its tokens are single bytes.

    GrammarProcess.check ── {"kind", "source"} ─▶ main: compile, first mask
                         ◀── {"error", "grown_mib"} ── or the process has ended
"""

from __future__ import annotations

import json
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from eyas.engine.schemas import lark, plain_schema
from eyas.errors import InputError

Kind = Literal["json_schema", "regex", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)  # fields of SamplingParams; one at most is given

# Of one grammar: CPU seconds to compile it, and what it may add to the process's memory. Schemas
# and expressions that people write take up to 60 ms and 3 MiB (docs/decisions/server.md).
BUDGET_S, BUDGET_MIB = 0.5, 8
_ADDRESS_SPACE = 1 << 30  # bytes, of the process
_WAIT_S = 20.0  # on a machine so busy that the process gets hardly any CPU time
# The thread that compiles for the engine has the system's default, 8 MiB: it can follow what this
# one has followed.
_STACK_BYTES = 1 << 20
# between the parts of a JSON text: some targets never leave off where blanks may go on
_BLANKS = r"[ \t\n\r]{0,20}"
# The library counts its work ("fuel"): to read a grammar, and for each token. Its defaults are
# five, two and four times as much.
PARSER_LIMITS = LLParserLimits(
    initial_lexer_fuel=200_000,
    step_lexer_fuel=100_000,
    max_lexer_states=64_000,  # 1.5 KiB each, kept as answers reach them
    verbose_errors=False,
)


def grammar_text(kind: Kind, source: str) -> str:
    """A grammar in the library's form. Raises ValueError."""
    if kind == "grammar":
        return lark(source)
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    with suppress(ValueError, RecursionError):  # of what is no schema the library says why
        source = json.dumps(plain_schema(json.loads(source)))
    return LLMatcher.grammar_from_json_schema(source, defaults={"whitespace_pattern": _BLANKS})


def compiled(tokenizer: LLTokenizer, kind: Kind, source: str) -> LLMatcher:
    """A matcher at the start of a grammar. Raises InputError for one that cannot be followed."""
    try:
        text = grammar_text(kind, source)
    except ValueError as error:
        raise InputError(
            f"the {kind} cannot be read: {error}",
            "give a grammar in GBNF or Lark's form"
            if kind == "grammar"
            else "give a JSON schema, an object, as a string of JSON",
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


class GrammarProcess:
    """The process: it starts with the first grammar, and again after one that has ended it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, kind: Kind, source: str) -> None:
        """Raise InputError for a grammar that cannot be compiled within the budget, or at all."""
        with self._lock:
            answer = self._answer({"kind": kind, "source": source})
        if answer is None or answer["grown_mib"] > BUDGET_MIB:
            raise InputError(
                f"the {kind} needs more than {BUDGET_S} s or {BUDGET_MIB} MiB to be compiled",
                "give smaller counts, fewer patterns for one value, or less nesting",
            )
        if answer["error"] is not None:
            raise InputError(*answer["error"])

    def _answer(self, question: dict[str, str]) -> dict[str, Any] | None:
        """What the process finds; None, and no process, where it exceeds the budget."""
        process = self._process or self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
        except OSError:  # it was ended from outside, while it had nothing to do
            _end(process)
            self._process = None
            return self._answer(question)
        is_ready, _, _ = select.select([process.stdout], [], [], _WAIT_S)
        line = process.stdout.readline() if is_ready else b""
        answer: dict[str, Any] | None = json.loads(line) if line else None
        if answer is None or answer["grown_mib"] > BUDGET_MIB:
            _end(process)
            self._process = None
        return answer

    def _started(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "eyas.engine.grammar_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a panic's message may quote what a client wrote
        )
        weakref.finalize(self, _end, self._process)
        return self._process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(BrokenPipeError), process:  # closes the pipes and waits
        pass


def main() -> None:
    """The process: answers a line of JSON by a line of JSON until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=_answer_lines)
    thread.start()
    thread.join()


def _answer_lines() -> None:
    tokenizer = LLTokenizer("byte")
    compiled(tokenizer, "regex", "a")
    for line in sys.stdin.buffer:
        question, before = json.loads(line), _resident_mib()
        error, start = None, None
        # its signal ends the process
        signal.setitimer(signal.ITIMER_VIRTUAL, BUDGET_S)
        try:
            start = compiled(tokenizer, question["kind"], question["source"])
        except InputError as refused:
            error = (refused.what, refused.hint)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        answer = {"error": error, "grown_mib": _resident_mib() - before}
        del start
        print(json.dumps(answer), flush=True)


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


if __name__ == "__main__":
    main()
