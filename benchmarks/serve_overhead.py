"""What streaming through HTTP costs: time per output token of a server against that of the engine
alone.

The same requests, of greedy answers of one length, are decoded by an engine in this process and
streamed from a server in a process of its own, one after the other, in turns: the same target,
head, precision, number of threads and engine settings. TPOT is (last token - first token) / (tokens
- 1) of a request; `overhead` is the median over the turns of the ratio of two neighbours, less one.
`loop_ms_per_token` is the CPU time of the server's threads but the engine's, nearly all of it the
event loop's, for each token that it sent: on a busy machine it is steadier than a ratio of times
(with --threads 1, else the engine has more than one thread). The last line is one JSON.

    python benchmarks/serve_overhead.py --quick
    python benchmarks/serve_overhead.py --turns 12
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path

import held_out
import torch

from eyas import hub
from eyas.bench.stream import read_reply
from eyas.client import Client
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.serve.server import ServeConfig, running_server

CONCURRENCIES = (1, 16)


def engine_tpot_ms(engine: Engine, requests: list[Request]) -> float:
    """Mean over the requests, all of them at once."""
    for request in requests:
        engine.add(request)
    times: dict[str, list[tuple[float, int]]] = {request.id: [] for request in requests}
    while engine.has_work:
        updates = engine.step()
        now = time.perf_counter()
        for update in updates:
            times[update.request_id].append((now, len(update.token_ids)))
    spans = [(one[-1][0] - one[0][0], sum(count for _, count in one) - 1) for one in times.values()]
    return statistics.mean(1000 * span / count for span, count in spans)


async def server_tpot_ms(client: Client, bodies: list[dict[str, object]]) -> float:
    """Mean over the requests, all of them at once. Ends the program where one fails."""
    replies = [
        read_reply(received) for received in await asyncio.gather(*map(client.stream, bodies))
    ]
    for reply in replies:
        if reply.error:
            raise SystemExit(f"error: {reply.error}")
    return statistics.mean(
        (reply.e2e_ms - reply.ttft_ms) / (reply.num_output_tokens - 1) for reply in replies
    )


def thread_cpu_s() -> dict[str, float]:
    """CPU seconds so far of each thread of the server, the one child of this process; empty without
    /proc.
    """
    own = os.getpid()
    seconds = {}
    try:
        (child,) = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        for thread in Path(f"/proc/{child}/task").iterdir():
            fields = (thread / "stat").read_text().rpartition(")")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            seconds[thread.name] = ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return {}
    return seconds


def loop_cpu_s(before: dict[str, float], after: dict[str, float]) -> float:
    """CPU seconds of all threads but the busiest, which is the engine's; NaN without /proc."""
    spent = [seconds - before.get(thread, 0.0) for thread, seconds in after.items()]
    return sum(spent) - max(spent) if spent else float("nan")


def arguments() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=64)
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=1, help="of either engine")
    parser.add_argument(
        "--speculation",
        default="fixed(4,2,8)",
        help="the same choice in both, whatever they measure; or auto, off",
    )
    args = parser.parse_args()
    if args.quick:
        args.turns, args.max_tokens = min(args.turns, 4), min(args.max_tokens, 64)
    return args


async def measured(args: argparse.Namespace, engine: Engine, url: str) -> dict[str, object]:
    """The figures of each concurrency."""
    dialogues = held_out.dialogues(args.data, args.prompts)
    requests = held_out.requests(args)
    by_id = {request.id: {"messages": dialogues[int(request.id)]} for request in requests}
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)
    figures: dict[str, object] = {}
    async with Client(url, 300) as client:
        for concurrency in CONCURRENCIES:
            pairs, cpu_s = [], 0.0
            for turn in range(args.turns + 1):
                chosen = [
                    requests[(turn * concurrency + number) % len(requests)]
                    for number in range(concurrency)
                ]
                alone = engine_tpot_ms(
                    engine, [Request(one.id, one.prompt_ids, params) for one in chosen]
                )
                shared = {
                    "model": "eyas",
                    "temperature": 0,
                    "max_tokens": args.max_tokens,
                    "ignore_eos": True,
                    "stream": True,
                }
                bodies = [
                    {**by_id[one.id], **shared, "stream_options": {"include_usage": True}}
                    for one in chosen
                ]
                before = thread_cpu_s()
                pairs.append((alone, await server_tpot_ms(client, bodies)))
                cpu_s += loop_cpu_s(before, thread_cpu_s())
            num_tokens = len(pairs) * concurrency * args.max_tokens
            pairs = pairs[1:]  # the first warms up
            ratios = sorted(served / alone for alone, served in pairs)
            figures[str(concurrency)] = {
                "engine_tpot_ms": round(statistics.median(alone for alone, _ in pairs), 3),
                "server_tpot_ms": round(statistics.median(served for _, served in pairs), 3),
                "loop_ms_per_token": round(1000 * cpu_s / num_tokens, 4),
                "overhead": round(statistics.median(ratios) - 1, 4),
                "overhead_quartiles": [
                    round(ratios[len(ratios) // 4] - 1, 4),
                    round(ratios[3 * len(ratios) // 4] - 1, 4),
                ],
            }
            print(concurrency, figures[str(concurrency)], flush=True)
    return figures


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    config = EngineConfig(max_batch=16, speculation=args.speculation)
    serve = ServeConfig(
        target=args.target,
        head=args.head,
        model="eyas",
        port=0,
        dtype=args.dtype,
        threads=args.threads,
        engine=config,
    )
    engine = Engine.load(
        hub.resolve_target(args.target), hub.resolve_head(args.head), args.dtype, config
    )
    with running_server(serve) as url:
        figures = asyncio.run(measured(args, engine, url))
    print(
        json.dumps(
            {
                "concurrency": figures,
                "dtype": args.dtype,
                "turns": args.turns,
                "machine": held_out.machine(),
            }
        )
    )


if __name__ == "__main__":
    main()
