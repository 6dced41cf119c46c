"""Answers at scale under kill -9: are the rows those of a run that nothing happened to, and how
fast do they come?

    python benchmarks/generate.py [--quick] [--rows 20000] [--kills 5] [--head builtin]
    python benchmarks/generate.py --writer [--quick] [--rows 2000] [--target smollm2]

`eyas generate` runs on conversations made of the packaged prompts: once whole, then again with
SIGKILL at random numbers of rows. Greedy, in fp32. The files must be the same to the byte, and no
kept row may be lost. With --folder a finished first run is found again.

--writer measures instead what one process takes in: `eyas generate` asks a server whose answers are
ready, and computed features are read as servers give them, and written. Seconds are those of the
writing process' processor time.

Exits with 1 where a check failed. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from held_out import machine, user_turns
from safetensors.torch import load, save

from eyas.artifact import Artifact, identity
from eyas.bench.machine import machine as this_machine
from eyas.chat import Chat
from eyas.hub import resolve_target
from eyas.operators.decoder import OwnDecoder
from eyas.records import Prompt, read_answers, read_origins
from eyas.shards import CodecName, FeatureMeta, Sample, ShardWriter, encoded

TURNS = (1, 1, 2, 3)  # of a conversation
MAX_LENGTH, MAX_BATCH = 512, 32
READY_TOKENS = 256  # of a ready answer or sample
NUM_SAMPLES = 24  # of features, written repeatedly under other keys


def write_prompts(output: Artifact, num_rows: int, seed: int) -> None:
    """A fifth more turns than rows: some follow a turn that ends its conversation."""
    rng, known, prompts, turns = random.Random(seed), user_turns(), [], 0
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


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_until_it_listens(port: int) -> None:
    for _ in range(1200):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    sys.exit(f"error: no server came up at port {port}")


def start(
    args: argparse.Namespace, prompts: str, output: Path, *words: str, **more: str
) -> subprocess.Popen[bytes]:
    sets = {"max_tokens": args.max_tokens, "max_batch": MAX_BATCH, "max_length": MAX_LENGTH}
    command = [sys.executable, "-m", "eyas.cli.main", "generate", prompts, "-t", args.target]
    command += ["-o", str(output), "--set", "dtype=float32", *words]
    command += [word for name in sets | more for word in ("--set", f"{name}={(sets | more)[name]}")]
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


# One process that writes


async def serve_ready(port: int, answers: list[list[int]]) -> None:
    """As vLLM answers by tokens."""
    numbers = iter(range(1 << 40))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                _, _, length = head.partition(b"content-length:")
                size = int(length.split(b"\r\n")[0]) if length else 0
                body = await reader.readexactly(size)
                content: dict[str, Any] = {"data": [{"id": "ready", "owned_by": "vllm"}]}
                if b"/version" in head.split(b"\r\n")[0]:
                    content = {"version": "0"}
                elif body:
                    asked = json.loads(body)
                    ids = answers[next(numbers) % len(answers)][-asked["max_tokens"] :]
                    choice = {"index": 0, "text": "", "finish_reason": "stop", "token_ids": ids}
                    content = {"choices": [{**choice, "prompt_token_ids": asked["prompt"]}]}
                sent = json.dumps(content).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%s" % (len(sent), sent)
                )
                await writer.drain()

    async with await asyncio.start_server(answer, "127.0.0.1", port) as server:
        await server.serve_forever()


def run_ready_server(port: int, answers: list[list[int]]) -> None:
    asyncio.run(serve_ready(port, answers))


def ready_answers(chat: Chat) -> list[list[int]]:
    """READY_TOKENS ids of real text and an end token."""
    rng, known, found = random.Random(0), user_turns(), []
    for _ in range(64):
        text = " ".join(rng.sample(known, 60))
        ids = chat.prompt_ids([{"role": "user", "content": text}])
        found.append([*ids[-2 * READY_TOKENS :][: READY_TOKENS - 1], chat.eos_token_ids[0]])
    assert {len(one) for one in found} == {READY_TOKENS}
    return found


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def writes_answers(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    prompts, port, target = Artifact(f"{folder}/prompts"), free_port(), resolve_target(args.target)
    write_prompts(prompts, args.rows, args.seed)
    ready = ready_answers(Chat(target))
    spawn = multiprocessing.get_context("spawn")
    server = spawn.Process(target=run_ready_server, args=(port, ready), daemon=True)
    server.start()
    wait_until_it_listens(port)
    args.max_tokens = READY_TOKENS
    output, sent = folder / "answers", {"client.send": "tokens", "max_length": "4096"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    process = start(args, prompts.url, output, "--server", f"http://127.0.0.1:{port}", **sent)
    wait_for_rows(process, output, 1)
    begun, spent = time.monotonic(), processor_s(process.pid)
    finish(process)
    seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    server.kill()
    server.join()
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - spent
    counts = Artifact(str(output)).manifest().counts
    taken = sum(n for name, n in counts.items() if name == "answers" or "dropped_pii." in name)
    return {
        "counts": counts,
        "seconds": round(seconds, 1),
        "processor_s": round(spent, 1),
        "answers_per_s": round(taken / seconds, 1),
        "answers_per_processor_s": round(taken / spent, 1),
        "tokens_per_processor_s": round(taken * READY_TOKENS / spent),
    }


def ready_samples(args: argparse.Namespace) -> tuple[FeatureMeta, list[Sample]]:
    folder = resolve_target(args.target)
    decoder, chat = OwnDecoder.load(folder, "bfloat16"), Chat(folder)
    shape, samples = decoder.shape, []
    for number, ids in enumerate(ready_answers(chat)[:NUM_SAMPLES]):
        states = decoder.states([ids])
        tokens, mask = torch.tensor(ids, dtype=torch.int32), torch.ones(len(ids), dtype=torch.bool)
        aux_hidden, last_hidden = states.aux_hidden[0].clone(), states.last_hidden[0].clone()
        samples.append(Sample(f"{number}", tokens, mask, aux_hidden, last_hidden))
    meta = FeatureMeta(
        taps=shape.default_taps,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        lm_head_sha256=decoder.lm_head_sha256,
    )
    return meta, samples


def rate(work: Callable[[int], int], seconds: float) -> float:
    """Tokens a second of processor time. work: of its number, gives its tokens."""
    work(0)
    started, num_tokens, number = time.process_time(), 0, 1
    while time.process_time() - started < seconds:
        num_tokens += work(number)
        number += 1
    return num_tokens / (time.process_time() - started)


def writes_features(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Tokens, and MB of bfloat16 hidden states, a second."""
    meta, samples = ready_samples(args)
    seconds, tokens = (1.0 if args.quick else 2.0), sum(len(one.token_ids) for one in samples)
    found: dict[str, float] = {}
    codecs: tuple[CodecName, ...] = ("within4", "lossless", "raw")
    for name in codecs:
        own = meta.model_copy(update={"codec": name})
        writer = ShardWriter(Artifact(f"{folder}/{name}"), "train", own)
        for one in samples:
            writer.add(one)
        codec = writer.codec
        assert codec is not None, "calibrated by now"
        ready = [encoded(one, own, codec) for one in samples]

        def encode(number: int, writer: ShardWriter = writer) -> int:
            for one in samples:
                writer.add(dataclasses.replace(one, key=f"{one.key}/{number}"))
            return tokens

        def write(number: int, writer: ShardWriter = writer, ready: Any = ready) -> int:
            for one in ready:
                entry = one.entry.model_copy(update={"key": f"{one.entry.key}/{number} ready"})
                writer.add(one._replace(entry=entry))
            return tokens

        found[f"encode and write, {name}"] = rate(encode, seconds)
        found[f"write what workers encoded, {name}"] = rate(write, seconds)
    T, H = len(samples[0].token_ids), meta.hidden_size
    streams = torch.cat([samples[0].aux_hidden, samples[0].last_hidden], 1).bfloat16().view(T, 4, H)
    file = save({"hidden_states": streams, "token_ids": samples[0].token_ids})

    def read_file(_: int) -> int:
        return len(load(file)["hidden_states"])

    found["read vLLM's file"] = rate(read_file, seconds)
    size = 8 * H / 1e6  # MB of a token in bfloat16
    rates = {
        name: {"tokens_per_processor_s": round(one), "mb_per_processor_s": round(one * size, 1)}
        for name, one in found.items()
    }
    return {"hidden_size": H, **rates}


def run_writer(args: argparse.Namespace, folder: Path) -> None:
    measured = {"features": writes_features(args, folder), "answers": writes_answers(args, folder)}
    for name, figures in measured.items():
        print(name, *figures.items(), sep="\n    ")
    print(json.dumps({"machine": this_machine(), "target": args.target, **measured}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of the moments")
    parser.add_argument("--target", default="builtin", help="target folder, or builtin")
    parser.add_argument("--head", help="head folder, or builtin; none by default")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--writer", action="store_true", help="what one process takes in")
    parser.add_argument("--folder", type=Path, help="of the outputs; by default a temporary one")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.kills, args.max_tokens = 150, 2, 32
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if args.writer:
            run_writer(args, folder)
            return
        result = run(args, folder)
    for failure in result["failures"]:
        print(f"FAILED: {failure}")
    print(json.dumps({"machine": machine(), **result}))
    sys.exit(0 if result["identical"] else 1)


if __name__ == "__main__":
    main()
