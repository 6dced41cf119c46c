"""Answers at scale under kill -9: are the rows those of a run that nothing happened to?

    python benchmarks/generate.py [--quick] [--rows 20000] [--kills 5] [--head builtin]

`eyas generate` runs on conversations made of the packaged prompts: once whole, then again with
SIGKILL at random numbers of rows. Greedy, in fp32. The files must be the same to the byte, and no
kept row may be lost. With --folder a finished first run is found again.

Exits with 1 where a check failed. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from held_out import machine

from eyas.artifact import Artifact, identity
from eyas.bench.workload import read_tasks
from eyas.builtin import BUILTIN
from eyas.records import Prompt, read_answers, read_origins

TURNS = (1, 1, 2, 3)  # of a conversation
MAX_LENGTH, MAX_BATCH = 512, 32


def write_prompts(output: Artifact, num_rows: int, seed: int) -> None:
    """A fifth more turns than rows: some follow a turn that ends its conversation."""
    tasks = read_tasks(BUILTIN, 10**6, seed)
    known = sorted({str(task.messages[-1]["content"]) for task in tasks})
    rng, prompts, turns = random.Random(seed), [], 0
    while turns < 1.2 * num_rows:
        count = rng.choice(TURNS)
        said = tuple(" ".join(rng.sample(known, rng.choice((1, 1, 2)))) for _ in range(count))
        prompts.append(Prompt(f"p{len(prompts)}", "packaged", "see demo_prompts.md", said))
        turns += count
    settings = {"rows": num_rows, "seed": seed}
    if output.begin(identity("prompts", settings, {})):
        output.write_jsonl("prompts-00000.jsonl", [prompt.to_json() for prompt in prompts])
        output.finish("prompts", settings, {}, {"prompts": len(prompts)})


# Processes


def start(args: argparse.Namespace, prompts: str, output: Path) -> subprocess.Popen[bytes]:
    sets = {"max_tokens": args.max_tokens, "max_batch": MAX_BATCH, "max_length": MAX_LENGTH}
    command = [sys.executable, "-m", "eyas.cli.main", "generate", prompts, "-t", args.target]
    command += ["-o", str(output), "--set", "dtype=float32"]
    command += [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    command += ["--head", args.head] if args.head else []
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


def finish(process: subprocess.Popen[bytes]) -> None:
    _, told = process.communicate()
    if process.returncode:
        text = told.decode(errors="replace")[-2000:]
        sys.exit(f"error: eyas generate ended with {process.returncode}\n{text}")


def wait_for_rows(process: subprocess.Popen[bytes], folder: Path, count: int) -> None:
    """Until so many rows are kept, or the process has ended."""
    while process.poll() is None:
        started = time.monotonic()
        if num_kept(folder) >= count:
            return
        time.sleep(max(0.01, 10 * (time.monotonic() - started)))  # to look takes its time too


# Checks


def num_kept(folder: Path) -> int:
    num, whole = 0, {path.stem[-5:] for path in folder.glob("answers-*.jsonl")}
    for path in [*folder.glob("answers-*.jsonl"), *(folder / "work").glob("*/*.json")]:
        mark = b"\n" if path.parent == folder else b'"answer": {'
        if path.parent != folder and path.parent.name[-5:] in whole:
            continue  # written, and not yet deleted
        with contextlib.suppress(FileNotFoundError):  # a journal goes when its part is whole
            num += path.read_bytes().count(mark)
    return num


def digest(folder: Path) -> str:
    """Of the rows that are to be the same in every run."""
    sha = hashlib.sha256()
    for path in sorted([*folder.glob("answers-*.jsonl"), *folder.glob("dropped-*.jsonl")]):
        sha.update(path.name.encode() + path.read_bytes())
    return sha.hexdigest()


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, prompts = random.Random(args.seed), Artifact(f"{folder}/prompts")
    write_prompts(prompts, args.rows, args.seed)
    whole, killed = folder / "whole", folder / "killed"
    started = time.monotonic()
    process = start(args, prompts.url, whole)
    wait_for_rows(process, whole, 1)
    begun = time.monotonic()
    finish(process)
    seconds, working_s = time.monotonic() - started, time.monotonic() - begun
    manifest = Artifact(str(whole)).manifest()
    print(f"whole: {manifest.counts} in {seconds:.0f} s, {working_s:.0f} s with rows", flush=True)
    kept: list[int] = []
    started = time.monotonic()
    moments = sorted(rng.sample(range(1, manifest.counts["answers"]), args.kills))
    for number, moment in enumerate(moments):
        process = start(args, prompts.url, killed)
        wait_for_rows(process, killed, max(moment, kept[-1] + 1 if kept else 1))
        time.sleep(rng.random() * working_s / manifest.counts["answers"])
        if process.poll() is not None:
            print(f"done before kill {number + 1}", flush=True)
            break
        process.kill()
        process.communicate()
        kept.append(num_kept(killed))
        print(f"kill {number + 1}: {kept[-1]} rows are kept", flush=True)
    finish(start(args, prompts.url, killed))
    found = [(row.prompt_id, row.turn) for row in read_answers(Artifact(str(killed)))]
    checks = {
        "turns are there twice": len({*found}) == len(found),
        "the files are not the same to the byte": digest(whole) == digest(killed),
        f"rows got lost: {kept}": kept == sorted(kept),
    }
    failures = [words for words, passed in checks.items() if not passed]
    latencies = sorted(one.latency_ms for one in read_origins(Artifact(str(whole))))
    return {
        "rows": manifest.counts["answers"],
        "counts": manifest.counts,
        "identical": not failures,
        "failures": failures,
        "kills": len(kept),
        "kept_at_kills": kept,
        "seconds": round(seconds, 1),
        "seconds_with_kills": round(time.monotonic() - started, 1),
        "seconds_with_rows": round(working_s, 1),
        "tokens_per_s": round(manifest.counts["answer_tokens"] / working_s, 1),
        "latency_ms_p50": latencies[len(latencies) // 2],
        "head": args.head,
        "sha256": digest(whole)[:16],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of the moments")
    parser.add_argument("--target", default="builtin", help="target folder, or builtin")
    parser.add_argument("--head", help="head folder, or builtin; none by default")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--folder", type=Path, help="of the outputs; by default a temporary one")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.kills, args.max_tokens = 150, 2, 32
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        result = run(args, folder)
    for failure in result["failures"]:
        print(f"FAILED: {failure}")
    print(json.dumps({"machine": machine(), **result}))
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
