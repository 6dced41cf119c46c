"""The talk between the peers benchmark and the process that holds one engine, in JSON lines.

A worker is run by its engine's own Python, so this file is standard library only. It reads one
command a line from stdin and answers one line on stdout:

    {"do": "load", ...settings}
        -> {"ok": true}
    {"do": "decode", "prompts": [[ids]], "max_tokens": n, "ignore_eos": b}
        -> {"ok": true, "answers": [Decoded, ...]}
    {"do": "together", ...the same}: all at once, for throughput
        -> {"ok": true, "answers": [Decoded]}, every answer's tokens in one

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
    """One answer: its tokens; the seconds from its first token to its last; the target's forwards
    in these seconds; and the seconds before the first token.
    """

    tokens: list[int]
    seconds: float
    rounds: int
    prompt_seconds: float = 0.0


def timed(asked: float, updates: Iterable[list[int]]) -> Decoded:
    """An answer from its tokens as its rounds give them; asked: when its prompt was given."""
    tokens: list[int] = []
    first = last = 0.0
    rounds = 0
    for update in updates:
        last = time.perf_counter()
        rounds += bool(tokens) and bool(update)
        first = first if tokens else last
        tokens += update
    return Decoded(tokens, last - first, rounds, first - asked)


class Engine(Protocol):
    """What a worker holds: one engine with one target, and a head or none."""

    def decode(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> Decoded: ...

    def decode_together(
        self, prompts: list[list[int]], max_tokens: int, ignore_eos: bool
    ) -> Decoded:
        """Greedy, as many at a time as the engine was loaded for; seconds of everything, prompts
        included. Only of engines in the section "together".
        """
        ...


def serve(load: Callable[[dict[str, Any]], Engine]) -> None:
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine: Engine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if (do := command.pop("do")) == "load":
                engine = load(command)
                reply: dict[str, Any] = {"ok": True}
            else:
                assert engine is not None, "decode before load"
                prompts, rest = command["prompts"], (command["max_tokens"], command["ignore_eos"])
                if do == "together":
                    answers = [engine.decode_together(prompts, *rest)]
                else:
                    answers = [engine.decode(prompt, *rest) for prompt in prompts]
                reply = {"ok": True, "answers": [asdict(one) for one in answers]}
        # whatever an engine raises is its answer: the benchmark goes on without it
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
