"""Speed at the sizes that people run, beside llama.cpp and beside reading the weights once.

    python benchmarks/sizes.py [--quick] [--shapes llama-1b,...] [--formats Q4_K_M,...]
        [--llama BUILD ...] [--sections plain,rows,draft,head,loads,eagle3] [--samples 5]
        [--threads N] [--work FOLDER] [--data FOLDER]

    plain       tokens/s of one request, and of a prompt of 512: eyas packed, llama-bench of every
                BUILD (a folder with bin/llama-bench), and a plain read of the bytes that a token
                reads, interleaved; medians. Memory after a request, and seconds to open the file
    rows        a forward of 2 to 64 rows in times of one row
    draft       growing the default tree in times of a forward of one row, and its parts
    head        time per token of plain decoding by that of speculative decoding, with the default
                tree and with auto, on short prompts of Spec-Bench (--data). Answers must be plain's
    eagle3      one request by llama.cpp's own EAGLE-3 (bin/llama-server of the first BUILD) and by
                ours, a chain of CHAIN, with the packaged head without the norms that it cannot read

Weights are random (random_models.py). draft, head and eagle3 need a head, so they run on
bodies alone (body-1b, body-8b): SmolLM2 and its packaged head, padded with zeros to that shape by
recipes/body.py. Every file has a process of its own, and is written first where it is not in FOLDER
(by default a temporary one). BF16 files run in bfloat16, the others packed. Times of rows and draft
are tenth percentiles of calls in turn. The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import multiprocessing
import operator
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import held_out
import numpy as np
from engines import Worker, head_folders, plain_head
from random_models import FORMATS, SHAPES, Shape, body, bytes_per_token, write_target

from eyas import hub
from eyas.chat import Chat
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.model.checkpoint import read_head
from eyas.model.rows import FeatureCache, Growth, Roots, Rows, rows_of, slots_of
from eyas.model.target import PAGE_SIZE, Target
from eyas.operators.tensors import read_head as read_tensors

SECTIONS = ("plain", "rows", "draft", "head", "eagle3")
ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, DECODED, CONTEXT = 512, 64, 200
SPECULATION = "fixed(6,3,12)"  # the default tree
STEPS, BRANCHES = 6, 3
PROMPTS, CHARACTERS = 2, 700  # of each task, and at most
CHAIN = 4
READ_BYTES = 1 << 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--quick", action="store_true", help="two samples of few tokens")
    parser.add_argument("--shapes", type=words, default=["body-1b"], help=", ".join(SHAPES))
    parser.add_argument("--formats", type=words, default=["Q4_K_M"], help=", ".join(FORMATS))
    parser.add_argument("--llama", type=Path, nargs="*", default=[], help="llama.cpp's builds")
    parser.add_argument("--sections", type=words, default=list(SECTIONS))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, help="folder for the files, kept")
    parser.add_argument("--data", type=Path, default=held_out.DATA)
    args = parser.parse_args()
    for given, known in ((args.shapes, SHAPES), (args.formats, FORMATS), (args.sections, SECTIONS)):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
    args.decoded = 16 if args.quick else DECODED
    args.samples = min(args.samples, 2) if args.quick else args.samples
    args.seconds = 0.3 if args.quick else 2.0
    return args


# Plain decoding


class Memory:
    """READ_BYTES, read by the C library's search for a byte that is not there, on all threads."""

    def __init__(self, threads: int) -> None:
        self.data = np.ones(READ_BYTES, dtype=np.uint8)
        self.parts = np.array_split(self.data, threads)
        self.search = ctypes.CDLL(None).memchr
        self.search.restype = ctypes.c_void_p
        self.search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def bytes_per_second(self) -> float:
        """The best of three reads."""
        with ThreadPoolExecutor(len(self.parts)) as pool:
            return READ_BYTES / min(self._read(pool) for _ in range(3))

    def _read(self, pool: ThreadPoolExecutor) -> float:
        started = time.perf_counter()
        list(pool.map(lambda part: self.search(part.ctypes.data, 255, part.nbytes), self.parts))
        return time.perf_counter() - started


def memory_mb() -> dict[str, float]:
    """Of this process, in MB: what it holds itself, what it has mapped of files, and its peak."""
    names = {"RssAnon": "own", "RssFile": "mapped", "VmHWM": "peak"}
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {
        names[key]: round(int(rest[0]) / 1e3, 1)
        for name, *rest in lines
        if (key := name.rstrip(":")) in names
    }


