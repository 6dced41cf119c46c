"""A storm over a server with a small cache: good, cancelled and bad requests and floods at once.

    python benchmarks/storm.py [--quick] [--requests 2000]

Checked: every good request is answered, and greedy answers are the engine's; every bad one gets a
4xx; memory is flat over the second half, and samples were preempted (from 1,000 requests on);
nothing is left behind. In a second storm comes SIGTERM: running requests finish, later ones are
refused. The last line is one JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import held_out
import httpx
import numpy as np
from servers import memory_mb, started

from eyas import hub
from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.serve.limits import LimitsConfig
from eyas.serve.server import ServeConfig

# 704 tokens for eight requests of up to 512: some must be preempted
MAX_LENGTH, NUM_PAGES, MAX_BATCH = 512, 44, 8
SHORT_ANSWER, LONG_ANSWER, GO_ON_SHARE = 96, 192, 0.3
# The second half may grow by the larger of the two: the allocator's pools move too.
FLAT_MB, FLAT_SHARE = 8.0, 0.02
LONG = 1000  # requests from which memory and preemptions are criteria
LIMITS = LimitsConfig(max_queue=24, max_connections=80, body_timeout_s=3)
AT_ONCE = 48  # clients
PATIENCE = 400  # times that a client repeats a request
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    b"content-length: 9\r\n\r\n"
)
KINDS = ("stream", "whole", "text", "sampled", "cancelled", "bad", "garbage", "flood")
WEIGHTS = (40, 20, 10, 8, 8, 10, 3, 1)
GARBAGE = (b"\x16\x03\x01\x02\x00", b"HELO x\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", bytes(200))
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": 1e9},
    {"max_tokens": 10**30},
    {"messages": [{"role": "user", "content": "x" * 200_000}]},
    {"unheard_of": 1},
    {"n": "three"},
    {"guided_regex": "(" * 1000},
    {"guided_json": {"not": {"type": "string"}}},
    {"tools": [{"type": "function", "function": {"name": "f"}}]},
)


@dataclass(frozen=True)
class Question:
    """A greedy question with its answer by the engine alone."""

    messages: list[dict[str, str]]
    prompt_ids: list[int]
    max_tokens: int
    goes_on: bool  # past its end: long answers fill the cache
    text: str

    def chat(self, **fields: Any) -> dict[str, Any]:
        return {"messages": self.messages, **self.shared, **fields}

    @property
    def shared(self) -> dict[str, Any]:
        asked = {"model": "eyas", "temperature": 0, "max_tokens": self.max_tokens}
        return {**asked, "ignore_eos": self.goes_on}


class Storm:
    """Clients of one server; `failures` must stay empty."""

    def __init__(self, url: str, pid: int, questions: list[Question], seed: int) -> None:
        self.counts = Counter[str]()
        self.failures: list[str] = []
        self.memory: list[float] = []  # MB of the server, as requests end
        self._pid, self._questions = pid, questions
        self._host, self._port = url.removeprefix("http://").split(":")
        self._rng = random.Random(seed)
        self._is_ending = False  # later refusals and cut connections are right
        self._begun: set[int] = set()  # answers of which the first piece has come
        self._http = httpx.AsyncClient(
            base_url=url, timeout=300, limits=httpx.Limits(max_connections=AT_ONCE + 8)
        )

    def expect(self, holds: bool, what: str) -> None:
        self.counts["checks"] += 1
        if not holds:
            self.failures.append(what)

    async def run(self, count: int, end_after: int | None = None) -> None:
        """`count` requests; end_after: SIGTERM once so many have been sent."""
        turns = iter(range(count))
        async with self._http:
            await asyncio.gather(*(self._client(turns, end_after) for _ in range(AT_ONCE)))
            if end_after is None:
                await self._settled()

    async def _client(self, turns: Any, end_after: int | None) -> None:
        for turn in turns:
            if turn == end_after:
                self._is_ending = True
                os.kill(self._pid, signal.SIGTERM)
            kind = self._rng.choices(KINDS, WEIGHTS)[0]
            try:
                await getattr(self, f"_{kind}")(self._rng.choice(self._questions), turn)
                self.counts[kind] += 1
            except (httpx.TransportError, OSError) as error:
                # before SIGTERM nothing may be cut, and after it no answer that had begun
                is_right = self._is_ending and turn not in self._begun
                self.expect(is_right, f"{kind}: {type(error).__name__}: {error}")
                self.counts["turned_away"] += 1
            self.memory.append(memory_mb(self._pid))

    async def _settled(self) -> None:
        for _ in range(200):
            if (await self._http.get("/health")).json()["requests"] == 0:
                break
            await asyncio.sleep(0.05)
        lines = (await self._http.get("/metrics")).text.splitlines()
        samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
        value = {name.split("{")[0]: float(number) for name, number in samples}
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        left = {name: value[f"eyas:{name}"] for name in names}
        self.expect(not any(left.values()), f"left behind: {left}")
        self.counts["preemptions"] = int(value["eyas:num_preemptions_total"])

    # Good requests

    async def _whole(self, asked: Question, turn: int) -> None:
        reply = await self._post("/v1/chat/completions", asked.chat())
        if reply is not None:
            self._right(asked, reply["choices"][0]["message"]["content"], "whole")

    async def _text(self, asked: Question, turn: int) -> None:
        reply = await self._post("/v1/completions", {"prompt": asked.prompt_ids, **asked.shared})
        if reply is not None:
            self._right(asked, reply["choices"][0]["text"], "text")

    async def _sampled(self, asked: Question, turn: int) -> None:
        n = self._rng.choice([1, 2, 3])
        body = asked.chat(temperature=0.8, seed=turn, n=n, logprobs=True)
        reply = await self._post("/v1/chat/completions", body)
        if reply is not None:
            counted = sum(len(choice["logprobs"]["content"]) for choice in reply["choices"])
            self.expect(len(reply["choices"]) == n, "sampled: choices are missing")
            is_whole = counted == reply["usage"]["completion_tokens"]
            self.expect(is_whole, "sampled: tokens are missing")

    async def _stream(self, asked: Question, turn: int) -> None:
        text = await self._streamed(asked, turn, None)
        if text is not None:
            self._right(asked, text, "stream")

    async def _cancelled(self, asked: Question, turn: int) -> None:
        text = await self._streamed(asked, turn, self._rng.randrange(6))
        self.expect(text is None or asked.text.startswith(text), "cancelled: another text")
        self._begun.discard(turn)

    async def _streamed(self, asked: Question, turn: int, leave_after: int | None) -> str | None:
        """The text of a stream, or of its first pieces; None where the server ends first."""
        body = asked.chat(stream=True, stream_options={"include_usage": True})
        for _ in range(PATIENCE):
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.status_code == 200:
                    return await self._read(reply, turn, leave_after)
                await reply.aread()
            if not await self._come_again(reply):
                return None
        self.expect(False, "stream: never let in")
        return None

    async def _read(self, reply: httpx.Response, turn: int, leave_after: int | None) -> str:
        text, is_over, number = "", False, 0
        async for line in reply.aiter_lines():
            self._begun.add(turn)
            if number == leave_after:
                return text
            if line == "data: [DONE]":
                is_over = True
            elif line:
                event = json.loads(line.removeprefix("data: "))
                self.expect("error" not in event, f"stream: {event.get('error')}")
                choices = event.get("choices", ())
                text += "".join(one["delta"].get("content") or "" for one in choices)
                number += 1
        self.expect(is_over, "stream: no end")
        return text

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
        for _ in range(PATIENCE):
            reply = await self._http.post(path, json=body)
            if reply.status_code == 200:
                return dict(reply.json())
            if not await self._come_again(reply):
                return None
        self.expect(False, f"{path}: never let in")
        return None

    async def _come_again(self, reply: httpx.Response) -> bool:
        """Waits after a refusal that a good request may meet; False at the server's end."""
        status = reply.status_code
        if status == 503 and self._is_ending:
            self.counts["turned_away"] += 1
            return False
        self.counts[f"refused_{status}"] += 1
        code = {503: "too_many_connections", 429: "queue_full"}.get(status)
        # other refusals, a 500's plain text among them, are failures
        is_right = code is not None and reply.json()["error"]["code"] == code
        self.expect(is_right, f"refused: {reply.text}")
        if status == 429:
            self.expect(int(reply.headers.get("retry-after", 0)) >= 1, "no retry-after")
        await asyncio.sleep(self._rng.uniform(0.2, 1.5))  # sooner than retry-after says
        return True

    def _right(self, asked: Question, text: str, kind: str) -> None:
        self.expect(text == asked.text, f"{kind}: another text than the engine's")

    # Bad ones

    async def _bad(self, asked: Question, turn: int) -> None:
        noise = bytes(self._rng.randrange(256) for _ in range(500))
        wrong = [json.dumps(asked.chat(**fields)).encode() for fields in WRONG]
        body = self._rng.choice([b"{", b"\xff\xfe", b"[" * 100_000, noise, *wrong])
        headers = {"content-type": "application/json"}
        for _ in range(PATIENCE):
            reply = await self._http.post("/v1/chat/completions", content=body, headers=headers)
            if reply.status_code not in (429, 503) or not await self._come_again(reply):
                break
        is_4xx = 400 <= reply.status_code < 500
        self.expect(is_4xx or self._is_ending, f"bad: {reply.status_code} {reply.text[:200]}")
        self.counts["answered_4xx"] += is_4xx

    async def _garbage(self, asked: Question, turn: int) -> None:
        reader, writer = await self._connect()
        try:
            writer.write(self._rng.choice(GARBAGE))
            received = await asyncio.wait_for(reader.read(64), 30)
            is_refused = received.split(b" ")[1:2] in ([b"400"], [b"408"], [b"503"])
            self.expect(is_refused, f"garbage: {received!r}")
        finally:
            writer.close()

    async def _flood(self, asked: Question, turn: int) -> None:
        """Connections that send nothing or half a head, which the client ends, and heads without
        bodies, which the server ends.
        """
        flood = [await self._connect() for _ in range(self._rng.randrange(5, 25))]
        halves = [b"", b"POST /v1/completions HTTP/1.1\r\n", b"GET /hea"]
        for number, (_, writer) in enumerate(flood):
            writer.write(HEAD if number % 2 else self._rng.choice(halves))
        await asyncio.sleep(self._rng.uniform(0.2, 1.0))
        for _, writer in flood[::2]:
            writer.close()
        for reader, writer in flood[1::2]:
            received = await asyncio.wait_for(reader.read(), 30)  # to the connection's end
            expected = [[b"408"], [b"503"]] + ([[]] if self._is_ending else [])
            self.expect(received.split(b" ")[1:2] in expected, f"flood: {received!r}")
            writer.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self._host, int(self._port))


