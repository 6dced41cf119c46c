"""A window for the draft's attention: tau, and what a round costs, by the length of the context.

    python benchmarks/window.py [--quick] [--target smollm2] [--head smollm2] [--window 512]
    [--contexts 512 2048 4096 8192] [--prompts 8] [--max-tokens 96] [--data FILE] [--costs]

One request at a time, greedy, bf16, in one process. A prompt is a chat of held-out dialogues one
after the other, cut before an answer where the context is full. The arms take turns prompt by
prompt: plain decoding, the head as it is, and the same head with the window, which nothing has
trained it for. Both draft one fixed tree, so that nothing but attention differs.

round_ms is the median round, draft_ms the head's part of it (entries of the last tokens and growth
of the tree), plain_ms the target's forward of one row: the target sees all of the context, so its
part grows in every arm. --costs measures the head's part alone, the fastest of many growths behind
random features: seconds instead of minutes, and no tau. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections import defaultdict
from typing import Any

import held_out
import numpy as np

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.engine.tree import Speculation
from eyas.model.checkpoint import read_head
from eyas.model.rows import FeatureCache, Growth, Roots
from eyas.model.target import PAGE_SIZE, Target
from eyas.tau import tau_of

TREE = "fixed(5,3,8)"


class TimedDraft(Draft):
    """Notes how many seconds each growth of a tree takes."""

    def grow(self, *args: Any) -> Any:
        begin = time.perf_counter()
        proposals = super().grow(*args)
        self.seconds.append(time.perf_counter() - begin)
        return proposals

    seconds: list[float]


def prompt(chat: Chat, dialogues: list[list[dict[str, str]]], room: int) -> tuple[int, ...]:
    """The most turns of the dialogues that fit, the user's the last."""
    turns = [message for messages in dialogues for message in messages]
    fits: tuple[int, ...] = ()
    low, high = 1, len(turns)
    while low <= high:  # longer chats have more tokens
        count = (low + high) // 2
        cut = turns[:count]
        while cut and cut[-1]["role"] != "user":
            cut = cut[:-1]
        ids = tuple(chat.prompt_ids(cut)) if cut else ()
        if len(ids) <= room:
            fits, low = max(fits, ids, key=len), count + 1
        else:
            high = count - 1
    return fits


def decode(engine: Engine, request: Request) -> tuple[list[int], list[int], list[float]]:
    """Tokens, accepted drafts by round, and seconds of the rounds behind the first token."""
    engine.add(request)
    tokens: list[int] = []
    accepted: list[int] = []
    seconds: list[float] = []
    while engine.has_work:
        begin = time.perf_counter()
        updates, is_round = engine.step(), bool(tokens)
        if is_round:
            seconds.append(time.perf_counter() - begin)
        for update in updates:
            tokens += update.token_ids
            if is_round and update.token_ids:
                accepted.append(len(update.token_ids) - 1)
    return tokens, accepted, seconds


def growth_ms(draft: Draft, context: int) -> float:
    """Milliseconds of two entries and a tree at the end of a context of random features."""
    sizes, tree = draft.config, Speculation.parse(TREE)
    pages = -(-(context + 64) // PAGE_SIZE)
    cache = draft.new_cache(pages)
    cache.data.normal_()
    features = FeatureCache(pages * PAGE_SIZE, 3 * sizes.target_hidden_size, cache.data.dtype)
    features.data.normal_()
    table = np.arange(pages, dtype=np.int32)[None]
    roots = Roots([context], [context - 1], [5, 6], table)
    growth = Growth(tree.num_draft_steps, tree.tree_topk, tree.tree_topk)
    fastest = math.inf
    for _ in range(60):
        begin = time.perf_counter()
        draft.grow(roots, cache, features, growth, [0.0] * tree.num_draft_steps)
        fastest = min(fastest, time.perf_counter() - begin)
    return round(1e3 * fastest, 3)


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=8)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096, 8192])
    parser.add_argument("--costs", action="store_true", help="of the head alone")
    parser.set_defaults(max_tokens=96)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 2), min(args.max_tokens, 48)
    folder = hub.resolve_target(args.target)
    chat, target = Chat(folder), Target.load(folder, "bfloat16")
    config, tensors = read_head(hub.resolve_head(args.head), target.config)
    windowed = config.model_copy(update={"sliding_window": args.window})
    drafts = {
        "head": TimedDraft(config, tensors, target),
        "window": TimedDraft(windowed, tensors, target),
    }
    if args.costs:
        for draft in drafts.values():
            draft.seconds = []
        ms = {
            name: {str(context): growth_ms(draft, context - 64) for context in args.contexts}
            for name, draft in drafts.items()
        }
        print(json.dumps({"window": args.window, "tree": TREE, "draft_ms": ms}))
        return
    dialogues = held_out.dialogues(args.data, 100 * args.prompts)
    found: dict[str, dict[str, Any]] = {}
    for context in args.contexts:
        sizes = {"max_batch": 1, "max_length": context, "prefix_reuse": False}
        arms = {"plain": Engine(target, None, EngineConfig(**sizes, speculation="off"))}
        for name, draft in drafts.items():
            arms[name] = Engine(target, draft, EngineConfig(**sizes, speculation=TREE))
            draft.seconds = []
        accepted, seconds = defaultdict(list), defaultdict(list)
        answers: list[dict[str, list[int]]] = []
        lengths = []
        for number in range(args.prompts):
            chosen = random.Random(number).sample(dialogues, min(100, len(dialogues)))
            ids = prompt(chat, chosen, context - args.max_tokens)
            params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
            lengths.append(len(ids))
            answers.append({})
            turn = number % len(arms)
            for name in [*arms][turn:] + [*arms][:turn]:
                answers[-1][name], by_round, times = decode(
                    arms[name], Request(f"{number}", ids, params)
                )
                accepted[name] += by_round
                seconds[name] += times
        row: dict[str, Any] = {
            "prompt_tokens": round(statistics.mean(lengths)),
            "plain_ms": round(1e3 * statistics.median(seconds["plain"]), 3),
        }
        for name, draft in drafts.items():
            hist = [accepted[name].count(n) for n in range(max(accepted[name]) + 1)]
            row[name] = {
                "tau": round(tau_of(hist), 3),
                "round_ms": round(1e3 * statistics.median(seconds[name]), 3),
                "draft_ms": round(1e3 * statistics.median(draft.seconds), 3),
                "identical": sum(one[name] == one["plain"] for one in answers),
                "answers": len(answers),
            }
        found[str(context)] = row
        print(context, row, flush=True)
    report = {"window": args.window, "tree": TREE, "contexts": found}
    print(json.dumps({**report, "machine": held_out.machine()}))


if __name__ == "__main__":
    main()
