"""Everything at once for half an hour: does the engine lose a page, a request, or memory?

    python benchmarks/soak.py [--quick] [--minutes 30] [--dtype bfloat16] [--seed 0] [--data
    FILE.jsonl]

Engines take turns of half a minute on one target (speculation auto and fixed, by both loops), each
with a cache too small for its batch. Requests arrive in bursts at random, over prefixes that many
share, with every sampling option at random; some are cancelled at some moment, some can never fit
and must be refused. Checked all along:

    pages and slots   engine.check() every two seconds; when idle, all pages are available again
    progress          a request ends, or is cancelled, within MOST_STEPS steps of its arrival
    answers           as many tokens as allowed, a log-probability each, a stop string only at the
                      end, JSON of its schema, text that its regular expression matches
    exactness         some of the seeded answers are decoded again, alone and plainly: same tokens
    memory            resident set every ten seconds: slope over the second half, and maximum

Exits with 1 where a check failed. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import held_out
import numpy as np

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams, TokenLogprob, Update
from eyas.errors import InputError
from eyas.model.checkpoint import read_head
from eyas.model.target import PAGE_SIZE, Target

MAX_LENGTH, NUM_PAGES, PAGE_BYTES = 512, 30, 4096
MOST_LIVE, MOST_STEPS = 40, 8000
TURN_S, CHECK_S, MEMORY_S = 30.0, 2.0, 10.0
ENGINES = [
    {"speculation": "auto", "max_batch": 12},
    {"speculation": "fixed(6,3,12)", "max_batch": 6},
    {"speculation": "auto", "max_batch": 8},
    {"speculation": "fixed(5,2,9)", "max_batch": 4},
]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "bb", None]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
REGEXES = [r"[0-9]{3}-[0-9]{4}", r"(yes|no|maybe)\.", r"[a-z ]{5,40}!"]
STOPS = ["the", ".", "?", " you", "ing "]


@dataclass(slots=True)
class Asked:
    """A request, when it came, when it is cancelled, and what each of its samples has given."""

    request: Request
    step: int
    cancelled_at: int | None
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    num_done: int = 0


@dataclass(slots=True)
class Record:
    """What happened, in numbers, and whatever should not have."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: list[tuple[float, float]] = field(default_factory=list)  # s, MiB
    longest_steps: int = 0

    def fail(self, what: str) -> None:
        self.failures.append(what)
        print(f"FAILED: {what}", flush=True)


# Requests


def random_params(rng: random.Random, eos: int) -> SamplingParams:
    """Each option with some probability, those that exclude each other apart."""

    def sometimes(share: float, name: str, value: object) -> dict[str, object]:
        return {name: value} if rng.random() < share else {}

    max_tokens = rng.choice([1, 4, 16, 60, 150])
    options: dict[str, object] = {"max_tokens": max_tokens, "seed": rng.getrandbits(40)}
    if rng.random() < 0.7:
        options["temperature"] = rng.choice([0.3, 0.8, 1.0, 1.4])
    options |= sometimes(0.3, "top_k", rng.choice([1, 5, 50])) | sometimes(
        0.3, "top_p", rng.choice([0.3, 0.9, 0.99])
    )
    options |= sometimes(0.2, "min_p", 0.05) | sometimes(
        0.2, "repetition_penalty", rng.choice([0.9, 1.3])
    )
    options |= sometimes(0.2, "frequency_penalty", 0.7) | sometimes(0.2, "presence_penalty", -0.5)
    options |= sometimes(
        0.2,
        "logit_bias",
        {rng.randrange(3, 8000): rng.uniform(-8, 8) for _ in range(3)} | {eos: -1.0},
    )
    options |= sometimes(0.2, "logprobs", rng.choice([0, 3, 20])) | sometimes(
        0.15, "n", rng.choice([2, 4])
    )
    options |= sometimes(0.2, "stop", tuple(rng.sample(STOPS, 2)))
    options |= sometimes(0.2, "stop_token_ids", (rng.randrange(3, 8000), rng.randrange(3, 400)))
    kind = rng.random()
    if kind < 0.12:
        options["json_schema"] = json.dumps(SCHEMA)
    elif kind < 0.24:
        options["regex"] = rng.choice(REGEXES)
    else:
        options |= sometimes(0.2, "min_tokens", min(8, max_tokens)) | sometimes(
            0.2, "ignore_eos", True
        )
    return SamplingParams(**options)  # type: ignore[arg-type]


def random_request(rng: random.Random, number: int, prompts: list[list[int]], eos: int) -> Request:
    """A dialogue's beginning, often one that others have as well."""
    ids = prompts[int(len(prompts) * rng.random() ** 3)]
    ids = ids[: rng.choice([rng.randrange(1, 40), 100, 250])]
    return Request(str(number), tuple(ids), random_params(rng, eos), rng.random() < 0.8)


# Answers


