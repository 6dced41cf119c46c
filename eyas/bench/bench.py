"""The benchmark: the same prompts to every arm (a way to ask), block by block in turn, so that a
busy minute hits all arms alike.

    concurrency c   block 0: plain eagle   block 1: eagle plain   block 2: plain eagle   ...
                    up to 4c prompts a block, c at a time
    rate r          the same, but requests are sent at given times, the same for every arm

At every load each arm has its own cache salt, where its server takes one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import secrets
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Annotated, Any, TypeVar

from pydantic import Field, model_validator

from eyas.artifact import Artifact, Manifest, file_identity, identity
from eyas.bench.machine import machine
from eyas.bench.server import (
    SETTLE_S,
    Counters,
    ServerFacts,
    add_counters,
    ask_facts,
    check_comparable,
    counted_between,
    differences_of_answers,
    differences_of_servers,
    read_counters,
)
from eyas.bench.stream import Reply, read_reply
from eyas.bench.summary import BenchRow, RequestLoad, summarise
from eyas.bench.workload import Task, arrival_times_s, read_tasks
from eyas.builtin import BUILTIN, packaged_prompts
from eyas.client import Client, StreamRecord
from eyas.errors import ConfigError, EyasError
from eyas.log import Track, quiet
from eyas.records import mixed_seed
from eyas.settings import Flag, Settings
from eyas.tau import LEAST_TURNS

PLAIN, EAGLE = "plain", "eagle"  # the arms of a server that has a head
BLOCK = 4  # prompts a slot
SALTED = ("eyas", "vllm")  # kinds that take the field cache_salt
TIMEOUT_S = 300.0  # between two pieces of an answer, which may wait in a long queue
T = TypeVar("T")


class ArmConfig(Settings):
    """One way to ask. url: of its own server. speculation: eyas' own field; null for other servers.
    fields: others of the request body, such as {"ignore_eos": true}.
    """

    url: str | None = None
    speculation: bool | None = None
    fields: dict[str, Any] = Field(default_factory=dict)


class BenchConfig(Settings):
    """What is asked, and at which loads.

    prompts: builtin, or a file of JSON lines (.gz too). url: of the server. arms: ways to ask, by
    name; the first is the baseline of comparisons. num_prompts: at each load; 4 times the
    concurrency if that is more. concurrencies: requests at a time, as in 1,2,4,8. rates: requests
    a second in an open loop, as in 0.5,2. max_tokens: an answer's. temperature: 0 is greedy.
    seed: of prompts, arrivals and draws. compare_anyway: compare unlike arms, and say so.
    """

    prompts: Annotated[str, Flag()] = BUILTIN
    url: str = "http://127.0.0.1:8000"
    arms: dict[str, ArmConfig] = Field(
        default={PLAIN: ArmConfig(speculation=False), EAGLE: ArmConfig(speculation=True)},
        min_length=1,
    )
    num_prompts: Annotated[int, Flag()] = Field(default=40, ge=1)
    concurrencies: Annotated[tuple[int, ...], Flag("--concurrency", separator=",")] = (1,)
    rates: Annotated[tuple[float, ...], Flag(separator=",")] = ()
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    compare_anyway: Annotated[bool, Flag()] = False

    @model_validator(mode="after")
    def _some_load(self) -> BenchConfig:
        if not self.loads or any(load.value <= 0 for load in self.loads):
            raise ValueError("concurrencies, rates: give one at least, all above 0")
        return self

    @property
    def loads(self) -> list[RequestLoad]:
        closed = [RequestLoad(concurrency=concurrency) for concurrency in self.concurrencies]
        return closed + [RequestLoad(rate=rate) for rate in self.rates]

    def num_at(self, load: RequestLoad) -> int:
        """Prompts for one load: at least two blocks of two a slot."""
        return max(self.num_prompts, 4 * load.concurrency)

    def is_salted(self, arm: str, facts: ServerFacts) -> bool:
        """Whether an arm gets a salt."""
        return facts.kind in SALTED and "cache_salt" not in self.arms[arm].fields

    def body(self, arm: str, task: Task, model: str) -> dict[str, Any]:
        """The request of one prompt to one arm. All arms have the same seed for a prompt; one seed
        for all prompts would correlate their draws.
        """
        body = {
            "model": model,
            "messages": list(task.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": mixed_seed(self.seed, task.prompt_id),
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.arms[arm].fields,
        }
        speculation = self.arms[arm].speculation
        return body if speculation is None else {**body, "speculation": speculation}


def bench_identity(config: BenchConfig, served: Mapping[str, Manifest]) -> str:
    """The identity of a benchmark; needs no server."""
    return identity("bench", _described(config, served), served)


def bench(
    config: BenchConfig,
    output: Artifact,
    track: Track = quiet,
    served: Mapping[str, Manifest] | None = None,
) -> Manifest:
    """Measure all arms at all loads into rows.jsonl (one request a row) and summary.json.

    served: the manifests of what the server runs (target, head); in the identity they replace the
    server's address. Raises MissingInputError (no server), MismatchError (arms that did other
    work), EyasError (an arm without an answer); the last two after rows.jsonl.
    """
    served = served or {}
    tasks = _read(config)
    # before the folder is claimed: the address may be wrong
    facts = {} if output.is_done() else _run(_ask_servers(config))
    with output.begun(bench_identity(config, served)) as is_work:
        if is_work:
            return _bench(config, output, tasks, facts, served, track)
    return output.manifest("bench")


def _bench(
    config: BenchConfig,
    output: Artifact,
    tasks: Sequence[Task],
    facts: Mapping[str, ServerFacts],
    served: Mapping[str, Manifest],
    track: Track,
) -> Manifest:
    before = machine()
    run = _run(_measure(config, facts, tasks, track))
    output.write_jsonl("rows.jsonl", [row.to_json() for row in run.rows])
    for arm, load in {(row.arm, row.load) for row in run.rows}:
        own = [row for row in run.rows if (row.arm, row.load) == (arm, load)]
        if not any(row.is_answered for row in own):
            what = f"no request of arm {arm!r} with {load} was answered: {own[0].reply.error}"
            raise EyasError(what, "mend that, and run it again; rows.jsonl has every error")
    differences = run.differences()
    cut = {task.prompt_id for task in tasks if task.has_later_turns}
    engines = {arm: one.engine for arm, one in facts.items()}
    summary = {
        **summarise(run.rows, list(config.arms), config.temperature == 0, run.counted, engines),
        "differences": differences,
        "num_cut_prompts": len(cut & {row.prompt_id for row in run.rows}),
        "compared_anyway": config.compare_anyway,
        "servers": {arm: dataclasses.asdict(one) for arm, one in facts.items()},
        "salted_arms": [arm for arm, one in facts.items() if config.is_salted(arm, one)],
        "config": config.model_dump(mode="json"),
        "machine": before,
        "load_average_after": machine()["load_average"],
    }
    output.write_json("summary.json", summary)
    counts = {
        "requests": len(run.rows),
        "failed": sum(not row.is_answered for row in run.rows),
        "prompts": len({row.prompt_id for row in run.rows}),
    }
    compared = {"comparisons": summary["comparisons"]}
    return output.finish("bench", _described(config, served), served, counts, compared)


def _run(work: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result; by another thread in a notebook, where a loop already runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


def _described(config: BenchConfig, served: Mapping[str, Manifest]) -> dict[str, Any]:
    """The part of the config in the identity, with the prompts' content for their path."""
    described = config.model_dump(mode="json", exclude={"prompts", "compare_anyway"})
    if served:
        del described["url"]
        for arm in described["arms"].values():
            del arm["url"]
    return {**described, "prompts_sha256": file_identity(packaged_prompts(config.prompts))}


