"""A head in SGLang, vLLM or eyas on one GPU: TPOT, throughput, TTFT and tau by load, with and
without it.

    python benchmarks/gpu/serve.py --body 8b [--engine sglang] [--at-once 3] [--seconds 500]
    python benchmarks/gpu/serve.py --target FOLDER --head FOLDER --prompts FILE
    python benchmarks/gpu/serve.py --engine none --foretold FILE    `eyas eval` alone
    python benchmarks/gpu/serve.py --tiny --engine eyas             on any machine

--body is SmolLM2's function in a model of that size (recipes/body.py): real text and acceptance at
the real size's price. Some arms' servers, plain decoding among them, share the card, and `eyas
bench` asks them in turns. Simulated acceptance (SGLang, vLLM) gives the costs of rounds, tau x
TPOT, for a head's card. --foretold: `eyas eval`'s tau on the same prompts, computed (in minutes on
a CPU) if the file is missing.

OUT/rows.jsonl grows; a second call measures what is missing. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import eyas
from eyas import hub
from eyas.artifact import Artifact, file_identity
from eyas.bench.bench import BenchConfig, bench
from eyas.bench.workload import read_tasks
from eyas.builtin import BUILTIN
from eyas.errors import EyasError
from eyas.export.engines import Launch
from eyas.gguf.checkpoint import whole_folder

ROOT = Path(__file__).resolve().parents[2]
EYAS = [sys.executable, "-m", "eyas.cli.main"]
TASKS = ("translation", "summarization", "qa", "math_reasoning", "rag")  # of Spec-Bench
OTHERS = "chat"  # all others, MT-Bench's categories
SOME = (1, 16)  # loads that are measured at T = 1 too
START_S = 600
LOADED = "Memory pool end"  # in SGLang's log: weights and cache are on the card
FLAGS = {
    "eyas": "",
    "vllm": "--max-model-len 4096 --max-num-seqs 64 --no-enable-prefix-caching",
    # prefill's CUDA graphs stay on, as by default
    "sglang": "--enable-metrics --context-length 4096 --max-total-tokens 65536 --sleep-on-idle "
    "--cuda-graph-bs-decode 1 2 4 8 16 24 32 48 64 --max-running-requests 64 "
    "--disable-radix-cache --mem-fraction-static 0.88 --skip-server-warmup",
}
NO_OVERLAP = {"sglang": "--disable-overlap-schedule", "vllm": "--no-async-scheduling"}
SHOWN = ("name", "load", "temperature", "task", "tpot_ms", "ttft_ms", "output_tokens_per_s", "tau")
SHOWN += ("foretold_tau", "speedup")
SIZES = ("steps", "topk", "verify")
Sizes = tuple[int, int, int]  # draft steps, branches, verified tokens with the root
REAL: tuple[Sizes, ...] = ((5, 4, 16), (5, 4, 8), (3, 1, 4))
# what is simulated, and tokens a round, near those of published heads
CHAINS = [((1, 1, 2), 1.6), ((2, 1, 3), 1.9), ((3, 1, 4), 2.2), ((3, 1, 4), 3.0), ((5, 1, 6), 2.4)]
COSTS = [*CHAINS, ((3, 4, 8), 2.4), ((5, 4, 8), 2.6), ((5, 4, 16), 2.8)]


class Arm(NamedTuple):
    """A server. simulated: tokens of each round, whatever the head proposes."""

    sizes: Sizes | None = None
    overlap: bool = True
    simulated: float | None = None

    @property
    def name(self) -> str:
        drafts = "plain" if self.sizes is None else "-".join(map(str, self.sizes))
        more = "" if self.simulated is None else f" simulated {self.simulated:g}"
        return drafts + more + ("" if self.overlap else " no overlap")

    @property
    def tree(self) -> str:
        return "off" if self.sizes is None else f"fixed({','.join(map(str, self.sizes))})"


class Unit(NamedTuple):
    """What one call of bench measures."""

    load: int
    temperature: float = 0.0
    task: str | None = None
    repeat: int = 0


def groups(args: argparse.Namespace) -> list[list[Arm]]:
    """Arms that share the card, the baseline first; simulated ones apart."""
    arms, simulated = [Arm(sizes) for sizes in REAL], list[Arm]()
    if args.engine != "eyas":
        arms += [Arm(overlap=False), *(Arm(sizes, overlap=False) for sizes in REAL)]
        simulated = [Arm(sizes, simulated=tau) for sizes, tau in COSTS]
    found, few = [], max(1, args.at_once - 1)
    for of, baseline in ((arms, [Arm()]), (simulated, [])):
        if args.engine == "vllm":
            of = [arm for arm in of if arm.sizes is None or arm.sizes[1] == 1]
        wanted = [arm for arm in of if not args.only or arm.name in args.only]
        found += [baseline + wanted[at : at + few] for at in range(0, len(wanted), few)]
    return found


def units(args: argparse.Namespace, group: list[Arm]) -> list[Unit]:
    """The most important first."""
    first = [Unit(load) for load in args.loads]
    if group[0].simulated:
        return first
    tasks = [Unit(min(4, count), 0.0, task) for task, count in args.by_task.items()]
    sampled = [Unit(load, 1.0) for load in args.loads if load in SOME]
    again = [Unit(load, 0.0, None, turn) for turn in range(1, args.repeats) for load in args.loads]
    return first + tasks + sampled + again


# Servers


def command(args: argparse.Namespace, arm: Arm, port: int, at_once: int) -> list[str]:
    """The words that start an arm's server."""
    starts = {"sglang": [args.python, "-m", "sglang.launch_server", "--model-path"]}
    starts |= {"vllm": ["vllm", "serve"], "eyas": [*EYAS, "serve", "--target"]}
    words = [*starts[args.engine], args.target]
    if args.engine == "eyas":
        words += ["--speculation", arm.tree, "-s", f"dtype={args.dtype}"]
        words += [] if arm.sizes is None else ["--head", args.head]
    else:
        words += ["--dtype", args.dtype]
    if arm.sizes is not None and args.engine != "eyas":
        launch = Launch(args.target, *arm.sizes, dtype=args.dtype)
        asked = launch.arguments(args.engine, str(args.export / args.engine))
        words = starts[args.engine] + asked[asked.index(args.target) :]
    words += ["--port", str(port), "--host", "127.0.0.1", *shlex.split(FLAGS[args.engine])]
    if args.engine == "sglang":
        words += ["--nccl-port", str(free_port())]
    if args.engine == "vllm":
        words += ["--gpu-memory-utilization", f"{0.92 / at_once:.2f}"]
        if arm.simulated:  # vllm/config/speculative.py
            at = words.index("--speculative-config") + 1
            more = {"synthetic_acceptance_length": arm.simulated}
            more = {"rejection_sample_method": "synthetic", **more}
            words[at] = json.dumps(json.loads(words[at]) | more)
    words += [] if arm.overlap else [NO_OVERLAP[args.engine]]
    return words + shlex.split(args.engine_args)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def servers(args: argparse.Namespace, group: list[Arm]) -> Iterator[dict[Arm, str]]:
    """The addresses of a group's servers that start, one after the other: SGLang takes a share of
    the memory that is free.
    """
    started: dict[Arm, tuple[subprocess.Popen, str, Path]] = {}
    try:
        for arm in group:
            port, log = free_port(), args.out / f"{arm.name.replace(' ', '_')}.log"
            words = command(args, arm, port, len(group))
            env = {"SGLANG_SIMULATE_ACC_LEN": str(arm.simulated)} if arm.simulated else {}
            with log.open("w") as file:
                print(shlex.join(words), file=file, flush=True)
                process = subprocess.Popen(
                    words, stdout=file, stderr=file, env={**os.environ, **env}, process_group=0
                )
            started[arm] = process, f"http://127.0.0.1:{port}", log
            is_up(*started[arm], mark=LOADED)
        ready = {arm: found[1] for arm, found in started.items() if is_up(*found)}
        for arm in started.keys() - ready.keys():
            print(f"{arm.name} did not start:", started[arm][2].read_text()[-1500:], flush=True)
        yield ready
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process, _, _ in started.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            time.sleep(2)


