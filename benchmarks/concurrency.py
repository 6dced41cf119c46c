"""Plain decoding against a head by number of requests at a time and by task, over HTTP.

    python benchmarks/concurrency.py [--quick] [--prompts 40] [--concurrency 1 2 4 6 8 10]
        [--arms 'auto;head;fixed(4,1,5);llama.cpp'] [--llama-cpp BUILD]
    python benchmarks/concurrency.py --starts 10

An arm is a server in a process of its own: plain, `auto` (head and text), `head` (without text), a
fixed tree by its name, `llama.cpp` (plain, on the GGUF file; BUILD is its cmake build folder). Arms
take turns block by block on the same prompts, none trained on (held_out.py). --starts measures our
server and llama.cpp's in turns: seconds until /health answers, by the clock and of CPU, MB (PSS)
then and after an answer; medians. Writes bench's report; the last line is one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import held_out
import httpx
from generate import free_port

from eyas import hub
from eyas.artifact import Artifact
from eyas.bench.bench import ArmConfig, BenchConfig, bench
from eyas.bench.report import Contents, show_table, write_reports
from eyas.cli.stage import stage
from eyas.engine.engine import EngineConfig
from eyas.errors import EyasError
from eyas.serve.server import ServeConfig, running_server

MOST_CHARACTERS = 4000
PLAIN, LLAMA = "plain", "llama.cpp"
LLAMA_CONTEXT, START_SECONDS = 2048, 60


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


@contextmanager
def ready(command: list[str], port: int) -> Iterator[tuple[int, str]]:
    """The process id and the URL of a server, once it answers."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}  # as installed packages start
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment, **silent) as process:
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while not is_up(url):
                if process.poll() is not None or time.monotonic() > until:
                    sys.exit(f"error: the server does not start: {command}")
                time.sleep(0.02)
            yield process.pid, url
        finally:
            process.terminate()


def started(command: list[str], port: int, model: str) -> dict[str, float]:
    begun = time.monotonic()
    with ready(command, port) as (pid, url):
        place = Path(f"/proc/{pid}")
        ready_s = time.monotonic() - begun
        times = place.joinpath("stat").read_text().rpartition(")")[2].split()[11:13]
        ready_mb = memory_mb(place)
        said = [{"role": "user", "content": "Tell me a story about a table."}]
        body = {"model": model, "messages": said, "max_tokens": 128}
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status()
        cpu_s = sum(map(int, times)) / os.sysconf("SC_CLK_TCK")
        after_mb = memory_mb(place)
    return {"ready_s": ready_s, "cpu_s": cpu_s, "ready_mb": ready_mb, "after_mb": after_mb}


def memory_mb(place: Path) -> float:
    lines = place.joinpath("smaps_rollup").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("Pss:"))
    return int(kib) * 1.024e-3


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


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


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
            if arm == LLAMA:
                server = ready(llama_command(args, port := free_port()), port)
                _, url = servers.enter_context(server)
            else:
                url = servers.enter_context(running_server(served(args, arm)))
            arms[arm] = ArmConfig(url=url, speculation=None if arm in (PLAIN, LLAMA) else True)
        config = BenchConfig(
            prompts=str(questions),
            arms=arms,
            num_prompts=len(asked),
            concurrencies=args.concurrency,
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            compare_anyway=LLAMA in arms,  # its sums have another order, its answers differ
        )
        try:
            with stage("bench", folder) as track:
                bench(config, folder, track)
        except EyasError as error:
            sys.exit(f"error: {error}")
    summary = folder.read_json("summary.json")
    command = " ".join(["python", "benchmarks/concurrency.py", *sys.argv[1:]])
    contents = Contents(
        bench=summary,
        manifest=folder.manifest("bench"),
        commands=[command],
        title=f"The head {args.head} on a CPU",
    )
    report = write_reports(folder, contents)
    show_table(summary)
    print(json.dumps({**figures(summary), "machine": summary["machine"], "report": report}))


if __name__ == "__main__":
    main()