class Asked:
    """An engine asked one request at a time, each under a salt of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.count = engine, 0

    def tokens(
        self, num_tokens: int, prompt: list[int], ends: bool = False
    ) -> tuple[list[int], list[float]]:
        """Greedy: the answer, and when each of its updates came, in seconds since it was asked for.
        ends: where the target ends it, else after so many tokens.
        """
        self.count += 1
        name, params = f"{self.count}", SamplingParams(max_tokens=num_tokens, ignore_eos=not ends)
        started = time.perf_counter()
        self.engine.add(Request(name, tuple(prompt), params, cache_salt=name))
        answer: list[int] = []
        times: list[float] = []
        while self.engine.has_work:
            for update in self.engine.step():
                if update.token_ids:
                    answer += update.token_ids
                    times.append(time.perf_counter() - started)
        return answer, times


def llama_bench(build: Path, file: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One sample of llama-bench: tokens/s of decoding and of the prompt, and what was built."""
    command = [build / "bin" / "llama-bench", "-m", file, "-p", PROMPT, "-n", args.decoded]
    command += ["-t", args.threads, "-r", 1, "-o", "json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    prompt, decoding = sorted(json.loads(done.stdout), key=lambda one: one["n_gen"])
    return {
        "decoding": decoding["avg_ts"],
        "prompt": prompt["avg_ts"],
        "built": f"{prompt['build_number']} ({prompt['build_commit']})",
    }


def plain(engine: Engine, file: Path, num_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    """num_bytes: read by a token."""
    rng = random.Random(0)
    tokens = [rng.randrange(300, 2000) for _ in range(PROMPT)]
    asked = Asked(engine)
    asked.tokens(5, tokens[:16])
    found: dict[str, Any] = {"memory_mb": memory_mb()}
    memory = Memory(args.threads)
    reads: list[float] = []
    own: dict[str, list[float]] = {"decoding": [], "prompt": []}
    theirs: dict[str, list[dict[str, Any]]] = {str(build): [] for build in args.llama}
    for _ in range(args.samples):
        for build, samples in theirs.items():
            samples.append(llama_bench(Path(build), file, args))
        reads.append(memory.bytes_per_second())
        times = asked.tokens(args.decoded + 1, tokens[:16])[1]
        own["decoding"].append(args.decoded / (times[-1] - times[0]))
        own["prompt"].append(PROMPT / asked.tokens(1, tokens)[1][0])
        reads.append(memory.bytes_per_second())
    read = statistics.median(reads)
    decoding, prompt = (statistics.median(own[what]) for what in ("decoding", "prompt"))
    found |= {
        "decoding": round(decoding, 2),
        "prompt": round(prompt, 1),
        "read_gb_per_second": round(read / 1e9, 1),
        "share_of_reading": round(decoding * num_bytes / read, 3),
        "samples": {what: [round(one, 1) for one in samples] for what, samples in own.items()},
    }
    for build, samples in theirs.items():
        speeds = {
            what: statistics.median(one[what] for one in samples) for what in ("decoding", "prompt")
        }
        found[f"llama.cpp {Path(build).name}"] = {
            "built": samples[0]["built"],
            **{what: round(speed, 2) for what, speed in speeds.items()},
            "ratio_decoding": round(decoding / speeds["decoding"], 3),
            "ratio_prompt": round(prompt / speeds["prompt"], 3),
        }
    return found


# Rows and the draft


def in_turn(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """ms of every call: the tenth percentile of turns within so many seconds for each, five at
    least.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds * len(calls)
    turns = 0
    while turns < 6 or time.perf_counter() < end:
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - started))
        turns += 1
    return {name: round(sorted(one[1:])[len(one) // 10], 3) for name, one in times.items()}


def chain(count: int, page_table: np.ndarray, first_column: int = 0) -> Rows:
    """So many nodes of a chain behind CONTEXT columns."""
    column, request = CONTEXT + np.arange(count), np.zeros(count, dtype=np.int64)
    seen = np.array([(1 << (i + 1)) - 1 for i in range(count)], dtype=np.uint64).view(np.int64)
    slot, prefix = slots_of(page_table, request, column, PAGE_SIZE), np.full(count, CONTEXT)
    arrays = (7 + np.arange(count), request, column - first_column, slot, prefix, seen)
    return rows_of(arrays, page_table, first_column)


def rows(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    page_table = np.arange((CONTEXT + ROWS[-1]) // PAGE_SIZE + 2, dtype=np.int32)[None]
    cache = target.new_cache(page_table.size)
    calls = {
        str(count): functools.partial(target.forward, chain(count, page_table), cache)
        for count in ROWS
    }
    ms = in_turn(calls, args.seconds)
    return {"ms": ms, "in_rows": {name: round(one / ms["1"], 3) for name, one in ms.items()}}


def draft(target: Target, head: Draft, args: argparse.Namespace) -> dict[str, Any]:
    page_table = np.arange(CONTEXT // PAGE_SIZE + 4, dtype=np.int32)[None]
    cache, own = target.new_cache(page_table.size), head.new_cache(page_table.size)
    num_slots, width = page_table.size * PAGE_SIZE, 3 * target.config.hidden_size
    features = FeatureCache(num_slots, width, target.dtype)

    def grow(steps: int, entries: int) -> Callable[[], object]:
        """Grows a tree of so many steps behind so many new entries."""
        roots = Roots([CONTEXT], [CONTEXT - entries + 1], list(range(7, 7 + entries)), page_table)
        growth = Growth(steps, BRANCHES, BRANCHES)
        return lambda: head.grow(roots, own, features, growth, [0.0] * steps)

    ms = in_turn(
        {
            "target": functools.partial(target.forward, chain(1, page_table), cache),
            "tree": grow(STEPS, 3),
            "extend and first step": grow(1, 3),
            "extend and two steps": grow(2, 3),
        },
        args.seconds,
    )
    first, two = ms["extend and first step"], ms["extend and two steps"]
    ms["a step"] = round((ms["tree"] - first) / (STEPS - 1), 3)
    ms["the first of them"] = round(two - first, 3)
    return {"ms": ms, "of_a_forward": round(ms["tree"] / ms["target"], 3)}


# The head


def prompts(target: str, args: argparse.Namespace) -> list[list[int]]:
    """Of each task of Spec-Bench the first that are short."""
    chat, count = Chat(target), 1 if args.quick else PROMPTS
    return [
        chat.prompt_ids(messages)
        for of_task in held_out.spec_bench(args.data).values()
        for messages in held_out.short(of_task, CHARACTERS)[:count]
    ]


def head(
    target: Target, draft: Draft, asked: list[list[int]], args: argparse.Namespace
) -> dict[str, Any]:
    """Plain and speculative answers in turn, sums over prompts."""
    arms = {}
    for speculation in ("off", SPECULATION, "auto"):
        config = EngineConfig(max_batch=1, speculation=speculation, text_drafts=False)
        arms[speculation] = Asked(Engine(target, draft if arms else None, config))
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    rounds = dict.fromkeys(arms, 0)
    num_tokens = 0
    for _ in range(args.samples):
        taken = dict.fromkeys(arms, 0.0)
        for prompt in asked:
            answers = {}
            for name, arm in arms.items():
                answers[name], times = arm.tokens(args.decoded, prompt, ends=True)
                taken[name] += times[-1] - times[0]
                rounds[name] += len(times) - 1
            num_tokens += len(answers["off"]) - 1
            for name, answer in answers.items():
                assert answer == answers["off"], f"{name}: speculation changed the answer"
        for name, one in taken.items():
            seconds[name].append(one)
    plain_s = seconds.pop("off")
    per_sample = num_tokens / args.samples
    return {
        "prompts": len(asked),
        "tokens": round(per_sample),
        "plain_ms": round(1e3 * statistics.median(plain_s) / per_sample, 2),
        "tau": {name: round(num_tokens / rounds[name], 2) for name in seconds},
        "speedup": {
            name: round(statistics.median(map(operator.truediv, plain_s, own)), 3)
            for name, own in seconds.items()
        },
    }


def eagle3(target: Target, file: Path, shape: Shape, args: argparse.Namespace) -> dict[str, Any]:
    """ms a token and tau over all prompts; answers equal to the same engine's without a head."""
    small, folder = hub.resolve_target(shape.body_of), hub.resolve_target(str(file))
    asked = prompts(folder, args)
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        work = Path(made)
        packaged = read_tensors(hub.resolve_head(shape.body_of))
        plain = plain_head(*packaged, Target.load(small, "float32"), prompts(small, args))
        own = head_folders(*plain, str(small), work, "plain")["head_eyas"]
        body.write_body_head(own, shape.sizes, folder, work / "body")
        forms = head_folders(*read_tensors(work / "body"), str(folder), work, "body")
        settings = {"gguf": str(file), "as_is": True, "target": str(folder), "work": made}
        settings |= {"llama_cpp": str(args.llama[0]), "threads": args.threads, "max_length": 1024}
        settings |= {"precision": "bfloat16"}
        with_head = {"head_vllm": forms["head_vllm"], "num_draft_steps": CHAIN}
        arms: dict[str, Callable[[list[int]], tuple[list[int], float, int]]] = {}
        for name, more in {"llama.cpp": {}, "llama.cpp, chain": with_head}.items():
            worker = Worker(sys.executable, "llama_cpp", args.threads, work / f"{name}.log")
            stack.callback(worker.close)
            worker.ask("load", **settings, **more)

            def theirs(prompt: list[int], worker: Worker = worker) -> tuple[list[int], float, int]:
                tokens = {"max_tokens": args.decoded, "ignore_eos": True}
                (one,) = worker.ask("decode", prompts=[prompt], **tokens)["answers"]
                return one["tokens"], one["seconds"], one["rounds"]

            arms[name] = theirs
        head = Draft(*read_head(work / "body"), target)
        speculations = {"eyas": "off", "eyas, chain": f"fixed({CHAIN},1,{CHAIN + 1})"}
        for name, speculation in (speculations | {"eyas, auto": "auto"}).items():
            config = EngineConfig(max_batch=1, speculation=speculation, text_drafts=False)
            engine = Asked(Engine(target, head if speculation != "off" else None, config))

            def ours(prompt: list[int], engine: Asked = engine) -> tuple[list[int], float, int]:
                tokens, times = engine.tokens(args.decoded, prompt)
                return tokens, times[-1] - times[0], len(times) - 1

            arms[name] = ours
        seconds, tokens, rounds = (dict.fromkeys(arms, 0.0) for _ in range(3))
        equal = dict.fromkeys(arms, 0)
        for prompt in asked * args.samples:
            plain_ones: dict[str, list[int]] = {}
            for name, arm in arms.items():
                answer, taken, count = arm(prompt)
                alone = plain_ones.setdefault(name.split(",")[0], answer)
                equal[name] += answer == alone
                seconds[name] += taken
                tokens[name] += len(answer) - 1
                rounds[name] += count
    return {
        name: {
            "ms": round(1e3 * seconds[name] / tokens[name], 2),
            "tau": round(tokens[name] / rounds[name], 2),
            "equal": f"{equal[name]} of {len(asked) * args.samples}",
        }
        for name in arms
    }


# Files


def opened(file: Path) -> tuple[Engine, float]:
    started = time.perf_counter()
    config = EngineConfig(max_batch=1, speculation="off")
    dtype = "bfloat16" if "BF16" in file.name else "packed"
    engine = Engine.load(hub.resolve_target(str(file)), None, dtype, config)
    return engine, round(time.perf_counter() - started, 2)


def opening(file: Path) -> float:
    """Seconds that opening takes in a process that has not read the file."""
    return opened(file)[1]


def measured(file: Path, name: str, num_bytes: int, args: argparse.Namespace) -> dict[str, Any]:
    shape = SHAPES[name]
    engine, seconds = opened(file)
    found: dict[str, Any] = {"opening_s": seconds}
    if "plain" in args.sections:
        found["plain"] = plain(engine, file, num_bytes, args)
    if "rows" in args.sections:
        found["rows"] = rows(engine.target, args)
    if shape.body_of and {"draft", "head"} & set(args.sections):
        target, folder = hub.resolve_target(str(file)), file.with_suffix(".head")
        if not folder.exists():
            body.write_body_head(shape.body_of, shape.sizes, target, folder)
        padded = Draft(*read_head(folder), engine.target)
        if "draft" in args.sections:
            found["draft"] = draft(engine.target, padded, args)
        if "head" in args.sections:
            found["head"] = head(engine.target, padded, prompts(target, args), args)
    if shape.body_of and args.llama and "eagle3" in args.sections:
        found["eagle3"] = eagle3(engine.target, file, shape, args)
    return found


def alone(call: Callable[..., Any], *arguments: Any) -> Any:
    """A call in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(call, *arguments).result()


def main() -> None:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    results = {}
    with ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        for name in args.shapes:
            for format in args.formats:
                file = work / f"{name}-{format}.gguf"
                if not file.exists():
                    write_target(SHAPES[name], format, file)
                num_bytes = bytes_per_token(SHAPES[name], format)
                size = {"megabytes": round(file.stat().st_size / 1e6), "of": SHAPES[name].of}
                first = alone(opening, file)
                found = alone(measured, file, name, num_bytes, args)
                results[file.stem] = {**size, "first_opening_s": first, **found}
                print(f"{file.stem}: {json.dumps(results[file.stem], indent=2)}", flush=True)
    print(json.dumps({"threads": args.threads, "files": results}))


if __name__ == "__main__":
    main()