def questions(args: argparse.Namespace, config: ServeConfig) -> list[Question]:
    """Greedy questions of random sizes, answered by an engine with room for all."""
    rng, target = random.Random(args.seed), hub.resolve_target(args.target)
    chat = Chat(target)
    plain = EngineConfig(max_length=MAX_LENGTH, prefix_reuse=False, speculation="off")
    engine = Engine.load(target, None, config.dtype, plain)
    asked = []
    for messages in held_out.dialogues(args.data, args.prompts):
        ids = chat.prompt_ids(messages)
        if len(ids) + 8 < MAX_LENGTH:
            goes_on = rng.random() < GO_ON_SHARE
            most = min(LONG_ANSWER if goes_on else SHORT_ANSWER, MAX_LENGTH - len(ids))
            asked.append((messages, ids, rng.randrange(1, most), goes_on))
    requests = [
        Request(str(at), tuple(ids), SamplingParams(max_tokens=most, ignore_eos=goes_on))
        for at, (_, ids, most, goes_on) in enumerate(asked)
    ]
    texts = {int(one.request_id): chat.decode(one.token_ids) for one in engine.run(requests)}
    return [Question(*one, texts[at]) for at, one in enumerate(asked)]


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=120, model="builtin")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.quick:
        args.requests, args.prompts = min(args.requests, 150), min(args.prompts, 30)
    engine = EngineConfig(max_batch=MAX_BATCH, max_length=MAX_LENGTH, num_pages=NUM_PAGES)
    config = ServeConfig(
        target=args.target, head=args.head, model="eyas", port=0, limits=LIMITS, engine=engine
    )
    asked = questions(args, config)
    with started(config) as (process, url):
        began = time.monotonic()
        storm = Storm(url, process.pid, asked, args.seed)
        asyncio.run(storm.run(args.requests))
        seconds = time.monotonic() - began
        ending = Storm(url, process.pid, asked, args.seed + 1)
        asyncio.run(ending.run(AT_ONCE * 3, end_after=AT_ONCE + AT_ONCE // 2))
        ending.expect(process.wait(60) == 0, f"exit code {process.returncode} after SIGTERM")
    settled = list(filter(None, storm.memory[len(storm.memory) // 2 :]))
    growth = float(np.polyfit(np.arange(len(settled)), settled, 1)[0]) * len(settled)
    is_flat = growth <= max(FLAT_MB, FLAT_SHARE * settled[0])
    if args.requests >= LONG:
        storm.expect(is_flat, f"memory grew by {growth:.1f} MB over the second half")
        storm.expect(storm.counts["preemptions"] > 0, "nothing was preempted: a smaller cache")
    failures = storm.failures + ending.failures
    figures = {
        "requests": args.requests,
        "seconds": round(seconds, 1),
        **dict(sorted(storm.counts.items())),
        "mb_halfway": round(settled[0], 1),
        "mb_end": round(settled[-1], 1),
        "mb_grown_in_second_half": round(growth, 2),
        "memory_is_flat": is_flat,
        "after_sigterm": dict(sorted(ending.counts.items())),
        "failures": len(failures),
        "first_failures": failures[:5],
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
