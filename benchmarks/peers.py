"""eyas against other engines on this machine: same weights, prompts and precision, one request at a
time, greedy, interleaved.

    python benchmarks/peers.py [--quick] [--llama-cpp BUILD] [--python-vllm PYTHON]
        [--sections plain,...] [--engines NAME,...] [--samples 5] [--threads 2] [--work FOLDER]

    plain           --target (SmolLM2) on 10 held-out prompts, past the answers' ends: tokens/s; a
                    GGUF file is read as it is too, by llama.cpp and by ours (eyas packed)
    prompts         --target, 8 prompts of 512 tokens, one request at a time: prompt tokens/s
    together        --target, 64 prompts of the plain section's kind, 32 at a time, prompts included

benchmarks/peers/README.md says how each peer is installed. Each engine has a process of its own,
which loads and converts once (into --work); all engines of a section stay loaded while their
samples alternate. A sample is one pass over the prompts: the tokens after the first of every answer
over their seconds. The median over samples is printed, after one pass of warming up. A peer that is
not given, or does not start, is named as skipped. The last line of stdout is one JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import held_out
import torch

from eyas import hub
from eyas.export.engines import engine_of, layers_info
from eyas.gguf.checkpoint import whole_folder
from eyas.gguf.folder import is_gguf
from eyas.model.config import HeadConfig, read_config
from eyas.model.dialects import Form
from eyas.model.forms import Verifier
from eyas.model.weights import read_arrays
from eyas.operators.tensors import array_of, tensor_of, write_head

WORKERS = Path(__file__).parent / "peers"
SGLANG_ON_A_CPU = {"PYTHONPATH": str(WORKERS / "sglang_cpu"), "SGLANG_USE_CPU_ENGINE": "1"}
SECTIONS = ("plain", "prompts", "together")
FEW_PROMPTS = 10
LONG_PROMPTS, LONG_PROMPT = 8, 512
MANY_PROMPTS, AT_A_TIME = 64, 32
SETTLE_SECONDS = 0.3
PACKED = {"precision": "packed"}  # a GGUF file's own blocks


@dataclass(frozen=True)
class Entry:
    """One engine in one setting. peer: whose worker runs it."""

    name: str
    peer: str
    settings: dict[str, Any] = field(default_factory=dict)


def entries(section: str, files: bool) -> list[Entry]:
    """What a section compares. files: whether the target is a GGUF file."""
    many = {"max_batch": AT_A_TIME} if section == "together" else {}
    packed = [Entry("eyas packed", "eyas", {**PACKED, **many})] if files else []
    if section == "together":
        return [Entry("eyas", "eyas", many), *packed, Entry("vLLM", "vllm", many)]
    return [
        Entry("eyas", "eyas"),
        Entry("llama.cpp", "llama_cpp"),
        *packed,
        *([Entry("llama.cpp, file as it is", "llama_cpp", {"as_is": True})] if files else []),
        Entry("vLLM", "vllm"),
    ]


class WorkerError(Exception):
    """An engine did not start, or did not answer."""


class Worker:
    """The process of one engine, asked line by line (peers/wire.py)."""

    def __init__(self, python: str, peer: str, threads: int, log: Path) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if peer == "sglang":
            environment |= SGLANG_ON_A_CPU
        openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
        # as its manual asks, and it is faster
        if peer == "vllm" and "LD_PRELOAD" not in environment and openmp.exists():
            environment |= {"LD_PRELOAD": str(openmp), "KMP_BLOCKTIME": "1"}
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(WORKERS / f"engine_{peer}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=environment,
            )
        self.log = log

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerError("its process ended") from error
        line = self.process.stdout.readline()
        reply: dict[str, Any] = json.loads(line) if line else {"error": "its process ended"}
        if "error" in reply:
            raise WorkerError(f"{reply['error']} (log: {self.log})")
        return reply

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# The models


def folder_of(files: dict[str, bytes], folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return str(folder)


def head_folders(
    config: HeadConfig, tensors: dict[str, torch.Tensor], target: str, work: Path, name: str
) -> dict[str, str]:
    """A head in every form of `eyas export` that can say it, by the name of the setting."""
    embed_tokens = tensor_of(read_arrays(target)["model.embed_tokens.weight"])
    architectures = ("LlamaForCausalLM",)
    found = {}
    for form in get_args(Form):
        if form == "eyas" or not engine_of(form).faults(config, tensors):
            holds_target = form != "eyas" and engine_of(form).target_embeddings
            beside = array_of(embed_tokens) if holds_target else None
            files = write_head(config, tensors, form, Verifier(target, architectures, beside))
            found[f"head_{form}"] = folder_of(files, work / f"{name}-head-{form}")
    return {**found, "layers_openvino": layers_info(config.taps)}


# The measurement


@dataclass
class Run:
    """The options, where the pythons of the peers are, what is skipped and why."""

    args: argparse.Namespace
    work: Path
    skipped: dict[str, str] = field(default_factory=dict)

    def python(self, peer: str) -> str | None:
        """The Python that runs a peer's worker, or None for a peer that is not here."""
        if peer == "vllm":
            found: str | None = self.args.python_vllm
            return found
        return sys.executable if peer == "eyas" or self.args.llama_cpp else None

    @contextmanager
    def workers(self, section: str, models: dict[str, Any]) -> Iterator[dict[str, Worker]]:
        """The engines of a section that are here and wanted, loaded, by name; those that fail are
        noted as skipped.
        """
        fixed = {**models, "work": str(self.work), "precision": "bfloat16", "max_length": 1024}
        fixed |= {"threads": self.args.threads, "llama_cpp": self.args.llama_cpp}
        fixed["eos_token_id"] = end_token(models["target"])
        with ExitStack() as stack:
            loaded = {}
            for number, entry in enumerate(entries(section, "gguf" in models)):
                wanted = self.args.engines is None or any(
                    entry.name.startswith(name) for name in self.args.engines
                )
                python = self.python(entry.peer)
                if not wanted or python is None:
                    self.skipped[f"{section}: {entry.name}"] = (
                        "not given" if python is None else "not asked for"
                    )
                    continue
                log = self.work / f"{section}-{number}-{entry.peer}.log"
                worker = Worker(python, entry.peer, self.args.threads, log)
                stack.callback(worker.close)
                print(f"{section}: loading {entry.name}", file=sys.stderr, flush=True)
                try:
                    worker.ask("load", **fixed | entry.settings)
                    loaded[entry.name] = worker
                except WorkerError as error:
                    self.skip(section, entry.name, error)
            yield loaded

    def skip(self, section: str, name: str, reason: object) -> None:
        self.skipped[f"{section}: {name}"] = str(reason)
        print(f"{section}: {name} is skipped: {reason}", file=sys.stderr, flush=True)

    def measure(
        self, section: str, models: dict[str, str], work_items: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """The figures of every engine of a section, their samples alternating, the order turning
        with each sample.
        """
        samples: dict[str, list[list[dict[str, Any]]]] = {}
        how = "together" if section == "together" else "decode"
        with self.workers(section, models) as workers:
            for number in range(self.args.samples + 1):
                names = deque(workers)
                names.rotate(-number)
                for name in list(names):
                    time.sleep(SETTLE_SECONDS)  # threads of the engine before may spin for a while
                    try:
                        answers = workers[name].ask(how, **work_items)["answers"]
                    except WorkerError as error:
                        self.skip(section, name, error)
                        workers.pop(name)
                        samples.pop(name, None)
                        continue
                    if section == "prompts":
                        answers = [
                            {**one, "tokens": [0, *prompt], "seconds": one["prompt_seconds"]}
                            for one, prompt in zip(answers, work_items["prompts"], strict=True)
                        ]
                    if number:  # the first pass warms up
                        samples.setdefault(name, []).append(answers)
                    print(
                        f"{section} {number}: {name} {per_second(answers):.1f} tokens/s",
                        file=sys.stderr,
                        flush=True,
                    )
            order = [name for name in workers if name in samples]
        return {name: figures(samples[name]) for name in order}


def end_token(target: str) -> int:
    """The token that ends an answer; of several, the first."""
    ends = read_config(target)["eos_token_id"]
    return int(ends[0] if isinstance(ends, list) else ends)


def without(end: int, tokens: list[int]) -> list[int]:
    """An answer without its end token, which some engines give and some keep."""
    return tokens[:-1] if tokens and tokens[-1] == end else tokens


def per_second(answers: list[dict[str, Any]]) -> float:
    """Tokens after the first per second of decoding."""
    count = sum(len(one["tokens"]) - 1 for one in answers)
    seconds: float = sum(one["seconds"] for one in answers)
    return count / max(1e-9, seconds)


def figures(samples: list[list[dict[str, Any]]]) -> dict[str, Any]:
    speeds = [round(per_second(answers), 1) for answers in samples]
    return {"tokens_per_second": round(statistics.median(speeds), 1), "samples": speeds}


def table(section: str, found: dict[str, dict[str, Any]]) -> str:
    lines = [f"\n{section:<45} {'tokens/s':>9}   samples"]
    for name, one in sorted(found.items(), key=lambda item: -item[1]["tokens_per_second"]):
        lines.append(f"{name:<45} {one['tokens_per_second']:>9}   {one['samples']}")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=30)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    words = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--llama-cpp", help="its cmake build folder")
    parser.add_argument("--python-vllm", help="its Python")
    parser.add_argument("--sections", type=words, default=list(SECTIONS))
    parser.add_argument("--engines", type=words, help="those whose names start so: eyas,llama.cpp")
    parser.add_argument("--samples", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="for weights, conversions and logs, kept")
    args = parser.parse_args()
    if args.quick:
        args.samples, args.prompts = min(args.samples, 2), min(args.prompts, 3)
        args.max_tokens = min(args.max_tokens, 48)
    unknown = set(args.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}: there are {', '.join(SECTIONS)}")
    return args