def is_up(process: subprocess.Popen, url: str, log: Path, mark: str = "") -> bool:
    """Waits for an answer, or the mark in the log; False if the server ended."""
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
        if mark and mark in log.read_text(errors="replace"):
            return True
        time.sleep(0.3)
    return False


# The measurement


class Measurement:
    """The rows of OUT/rows.jsonl, earlier calls' included."""

    def __init__(self, args: argparse.Namespace, foretold: dict[str, Any]) -> None:
        self._args, self._foretold, self._card = args, foretold, "cpu"
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "-i", "0", "--format=csv,noheader", "--query-gpu=name"]
            self._card = subprocess.check_output(query, text=True).strip()
        self._file = args.out / "rows.jsonl"
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]

    def key(self, group: list[Arm], unit: Unit) -> str:
        args, beside = self._args, "+".join(arm.name for arm in group)
        asked = (args.engine, args.named, args.dtype, beside, *unit)
        return "_".join(map(str, asked)).replace(" ", "-").replace("/", "-")

    def has(self, key: str) -> bool:
        return any(row["key"] == key for row in self.rows)

    def measure(self, group: list[Arm], unit: Unit, urls: dict[Arm, str]) -> None:
        """One call of bench, a row for each arm. Simulated answers go on past their end."""
        args, key = self._args, self.key(group, unit)
        body = {"ignore_eos": True} if group[0].simulated else {}
        asked = [arm for arm in group if arm in urls and (arm.sizes or not unit.task)]
        if not asked:
            return
        config = {
            "prompts": str(args.out / f"prompts-{unit.task or 'all'}.jsonl"),
            "arms": {arm.name: {"url": urls[arm], "fields": body} for arm in asked},
            "num_prompts": args.num_prompts,
            "concurrencies": (unit.load,),
            "max_tokens": args.max_tokens,
            "temperature": unit.temperature,
            "compare_anyway": True,
        }
        shutil.rmtree(args.out / "bench" / key, ignore_errors=True)
        output = Artifact(str(args.out / "bench" / key))
        bench(BenchConfig.model_validate(config), output)
        summary = output.read_json("summary.json")
        comparisons = [one for one in summary["comparisons"] if one["baseline"] == Arm().name]
        by_plain = {one["arm"]: one for one in comparisons}
        for arm, one in zip(asked, summary["results"], strict=True):
            tau = self._foretold.get(arm.tree, {}).get(unit.task)
            compared = by_plain.get(arm.name, {})
            row: dict[str, Any] = {
                "engine": args.engine,
                "version": summary["servers"][arm.name]["version"],
                "card": self._card,
                "target": args.named,
                "dtype": args.dtype,
                "arm": arm.sizes and dict(zip(SIZES, arm.sizes, strict=True)),
                "overlap": arm.overlap,
                "simulated": arm.simulated,
                **unit._asdict(),
                **{name: one[name] and one[name]["median"] for name in ("tpot_ms", "ttft_ms")},
                "output_tokens_per_s": one["throughput_tps"],
                "foretold_tau": None if arm.simulated else tau,
                "day": time.strftime("%Y-%m-%d"),
            }
            row |= {name: one[name] for name in ("tau", "num_requests", "num_failed")}
            row |= {name: compared.get(name) for name in ("speedup", "speedup_interval")}
            self.keep(key, arm, row)

    def keep(self, key: str, arm: Arm, row: dict[str, Any]) -> None:
        row = {"key": key, "name": arm.name, **row}
        self.rows.append(row)
        with self._file.open("a") as file:
            print(json.dumps(row), file=file)
        told = {name: row[name] for name in SHOWN if row.get(name) is not None}
        print({n: round(v, 3) if isinstance(v, float) else v for n, v in told.items()}, flush=True)


