"""Does the watch catch a shift of traffic, from /metrics alone, and how often is it wrong?

    python benchmarks/watch.py [--quick] [--target builtin --head builtin] [--requests 100]
        [--shifted "word problems"] [--speculation "fixed(6,3,12)"]

The head's card is measured on dialogues (`eyas eval`, greedy, --max-tokens). A server then answers
other dialogues, and from one request on another traffic (--shifted: word problems, commands, or a
task of Spec-Bench); a watch polls its counters all the while. `alarm_after` is how many requests of
the new traffic had ended when the watch said stale, None if it never did.

What each answer counted (usage.eyas) is kept, and windows are drawn from answers with replacement:

    caught          of windows of the new traffic, by size: called stale
    false_alarms    of windows of dialogues, against the card
    test_alone      the same without the margin, against NUM_CARDS cards that are themselves drawn
                    from these dialogues: 0.001, were sums of answers normal

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import held_out
import numpy as np

from eyas.artifact import Artifact
from eyas.bench.watch import FALSE_ALARMS, Z_95, CardTau, WatchWindow, Z, read_card, windows
from eyas.client import Client
from eyas.engine.engine import EngineConfig
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import EvalPrompt
from eyas.serve.server import ServeConfig, running_server
from eyas.tau import num_emitted

CONCURRENCY = 4
POLL_S = 0.2
SIZES = (30, 50, 100, 200)  # of windows that are drawn
NUM_DRAWN = 20_000
NUM_CARDS = 5_000
Row = tuple[int, int]  # emitted tokens and rounds of one answer


def arguments() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=200, model="builtin")
    parser.add_argument("--requests", type=int, default=100, help="of a window")
    parser.add_argument("--shifted", default="word problems", help="the new traffic")
    parser.add_argument("--speculation", default="fixed(6,3,12)")
    parser.set_defaults(max_tokens=64)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.requests = min(args.prompts, 60), min(args.requests, 30)
    return args


def measured_card(args: argparse.Namespace, prompts: Sequence[Any], folder: str) -> CardTau:
    config = EvalConfig(
        trees=(args.speculation,),
        temperatures=(0.0,),
        num_prompts=len(prompts),
        max_tokens=args.max_tokens,
    )
    asked = [
        EvalPrompt(str(number), "dialogues", tuple(messages))
        for number, messages in enumerate(prompts)
    ]
    evaluate(config, args.target, args.head, Artifact(folder), prompts=asked)
    return read_card(folder)[0]


def body(messages: Any, max_tokens: int) -> dict[str, Any]:
    """A request, greedy."""
    return {"model": "eyas", "messages": messages, "max_tokens": max_tokens, "temperature": 0}


class Traffic:
    """Requests to one server, and what each answer counted, in the order of their ends."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.rows: list[Row] = []

    async def send(self, bodies: Sequence[dict[str, Any]]) -> None:
        """All of them, CONCURRENCY at a time."""
        waiting = iter(bodies)

        async def sender() -> None:
            for one in waiting:
                reply = await self._client.request("/v1/chat/completions", one)
                hist = json.loads(reply)["usage"]["eyas"]["accept_hist"]
                self.rows.append((num_emitted(hist), sum(hist)))

        await asyncio.gather(*(sender() for _ in range(CONCURRENCY)))


def server(args: argparse.Namespace) -> AbstractContextManager[str]:
    """A running server of the head; its address."""
    config = ServeConfig(
        target=args.target,
        head=args.head,
        model="eyas",
        port=0,
        engine=EngineConfig(speculation=args.speculation, max_batch=CONCURRENCY, max_length=1024),
    )
    return running_server(config)


