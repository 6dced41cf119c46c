"""Drafts from text beside the head's, and without a head: tau, tokens a second, identity.

    python benchmarks/text_drafts.py [--quick] [--target smollm2] [--head smollm2]
    [--prompts 20] [--max-tokens 128] [--data FOLDER] [--also "head, auto(8,2,16)" ...]

One request at a time, greedy, bf16, in one process. The arms take turns prompt by prompt, the order
changing, so that a busy moment hits all alike: plain decoding, the head alone, head and text, the
same without recent answers of the server, text alone without a head. Spec-Bench's six tasks; four
sets whose answers repeat their prompts, made here of the Python library's own source and
documentation (PSF-2.0); and, after all of them, Spec-Bench's questions asked again in other words,
where an earlier answer may help. --also adds arms of other trees.

Tokens a second are those behind the first token over the time since; speed-ups are ratios of
medians of a token's time over prompts, and of the sums. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import fnmatch
import heapq
import inspect
import json
import random
import statistics
import string
import textwrap
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import held_out

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.engine.text import RecentAnswers
from eyas.model.checkpoint import read_head
from eyas.model.target import Target

MAX_LENGTH = 2048
LIBRARY: tuple[ModuleType, ...] = (argparse, fnmatch, heapq, inspect, json, random, statistics)
LIBRARY += (string, textwrap)
AGAIN = "I would like to ask you something."
SIZES = 300, 1600  # characters of what is to be repeated


@dataclass(frozen=True, slots=True)
class Decoded:
    """One answer: its tokens, rounds of the target behind the first token, seconds since then."""

    tokens: list[int]
    rounds: int
    seconds: float


def repeating(count: int) -> dict[str, list[str]]:
    """Prompts whose answers repeat them, by task."""
    functions, paragraphs = [], []
    for module in LIBRARY:
        for _, one in inspect.getmembers(module, inspect.isfunction):
            if one.__module__ == module.__name__:
                functions.append(textwrap.dedent(inspect.getsource(one)))
        for _, kind in inspect.getmembers(module, inspect.isclass):
            if kind.__module__ == module.__name__ and kind.__doc__:
                paragraphs.append(inspect.cleandoc(kind.__doc__))
        paragraphs.append(inspect.cleandoc(module.__doc__ or ""))
    rng = random.Random(0)
    least, most = SIZES
    short = [one for one in functions if least <= len(one) <= most]
    texts = [one[:most] for one in paragraphs if len(one) >= least]
    rng.shuffle(short)
    rng.shuffle(texts)
    return {
        "rename in code": [
            f"Rename the function to `renamed` and write the whole code again.\n\n{one}"
            for one in short[:count]
        ],
        "comment code": [
            f"Write this code again, unchanged, with a comment at its top.\n\n{one}"
            for one in short[count : 2 * count]
        ],
        "correct text": [
            f"Correct spelling and grammar of this text, change nothing else, and write all of "
            f"it.\n\n{one}"
            for one in texts[:count]
        ],
        "quote": [
            f"{one}\n\nQuote the sentences of this text that say what it is for."
            for one in texts[:count]
        ],
    }


def asked(args: argparse.Namespace, chat: Chat) -> list[tuple[str, str, Request]]:
    """Group, task and request of every prompt that leaves room for an answer."""
    spec_bench = held_out.spec_bench(args.data)
    groups = {
        "Spec-Bench": spec_bench,
        "repeats its prompt": {
            task: [[{"role": "user", "content": one}] for one in prompts]
            for task, prompts in repeating(args.prompts).items()
        },
    }
    groups["asked again"] = {
        f"{task}, again": [
            [{"role": "user", "content": f"{AGAIN} {messages[0]['content']}"}]
            for messages in prompts
        ]
        for task, prompts in spec_bench.items()
    }
    params, found = SamplingParams(max_tokens=args.max_tokens), []
    for group, by_task in groups.items():
        for task, prompts in by_task.items():
            for number, messages in enumerate(prompts[: args.prompts]):
                ids = tuple(chat.prompt_ids(messages))
                if len(ids) + args.max_tokens <= MAX_LENGTH:
                    found.append((group, task, Request(f"{task}-{number}", ids, params)))
    # tasks in turns: what is learned of acceptance is of no task alone
    random.Random(0).shuffle(found)
    # nobody asks again before having asked
    return sorted(found, key=lambda one: one[0] == "asked again")


def engines(args: argparse.Namespace, chat: Chat) -> dict[str, Engine]:
    """The arms by name, on one target and head."""
    target = Target.load(hub.resolve_target(args.target), "bfloat16")
    draft = Draft(*read_head(hub.resolve_head(args.head), target), target)

    def engine(head: bool, **config: Any) -> Engine:
        sizes = EngineConfig(max_batch=1, max_length=MAX_LENGTH, **config)
        return Engine(target, draft if head else None, sizes, chat.tokenizer)

    arms = {
        "plain": engine(False, speculation="off"),
        "head": engine(True, text_drafts=False),
        "head and text": engine(True),
        "head and text, not recent": engine(True),
        "text": engine(False),
    }
    arms["head and text, not recent"].rounds.text.recent = RecentAnswers(0)
    for name in args.also:
        source, _, tree = name.partition(", ")
        arms[name] = engine("head" in source, speculation=tree, text_drafts="text" in source)
    return arms


def decode(engine: Engine, request: Request) -> Decoded:
    engine.add(request)
    tokens: list[int] = []
    rounds, first_at = 0, time.perf_counter()
    while engine.has_work:
        for update in engine.step():
            if tokens:
                rounds += 1
            else:
                first_at = time.perf_counter()
            tokens += update.token_ids
    return Decoded(tokens, rounds, time.perf_counter() - first_at)


def figures(of_arm: list[Decoded], of_plain: list[Decoded]) -> dict[str, Any]:
    pairs = [
        (one, plain)
        for one, plain in zip(of_arm, of_plain, strict=True)
        if len(one.tokens) > 1 and len(plain.tokens) > 1
    ]
    behind = [len(one.tokens) - 1 for one, _ in pairs]
    seconds = sum(one.seconds for one, _ in pairs)
    ms = statistics.median(1e3 * one.seconds / (len(one.tokens) - 1) for one, _ in pairs)
    return {
        "tau": round(sum(behind) / sum(one.rounds for one, _ in pairs), 3),
        "tokens_per_s": round(sum(behind) / seconds, 1),
        "tpot_ms": round(ms, 3),
        "identical": sum(one.tokens == plain.tokens for one, plain in pairs),
        "answers": len(pairs),
    }


def compared(arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """With the speed-ups over the head alone and over plain decoding: of the sums, and medians."""
    for one in arms.values():
        for other in ("head", "plain"):
            one[f"over_{other}"] = round(one["tokens_per_s"] / arms[other]["tokens_per_s"], 3)
            one[f"median_over_{other}"] = round(arms[other]["tpot_ms"] / one["tpot_ms"], 3)
    return arms


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--prompts", type=int, default=20, help="of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--data", type=Path, default=held_out.DATA)
    parser.add_argument("--also", nargs="+", default=[], help="more arms: SOURCES, SPECULATION")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 2), min(args.max_tokens, 64)
    return args


def main() -> None:
    args = arguments()
    chat = Chat(hub.resolve_target(args.target))
    requests, arms = asked(args, chat), engines(args, chat)
    decoded: dict[str, dict[str, list[Decoded]]] = defaultdict(lambda: defaultdict(list))
    for number, (group, task, request) in enumerate(requests):
        turn = number % len(arms)
        for name in [*arms][turn:] + [*arms][:turn]:
            one = decode(arms[name], request)
            for place in (group, task):
                decoded[place][name].append(one)
    found = {
        place: compared({name: figures(ones[name], ones["plain"]) for name in arms})
        for place, ones in decoded.items()
    }
    for place, by_arm in found.items():
        for name, one in by_arm.items():
            print(f"{place:20} {name:22} " + "  ".join(f"{key} {one[key]}" for key in one))
    accepted = {
        name: {key: value for key, value in engine.metrics().items() if "accepted" in key}
        for name, engine in arms.items()
    }
    print(json.dumps({"figures": found, "accepted": accepted, "machine": held_out.machine()}))


if __name__ == "__main__":
    main()