def wrong_with(request: Request, asked: Asked, update: Update, chat: Chat) -> str | None:
    """What a finished answer should not be, or None."""
    params, tokens = request.params, asked.token_ids[update.index]
    text = chat.decode(tokens)
    if not 1 <= len(tokens) <= params.max_tokens:
        return f"{len(tokens)} tokens, {params.max_tokens} allowed"
    if update.finish_reason == "length" and len(tokens) != params.max_tokens:
        return f"cut at {len(tokens)} of {params.max_tokens} tokens"
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else chat.eos_token_ids)}
    if ends & set(tokens[:-1]):
        return "goes on behind an end token"
    if len(tokens) < params.min_tokens and not any(stop in text for stop in params.stop):
        return f"{len(tokens)} tokens, {params.min_tokens} asked for"
    if any(stop in chat.decode(tokens[:-1]) for stop in params.stop):
        return f"goes on behind a stop string: {text!r}"
    if (
        update.finish_reason == "stop"
        and tokens[-1] not in ends
        and not any(stop in text for stop in params.stop)
    ):
        return f"stopped for no reason: {text!r}"
    if params.logprobs is not None:
        told = asked.logprobs.get(update.index, [])
        if [one.token_id for one in told] != tokens or any(
            len(one.top) != params.logprobs for one in told
        ):
            return "log-probabilities are not one a token"
    is_whole = (
        update.finish_reason == "stop"
        and tokens[-1] in chat.eos_token_ids
        and tokens[-1] not in params.stop_token_ids
    )
    if is_whole and params.regex is not None and not re.fullmatch(params.regex, text):
        return f"{text!r} is not {params.regex}"
    return json_wrong_with(text) if is_whole and params.json_schema is not None else None


def json_wrong_with(text: str) -> str | None:
    """Whether a text is what SCHEMA describes, spelled out: no schema library is among the
    dependencies.
    """
    try:
        value = json.loads(text)
    except ValueError:
        return f"no JSON: {text!r}"
    fits = (
        value.keys() == {"name", "count", "kind"}
        and len(value["name"]) <= 8
        and value["count"] in range(100)
        and value["kind"] in ("a", "bb", None)
    )
    return None if fits else f"not of the schema: {text!r}"


# One engine's turn


class Turn:
    """Feeds one engine at random until its time is over, then lets it finish."""

    def __init__(self, engine: Engine, plain: Engine, chat: Chat, record: Record) -> None:
        self.engine, self.plain, self.chat, self.record = engine, plain, chat, record
        self.live: dict[str, Asked] = {}
        self.checked: list[tuple[Request, int, list[int]]] = []
        self.step = 0

    def run(
        self, rng: random.Random, prompts: list[list[int]], seconds: float, first_id: int
    ) -> int:
        """Returns the number of requests made."""
        number, started, checked_at = first_id, time.monotonic(), time.monotonic()
        while time.monotonic() - started < seconds or self.engine.has_work:
            self.step += 1
            if (
                time.monotonic() - started < seconds
                and len(self.live) < MOST_LIVE
                and rng.random() < 0.2
            ):
                for _ in range(rng.choice([1, 1, 2, 3, 8])):
                    self._add(random_request(rng, number, prompts, self.chat.eos_token_ids[0]), rng)
                    number += 1
            self._cancel()
            for update in self.engine.step():
                self._take(update, rng)
            if time.monotonic() - checked_at > CHECK_S:
                checked_at = time.monotonic()
                self._check()
            self._remember(self.record)
        self._check()
        metrics = self.engine.metrics()
        if self.live:
            self.record.fail(f"idle, and {len(self.live)} requests have not ended")
        if metrics["pages_available"] != NUM_PAGES:
            self.record.fail(
                f"idle, and {metrics['pages_available']} of {NUM_PAGES} pages available"
            )
        self._again()
        return number - first_id

    def _add(self, request: Request, rng: random.Random) -> None:
        cancelled_at = self.step + rng.randrange(1, 120) if rng.random() < 0.2 else None
        try:
            self.engine.add(request)
        except InputError as error:
            self.record.fail(f"request {request.id} was refused: {error}")
            return
        self.live[request.id] = Asked(request, self.step, cancelled_at)
        self.record.counts["requests"] += 1
        if rng.random() < 0.05:
            self._add_impossible(request)

    def _add_impossible(self, request: Request) -> None:
        length = NUM_PAGES * PAGE_SIZE
        too_long = tuple(request.prompt_ids[at % len(request.prompt_ids)] for at in range(length))
        try:
            self.engine.add(dataclasses.replace(request, id="impossible", prompt_ids=too_long))
            self.record.fail("a request that can never fit was taken")
        except InputError:
            self.record.counts["refused"] += 1

    def _cancel(self) -> None:
        for name, asked in list(self.live.items()):
            if asked.cancelled_at is not None and asked.cancelled_at <= self.step:
                self.engine.cancel(name)
                self.record.counts["cancelled"] += 1
                del self.live[name]
            elif self.step - asked.step == MOST_STEPS:
                self.record.fail(
                    f"request {name} has not ended {MOST_STEPS} steps after it came: "
                    f"{asked.request.params}"
                )

    def _take(self, update: Update, rng: random.Random) -> None:
        asked = self.live.get(update.request_id)
        if asked is None:
            self.record.fail(f"an update of {update.request_id}, which is over")
            return
        asked.token_ids.setdefault(update.index, []).extend(update.token_ids)
        asked.logprobs.setdefault(update.index, []).extend(update.logprobs or [])
        self.record.counts["tokens"] += len(update.token_ids)
        self.record.counts["accepted_drafts"] += update.num_accepted_drafts or 0
        if update.finish_reason is None:
            return
        asked.num_done += 1
        self.record.counts[f"finished_{update.finish_reason}"] += 1
        wrong = wrong_with(asked.request, asked, update, self.chat)
        if wrong is not None:
            self.record.fail(f"{asked.request.id}: {wrong}; {asked.request.params}")
        if rng.random() < 0.05:
            self.checked.append((asked.request, update.index, asked.token_ids[update.index]))
        if asked.num_done == asked.request.params.n:
            self.record.longest_steps = max(self.record.longest_steps, self.step - asked.step)
            del self.live[update.request_id]

    def _check(self) -> None:
        try:
            self.engine.check()
            self.record.counts["checks"] += 1
        except AssertionError as error:
            self.record.fail(f"step {self.step}: {error}")

    def _remember(self, record: Record) -> None:
        now = time.monotonic()
        if not record.memory or now - record.memory[-1][0] >= MEMORY_S:
            record.memory.append((now, resident_mib()))

    def _again(self) -> None:
        """A sample of what was decoded, alone and plainly."""
        for request, index, tokens in self.checked:
            results = {
                one.index: one.token_ids
                for one in self.plain.run([dataclasses.replace(request, speculation=False)])
            }
            self.record.counts["decoded_again"] += 1
            if results[index] != tokens:
                self.record.fail(
                    f"{request.id}, sample {index}: other tokens alone; {request.params}"
                )