async def live(
    args: argparse.Namespace,
    card: CardTau,
    url: str,
    old: Sequence[dict[str, Any]],
    new: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The watch beside the traffic."""
    seen: list[dict[str, Any]] = []
    async with Client(url, 600) as client, Client(url, 30) as other:
        traffic = Traffic(client)

        async def watch() -> None:
            async for window in windows([other], [card], 0.0, args.requests, POLL_S):
                seen.append({"ended": len(traffic.rows), "window": window})
                print(
                    f"after {len(traffic.rows)} requests: tau {window.tau:.2f}, stale below "
                    f"{window.least_tau:.2f}{'  STALE' if window.is_stale else ''}",
                    flush=True,
                )

        task = asyncio.create_task(watch())
        await asyncio.sleep(5 * POLL_S)
        await traffic.send(old)
        num_old = len(traffic.rows)
        await traffic.send(new)
        await asyncio.sleep(5 * POLL_S)
        if task.done():
            task.result()  # raises: windows have no end
        task.cancel()
    stale = [one["ended"] for one in seen if one["window"].is_stale]
    return {
        "rows": (traffic.rows[:num_old], traffic.rows[num_old:]),
        "windows": [
            {
                "ended": one["ended"],
                "tau": round(one["window"].tau, 3),
                "stale": one["window"].is_stale,
            }
            for one in seen
        ],
        "false_alarms": sum(ended <= num_old for ended in stale),
        "alarm_after": next((ended - num_old for ended in stale if ended > num_old), None),
    }


def drawn(rng: np.random.Generator, rows: np.ndarray, size: int, card: CardTau) -> WatchWindow:
    """A window of answers drawn with replacement."""
    emitted, rounds = rows[rng.integers(len(rows), size=size)].sum(axis=0)
    return WatchWindow(size, int(rounds), float(emitted / rounds), (), card)


def tau_of(rows: np.ndarray) -> float:
    emitted, rounds = rows.sum(axis=0)
    return float(emitted / rounds)


def card_of(rows: np.ndarray) -> CardTau:
    """A card of these answers, its interval by linearisation: 5,000 bootstraps would take long."""
    tau, (_, num_rounds) = tau_of(rows), rows.sum(axis=0)
    left = rows[:, 0] - tau * rows[:, 1]
    half = Z_95 * math.sqrt((left**2).sum() * len(rows) / (len(rows) - 1)) / num_rounds
    return CardTau("auto", 0.0, tau, (tau - half, tau + half), len(rows), int(num_rounds), ())


def resampled(card: CardTau, old: Sequence[Row], new: Sequence[Row]) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    before, after = np.array(old), np.array(new)
    figures: dict[str, Any] = {"test_promises": FALSE_ALARMS}
    cards = [
        card_of(before[rng.integers(len(before), size=card.num_answers)]) for _ in range(NUM_CARDS)
    ]
    for size in SIZES:
        wrong = [drawn(rng, before, size, card).is_stale for _ in range(NUM_DRAWN)]
        right = [drawn(rng, after, size, card).is_stale for _ in range(NUM_DRAWN)]
        alone = [
            one.tau - window.tau > Z * math.hypot(one.se, window.se)
            for one in cards
            for _ in range(NUM_DRAWN // NUM_CARDS)
            for window in [drawn(rng, before, size, one)]
        ]
        figures[str(size)] = {
            "caught": round(float(np.mean(right)), 4),
            "false_alarms": round(float(np.mean(wrong)), 5),
            "test_alone": round(float(np.mean(alone)), 5),
        }
    return figures


def main() -> None:
    args = arguments()
    dialogues = held_out.dialogues(args.data, 3 * args.prompts)
    of_card, old = dialogues[: args.prompts], dialogues[args.prompts :]
    others = held_out.not_trained_on(held_out.DATA, args.prompts) | held_out.spec_bench(
        held_out.DATA
    )
    new = others[args.shifted][: args.prompts]
    with tempfile.TemporaryDirectory() as folder:
        card = measured_card(args, of_card, folder)
    print(f"card: tau {card.tau:.2f} ({card.interval[0]:.2f}-{card.interval[1]:.2f})", flush=True)
    bodies = [[body(one, args.max_tokens) for one in prompts] for prompts in (old, new)]
    with server(args) as url:
        watched = asyncio.run(live(args, card, url, *bodies))
    before, after = watched.pop("rows")
    result = {
        "target": args.target,
        "speculation": args.speculation,
        "requests": args.requests,
        "shifted": args.shifted,
        "card": {"tau": round(card.tau, 3), "interval": card.interval, "answers": card.num_answers},
        "tau_before": round(tau_of(np.array(before)), 3),
        "tau_after": round(tau_of(np.array(after)), 3),
        **watched,
        "drawn": resampled(card, before, after),
    }
    for size in SIZES:
        print(f"windows of {size}: {result['drawn'][str(size)]}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
