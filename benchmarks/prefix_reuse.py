"""Dialogues of several turns: how much of each prompt is found in the cache, and what that saves,
with and without speculation.

    python benchmarks/prefix_reuse.py [--quick] [--dtype bfloat16] [--prompts 24] [--turns 4]
    [--concurrency 4] [--data FILE]

Every next prompt is all that was said before, answer included, and the next question; the same for
every engine. The hit rate is reused over all prompt tokens; `possible` is what whole pages allow:
of each prompt the part that its dialogue has already been through. Off, fixed and auto must reach
the same: SGLang's hit rate fell from 97 % to 40-53 % with EAGLE, whose draft needs one token more
than the target does. The time to the first token is that of later turns, alone in the engine, with
reuse and without, in turns. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator

import held_out

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.model.checkpoint import read_head
from eyas.model.target import PAGE_SIZE, Target

MAX_LENGTH = 1024
MODES = ["off", "fixed(6,3,12)", "auto"]


def questions(args: argparse.Namespace, chat: Chat) -> list[list[list[int]]]:
    """Per dialogue the tokens that each turn adds: the first prompt, then what stands between an
    answer and the next one.
    """
    made = []
    for messages in held_out.dialogues(args.data, args.prompts * 4):
        users = [message for message in messages if message["role"] == "user"]
        if len(users) < args.turns:
            continue
        first = chat.prompt_ids(users[:1])
        made.append([first, *[chat.prompt_ids([user]) for user in users[1 : args.turns]]])
    if len(made) < args.prompts:
        sys.exit(
            f"error: {args.data} has {len(made)} dialogues of {args.turns} turns\n  -> lower "
            "--prompts or --turns"
        )
    return made[: args.prompts]


def talk(
    engine: Engine, dialogues: list[list[list[int]]], max_tokens: int
) -> tuple[list[list[Request]], int]:
    """All dialogues turn by turn; the requests of each turn, and the tokens that whole pages could
    have given again.
    """
    said: dict[str, tuple[int, ...]] = {str(number): () for number in range(len(dialogues))}
    turns: list[list[Request]] = []
    possible = 0
    for number in range(len(dialogues[0])):
        asked = [
            Request(
                name,
                (*said[name], *dialogue[number]),
                SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            )
            for name, dialogue in zip(said, dialogues, strict=True)
        ]
        asked = [one for one in asked if len(one.prompt_ids) + max_tokens <= MAX_LENGTH]
        possible += sum(max(0, len(said[one.id]) - 1) // PAGE_SIZE * PAGE_SIZE for one in asked)
        prompts = {one.id: one.prompt_ids for one in asked}
        for result in engine.run(asked):
            said[result.request_id] = (*prompts[result.request_id], *result.token_ids)
        turns.append(asked)
    engine.check()
    return turns, possible


def first_token_ms(engine: Engine, turns: list[list[Request]]) -> Iterator[float]:
    """Of every turn after the first, one dialogue after the other, each turn behind those before
    it.
    """
    for name in [request.id for request in turns[-1]]:
        for number, turn in enumerate(turns):
            request = next(one for one in turn if one.id == name)
            engine.add(request)
            started, took_ms = time.perf_counter(), 0.0
            while engine.has_work:
                if engine.step() and took_ms == 0:
                    took_ms = (time.perf_counter() - started) * 1e3
            if number:
                yield took_ms


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=24)
    parser.set_defaults(max_tokens=32)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--concurrency", type=int, default=4)
    args = parser.parse_args()
    if args.quick:
        args.prompts = min(args.prompts, 8)
    folder = hub.resolve_target(args.target)
    dialogues = questions(args, Chat(folder))
    target = Target.load(folder, args.dtype)
    draft = Draft(*read_head(hub.resolve_head(args.head)), target)
    # nothing is evicted: a miss is the engine's own
    num_pages = args.prompts * MAX_LENGTH // PAGE_SIZE

    def engine(mode: str, **config: object) -> Engine:
        sizes = {
            "max_batch": args.concurrency,
            "max_length": MAX_LENGTH,
            "num_pages": num_pages,
            **config,
        }
        return Engine(
            target, draft if mode != "off" else None, EngineConfig(speculation=mode, **sizes)
        )

    rows, turns = [], list[list[Request]]()
    for mode in MODES:
        running = engine(mode)
        turns, possible = talk(running, dialogues, args.max_tokens)
        metrics = running.metrics()
        row = {
            "speculation": mode,
            "prompt_tokens": int(metrics["prompt_tokens"]),
            "reused_tokens": int(metrics["prompt_tokens_reused"]),
            "hit_rate": round(metrics["prompt_tokens_reused"] / metrics["prompt_tokens"], 4),
            "possible": round(possible / metrics["prompt_tokens"], 4),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    times: dict[str, list[float]] = {"reuse": [], "no_reuse": []}
    streams = {
        name: first_token_ms(engine("auto", prefix_reuse=name == "reuse"), turns) for name in times
    }
    for pair in zip(*streams.values(), strict=True):
        for name, took_ms in zip(times, pair, strict=True):
            times[name].append(took_ms)
    medians = {name: statistics.median(took) for name, took in times.items()}
    figures = {
        "by_speculation": rows,
        "equal": len({(row["prompt_tokens"], row["reused_tokens"]) for row in rows}) == 1,
        "ttft_ms_reuse": round(medians["reuse"], 2),
        "ttft_ms_no_reuse": round(medians["no_reuse"], 2),
        "ttft_ratio": round(medians["no_reuse"] / medians["reuse"], 2),
        "dtype": args.dtype,
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))
    sys.exit(0 if figures["equal"] else 1)


if __name__ == "__main__":
    main()