def resident_mib() -> float:
    """Of this process; NaN where the system has no /proc."""
    statm = Path("/proc/self/statm")
    return (
        int(statm.read_text().split()[1]) * PAGE_BYTES / 2**20 if statm.exists() else float("nan")
    )


def memory_figures(memory: list[tuple[float, float]]) -> dict[str, float | None]:
    """Slope by least squares over the second half: the first warms up, every engine's caches with
    it.
    """
    settled = np.array(memory[len(memory) // 2 :])
    slope = float(np.polyfit(settled[:, 0] / 60, settled[:, 1], 1)[0]) if len(settled) > 2 else None
    return {
        "rss_mib_settled": round(float(settled[0, 1]), 1),
        "rss_mib_max": round(max(mib for _, mib in memory), 1),
        "rss_mib_last": round(memory[-1][1], 1),
        "rss_mib_per_minute": None if slope is None else round(slope, 3),
    }


def arguments() -> argparse.Namespace:
    # the engine is tried, not the model
    parser = held_out.arguments(__doc__, prompts=400, model="builtin")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.minutes = min(args.minutes, 1.0)
    return args


def main() -> None:
    args = arguments()
    folder = hub.resolve_target(args.target)
    chat, rng, record = Chat(folder), random.Random(args.seed), Record()
    prompts = [
        chat.prompt_ids(messages) for messages in held_out.dialogues(args.data, args.prompts)
    ]
    target = Target.load(folder, args.dtype)
    draft = Draft(*read_head(hub.resolve_head(args.head)), target)
    sizes = {"max_length": MAX_LENGTH, "num_pages": NUM_PAGES, "prefill_chunk": 64}
    plain = Engine(
        target,
        None,
        EngineConfig(max_batch=1, max_length=MAX_LENGTH, prefix_reuse=False, speculation="off"),
        chat.tokenizer,
    )
    engines = [
        Engine(target, draft, EngineConfig(**sizes, **config), chat.tokenizer) for config in ENGINES
    ]
    started, turns, made = time.monotonic(), 0, 0
    turn_s = min(TURN_S, args.minutes * 60 / 16)
    while (left := args.minutes * 60 - (time.monotonic() - started)) > 0:
        turn = Turn(engines[turns % len(engines)], plain, chat, record)
        made += turn.run(rng, prompts, min(turn_s, left), made)
        turns += 1
        print(
            f"{time.monotonic() - started:5.0f} s  {dict(record.counts)}  {resident_mib():.0f} MiB",
            flush=True,
        )
    metrics = [engine.metrics() for engine in engines]
    figures = {
        "minutes": round((time.monotonic() - started) / 60, 2),
        "turns": turns,
        **record.counts,
        "preemptions": int(sum(one["preemptions"] for one in metrics)),
        "pages_evicted": int(sum(one["pages_evicted"] for one in metrics)),
        "reused_share": round(
            sum(one["prompt_tokens_reused"] for one in metrics)
            / sum(one["prompt_tokens"] for one in metrics),
            3,
        ),
        "longest_steps": record.longest_steps,
        **memory_figures(record.memory),
        "failures": len(record.failures),
        "first_failures": record.failures[:5],
        "dtype": args.dtype,
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))
    sys.exit(1 if record.failures else 0)


if __name__ == "__main__":
    main()