# What is measured on


def write_prompts(args: argparse.Namespace) -> None:
    """Files of prompts: all, each task's, and these together for eval."""
    tasks: dict[str, list[Any]] = {name: [] for name in (*TASKS, OTHERS)}
    for one in read_tasks(args.prompts, 10**9, 0):
        if sum(len(turn["content"]) for turn in one.messages) <= args.longest:
            name = one.category if one.category in TASKS else OTHERS
            row = {"id": one.prompt_id, "category": name, "messages": one.messages}
            tasks[name].append(json.dumps(row) + "\n")
    few = {name: of[: args.of_a_task] for name, of in tasks.items() if of}
    args.by_task = {name: len(of) for name, of in few.items()}
    files = {**few, "all": chain(*tasks.values()), "eval": chain(*few.values())}
    for name, of in files.items():
        (args.out / f"prompts-{name}.jsonl").write_text("".join(of))


def foretold(args: argparse.Namespace) -> dict[str, Any]:
    """tau of each tree by task: read, or computed and written."""
    if args.foretold is None:
        return {}
    prompts = str(args.out / "prompts-eval.jsonl")
    asked = [file_identity(prompts), args.max_tokens, args.eval_head]
    if args.foretold.exists():
        read = json.loads(args.foretold.read_text())
        if read["asked"] != asked:
            sys.exit(f"error: {args.foretold} is of other prompts or another head\n  -> delete it")
        return dict(read["tau"])
    found = eyas.evaluate(
        args.eval_head,
        prompts,
        target=args.eval_target,
        trees=[Arm(sizes).tree for sizes in REAL],
        temperatures=[0.0],
        num_prompts=10**6,
        max_tokens=args.max_tokens,
        models={"dtype": "float32" if args.tiny else "bfloat16", "max_length": 4096},
    )
    tau = {
        one["speculation"]: {name: of["tau"] for name, of in one["by_source"].items()}
        | {"all": one["tau"]}
        for one in found.result["trees"]
    }
    args.foretold.write_text(json.dumps({"asked": asked, "tau": tau}, indent=1))
    return tau