def _read(config: BenchConfig) -> list[Task]:
    """The tasks of the heaviest load, and others to warm up with."""
    num_warm_up = max(load.num_warm_up for load in config.loads)
    num_tasks = max(map(config.num_at, config.loads)) + num_warm_up
    tasks = read_tasks(config.prompts, num_tasks, config.seed)
    most = max(load.concurrency for load in config.loads)
    if len(tasks) < most:
        what = f"{packaged_prompts(config.prompts)} has {len(tasks)} prompts for {most} at a time"
        raise ConfigError(what, "give more prompts, or lower concurrencies")
    return tasks


async def _ask_servers(config: BenchConfig) -> dict[str, ServerFacts]:
    facts: dict[str, ServerFacts] = {}
    for name, arm in config.arms.items():
        async with Client(arm.url or config.url, TIMEOUT_S) as client:
            facts[name] = await ask_facts(client)
    baseline, *others = facts
    for other in others:
        differences = differences_of_servers(facts[baseline], facts[other])
        check_comparable(other, baseline, differences, config.compare_anyway)
    return facts


async def _measure(
    config: BenchConfig, facts: Mapping[str, ServerFacts], tasks: Sequence[Task], track: Track
) -> BenchRun:
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(Client(arm.url or config.url, TIMEOUT_S))
            for name, arm in config.arms.items()
        }
        run = BenchRun(config, facts, clients)
        total = len(config.arms) * sum(
            min(len(tasks), config.num_at(load)) for load in config.loads
        )
        for load in config.loads:
            await run.warm_up(load, tasks[-load.num_warm_up :])
            await run.measure(
                load, tasks[: config.num_at(load)], lambda done, note: track(done, total, note)
            )
        return run


