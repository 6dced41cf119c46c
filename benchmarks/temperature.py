"""Sampling against greedy decoding, plain and with a head, one engine each in one process.

    python benchmarks/temperature.py [--quick] [--target smollm2] [--head smollm2] [--concurrency 1]
    [--prompts 4] [--speculation auto] [--tree fixed(4,2,8)]

Every setting (temperatures, cuts, penalties, log-probabilities) runs the same prompts, some of each
of Spec-Bench's tasks, through four engines on one target: plain, `--speculation`, the same with a
draft that does not know the numbers that tokens are drawn with, and a fixed tree, whose rounds cost
the same at every temperature but for the draws. The settings take turns
prompt by prompt, so that a busy minute hits all alike. By setting: ms a token of each engine
(medians over requests), the speed-up, tau, and ms a round of the fixed tree; and microseconds of a
single draw, as of a first token or under a grammar, in NumPy and in the native library. The last
line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import time
from dataclasses import replace

import held_out
import torch
from speedup import Measured, turn

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.engine.sampling import Sampler
from eyas.model.checkpoint import read_head
from eyas.model.target import Target

SETTINGS = {
    "greedy": {},
    "T 0.3": {"temperature": 0.3},
    "T 0.7": {"temperature": 0.7},
    "T 1": {"temperature": 1.0},
    "T 1 top_k 50": {"temperature": 1.0, "top_k": 50},
    "T 1 top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "T 1 min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "T 1 penalties": {"temperature": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    "T 1 logprobs": {"temperature": 1.0, "logprobs": 5},
}


WAYS = ("plain", "auto", "blind", "tree")


class BlindDraft:
    """A draft that proposes what is most probable, whatever the numbers of the draws."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft

    def __getattr__(self, name: str) -> object:
        return getattr(self._draft, name)

    def grow(self, *arguments: object) -> object:
        return self._draft.grow(*arguments[:-1])


def requests(args: argparse.Namespace) -> list[Request]:
    """Some prompts of each task, mixed."""
    chat, found = Chat(hub.resolve_target(args.target)), []
    for task, conversations in held_out.spec_bench(args.data).items():
        ids = [chat.prompt_ids(one) for one in conversations[: 2 * args.prompts]]
        fits = [one for one in ids if len(one) + args.max_tokens <= args.most][: args.prompts]
        found += [Request(f"{task}-{n}", tuple(one)) for n, one in enumerate(fits)]
    random.Random(0).shuffle(found)
    return found


def arguments() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=4)
    parser.set_defaults(data=held_out.DATA)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--tree", default="fixed(4,2,8)")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--most", type=int, default=1024, help="tokens of prompt and answer")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = 1, 48
    return args


def main() -> None:
    args = arguments()
    target = Target.load(hub.resolve_target(args.target), "bfloat16")
    draft = Draft(*read_head(hub.resolve_head(args.head)), target)
    single = single_draws(args.settings, target.config.vocab_size)
    shared = {"max_batch": args.concurrency, "max_length": args.most, "prefix_reuse": False}
    ways = dict.fromkeys(WAYS, args.speculation) | {"plain": "off", "tree": args.tree}
    engines = {
        way: Engine(target, draft, EngineConfig(speculation=mode, **shared))
        for way, mode in ways.items()
    }
    engines["blind"].rounds.head.draft = BlindDraft(draft)
    measured = {(setting, way): Measured() for setting in args.settings for way in ways}
    asked = requests(args)
    groups = [asked[at : at + args.concurrency] for at in range(0, len(asked), args.concurrency)]
    for number, group in enumerate([groups[0], *groups]):
        order = list(measured)
        random.Random(number).shuffle(order)
        for setting, way in order:
            params = SamplingParams(
                **{"seed": number, "max_tokens": args.max_tokens} | SETTINGS[setting]
            )
            # of other settings neither prefixes nor answers help
            batch = [replace(one, params=params, cache_salt=setting) for one in group]
            # the first group warms up
            into = measured[setting, way] if number else Measured()
            turn(engines[way], batch, args.concurrency, into)
    rows = {setting: row(measured, setting) for setting in args.settings}
    for setting, figures in rows.items():
        figures["plain_to_greedy"] = ratio(figures["ms_plain"], rows[args.settings[0]]["ms_plain"])
        figures |= single.get(setting, {})
        print(setting, json.dumps(figures), flush=True)
    print(
        json.dumps(
            {
                "by_setting": rows,
                "concurrency": args.concurrency,
                "requests": len(asked),
                "machine": held_out.machine(),
            }
        )
    )


def single_draws(settings: list[str], vocab_size: int) -> dict[str, dict[str, float]]:
    """Microseconds of a draw from a row of logits, the fastest of 100, by setting that is sampled:
    in turns, since other work on the machine only ever adds.
    """
    generator = torch.Generator().manual_seed(0)
    logits_V = 4 * torch.randn(vocab_size, generator=generator)
    params = {name: SamplingParams(seed=0, **SETTINGS[name]) for name in settings if SETTINGS[name]}
    found = {name: {"us_draw_plain": math.inf, "us_draw_native": math.inf} for name in params}
    for _ in range(100):
        for (name, one), native in itertools.product(params.items(), (False, True)):
            sampler = Sampler(one, range(500), vocab_size, frozenset())
            started = time.perf_counter()
            sampler.draw(logits_V, native)
            us = (time.perf_counter() - started) * 1e6
            key = "us_draw_native" if native else "us_draw_plain"
            found[name][key] = min(found[name][key], round(us, 1))
    return found


def row(measured: dict[tuple[str, str], Measured], setting: str) -> dict[str, float | None]:
    plain, auto, blind, tree = (measured[setting, way] for way in WAYS)
    ms = {way: statistics.median(measured[setting, way].tpot_ms) for way in WAYS}
    return {
        "ms_plain": round(ms["plain"], 3),
        "ms_auto": round(ms["auto"], 3),
        "speedup": ratio(ms["plain"], ms["auto"]),
        "speedup_blind": ratio(ms["plain"], ms["blind"]),
        "throughput_ratio": ratio(auto.tokens / auto.seconds, plain.tokens / plain.seconds),
        "tau_auto": None if auto.tau is None else round(auto.tau, 3),
        "tau_blind": None if blind.tau is None else round(blind.tau, 3),
        "tau_tree": None if tree.tau is None else round(tree.tau, 3),
        "ms_round_tree": round(statistics.median(tree.tpot_ms) * (tree.tau or 1), 3),
        "same_outputs": sum(plain.outputs[one] == auto.outputs[one] for one in plain.outputs),
    }


def ratio(a: float, b: float) -> float:
    return round(a / b, 3)


if __name__ == "__main__":
    main()
