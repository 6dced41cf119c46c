"""Speed at the sizes that people run, held against llama.cpp and against reading the weights once.

    python benchmarks/sizes.py [--quick] [--shapes llama-1b,...] [--formats Q4_K_M,...]
        [--llama BUILD ...] [--sections plain,rows,draft,synthetic] [--samples 5] [--threads N]
        [--work FOLDER]

    plain       tokens/s of one request, and of a prompt of 512: eyas packed, llama-bench of every
                BUILD (a folder with bin/llama-bench), and a plain read of the bytes that a token
                reads, interleaved; medians. Memory after a request, and seconds to open the file
    rows        a forward of 2 to 64 rows in times of one row
    draft       growing the default tree in times of a forward of one row, and its parts
    synthetic   time per token of plain decoding by that of speculative decoding, with the default
                tree and as the policy chooses, where drafts are SYNTHETIC: they are put right as
                often as gives a tau of 3.0; everything else, the head's forwards among them, runs
                as it is. The answer must be plain's

Weights are random (random_models.py): speed does not depend on their values. Every file has a
process of its own. A file that is not in FOLDER (by default a temporary one) is written first.
BF16 files run in bfloat16, the others packed. Times of rows and draft are tenth percentiles of
calls in turn: what the code costs when nothing else wants the cores. The last line of stdout is
one JSON object.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import math
import multiprocessing
import os
import random
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from random_models import FORMATS, SHAPES, bytes_per_token, write_random_head, write_target

from eyas import hub
from eyas.engine.draft import Draft
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.model.checkpoint import read_head
from eyas.model.rows import (
    FeatureCache,
    Growth,
    PagedCache,
    Proposals,
    Roots,
    Rows,
    rows_of,
    slots_of,
)
from eyas.model.target import PAGE_SIZE, Target

SECTIONS = ("plain", "rows", "draft", "synthetic")
ROWS = (1, 2, 4, 8, 16, 32, 64)
PROMPT, DECODED, CONTEXT = 512, 64, 200
SPECULATION = "fixed(6,3,12)"  # the default tree
STEPS, BRANCHES = 6, 3
ACCEPTANCE = 0.688  # of each draft whose parent is accepted: tau 3.0 over six steps
GOLDEN = (math.sqrt(5) - 1) / 2
READ_BYTES = 1 << 30


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--quick", action="store_true", help="two samples of few tokens")
    parser.add_argument("--shapes", type=words, default=["llama-1b"], help=", ".join(SHAPES))
    parser.add_argument("--formats", type=words, default=["Q4_K_M"], help=", ".join(FORMATS))
    parser.add_argument("--llama", type=Path, nargs="*", default=[], help="llama.cpp's builds")
    parser.add_argument("--sections", type=words, default=list(SECTIONS))
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, help="folder for the files, kept")
    args = parser.parse_args()
    for given, known in (
        (args.shapes, SHAPES),
        (args.formats, FORMATS),
        (args.sections, SECTIONS),
    ):
        if unknown := set(given) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: known are {', '.join(known)}")
    args.decoded = 16 if args.quick else DECODED
    args.samples = min(args.samples, 2) if args.quick else args.samples
    args.seconds = 0.3 if args.quick else 2.0
    return args


# Plain decoding


class Memory:
    """READ_BYTES that are read as fast as this machine reads: by the C library's search for a byte
    that is not there, on every thread a part.
    """

    def __init__(self, threads: int) -> None:
        self.data = np.ones(READ_BYTES, dtype=np.uint8)
        self.parts = np.array_split(self.data, threads)
        self.search = ctypes.CDLL(None).memchr
        self.search.restype = ctypes.c_void_p
        self.search.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

    def bytes_per_second(self) -> float:
        """The best of three reads."""
        return READ_BYTES / min(self._read() for _ in range(3))

    def _read(self) -> float:
        threads = [
            threading.Thread(target=self.search, args=(part.ctypes.data, 255, part.nbytes))
            for part in self.parts
        ]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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
    """An engine asked one request at a time; every one is under a salt of its own."""

    def __init__(self, engine: Engine, prompt: list[int]) -> None:
        self.engine, self.prompt, self.count = engine, prompt, 0

    def tokens(self, num_tokens: int, prompt: list[int]) -> tuple[list[int], list[float], int]:
        """Greedy: the answer, when each of its updates came, in seconds since it was asked for, and
        how many updates there were with tokens after the first.
        """
        self.count += 1
        name, params = f"{self.count}", SamplingParams(max_tokens=num_tokens, ignore_eos=True)
        started = time.perf_counter()
        self.engine.add(Request(name, tuple(prompt), params, cache_salt=name))
        answer: list[int] = []
        times: list[float] = []
        while self.engine.has_work:
            for update in self.engine.step():
                if update.token_ids:
                    answer += update.token_ids
                    times.append(time.perf_counter() - started)
        return answer, times, len(times) - 1

    def decoding(self, num_tokens: int) -> tuple[float, list[int], int]:
        """Seconds per token after the first, the answer, rounds."""
        answer, times, rounds = self.tokens(num_tokens + 1, self.prompt[:16])
        return (times[-1] - times[0]) / num_tokens, answer, rounds

    def prompt_seconds(self) -> float:
        return self.tokens(1, self.prompt)[1][0]


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
    """The section, of `num_bytes` read by a token."""
    rng = random.Random(0)
    asked = Asked(engine, [rng.randrange(300, 2000) for _ in range(PROMPT)])
    asked.decoding(4)
    found: dict[str, Any] = {"memory_mb": memory_mb()}
    memory = Memory(args.threads)
    reads: list[float] = []
    own: dict[str, list[float]] = {"decoding": [], "prompt": []}
    theirs: dict[str, list[dict[str, Any]]] = {str(build): [] for build in args.llama}
    for _ in range(args.samples):
        for build, samples in theirs.items():
            samples.append(llama_bench(Path(build), file, args))
        reads.append(memory.bytes_per_second())
        own["decoding"].append(1 / asked.decoding(args.decoded)[0])
        own["prompt"].append(PROMPT / asked.prompt_seconds())
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
    """Milliseconds of every call: the tenth percentile of turns that fit into so many seconds for
    each, five turns at least.
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
    """The section."""
    page_table = np.arange((CONTEXT + ROWS[-1]) // PAGE_SIZE + 2, dtype=np.int32)[None]
    cache = target.new_cache(page_table.size)
    calls = {
        str(count): functools.partial(target.forward, chain(count, page_table), cache)
        for count in ROWS
    }
    ms = in_turn(calls, args.seconds)
    return {"ms": ms, "in_rows": {name: round(one / ms["1"], 3) for name, one in ms.items()}}


def draft(target: Target, head: Draft, args: argparse.Namespace) -> dict[str, Any]:
    """The section."""
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


# Synthetic acceptance


class SyntheticDraft:
    """A draft whose trees are grown by the head, as deep as ACCEPTANCE lets them pay, and then hold
    the right token at as many levels as ACCEPTANCE gives, and wrong ones behind them.

    tokens: prompt and answer, which plain decoding gave. wrong: a token that is not in the answer.
    """

    def __init__(self, head: Draft, tokens: list[int], wrong: int) -> None:
        self._head, self._tokens, self._wrong, self._trees = head, tokens, wrong, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def grow(
        self,
        roots: Roots,
        cache: PagedCache,
        features: FeatureCache,
        growth: Growth,
        thresholds: Sequence[float],
        draws: Any = None,
    ) -> Proposals:
        # `tree.goes_on` by the scores below: a random head's own are those of no path that pays
        paths = [max(ACCEPTANCE ** (level + 1) - thresholds[-1], 0.0) for level in range(STEPS)]
        goes_on = [path >= least for path, least in zip(paths, thresholds, strict=True)]
        forced = [0.0 if one else math.inf for one in goes_on[:-1]] + [0.0]
        proposals = self._head.grow(roots, cache, features, growth, forced, draws)
        tokens, scores = np.array(proposals.tokens), np.array(proposals.scores)
        parents, parent, right = proposals.parents[0], -1, self._levels()
        for level in range(STEPS):
            children = np.flatnonzero(parents == parent)
            if len(children) == 0:
                break
            # the child that the head has grown further
            parent = int([*children[np.isin(children, parents)], *children][0])
            column = roots.lens[0] + 1 + level
            tokens[0, children] = self._wrong
            if level < right and column < len(self._tokens):
                tokens[0, parent] = self._tokens[column]
            scores[0, children] = (level + 1) * math.log(ACCEPTANCE) - 2
            scores[0, parent] += 2
        return replace(proposals, tokens=tokens, scores=scores)

    def _levels(self) -> int:
        """How many levels of the next tree are right: spread evenly, not drawn, so that a few
        trees have the same mean as many.
        """
        self._trees += 1
        return int(math.log(self._trees * GOLDEN % 1) / math.log(ACCEPTANCE))


def synthetic(target: Target, head: Draft, args: argparse.Namespace) -> dict[str, Any]:
    """The section: plain and speculative answers in turn."""
    rng = random.Random(0)
    prompt = [rng.randrange(300, 2000) for _ in range(PROMPT)]
    count = 4 * args.decoded
    engine = Engine(target, None, EngineConfig(max_batch=1, speculation="off"))
    of_plain = Asked(engine, prompt)
    _, answer, _ = of_plain.decoding(count)
    unlike = next(token for token in range(50, 10**6) if token not in answer)
    made = SyntheticDraft(head, [*prompt[:16], *answer], unlike)
    arms = {"plain": of_plain}
    for speculation in (SPECULATION, "auto"):
        config = EngineConfig(max_batch=1, speculation=speculation, text_drafts=False)
        arms[speculation] = Asked(Engine(target, made, config), prompt)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    taus: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(args.samples):
        for name, arm in arms.items():
            one, tokens, num_rounds = arm.decoding(count)
            assert tokens == answer, f"{name}: speculation changed the answer"
            seconds[name].append(one)
            taus[name].append(count / num_rounds)
    ms = {name: statistics.median(samples) * 1e3 for name, samples in seconds.items()}
    return {
        "acceptance": "SYNTHETIC",
        "ms_per_token": {name: round(one, 2) for name, one in ms.items()},
        "tau": {name: round(statistics.median(taus[name]), 2) for name in arms},
        "speedup": {name: round(ms["plain"] / one, 3) for name, one in ms.items()},
    }


# Files


def opened(file: Path) -> tuple[Engine, float]:
    """An engine of a file for one request at a time, and the seconds that opening it took."""
    started = time.perf_counter()
    config = EngineConfig(max_batch=1, speculation="off")
    dtype = "bfloat16" if "BF16" in file.name else "packed"
    engine = Engine.load(hub.resolve_target(str(file)), None, dtype, config)
    return engine, round(time.perf_counter() - started, 2)


def opening(file: Path) -> float:
    """Seconds that opening takes in a process that has not read the file."""
    return opened(file)[1]


def measured(
    file: Path, shape: str, num_bytes: int, work: Path, args: argparse.Namespace
) -> dict[str, Any]:
    """The sections of one file."""
    engine, seconds = opened(file)
    found: dict[str, Any] = {"opening_s": seconds}
    if "plain" in args.sections:
        found["plain"] = plain(engine, file, num_bytes, args)
    if "rows" in args.sections:
        found["rows"] = rows(engine.target, args)
    if {"draft", "synthetic"} & set(args.sections):
        folder = work / f"head-{shape}"
        if not folder.exists():
            write_random_head(shape, engine.target.config, folder)
        head = Draft(*read_head(folder), engine.target)
        if "draft" in args.sections:
            found["draft"] = draft(engine.target, head, args)
        if "synthetic" in args.sections:
            found["synthetic"] = synthetic(engine.target, head, args)
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
        for shape in args.shapes:
            for format in args.formats:
                file = work / f"{shape}-{format}.gguf"
                if not file.exists():
                    write_target(shape, format, file)
                num_bytes = bytes_per_token(shape, format)
                size = {"megabytes": round(file.stat().st_size / 1e6), "of": SHAPES[shape].of}
                first = alone(opening, file)
                found = alone(measured, file, shape, num_bytes, work, args)
                results[file.stem] = {**size, "first_opening_s": first, **found}
                print(f"{file.stem}: {json.dumps(results[file.stem], indent=2)}", flush=True)
    print(json.dumps({"threads": args.threads, "files": results}))


if __name__ == "__main__":
    main()
