"""Plain decoding against a head by number of requests at a time and by task, over HTTP.

    python benchmarks/concurrency.py [--quick] [--prompts 40] [--concurrency 1 2 4 6 8 10]
        [--arms 'auto;head;fixed(4,1,5)']
    python benchmarks/concurrency.py --starts 10 [--llama-cpp BUILD]

An arm is a server in a process of its own: plain, `auto` (head and text), `head` (without text), or
a fixed tree by its name. Arms take turns block by block on the same prompts, none trained on
(held_out.py), as `eyas bench` has them. --starts measures our server, and llama.cpp's (BUILD is its
cmake build folder) on the same GGUF file, in turns: seconds until /health answers, by the clock and
of CPU, MB (PSS) then and after an answer; medians. The last line is one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import held_out
import httpx
from servers import free_port, memory_mb, ready

from eyas import hub
from eyas.artifact import Artifact
from eyas.bench.bench import ArmConfig, BenchConfig, bench
from eyas.bench.report import show_table
from eyas.cli.stage import stage
from eyas.engine.engine import EngineConfig
from eyas.errors import EyasError
from eyas.serve.server import ServeConfig, running_server

MOST_CHARACTERS = 4000
PLAIN, LLAMA = "plain", "llama.cpp"
LLAMA_CONTEXT = 2048


def prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Of each task --prompts rows: id, task, messages."""
    count = 4 * args.prompts
    by_task = held_out.spec_bench(args.data) | held_out.not_trained_on(args.data, count)
    found = []
    for task, conversations in by_task.items():
        short = held_out.short(conversations, MOST_CHARACTERS)
        random.Random(0).shuffle(short)
        found += [
            {"id": f"{task}-{n}", "category": task, "messages": one}
            for n, one in enumerate(short[: args.prompts])
        ]
    return found


def served(args: argparse.Namespace, arm: str) -> ServeConfig:
    engine = EngineConfig(
        max_batch=max(args.concurrency),
        speculation={PLAIN: "off", "head": "auto"}.get(arm, arm),
        text_drafts=arm != "head",
    )
    given = {name: getattr(args, name) for name in ("target", "head", "dtype", "threads")}
    return ServeConfig(**given, port=0, engine=engine)


def llama_command(args: argparse.Namespace, port: int) -> list[str]:
    slots = max(args.concurrency)
    settings = {"--alias": args.target, "--port": port, "-t": args.threads, "-tb": args.threads}
    settings |= {"-np": slots, "-c": slots * LLAMA_CONTEXT, "--cache-ram": 0}
    command = [f"{args.llama_cpp}/bin/llama-server", "-m", hub.locate(args.target, "target")]
    command += [str(word) for setting in settings.items() for word in setting]
    return [*command, "--jinja", "--metrics"]


def started(command: list[str], port: int, model: str) -> dict[str, float]:
    begun = time.monotonic()
    with ready(command, port) as (pid, url):
        ready_s = time.monotonic() - begun
        times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        ready_mb = memory_mb(pid)
        said = [{"role": "user", "content": "Tell me a story about a table."}]
        body = {"model": model, "messages": said, "max_tokens": 128}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        cpu_s = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        after_mb = memory_mb(pid)
    return {"ready_s": ready_s, "cpu_s": cpu_s, "ready_mb": ready_mb, "after_mb": after_mb}


def starts(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    found = defaultdict(list)
    for _ in range(args.starts):
        ours = [sys.executable, "-m", "eyas.cli.main", "serve", "--port", str(port := free_port())]
        ours += ["--target", args.target, "--set", f"dtype={args.dtype}", "--set", "model=it"]
        found["eyas"].append(started(ours, port, "it"))
        if args.llama_cpp:
            theirs = llama_command(args, port := free_port())
            found[LLAMA].append(started(theirs, port, args.target))
    return {
        name: {key: rounded(statistics.median(one[key] for one in runs)) for key in runs[0]}
        for name, runs in found.items()
    }


def figures(summary: dict[str, Any]) -> dict[str, Any]:
    by_concurrency: dict[int, dict[str, Any]] = defaultdict(dict)
    for row in summary["results"]:
        tpot, tps = row["tpot_ms"], row["throughput_tps"]
        by_concurrency[row["concurrency"]][row["arm"]] = {
            "tpot_ms": None if tpot is None else round(tpot["median"], 3),
            "tokens_per_s": None if tps is None else round(tps),
            "tau": rounded(row["tau"]),
            "nodes": rounded(row["speculation"].get("nodes_mean")),
        }
    for row in summary["comparisons"]:
        by_concurrency[row["concurrency"]][row["arm"]] |= {
            "speedup": rounded(row["speedup"]),
            "interval": list(map(rounded, row["speedup_interval"] or ())) or None,
            "identical": f"{row['identical']} of {row['num_pairs']}",
        }
    return {"by_concurrency": by_concurrency}


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute: shows that it works")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 6, 8, 10])
    parser.add_argument("--prompts", type=int, default=40, help="of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of each engine")
    parser.add_argument("--dtype", default="bfloat16", help="bfloat16, float32 or packed")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--arms", default="auto;fixed(4,1,5)", help="beside plain, split by ;")
    parser.add_argument("--starts", type=int, help="measure starts in place of speed, so many")
    parser.add_argument("--llama-cpp", help="its cmake build folder")
    parser.add_argument("--data", type=Path, default=held_out.DATA)
    parser.add_argument("--output", default=f"out/concurrency-{time.strftime('%Y%m%d-%H%M%S')}")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 8), min(args.max_tokens, 48)
        args.concurrency = [1, 4]
    return args


def main() -> None:
    args = arguments()
    if args.starts:
        print(json.dumps(starts(args)))
        return
    asked = prompts(args)
    folder, questions = Artifact(args.output), Path(f"{args.output}-prompts.jsonl")
    questions.parent.mkdir(parents=True, exist_ok=True)
    questions.write_text("".join(json.dumps(row) + "\n" for row in asked), encoding="utf-8")
    with ExitStack() as servers:
        arms = {}
        for arm in (PLAIN, *args.arms.split(";")):
            url = servers.enter_context(running_server(served(args, arm)))
            arms[arm] = ArmConfig(url=url, speculation=None if arm == PLAIN else True)
        config = BenchConfig(
            prompts=str(questions),
            arms=arms,
            num_prompts=len(asked),
            concurrencies=args.concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
        )
        try:
            with stage("bench", folder) as track:
                bench(config, folder, track)
        except EyasError as error:
            sys.exit(f"error: {error}")
    summary = folder.read_json("summary.json")
    show_table(summary)
    print(json.dumps({**figures(summary), "machine": summary["machine"]}))


if __name__ == "__main__":
    main()
