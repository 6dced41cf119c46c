"""The benchmark: the same prompts to every arm, block by block in turn, so that a busy minute hits all arms alike.

    concurrency c:   block 0: plain eagle   block 1: eagle plain   block 2: plain eagle   ...
    a block:         4c prompts, c at a time

Knows the order of things; the client measures, `summary` counts. An arm is a way to ask: with or without speculation, at
one server or another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from eyas.artifact import Artifact, Manifest, file_identity, identity
from eyas.bench.client import Client, Received, read_reply
from eyas.bench.machine import machine
from eyas.bench.summary import Row, summarise
from eyas.bench.workload import Task, read_tasks
from eyas.errors import EyasError
from eyas.log import Track, quiet

BLOCK = 4  # prompts per slot of concurrency in a block: short enough to share the weather, long enough to fill the slots


class ArmConfig(BaseModel):
    """One way to ask. `speculation` is eyas' own field: None leaves it out, for servers that do not know it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str | None = None  # of this arm's own server, where it has one
    speculation: bool | None = None


class BenchConfig(BaseModel):
    """What is asked, how often and how many at a time. The first arm is the baseline of the comparisons."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    prompts: str  # JSON lines, .gz or plain: eyas' prompts, OpenAI's messages, Spec-Bench
    url: str = "http://127.0.0.1:8000"
    arms: dict[str, ArmConfig] = Field(
        default={"plain": ArmConfig(speculation=False), "eagle": ArmConfig(speculation=True)}, min_length=1
    )
    num_prompts: int = Field(default=40, ge=1)
    concurrencies: tuple[int, ...] = Field(default=(1,), min_length=1)
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=0.0, ge=0)
    seed: int = 0
    timeout_s: float = Field(default=300.0, gt=0)

    def body(self, arm: str, task: Task, model: str) -> dict[str, Any]:
        """The request of one prompt to one arm; all have the same seed, so that sampling arms draw alike."""
        body = {
            "model": model,
            "messages": list(task.messages),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        speculation = self.arms[arm].speculation
        return body if speculation is None else {**body, "speculation": speculation}


def bench_identity(config: BenchConfig, served: Mapping[str, Manifest]) -> str:
    """The identity of a benchmark, known before any server runs."""
    return identity("bench", _described(config, served), served)


def bench(
    config: BenchConfig, output: Artifact, track: Track = quiet, served: Mapping[str, Manifest] | None = None
) -> Manifest:
    """Measure all arms at all concurrencies into rows.jsonl (one request a row) and summary.json.

    `served` are the manifests of what the server runs (target, head): with them, they say what is measured and the server's
    address does not matter; without, the address does. Raises MissingInputError (no server), EyasError (no arm's request
    succeeds; an impossible speed-up).
    """
    served = served or {}
    tasks = read_tasks(config.prompts, config.num_prompts, config.seed)
    # Servers are looked for first: a wrong address must not claim the folder for a benchmark that never was.
    models = {} if output.is_done() else asyncio.run(_models(config))
    if not output.begin(bench_identity(config, served)):
        return output.manifest("bench")
    before = machine()
    rows = asyncio.run(_measure(config, models, tasks, track))
    output.write_jsonl("rows.jsonl", [row.to_json() for row in rows])
    _check_answered(rows)
    summary = {
        **summarise(rows, list(config.arms), is_greedy=config.temperature == 0),
        "config": config.model_dump(mode="json"),
        "machine": before,
        "load_average_after": machine()["load_average"],
    }
    output.write_json("summary.json", summary)
    counts = {"requests": len(rows), "failed": sum(not row.is_answered for row in rows), "prompts": len(tasks)}
    return output.finish("bench", _described(config, served), served, counts, facts={"comparisons": summary["comparisons"]})


def _described(config: BenchConfig, served: Mapping[str, Manifest]) -> dict[str, Any]:
    """The config as far as it says what is measured, with the content of the prompts in place of their path."""
    described = config.model_dump(mode="json", exclude={"timeout_s", "prompts"})
    if served:
        del described["url"]
        for arm in described["arms"].values():
            del arm["url"]
    return {**described, "prompts_sha256": file_identity(config.prompts)}


def _check_answered(rows: Sequence[Row]) -> None:
    """Raises EyasError when some arm at some concurrency has no answer at all: there is nothing to summarise."""
    for arm, concurrency in {(row.arm, row.concurrency) for row in rows}:
        own = [row for row in rows if (row.arm, row.concurrency) == (arm, concurrency)]
        if not any(row.is_answered for row in own):
            what = f"no request of arm {arm!r} at concurrency {concurrency} was answered: {own[0].reply.error}"
            raise EyasError(what, "mend that, and run it again; rows.jsonl has every error")


async def _models(config: BenchConfig) -> dict[str, str]:
    """The model that each arm's server has. Raises MissingInputError, EyasError."""
    models = {}
    for name, arm in config.arms.items():
        async with Client(arm.url or config.url, config.timeout_s) as client:
            models[name] = await client.model()
    return models


async def _measure(config: BenchConfig, models: Mapping[str, str], tasks: Sequence[Task], track: Track) -> list[Row]:
    """All rows of the run, in the order they were asked for."""
    rows: list[Row] = []
    total = len(tasks) * len(config.arms) * len(config.concurrencies)
    begin = time.perf_counter()
    async with AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(Client(arm.url or config.url, config.timeout_s))
            for name, arm in config.arms.items()
        }

        async def ask(arm: str, some: Sequence[Task], concurrency: int) -> list[Received]:
            bodies = [config.body(arm, task, models[arm]) for task in some]
            return await _ask_all(clients[arm], bodies, concurrency)

        for concurrency in config.concurrencies:
            for arm in config.arms:
                await ask(arm, tasks[:concurrency], concurrency)  # warms up and is not counted
            size = BLOCK * concurrency
            for block, start in enumerate(range(0, len(tasks), size)):
                for arm in _in_turn(list(config.arms), block):
                    some = tasks[start : start + size]
                    for task, got in zip(some, await ask(arm, some, concurrency), strict=True):
                        where = (arm, concurrency, block, task.prompt_id, task.category, got.sent - begin)
                        rows.append(Row(*where, read_reply(got)))
                    track(len(rows), total, f"{arm}, {concurrency} at a time")
    return rows


def _in_turn(arms: list[str], block: int) -> list[str]:
    """The arms, another one first in each block."""
    first = block % len(arms)
    return arms[first:] + arms[:first]


async def _ask_all(client: Client, bodies: Sequence[dict[str, Any]], concurrency: int) -> list[Received]:
    """Ask for all, `concurrency` at a time, in order."""
    received: list[Received | None] = [None] * len(bodies)
    waiting = iter(enumerate(bodies))

    async def slot() -> None:
        for place, body in waiting:
            received[place] = await client.complete(body)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(slot())
    assert None not in received
    return [one for one in received if one is not None]
