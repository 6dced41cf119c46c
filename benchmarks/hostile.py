"""Requests that cost as much as they can, beside a client that streams and one that asks /health.

    python benchmarks/hostile.py --quick
    python benchmarks/hostile.py --rounds 20 --kinds rules tools
    python benchmarks/hostile.py --target smollm2 --head smollm2 --kinds --rounds 0     (crowds)

First nothing is sent (`quiet`), then each kind of hostile body, all kinds at once, and crowds of
clients of one kind. Measured: statuses, the longest wait for /health, the longest gap in the
stream, memory with child processes against idle. Goals: no gap 150 ms above the quiet one, memory
within 1.2 of idle. The last line is one JSON.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import held_out
import httpx
from servers import memory_mb, started

from eyas.engine.engine import EngineConfig
from eyas.serve.server import ServeConfig

GOAL_MS, GOAL_MEMORY = 150.0, 1.2
AT_ONCE = 8
SIZE = (1 << 20) - 64  # bytes: just below the largest body
QUIET_S = 5.0
PROMPT_TOKENS, SHORT_TOKENS = 940, 40
NUM_READERS, READ_S, READ_BYTES = 50, 10.0, 256  # slow readers: bytes each 50 ms
STREAM = {
    "model": "eyas",
    "messages": [{"role": "user", "content": "I would like a table for two."}],
    "temperature": 0,
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HEAD = b'{"model":"eyas","max_tokens":2,'
ASK = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
# A line without end, one of 1 MB, 50,000 lines, and the most that are allowed.
HEADERS = [b"x: " + b"y" * 100_000, b"x: " + b"y" * (1 << 20) + b"\r\n\r\n"]
HEADERS += [b"x: y\r\n" * 50_000 + b"\r\n", b"x: y\r\n" * 250 + b"\r\n"]
ASKED = b'"messages":[{"role":"user","content":"Hello"}]'


def filled(before: bytes, unit: Callable[[int], bytes], after: bytes, most: int = SIZE) -> bytes:
    """A body of nearly `most` bytes: units between commas."""
    units, size = list[bytes](), len(before) + len(after)
    while size < most:
        units.append(unit(len(units)))
        size += len(units[-1]) + 1
    return before + b",".join(units[:-1]) + after


def guided(name: str, value: Any) -> bytes:
    return HEAD + ASKED + f',"{name}":{json.dumps(value)}'.encode() + b"}"


def messages(unit: bytes, most: int = SIZE) -> bytes:
    return filled(HEAD + b'"messages":[', lambda _: unit, b"]}", most)


def content(text: bytes) -> bytes:
    before = HEAD + b'"messages":[{"role":"user","content":"'
    return before + text * ((SIZE - len(before) - 4) // len(text)) + b'"}]}'


def definitions(link: Callable[[str], dict[str, Any]], count: int) -> dict[str, Any]:
    """Definitions that refer to each other in a row."""
    named = {f"d{at}": link(f"#/$defs/d{at + 1}") for at in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": named | {f"d{count}": {"type": "integer"}}}


def mutual_references(count: int = 30) -> dict[str, Any]:
    """Definitions each of which may be any other, or an array of one: an answer can be read in as
    many ways as there are paths between them.
    """
    links = [{"$ref": f"#/$defs/d{at}"} for at in range(count)]
    defs = {}
    for at in range(count):
        array = {"type": "array", "items": links[(at + 1) % count]}
        defs[f"d{at}"] = {"anyOf": [*links[:at], *links[at + 1 :], array]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


def long_prompts(
    count: int, seed: int, tokens: int = PROMPT_TOKENS, **options: Any
) -> list[tuple[str, bytes]]:
    rng = random.Random(seed)
    asked = [[rng.randrange(100, 500) for _ in range(tokens)] for _ in range(count)]
    body = {"model": "eyas", "max_tokens": 2, "temperature": 0, **options}
    return [(TEXT, json.dumps({**body, "prompt": one}).encode()) for one in asked]


def most(tokens: int) -> tuple[bytes, bytes]:
    """For bytes.replace."""
    return b'"max_tokens":2', b'"max_tokens":%d' % tokens


def bodies() -> dict[str, tuple[str, bytes]]:
    """The worst of every kind that is not refused unread, with its path."""
    user = b'{"role":"user","content":"x"}'
    rules = "".join(f'r{at} ::= "{"x" * 6}" | r{at + 1} "a"\n' for at in range(2000))
    tool = b'{"type":"function","function":{"name":"f%d","parameters":{"properties":{%s}}}}'
    fields = b",".join(b'"p%d":{"enum":[%d,null]}' % (at, at) for at in range(30))
    part = b'{"type":"text","text":""}'
    call = b'{"id":"","function":{"name":"","arguments":"{}"}}'
    in_parts = b'{"role":"user","content":[%s]}'
    in_calls = b'{"role":"assistant","tool_calls":[%s]}'
    numbered, logprobs = b'"x%d":1'.__mod__, b',"logprobs":true,"top_logprobs":20}'
    patterns = [{"pattern": f"(a|b)*a(a|b){{{n}}}"} for n in range(30)]
    ways = 'root ::= s\ns ::= s s | s s s | "a" | "b" | " " | ""'
    properties, required = {f"p{n}": {} for n in range(1500)}, [f"k{n}" for n in range(6000)]
    few = 16_000  # bytes of units that pass the bounds of keys
    made = {
        "empty_messages": messages(b"{}", few * 3),
        "messages": messages(user, 150_000),
        "numbers_for_messages": messages(b"1", 500_000),
        "parts": messages(in_parts % b",".join([part] * 5000), 140_000),
        "bad_parts": messages(in_parts % b",".join([b"{}"] * 16000), 60_000),
        "calls": messages(in_calls % b",".join([call] * 3000), 160_000),
        "wrong_biases": filled(HEAD + ASKED + b',"logit_bias":{', numbered, b"}}", few * 8),
        "unknown_fields": filled(HEAD + ASKED + b",", numbered, b"}", few * 8),
        "nested": HEAD + ASKED + b',"metadata":' + b"[" * 16_000 + b"]" * 16_000 + b"}",
        "enum": filled(HEAD + ASKED + b',"guided_json":{"enum":[', b"%d".__mod__, b"]}}"),
        "choices": filled(HEAD + ASKED + b',"guided_choice":[', lambda _: b'"x"', b"]}"),
        "long_stops": guided("stop", ["a" * 1023 + chr(98 + at) for at in range(16)]),
        "tools": filled(
            HEAD + ASKED + b',"tools":[{"type":"function","function":{"name":"f","parameters":{',
            lambda at: b'"%d":"%s"' % (at, b"x" * 100),
            b"}}}]}",
        ),
        "words": content(b"I would like a table, for two. "),
        "one_word": content(b"x"),
        "blanks": content(b" "),
        "escapes": content(rb"\ud83d\ude00"),
        "escaped_quotes": content(rb"\""),
        "control_names": content(b"<|im_end|>"),
        "brackets_in_text": content(b"[{,:"),
        "words_within_characters": content(b"I would like a table, for two. ")[:400_000] + b'"}]}',
        "long_number": HEAD + ASKED + b',"seed":' + b"9" * 500_000 + b"}",
        "broken": filled(HEAD + b'"messages":[', lambda _: user, b""),
        "too_large": b" " * (8 << 20),
        "samples": guided("n", 128),
        "samples_with_logprobs": guided("n", 64).replace(*most(60))[:-1] + logprobs,
        "samples_with_long_logprobs": guided("n", 128).replace(*most(900))[:-1] + logprobs,
        "options": filled(
            HEAD + ASKED + b',"chat_template_kwargs":{', b'"x%d":true'.__mod__, b"}}", few
        ),
        "marks": content("a\u0301".encode())[:200_000] + b'"}]}',
        "control_names_within_characters": content(b"<|im_end|>")[:60_000] + b'"}]}',
        "penalties": guided("repetition_penalty", 1.5),
        "regex_memory": guided("guided_regex", "((a{101}){100}){97}c"),
        "regex_later": guided("guided_regex", "(x|y|z)*((a{101}){100}){97}c"),
        "regex_optional": guided("guided_regex", "a?" * 5000 + "a" * 5000),
        "patterns": guided("guided_json", {"type": "string", "allOf": patterns}),
        "references": guided("guided_json", definitions(lambda to: {"items": {"$ref": to}}, 1400)),
        "mutual_references": guided("guided_json", mutual_references()).replace(*most(100)),
        "rules": guided("grammar", f'root ::= r0\n{rules}r2000 ::= "b"'),
        "ways_to_read": guided("grammar", ways).replace(*most(300)),
        "many_tools_in_a_schema": filled(
            HEAD + ASKED + b',"response_format":{"type":"json_object"},"tools":[',
            lambda at: tool % (at, fields),
            b"]}",
            100_000,
        ),
        "properties": guided("guided_json", {"type": "object", "properties": properties}),
        "required": guided("guided_json", {"type": "object", "required": required}),
    }
    chats = {name: (CHAT, body) for name, body in made.items()}
    ids = HEAD + b'"prompt":['
    few_ids = filled(ids, lambda _: b'"x"', b"]", 4 * 1000)
    biases = b",".join(b'"%d":1' % at for at in range(1000))
    return chats | {
        "token_ids": (TEXT, filled(ids, lambda _: b"1", b"]}", 500_000)),
        "wrong_token_ids": (TEXT, filled(ids, lambda _: b"-1", b"]}", 700_000)),
        "lists_of_ids": (TEXT, filled(ids, lambda _: b"[1]", b"]}", 60_000)),
        "prompts_with_biases": (TEXT, few_ids + b',"logit_bias":{%s}}' % biases),
    }


class Watch:
    """The longest waits, in ms, since the last report; in a process of its own."""

    def __init__(self, url: str, reports: Connection) -> None:
        self._url, self._reports = url, reports
        self._longest = {"health_ms": 0.0, "stream_ms": 0.0}
        self._since: dict[str, float] = {}  # starts of the present waits

    async def run(self) -> None:
        works = [asyncio.ensure_future(one) for one in (self._ask(), self._stream())]
        while True:
            await asyncio.sleep(0.01)
            if self._reports.poll():
                try:
                    self._reports.recv()
                except EOFError:
                    break
                for name in list(self._since):
                    self._note(name)
                self._reports.send(self._longest)
                self._longest = dict.fromkeys(self._longest, 0.0)
        for work in works:
            work.cancel()

    def _note(self, name: str) -> None:
        waited_ms = 1000 * (time.perf_counter() - self._since[name])
        self._longest[name] = max(self._longest[name], waited_ms)

    async def _ask(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as http:
            while True:
                self._since["health_ms"] = time.perf_counter()
                await http.get("/health")
                self._note("health_ms")
                del self._since["health_ms"]
                await asyncio.sleep(0.01)

    async def _stream(self) -> None:
        # from the first chunk to the last: the wait before is the queue's
        async with httpx.AsyncClient(base_url=self._url, timeout=300) as http:
            while True:
                async with http.stream("POST", CHAT, json=STREAM) as reply:
                    async for _ in reply.aiter_bytes():
                        if "stream_ms" in self._since:
                            self._note("stream_ms")
                        self._since["stream_ms"] = time.perf_counter()
                self._since.pop("stream_ms", None)


def watch(url: str, reports: Connection) -> None:
    asyncio.run(Watch(url, reports).run())


class Attack:
    def __init__(self, url: str, pid: int, reports: Connection) -> None:
        self._url, self._pid, self._reports = url, pid, reports
        host, port = url.removeprefix("http://").split(":")
        self._address = host, int(port)
        self.idle_mb = 0.0

    def reported(self) -> dict[str, float]:
        self._reports.send(None)
        return {name: round(value, 1) for name, value in self._reports.recv().items()}

    async def send(self, asked: list[tuple[str, bytes]], at_once: int) -> Counter[str]:
        statuses, left = Counter[str](), iter(asked)

        async def client(http: httpx.AsyncClient) -> None:
            for path, body in left:
                headers = {"content-type": "application/json"}
                try:
                    reply = await http.post(path, content=body, headers=headers)
                    statuses[str(reply.status_code)] += 1
                except httpx.TransportError as error:
                    statuses[type(error).__name__] += 1

        async with httpx.AsyncClient(base_url=self._url, timeout=300) as http:
            await asyncio.gather(*(client(http) for _ in range(at_once)))
        return statuses

    async def beside_long_prompts(self, tokens: int) -> dict[str, list[float]]:
        """Seconds until all long prompts are answered, and of each short one beside them."""
        seconds: dict[str, list[float]] = {}
        for seed, (num_long, num_short) in enumerate([(0, 3), (1, 0), (1, 3), (3, 3)]):
            began = [time.perf_counter()]
            reading = asyncio.ensure_future(self.send(long_prompts(num_long, seed, tokens), 4))
            waits = seconds[f"{num_long} long, {num_short} short"] = []
            for short in long_prompts(num_short, 50 + seed, SHORT_TOKENS):
                await asyncio.sleep(0.5)
                began.append(time.perf_counter())
                await self.send([short], 1)
                waits.append(round(time.perf_counter() - began.pop(), 3))
            await reading
            waits.insert(0, round(time.perf_counter() - began[0], 3))
        return seconds

    async def read_slowly(self) -> Counter[str]:
        """Streams whose clients read a little at a time, and leave."""
        body = json.dumps({**STREAM, "logprobs": True, "top_logprobs": 20}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(body)}\r\n\r\n"

        async def reader() -> str:
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            made.setblocking(False)
            loop, end = asyncio.get_running_loop(), time.monotonic() + READ_S
            with made:
                await loop.sock_connect(made, self._address)
                await loop.sock_sendall(made, head.encode() + body)
                status = ""
                while time.monotonic() < end:
                    with suppress(TimeoutError):
                        piece = await asyncio.wait_for(loop.sock_recv(made, READ_BYTES), 1)
                        status = status or piece[9:12].decode()
                    await asyncio.sleep(0.05)
            return status or "waited"

        return Counter(await asyncio.gather(*(reader() for _ in range(NUM_READERS))))

    async def connect(self, *sent: bytes, count: int = 1000) -> Counter[str]:
        """Connections that send nothing, or each the next of these, beside new ones of probes."""
        statuses, held = Counter[str](), list[socket.socket]()
        try:
            for at in range(count):
                held.append(socket.create_connection(self._address, timeout=10))
                if sent:
                    with suppress(OSError):  # it is refused while it sends
                        held[-1].sendall(ASK + sent[at % len(sent)])
            for one in held if sent else ():
                with suppress(OSError):
                    statuses[f"sent, {one.recv(12)[9:].decode() or 'closed'}"] += 1
            for path in ("/health", "/metrics") * 20:
                async with httpx.AsyncClient(base_url=self._url, timeout=10) as http:
                    try:
                        statuses[str((await http.get(path)).status_code)] += 1
                    except httpx.TransportError as error:
                        statuses[type(error).__name__] += 1
                await asyncio.sleep(0.05)
        finally:
            for one in held:
                one.close()
        return statuses

    def crowds(self, seed: int) -> dict[str, Callable[[], Awaitable[Counter[str]]]]:
        echo = {"echo": True, "logprobs": 20, "max_tokens": 1}
        schema = [bodies()["mutual_references"]] * 16
        return {
            "16 prompts": lambda: self.send(long_prompts(16, seed), 16),
            "8 echoes": lambda: self.send(long_prompts(8, seed + 1, **echo), 8),
            "16 schemas": lambda: self.send(schema, 16),
            "50 slow readers": self.read_slowly,
            "1,000 idle connections": self.connect,
            "1,000 clients": partial(self.connect, b"\r\n"),
            "100 headers": partial(self.connect, *HEADERS, count=100),
        }

    def measured(self, work: Callable[[], Awaitable[Counter[str]]]) -> dict[str, Any]:
        async def during() -> Counter[str]:
            await asyncio.sleep(0.5)  # the watch's stream is under way
            return await work()

        self.reported()
        statuses = asyncio.run(during())
        return {
            "statuses": dict(statuses),
            **self.reported(),
            "memory": round(memory_mb(self._pid) / self.idle_mb, 3),
        }


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=0, model="builtin")
    parser.add_argument("--rounds", type=int, default=10, help="of all kinds at once")
    parser.add_argument("--kinds", nargs="*", help="these alone")
    parser.add_argument("--max-length", type=int, default=1024)
    args = parser.parse_args()
    engine = EngineConfig(max_length=args.max_length)
    config = ServeConfig(target=args.target, head=args.head, model="eyas", port=0, engine=engine)
    made = bodies()
    kinds = list(made) if args.kinds is None else args.kinds
    rounds, repeats = (min(args.rounds, 2), 1) if args.quick else (args.rounds, 3)
    with started(config) as (process, url):
        reports, ours = multiprocessing.Pipe()
        watch_it = multiprocessing.get_context("spawn").Process
        watch_it(target=watch, args=(url, ours), daemon=True).start()
        attack = Attack(url, process.pid, reports)
        # what the first good requests load is no growth
        asyncio.run(attack.send([(CHAT, guided("guided_regex", "[a-z]{3}")), made["samples"]], 1))
        time.sleep(QUIET_S)
        attack.idle_mb = memory_mb(process.pid)
        attack.reported()
        time.sleep(QUIET_S)
        quiet = attack.reported()

        def shown(name: str, work: Callable[[], Awaitable[Counter[str]]]) -> dict[str, Any]:
            found = attack.measured(work)
            print(f"{name:32s} {json.dumps(found)}", flush=True)
            return found

        by_kind = {
            kind: shown(kind, partial(attack.send, [made[kind]] * repeats, 1)) for kind in kinds
        }
        mixed = [made[kind] for kind in kinds * rounds]
        random.Random(0).shuffle(mixed)
        at_once = shown("all at once", partial(attack.send, mixed, AT_ONCE))
        crowds = {name: shown(name, work) for name, work in attack.crowds(seed=0).items()}
        beside = asyncio.run(attack.beside_long_prompts(args.max_length - 64))
        time.sleep(QUIET_S)
        after = memory_mb(process.pid) / attack.idle_mb
    most_ms = {
        name: max(((one[name], kind) for kind, one in by_kind.items()), default=(0.0, "none"))
        for name in ("health_ms", "stream_ms")
    }
    figures = {
        "requests": len(kinds) * repeats + len(mixed),
        "quiet": quiet,
        "longest_alone": most_ms,
        "longest_at_once": {name: at_once[name] for name in most_ms},
        "crowds": crowds,
        "beside_long_prompts_s": beside,
        "kinds_over_goal": sorted(
            kind
            for kind, one in (by_kind | crowds).items()
            if any(one[name] > quiet[name] + GOAL_MS for name in most_ms)
        ),
        "idle_mb": round(attack.idle_mb, 1),
        "most_memory": max(one["memory"] for one in [at_once, *by_kind.values(), *crowds.values()]),
        "memory_after": round(after, 3),
        "memory_holds": after <= GOAL_MEMORY,
        "statuses": dict(sum((Counter(one["statuses"]) for one in by_kind.values()), Counter())),
        "machine": held_out.machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