class BenchRun:
    """The rows of a benchmark in the order of requests, and the servers' counts by arm and load."""

    def __init__(
        self, config: BenchConfig, facts: Mapping[str, ServerFacts], clients: Mapping[str, Client]
    ) -> None:
        self.rows: list[BenchRow] = []
        self.counted: dict[tuple[str, RequestLoad], Counters] = {}
        self._config, self._facts, self._clients = config, facts, clients
        self._begin = time.perf_counter()

    async def measure(self, load: RequestLoad, tasks: Sequence[Task], track: Any) -> None:
        salts = {arm: secrets.token_hex(8) for arm in self._config.arms}
        arms = list(self._config.arms)
        size = math.ceil(len(tasks) / LEAST_TURNS)  # fewer turns give no interval
        if load.rate is None:
            size = max(2 * load.concurrency, min(BLOCK * load.concurrency, size))
        for block, start in enumerate(range(0, len(tasks), size)):
            some = tasks[start : start + size]
            first = block % len(arms)
            for arm in arms[first:] + arms[:first]:
                client, bodies = self._clients[arm], self._bodies(arm, some, salts[arm])
                before = await read_counters(client)
                if load.rate is None:
                    received = await _ask_all(client, bodies, load.concurrency)
                else:
                    times_s = arrival_times_s(load.rate, len(bodies), self._config.seed + block)
                    received = await _ask_all(client, bodies, len(bodies), times_s)
                await asyncio.sleep(SETTLE_S)
                own = counted_between(before, await read_counters(client))
                self.counted[arm, load] = add_counters(self.counted.get((arm, load), {}), own)
                for task, got in zip(some, received, strict=True):
                    row = BenchRow(
                        arm=arm,
                        load=load,
                        block=block,
                        prompt_id=task.prompt_id,
                        category=task.category,
                        started_s=got.sent - self._begin,
                        reply=read_reply(got),
                    )
                    self.rows.append(row)
                track(len(self.rows), f"{arm}, {load}")

    def differences(self) -> list[dict[str, Any]]:
        """How each arm differs from the first, over all loads. Raises MismatchError."""
        baseline, *others = self._config.arms
        replies: dict[str, dict[Any, Reply]] = {arm: {} for arm in self._config.arms}
        for row in self.rows:
            if row.is_answered:
                replies[row.arm][row.load, row.prompt_id] = row.reply
        found = []
        for arm in others:
            own = replies[arm]
            pairs = [(one, own[key]) for key, one in replies[baseline].items() if key in own]
            differences = differences_of_servers(self._facts[baseline], self._facts[arm])
            differences += differences_of_answers(pairs, self._config.temperature == 0)
            check_comparable(arm, baseline, differences, self._config.compare_anyway)
            found += [
                {"arm": arm, "baseline": baseline, **dataclasses.asdict(one)} for one in differences
            ]
        return found

    async def warm_up(self, load: RequestLoad, tasks: Sequence[Task]) -> None:
        """Ask all arms, count nothing. Raises MismatchError for arms that read other prompts."""
        replies = {}
        for arm, client in self._clients.items():
            bodies = self._bodies(arm, tasks, secrets.token_hex(8))
            received = await _ask_all(client, bodies, max(load.concurrency, 1))
            replies[arm] = [read_reply(one) for one in received]
        baseline, *others = replies
        for arm in others:
            both = zip(replies[baseline], replies[arm], strict=True)
            pairs = [pair for pair in both if not (pair[0].error or pair[1].error)]
            refused = [
                one
                for one in differences_of_answers(pairs, is_greedy=False)
                if one.what in ("prompts", "counts")
            ]
            check_comparable(arm, baseline, refused, self._config.compare_anyway)

    def _bodies(self, arm: str, tasks: Sequence[Task], salt: str) -> list[dict[str, Any]]:
        more = {"cache_salt": salt} if self._config.is_salted(arm, self._facts[arm]) else {}
        return [{**self._config.body(arm, task, self._facts[arm].model), **more} for task in tasks]


async def _ask_all(
    client: Client,
    bodies: Sequence[dict[str, Any]],
    concurrency: int,
    times_s: Iterable[float] = itertools.repeat(0.0),
) -> list[StreamRecord]:
    begin, slots = time.perf_counter(), asyncio.Semaphore(concurrency)

    async def ask(body: dict[str, Any], at_s: float) -> StreamRecord:
        await asyncio.sleep(at_s - (time.perf_counter() - begin))
        async with slots:
            return await client.stream(body)

    async with asyncio.TaskGroup() as group:
        answers = [
            group.create_task(ask(body, at_s)) for body, at_s in zip(bodies, times_s, strict=False)
        ]
    return [one.result() for one in answers]
