"""Outputs under stress against plain decoding alone, token by token: are they the same?

    python benchmarks/identity.py [--quick] [--dtype float32|bfloat16|packed] [--prompts 500]
    [--sampled] [--swap HEAD] [--max-tokens 64] [--data FILE.jsonl]

Plainly: one prompt at a time, no head, no reuse of prefixes. Under stress: four engines in turn,
each with a quarter of the prompts, in batches of 4 to 12, with a cache that holds little more than
the longest request, so that samples are preempted all the time. Prompts are dialogues cut before
two of their answers, so that they begin with each other; every tenth is asked for twice. Every
other answer goes on past its end token. Requests arrive in bursts, every sixth with one that is
cancelled after some steps.

With --sampled every request has random sampling parameters and a seed. With --swap the head and
that one draft in turn, SWAP_STEPS steps each. Where two outputs part, the gap of the best two
logits says whether rounding can explain it. Exit code 1 if an output differs. The last line of
stdout is one JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from dataclasses import dataclass
from itertools import takewhile

import held_out
import numpy as np

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.log import quiet
from eyas.model.checkpoint import read_head
from eyas.model.target import PAGE_SIZE, Target

MAX_LENGTH, MAX_STEPS = 320, 200_000
SWAP_STEPS = 25
STRESSES = [
    {"speculation": "fixed(6,3,12)", "max_batch": 5},
    {"speculation": "auto", "max_batch": 8},
    {"speculation": "fixed(4,2,8)", "max_batch": 12},
    {"speculation": "auto", "max_batch": 4},
]


@dataclass(slots=True)
class Stressed:
    outputs: dict[str, list[int]]
    cancelled: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    accepted: int = 0
    swaps: int = 0


def prompts(args: argparse.Namespace) -> list[Request]:
    """Dialogues cut before two of their answers, one after the other; every tenth twice."""
    chat, rng = Chat(hub.resolve_target(args.target)), random.Random(args.seed)
    made: list[Request] = []
    for messages in held_out.dialogues(args.data, args.prompts):
        for cut in (len(messages) - 2, len(messages)):
            ids = chat.prompt_ids(messages[:cut]) if cut > 0 else []
            if 0 < len(ids) <= MAX_LENGTH - args.max_tokens:
                params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=len(made) % 2 == 0)
                if args.sampled:
                    params = random_params(rng, params)
                made += [Request("", tuple(ids), params)] * (2 if len(made) % 10 == 0 else 1)
    if len(made) < args.prompts:
        sys.exit(
            f"error: {args.data} gives only {len(made)} prompts\n  -> give fewer with --prompts, "
            "or more data with --data"
        )
    return [
        dataclasses.replace(one, id=str(index)) for index, one in enumerate(made[: args.prompts])
    ]


def random_params(rng: random.Random, params: SamplingParams) -> SamplingParams:
    options: dict[str, object] = {"temperature": rng.choice([0.3, 0.8, 1.0, 1.4])}
    options["seed"] = rng.getrandbits(31)
    for share, name, value in (
        (0.3, "top_k", rng.choice([1, 5, 50])),
        (0.3, "top_p", rng.choice([0.3, 0.9, 0.99])),
        (0.2, "min_p", 0.05),
        (0.2, "repetition_penalty", rng.choice([0.9, 1.3])),
        (0.2, "frequency_penalty", 0.7),
        (0.2, "presence_penalty", -0.5),
        (0.2, "logit_bias", {rng.randrange(3, 8000): rng.uniform(-8, 8) for _ in range(3)}),
        (0.2, "logprobs", rng.choice([0, 3, 20])),
        (0.1, "regex", r"[a-z ]{5,40}!"),
    ):
        if rng.random() < share:
            options[name] = value
    if "regex" in options:  # a grammar ends its answers itself
        options["ignore_eos"] = False
    return dataclasses.replace(params, **options)  # type: ignore[arg-type]


def stress(
    engine: Engine, requests: list[Request], rng: random.Random, into: Stressed, drafts: list[Draft]
) -> None:
    """All requests through one engine, in bursts, among others that are cancelled. drafts: those
    that take turns; the engine begins with the first.
    """
    waiting, doomed = list(reversed(requests)), dict[str, int]()
    done = 0
    for step in range(MAX_STEPS):
        if done == len(requests) and not engine.has_work:
            break
        if len(drafts) > 1 and step % SWAP_STEPS == SWAP_STEPS - 1:
            into.swaps += engine.swap_draft(drafts[(step + 1) // SWAP_STEPS % len(drafts)])
        if waiting and rng.random() < 0.4:
            for _ in range(min(len(waiting), rng.choice([1, 1, 2, 6]))):
                request = waiting.pop()
                engine.add(request)
                if rng.random() < 1 / 6:
                    other = dataclasses.replace(request, id=f"doomed-{request.id}")
                    doomed[other.id] = step + rng.randrange(1, 25)
                    engine.add(other)
        for name in [name for name, end in doomed.items() if end <= step]:
            engine.cancel(name)
            into.cancelled += 1
            del doomed[name]
        for update in engine.step():
            into.accepted += update.num_accepted_drafts or 0
            if update.request_id.startswith("doomed"):
                if update.finish_reason is not None:
                    doomed.pop(update.request_id, None)
                continue
            into.outputs.setdefault(update.request_id, []).extend(update.token_ids)
            done += update.finish_reason is not None
    assert done == len(requests), f"not all requests finished in {MAX_STEPS} steps"
    engine.check()
    metrics = engine.metrics()
    into.preemptions += int(metrics["preemptions"])
    into.prompt_tokens += int(metrics["prompt_tokens"])
    into.reused_tokens += int(metrics["prompt_tokens_reused"])


def gap_at_parting(
    target: Target, request: Request, plain: list[int], stressed: list[int]
) -> tuple[int, float]:
    """Where two outputs part, and the gap of the two best logits there."""
    both = zip(plain, stressed, strict=False)
    place = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
    logits_V = target.logits(np.array([[*request.prompt_ids, *plain[:place]]]))[0, -1]
    second, best = np.sort(logits_V)[-2:].tolist()
    return place, best - second


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=500)
    parser.set_defaults(max_tokens=64)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "packed"])
    parser.add_argument("--sampled", action="store_true", help="random sampling parameters")
    parser.add_argument("--swap", metavar="HEAD", help="drafts in turn with the first")
    parser.add_argument("--seed", type=int, default=0, help="of arrivals, cancellations, sampling")
    args = parser.parse_args()
    if args.quick:
        args.prompts = min(args.prompts, 60)
    requests = prompts(args)
    folder = hub.resolve_target(args.target)
    tokenizer = Chat(folder).tokenizer
    target = Target.load(folder, args.dtype)
    heads = [args.head, *([args.swap] if args.swap else [])]
    drafts = [Draft(*read_head(hub.resolve_head(head)), target) for head in heads]
    started = time.perf_counter()
    settings = {"max_batch": 1, "prefix_reuse": False, "speculation": "off"}
    config = EngineConfig(max_length=MAX_LENGTH, **settings)
    alone = Engine(target, None, config, tokenizer)
    plain = {result.request_id: result.token_ids for result in alone.run(requests, quiet)}
    plain_s = time.perf_counter() - started
    print(f"plain decoding alone: {len(plain)} prompts, {plain_s:.0f} s", flush=True)
    total, rng = Stressed({}), random.Random(args.seed)
    longest = max(len(request.prompt_ids) for request in requests) + args.max_tokens
    pages = -(-(longest + 64) // PAGE_SIZE)  # for the longest with its trees
    for number, one in enumerate(STRESSES):
        sizes = {"max_length": MAX_LENGTH, "num_pages": pages, "prefill_chunk": 96}
        engine = Engine(target, drafts[0], EngineConfig(**sizes, **one), tokenizer)
        # Quarters by blocks of eight, so that turns of one dialogue meet in one engine.
        own = [request for at, request in enumerate(requests) if at // 8 % 4 == number]
        stress(engine, own, rng, total, drafts)
        print(f"{one}: {len(own)} prompts, {time.perf_counter() - started:.0f} s", flush=True)
    partings = []
    for request in requests:
        if plain[request.id] != total.outputs[request.id]:
            both = plain[request.id], total.outputs[request.id]
            place, gap = gap_at_parting(target, request, *both)
            partings.append({"prompt": request.id, "token": place, "gap": gap})
            print(f"prompt {request.id} parts at token {place}; gap of the logits {gap:.2e}")
    figures = {
        "prompts": len(requests),
        "tokens": sum(map(len, plain.values())),
        "identical": len(requests) - len(partings),
        "partings": partings,
        "preemptions": total.preemptions,
        "cancelled": total.cancelled,
        "reused_share": round(total.reused_tokens / total.prompt_tokens, 3),
        "accepted_drafts": total.accepted,
        "swaps": total.swaps,
        "dtype": args.dtype,
        "sampled": args.sampled,
        "seconds_plain": round(plain_s, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))
    sys.exit(1 if partings else 0)


if __name__ == "__main__":
    main()