def prepare(args: argparse.Namespace) -> None:
    if args.body:
        folder = args.out.parent / f"body-{args.body}"
        recipe = str(ROOT / "recipes" / "body.py")
        if not folder.exists():
            words = [sys.executable, recipe, "--size", args.body, "--out", str(folder)]
            subprocess.run(words, check=True)
        args.target, args.head = str(folder / "target"), str(folder / "head")
    args.named = f"body of {args.body}" if args.body else Path(args.target).name
    if args.engine != "eyas":
        args.export = args.out / f"export-{args.named.replace(' ', '-')}"
        if not args.export.exists():
            words = [*EYAS, "export", args.head, "-t", args.target, "-o", str(args.export)]
            subprocess.run(words, check=True)
        args.target = str(whole_folder(hub.resolve_target(args.target)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="the packaged test model, few tokens")
    parser.add_argument("--engine", choices=("sglang", "vllm", "eyas", "none"), default="sglang")
    parser.add_argument("--body", choices=("8b", "1b"), help="in place of target and head")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", default=BUILTIN, help="as for eyas bench, e.g. Spec-Bench's")
    parser.add_argument("--foretold", type=Path, help="eval's tau of these prompts, JSON")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"))
    parser.add_argument("--only", type=lambda text: text.split(","), help="arms by name")
    parser.add_argument("--at-once", type=int, default=3, help="servers (8 B: 20 to 25 GB each)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="then no further measurement")
    parser.add_argument("--python", default=sys.executable, help="that has SGLang")
    parser.add_argument("--engine-args", default="", help="more flags of the engine's server")
    args = parser.parse_args()
    args.loads, args.num_prompts, args.max_tokens = (1, 4, 16, 64), 24, 128
    args.of_a_task, args.longest = 16, 6000  # prompts; characters
    if args.tiny:
        args.target, args.head, args.dtype = BUILTIN, BUILTIN, "float32"
        args.loads, args.num_prompts, args.max_tokens = (1, 2), 4, 16
        args.of_a_task, args.longest = 4, 1000
    args.eval_target, args.eval_head = args.target, args.head  # of a body: its original's
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers end, too
    args = arguments()
    end = time.monotonic() + args.seconds
    write_prompts(args)
    told = foretold(args)
    run = Measurement(args, told)
    if args.engine != "none":
        prepare(args)
    for group in groups(args) if args.engine != "none" else ():
        todo = [unit for unit in units(args, group) if not run.has(run.key(group, unit))]
        if not todo or time.monotonic() > end:
            continue
        with servers(args, group) as urls:
            for unit in todo:
                try:
                    if time.monotonic() < end:
                        run.measure(group, unit, urls)
                except EyasError as error:
                    print(f"error: {unit}: {error}", flush=True)

    print(json.dumps({"rows": len(run.rows), "file": str(args.out / "rows.jsonl"), "tau": told}))


if __name__ == "__main__":
    main()
