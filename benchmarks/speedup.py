"""Speculation against plain decoding by number of concurrent requests: same target, precision and
prompts, interleaved.

    python benchmarks/speedup.py [--quick] [--dtype bfloat16] [--concurrency 1 4 8 16 32 64]
    [--temperature 0]
        [--speculation auto] [--prompts 64] [--data FILE.jsonl]

Two engines on one target: one without a head, one with it. At concurrency c the same prompts run
through both, c at a time, in turns of a few seconds, the order changing from turn to turn. TPOT of
a request is the time from its first token to its last over the tokens between; the speed-up is the
ratio of the medians over requests. The throughput ratio counts all tokens over all time, prompts
included. The first turn of each is a warm-up and not counted. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from dataclasses import dataclass, field

import held_out

from eyas import hub
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request
from eyas.model.checkpoint import read_head
from eyas.model.target import Target


@dataclass
class Measured:
    """What one engine did at one concurrency."""

    tpot_ms: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    accepted: list[int] = field(default_factory=list)
    outputs: dict[str, list[int]] = field(default_factory=dict)

    @property
    def tau(self) -> float | None:
        return (
            sum(drafts + 1 for drafts in self.accepted) / len(self.accepted)
            if self.accepted
            else None
        )


def turn(engine: Engine, requests: list[Request], concurrency: int, into: Measured) -> None:
    """All requests through the engine, `concurrency` at a time."""
    waiting = list(reversed(requests))
    first: dict[str, float] = {}
    counts: dict[str, int] = {}
    running = 0
    started = time.perf_counter()
    while waiting or running:
        while waiting and running < concurrency:
            engine.add(waiting.pop())
            running += 1
        updates, now = engine.step(), time.perf_counter()
        for update in updates:
            into.outputs.setdefault(update.request_id, []).extend(update.token_ids)
            if update.num_accepted_drafts is not None:
                into.accepted.append(update.num_accepted_drafts)
            counts[update.request_id] = counts.get(update.request_id, 0) + len(update.token_ids)
            first.setdefault(update.request_id, now)
            if update.finish_reason is not None:
                running -= 1
                if counts[update.request_id] > 1:
                    into.tpot_ms.append(
                        (now - first[update.request_id]) * 1e3 / (counts[update.request_id] - 1)
                    )
    into.seconds += time.perf_counter() - started
    into.tokens += sum(counts.values())


def compare(
    plain: Engine, eagle: Engine, requests: list[Request], concurrency: int, turns: int
) -> dict[str, object]:
    """Figures at one concurrency. Prompts differ from turn to turn while they last."""
    per_turn = max(concurrency * 2, min(12, len(requests)))
    measured = {"plain": Measured(), "eagle": Measured()}
    for number in range(turns + 1):
        start = number * per_turn
        batch = [
            dataclasses.replace(requests[(start + at) % len(requests)], id=f"{number}-{at}")
            for at in range(per_turn)
        ]
        engines = {"plain": plain, "eagle": eagle}
        for name in engines if number % 2 else reversed(engines):
            turn(engines[name], batch, concurrency, measured[name] if number else Measured())
    a, b = measured["plain"], measured["eagle"]
    plain_ms, eagle_ms = statistics.median(a.tpot_ms), statistics.median(b.tpot_ms)
    return {
        "concurrency": concurrency,
        "tpot_ms_plain": round(plain_ms, 3),
        "tpot_ms_eagle": round(eagle_ms, 3),
        "speedup": round(plain_ms / eagle_ms, 3),
        "throughput_ratio": round(b.tokens / b.seconds / (a.tokens / a.seconds), 3),
        "tokens_per_s_plain": round(a.tokens / a.seconds),
        "tokens_per_s_eagle": round(b.tokens / b.seconds),
        "tau": None if b.tau is None else round(b.tau, 3),
        "requests": len(a.outputs),
        "same_outputs": sum(a.outputs[one] == b.outputs[one] for one in a.outputs),
    }


def arguments() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32", "packed"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--speculation", default="auto", help="auto or fixed(6,3,12)")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument(
        "--no-native", action="store_true", help="PyTorch operators instead of the native CPU path"
    )
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.turns, args.concurrency = min(args.prompts, 24), 2, [1, 4, 16]
    return args


def main() -> None:
    args = arguments()
    folder = hub.resolve_target(args.target)
    target = Target.load(folder, args.dtype, native=not args.no_native)
    draft = Draft(*read_head(hub.resolve_head(args.head)), target)
    most = max(args.concurrency)
    shared = {"max_batch": most}
    plain = Engine(target, None, EngineConfig(speculation="off", **shared))
    eagle = Engine(target, draft, EngineConfig(speculation=args.speculation, **shared))
    requests = [
        dataclasses.replace(
            one, params=dataclasses.replace(one.params, temperature=args.temperature, seed=index)
        )
        for index, one in enumerate(held_out.requests(args))
    ]
    rows = []
    for concurrency in args.concurrency:
        rows.append(compare(plain, eagle, requests, concurrency, args.turns))
        print(json.dumps(rows[-1]), flush=True)
    figures = {
        "by_concurrency": rows,
        "dtype": args.dtype,
        "temperature": args.temperature,
        "speculation": args.speculation,
        "native": target.is_native,
        "metrics": {name: round(value, 3) for name, value in eagle.metrics().items()},
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
