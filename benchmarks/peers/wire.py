"""The talk between a benchmark and the process that holds one engine, in JSON lines.

A worker is run by its engine's own Python, so this file is standard library only. It reads one
command a line from stdin and answers one line on stdout:

    {"do": "load", ...settings}
        -> {"ok": true}
    {"do": "decode", "prompts": [[ids]], "max_tokens": n, "ignore_eos": b}
        -> {"ok": true, "answers": [Decoded, ...]}

or {"error": text}. The engine stays loaded between commands. What libraries print goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer: its tokens; the seconds from its first token to its last; and the target's
    forwards in these seconds.
    """

    tokens: list[int]
    seconds: float
    rounds: int


def timed(updates: Iterable[list[int]]) -> Decoded:
    """An answer from its tokens as its rounds give them."""
    tokens: list[int] = []
    first = last = 0.0
    rounds = 0
    for update in updates:
        last = time.perf_counter()
        rounds += bool(tokens) and bool(update)
        first = first if tokens else last
        tokens += update
    return Decoded(tokens, last - first, rounds)


class Engine(Protocol):
    """What a worker holds: one engine with one target, and a head or none."""

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded: ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command.pop("do") == "load":
                engine = load(command)
                reply: dict[str, Any] = {"ok": True}
            else:
                assert engine is not None, "decode before load"
                prompts, rest = command["prompts"], (command["max_tokens"], command["ignore_eos"])
                answers = [engine.decode(prompt, *rest) for prompt in prompts]
                reply = {"ok": True, "answers": [asdict(one) for one in answers]}
        # whatever an engine raises is its answer: the benchmark goes on without it
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
