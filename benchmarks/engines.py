"""Heads of `eyas export` in the engines that people run: equal answers, tau as foretold.

    python benchmarks/engines.py [--quick] [--engines-folder .engines] [--only NAME,...]
        [--head smollm2] [--prompts 24] [--max-tokens 64] [--threads 2] [--work FOLDER]

`make engines` makes the environments and runs this. One engine after the other decodes the same
held-out prompts greedily, one at a time, in float32, with the head in the form that it reads. An
answer must be the target's own greedy one, which our engine gives without a head; where it leaves
that, it counts as a "tie" if our target's logits of the two tokens differ by less than TIE.

tau is the tokens after the first of every answer over the target's forwards; "foretold" is the
`eyas eval` of the same head, drafts and prompts. Two heads: the packaged one, and "plain" without
the norms that some engines cannot read (eyas/export/engines.py): fc_norm is folded into fc at the
mean size of each stream, norm_output is left out. SGLang's engine runs with torch in place of its
CPU kernels, which are in no wheel (peers/sglang_cpu). The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

import held_out
import numpy as np
import safetensors.torch
import torch

from eyas import hub
from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import EvalPrompt, ModelsConfig
from eyas.export.engines import ENGINES, engine_of, layers_info
from eyas.gguf.checkpoint import whole_folder
from eyas.model.config import HeadConfig, read_config
from eyas.model.dialects import FC_NORMS, Form
from eyas.model.forms import Verifier
from eyas.model.target import Target
from eyas.model.threads import set_num_threads
from eyas.model.weights import read_arrays
from eyas.operators.tensors import array_of, read_head, tensor_of, write_head
from eyas.tau import tau_interval

WORKERS = Path(__file__).parent / "peers"
SGLANG_ON_A_CPU = {"PYTHONPATH": str(WORKERS / "sglang_cpu"), "SGLANG_USE_CPU_ENGINE": "1"}
DTYPE = "float32"
# between the logits of two tokens: float32 sums in another order move logits by 1e-4 at most
TIE = 1e-3
NEAR = 0.03  # tau of an engine to the foretold one
MAX_LENGTH = 1024
SIZED_PROMPTS = 8  # over which the streams' sizes are averaged, for the plain head
STEPS, TREE_TOPK, TREE_NODES = 4, 4, 16
CHAIN, TREE = f"fixed({STEPS},1,{STEPS + 1})", f"fixed({STEPS},{TREE_TOPK},{TREE_NODES})"
WORKER_SECONDS = 3600  # for one row: an engine that hangs leaves the others'


@dataclass(frozen=True)
class Arm:
    """One engine with one head."""

    engine: str
    peer: str
    head: str
    speculation: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.head}, {self.speculation}"


DRAFTS = {"num_draft_steps": STEPS}
WIDE = {**DRAFTS, "tree_topk": TREE_TOPK, "num_verify_tokens": TREE_NODES}
ARMS = [
    *(
        Arm("eyas", "eyas", head, size, {"speculation": size})
        for head in ("packaged", "plain")
        for size in (CHAIN, TREE)
    ),
    Arm("vLLM", "vllm", "packaged", CHAIN, DRAFTS),
    Arm("llama.cpp", "llama_cpp", "plain", CHAIN, DRAFTS),
    Arm("OpenVINO", "openvino", "plain", CHAIN, DRAFTS),
    Arm("OpenVINO", "openvino", "plain", TREE, WIDE),
    Arm("SGLang", "sglang", "packaged", CHAIN, DRAFTS),
    Arm("SGLang", "sglang", "packaged", TREE, WIDE),
]


# Engines in processes of their own


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


# Heads


def plain_head(
    config: HeadConfig, tensors: dict[str, torch.Tensor], target: Target, prompts: list[list[int]]
) -> tuple[HeadConfig, dict[str, torch.Tensor]]:
    """The head without fc_norm and norm_output: each stream is scaled by its mean 1 / rms over the
    prompts instead (without first tokens, which are far larger).
    """
    inverse_3, count = torch.zeros(3), 0
    for prompt in prompts:
        aux_hidden, _ = target.features(np.array([prompt]))
        aux_T3H = tensor_of(aux_hidden)[0, 1:].float().unflatten(-1, (3, -1))
        inverse_3 += aux_T3H.square().mean(-1).rsqrt().sum(0)
        count += len(aux_T3H)
    columns = tensors["fc.weight"].float().chunk(3, dim=1)
    folded = torch.cat(
        [
            column * tensors[name].float() * size if config.fc_norm else column
            for column, name, size in zip(columns, FC_NORMS, inverse_3 / count, strict=True)
        ],
        dim=1,
    )
    kept = {name: tensor for name, tensor in tensors.items() if name not in FC_NORMS}
    kept["fc.weight"] = folded.to(tensors["fc.weight"].dtype)
    return config.model_copy(update={"fc_norm": False, "norm_output": False}), kept


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
            folder = work / f"{name}-head-{form}"
            folder.mkdir(parents=True, exist_ok=True)
            verifier = Verifier(target, architectures, beside)
            for file, data in write_head(config, tensors, form, verifier).items():
                (folder / file).write_bytes(data)
            found[f"head_{form}"] = str(folder)
    return {**found, "layers_openvino": layers_info(config.taps)}


def named_by_content(name: str, config: HeadConfig, tensors: dict[str, torch.Tensor]) -> str:
    """The name of a head's folders: no other head's conversion is taken for its own."""
    content = config.model_dump_json().encode() + safetensors.torch.save(tensors)
    return f"{name}-{hashlib.sha256(content).hexdigest()[:8]}"


# The measurement


def foretold(
    args: argparse.Namespace, head: str, trees: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """`eyas eval` of a head on these prompts, by tree."""
    dialogues = held_out.dialogues(args.data, args.prompts)
    prompts = [
        EvalPrompt(f"{number}", "dialogues", tuple(messages))
        for number, messages in enumerate(dialogues)
    ]
    config = EvalConfig(
        trees=trees,
        temperatures=(0.0,),
        num_prompts=len(prompts),
        max_tokens=args.max_tokens,
        models=ModelsConfig(dtype=DTYPE, max_length=MAX_LENGTH, threads=args.threads, max_batch=1),
    )
    with tempfile.TemporaryDirectory() as folder:
        output = Artifact(folder)
        evaluate(config, args.target, head, output, None, prompts)
        measured = output.read_json("eval.json")["trees"]
    return {one["speculation"]: one for one in measured}


@dataclass
class Run:
    """The options; where the target lies and the forms of the heads; the target's own answers."""

    args: argparse.Namespace
    work: Path
    folder: str
    heads: dict[str, dict[str, str]]
    prompts: list[list[int]]
    target: Target
    own: list[list[int]] = field(default_factory=list)

    def answers(self, arm: Arm) -> list[dict[str, Any]]:
        python = sys.executable
        if arm.peer not in ("eyas", "llama_cpp"):
            python = str(self.args.engines_folder / arm.peer / "bin" / "python")
        llama_cpp = self.args.engines_folder / "llama.cpp"
        if not Path(llama_cpp if arm.peer == "llama_cpp" else python).exists():
            raise WorkerError("not here")
        log = self.work / f"{arm.name.replace(' ', '_')}.log"
        settings = {
            "target": self.folder,
            **self.heads.get(arm.head, {}),
            "threads": self.args.threads,
            "work": str(self.work),
            "llama_cpp": str(llama_cpp),
            "precision": DTYPE,
            "max_length": MAX_LENGTH,
            "eos_token_id": end_token(self.folder),
            **arm.settings,
        }
        with (
            closing(Worker(python, arm.peer, self.args.threads, log)) as worker,
            ExitStack() as stack,
        ):
            late = threading.Timer(WORKER_SECONDS, worker.process.kill)
            stack.callback(late.cancel)
            late.start()
            worker.ask("load", **settings)
            asked = {"max_tokens": self.args.max_tokens, "ignore_eos": False}
            worker.ask("decode", prompts=self.prompts[:1], **asked)  # warms up
            found: list[dict[str, Any]] = worker.ask("decode", prompts=self.prompts, **asked)[
                "answers"
            ]
        return found

    def row(self, arm: Arm, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """A line of the table. Raises WorkerError, OSError."""
        answers = self.answers(arm)
        end = end_token(self.folder)
        kinds = [
            self.judged(prompt, own, without(end, one["tokens"]))
            for prompt, own, one in zip(self.prompts, self.own, answers, strict=True)
        ]
        return {
            "engine": arm.engine,
            "head": arm.head,
            "speculation": arm.speculation,
            "equal": kinds.count("equal"),
            "ties": kinds.count("tie"),
            "answers": len(kinds),
            "foretold": round(told[arm.head][arm.speculation]["tau"], 3),
            **tau_figures(answers),
            "tokens_per_second": round(per_second(answers), 1),
        }

    def judged(self, prompt: list[int], own: list[int], theirs: list[int]) -> str:
        """equal, tie, or other."""
        if own == theirs:
            return "equal"
        both = zip(own, theirs, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        end = end_token(self.folder)
        one, other = (answer[shared] if shared < len(answer) else end for answer in (own, theirs))
        logits_V = self.target.logits(np.array([prompt + own[:shared]]))[0, -1]
        return "tie" if abs(float(logits_V[one] - logits_V[other])) < TIE else "other"


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


def tau_figures(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """tau of an engine's answers, with its interval over answers."""
    emitted = [len(one["tokens"]) - 1 for one in answers]
    rounds = [one["rounds"] for one in answers]
    interval = tau_interval(emitted, rounds)
    return {
        "tau": round(sum(emitted) / max(1, sum(rounds)), 3),
        "tau_interval": interval and [round(end, 2) for end in interval],
    }


def table(rows: list[dict[str, Any]], skipped: dict[str, str]) -> str:
    columns = f"{'answers equal':>14} {'tau':>6} {'interval':>13} {'foretold':>9} {'off':>7}"
    lines = [f"{'engine, head, drafts':<40} {columns} {'tokens/s':>9}"]
    for one in rows:
        name = f"{one['engine']}, {one['head']}, {one['speculation']}"
        equal = f"{one['equal'] + one['ties']}/{one['answers']}"
        equal += f" ({one['ties']} ties)" if one["ties"] else ""
        span = "-".join(f"{end:.2f}" for end in one["tau_interval"] or [])
        off = one["tau"] / one["foretold"] - 1
        lines.append(
            f"{name:<40} {equal:>14} {one['tau']:>6.2f} {span:>13} {one['foretold']:>9.2f} "
            f"{off:>+7.1%} {one['tokens_per_second']:>9}"
            + ("" if abs(off) <= NEAR else " <- not as foretold")
        )
    return "\n".join([*lines, *(f"skipped {name}: {why}" for name, why in skipped.items())])


# The command


def parse() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=24)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(max_tokens=64)
    parser.add_argument("--engines-folder", type=Path, default=Path(".engines"))
    parser.add_argument("--only", type=lambda text: text.split(","), help="engines, by their names")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for heads, conversions and logs, kept")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 6), min(args.max_tokens, 32)
    args.engines_folder = args.engines_folder.absolute()
    return args


def prepared(args: argparse.Namespace, work: Path) -> Run:
    folder = str(whole_folder(hub.resolve_target(args.target)))
    chat = Chat(folder)
    prompts = [
        ids
        for messages in held_out.dialogues(args.data, args.prompts)
        if len(ids := list(chat.prompt_ids(messages))) + args.max_tokens <= MAX_LENGTH
    ]
    target = Target.load(folder, DTYPE)
    config, tensors = read_head(hub.resolve_head(args.head))
    plain = plain_head(config, tensors, target, prompts[:SIZED_PROMPTS])
    heads = {
        name: head_folders(*head, folder, work, named_by_content(name, *head))
        for name, head in {"packaged": (config, tensors), "plain": plain}.items()
    }
    return Run(args, work, folder, heads, prompts, target)


def main() -> None:
    args = parse()
    set_num_threads(args.threads)
    wanted = [arm for arm in ARMS if args.only is None or arm.engine in args.only]
    rows: list[dict[str, Any]] = []
    skipped: dict[str, str] = {}
    with ExitStack() as stack:
        work = (args.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        work.mkdir(parents=True, exist_ok=True)
        run = prepared(args, work)
        trees = tuple(dict.fromkeys(arm.speculation for arm in wanted))
        told = {
            head: foretold(args, folders["head_eyas"], trees)
            for head, folders in run.heads.items()
            if trees
        }
        end = end_token(run.folder)
        plain = Arm("eyas", "eyas", "", "off")
        run.own = [without(end, one["tokens"]) for one in run.answers(plain)]
        for arm in wanted:
            print(f"{arm.name} ...", file=sys.stderr, flush=True)
            try:
                rows.append(run.row(arm, told))
                print(table(rows[-1:], {}).splitlines()[-1], file=sys.stderr, flush=True)
            except (WorkerError, OSError) as error:
                skipped[arm.name] = str(error)
    unread = {
        engine.title: engine.unread_flags(read_head(hub.resolve_head(args.head))[0])
        for engine in ENGINES
    }
    for name, flags in unread.items():
        if flags:
            skipped[f"{name}, packaged"] = f"does not read {', '.join(flags)}"
    print(table(rows, skipped))
    settings = {"prompts": len(run.prompts), "max_tokens": args.max_tokens, "dtype": DTYPE}
    print(json.dumps({"rows": rows, "skipped": skipped, **settings, "machine": held_out.machine()}))


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