def asked(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What every engine of a section decodes. Speed without a head does not depend on the answer:
    its end is ignored.
    """
    prompts = [list(request.prompt_ids) for request in held_out.requests(args)][:FEW_PROMPTS]
    plain = {"prompts": prompts, "max_tokens": args.max_tokens, "ignore_eos": True}
    more = argparse.Namespace(**{**vars(args), "prompts": max(args.prompts, 2 * MANY_PROMPTS)})
    many = [list(request.prompt_ids) for request in held_out.requests(more)]
    joined = [token for prompt in many for token in prompt]
    starts = range(0, LONG_PROMPTS * LONG_PROMPT, LONG_PROMPT)
    long = [joined[start : start + LONG_PROMPT] for start in starts]
    return {
        "prompts": {"prompts": long, "max_tokens": 2, "ignore_eos": True},
        "together": {**plain, "prompts": many[:MANY_PROMPTS]},
        "plain": plain,
    }


def main() -> None:
    args = parse()
    with ExitStack() as stack:
        work = args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        work.mkdir(parents=True, exist_ok=True)
        run = Run(args, work.resolve())
        work_items = asked(args)
        given = {"target": str(whole_folder(hub.resolve_target(args.target)))}
        if is_gguf(file := hub.locate(args.target, "target")):
            given["gguf"] = file
        results: dict[str, Any] = {}
        for section in args.sections:
            results[section] = run.measure(section, given, work_items[section])
            print(table(section, results[section]), flush=True)
    for name, reason in run.skipped.items():
        if reason != "not asked for":
            print(f"skipped {name}: {reason}")
    settings = {"samples": args.samples, "threads": args.threads, "machine": held_out.machine()}
    print(json.dumps({**results, "skipped": run.skipped, **settings}))


if __name__ == "__main__":
    main()
