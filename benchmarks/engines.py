"""Heads of `eyas export` in the engines that people run: equal answers, tau as foretold.

    python benchmarks/engines.py [--quick] [--broken] [--engines-folder .engines]
        [--llama-cpp BUILD] [--python-openvino PYTHON] [--python-vllm PYTHON]
        [--python-sglang PYTHON] [--only NAME,...] [--head smollm2] [--prompts 24]
        [--max-tokens 64] [--num-draft-steps 4] [--threads 2] [--work FOLDER]

`make engines` makes the environments and runs this. A row is kept in rows.json of --work as soon as
it is measured, and not measured again for the same head and settings. One engine after the other
decodes the same held-out prompts greedily, one at a time, in float32, with the head in the form
that it reads. An answer must be the target's own greedy one, which our engine gives without a head;
where it leaves that, it counts as a "tie" if our target's logits of the two tokens differ by less
than TIE.

tau is the tokens after the first of every answer over the target's forwards; "foretold" is the
`eyas eval` of the same head, drafts and prompts. Two heads: the packaged one, and "plain" without
the norms that some engines cannot read (eyas/export/engines.py): fc_norm is folded into fc at the
mean size of each stream, norm_output is left out.

--broken adds exports that are wrong on purpose: layer ids one too early, norm_output lost, the
layers that OpenVINO's converter leaves out not written. Their tau must fall. SGLang's engine runs
with torch in place of its CPU kernels, which are in no wheel (peers/sglang_cpu).

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import threading
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import held_out
import numpy as np
import safetensors.torch
import torch
from peers import Worker, WorkerError, end_token, folder_of, head_folders, per_second, without

from eyas import hub
from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import EvalPrompt, ModelsConfig
from eyas.export.engines import ENGINES
from eyas.gguf.checkpoint import whole_folder
from eyas.model.config import HeadConfig
from eyas.model.dialects import CONFIG_JSON, FC_NORMS, LAYER_IDS
from eyas.model.target import Target
from eyas.model.threads import set_num_threads
from eyas.operators.tensors import read_head, tensor_of
from eyas.tau import tau_interval

DTYPE = "float32"
# between the logits of two tokens: float32 sums in another order move logits by 1e-4 at most
TIE = 1e-3
NEAR = 0.03  # tau of an engine to the foretold one
MAX_LENGTH = 1024
SIZED_PROMPTS = 8  # over which the streams' sizes are averaged, for the plain head
TREE_TOPK, TREE_NODES = 4, 16
ROWS = "rows.json"
WORKER_SECONDS = 3600  # for one row: an engine that hangs leaves the others'


@dataclass(frozen=True)
class Arm:
    """One engine with one head. fault: how the export is spoiled, empty for a right one."""

    engine: str
    peer: str
    head: str
    speculation: str
    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = ""

    @property
    def name(self) -> str:
        return f"{self.engine}, {self.head}, {self.speculation}" + (
            f", {self.fault}" if self.fault else ""
        )


FAULTS: dict[str, dict[str, Any]] = {
    "layers one early": {},
    "norm_output lost": {"norm_output": False},
}
NOT_WRITTEN = "layers not written"  # of OpenVINO's form


def arms(steps: int, broken: bool) -> list[Arm]:
    """What is run, in this order. steps: of the chain and of the tree."""
    chain, tree = f"fixed({steps},1,{steps + 1})", f"fixed({steps},{TREE_TOPK},{TREE_NODES})"
    # the weights as they are stored
    in_fp32 = {"weights": "bf16", "inference_precision": "f32", "kv_cache": "f32"}
    drafts = {"num_draft_steps": steps}
    wide = {**drafts, "tree_topk": TREE_TOPK, "num_verify_tokens": TREE_NODES}
    found = [
        *(
            Arm("eyas", "eyas", head, size, {"speculation": size})
            for head in ("packaged", "plain")
            for size in (chain, tree)
        ),
        Arm("vLLM", "vllm", "packaged", chain, {**drafts, "eager": True}),
        Arm("llama.cpp", "llama_cpp", "plain", chain, drafts),
        Arm("OpenVINO", "openvino", "plain", chain, {**in_fp32, **drafts}),
        Arm("OpenVINO", "openvino", "plain", tree, {**in_fp32, **wide}),
        Arm("SGLang", "sglang", "packaged", chain, drafts),
        Arm("SGLang", "sglang", "packaged", tree, wide),
    ]
    if broken:
        for fault in FAULTS:
            eager = {**drafts, "eager": True}
            found.append(Arm("vLLM", "vllm", "packaged", chain, eager, fault))
            found.append(Arm("SGLang", "sglang", "packaged", chain, drafts, fault))
        found += [
            Arm("llama.cpp", "llama_cpp", "plain", chain, drafts, "layers one early"),
            Arm("OpenVINO", "openvino", "plain", chain, {**in_fp32, **drafts}, NOT_WRITTEN),
        ]
    return found


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


def spoiled(folders: dict[str, str], fault: str, form: str = "head_vllm") -> dict[str, str]:
    """The forms of a head, one of them exported wrongly."""
    form = "head_openvino" if fault == NOT_WRITTEN else form
    files = {file.name: file.read_bytes() for file in Path(folders[form]).iterdir()}
    settings = json.loads(files[CONFIG_JSON])
    if fault in FAULTS:
        eagle = settings.get("eagle_config", settings)  # where SGLang's form has the layers
        early = {LAYER_IDS: [layer - 1 for layer in eagle[LAYER_IDS]]}
        (settings if FAULTS[fault] else eagle).update(FAULTS[fault] or early)
        files[CONFIG_JSON] = json.dumps(settings).encode()
    place = Path(f"{folders[form]}-{fault.replace(' ', '-')}")
    layers = "" if fault == NOT_WRITTEN else folders.get("layers_openvino", "")
    return {**folders, form: folder_of(files, place), "layers_openvino": layers}


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
    return {one["speculation"]: {k: one[k] for k in ("tau", "tau_interval")} for one in measured}


@dataclass
class Run:
    """The options; where the engines are; the target, and its own greedy answers."""

    args: argparse.Namespace
    work: Path
    models: dict[str, str]
    heads: dict[str, dict[str, str]]
    prompts: list[list[int]]
    target: Target
    own: list[list[int]] = field(default_factory=list)

    def answers(self, arm: Arm) -> list[dict[str, Any]]:
        python = place_of(self.args, arm.peer)
        if python is None:
            raise WorkerError("not here")
        folders = dict(self.heads.get(arm.head, {}))
        if arm.fault:
            form = "head_sglang" if arm.peer == "sglang" else "head_vllm"
            folders = spoiled(folders, arm.fault, form)
        log = self.work / f"{arm.name.replace(' ', '_')}.log"
        settings = {
            **self.models,
            **folders,
            "threads": self.args.threads,
            "work": str(self.work),
            "llama_cpp": self.args.llama_cpp,
            "precision": DTYPE,
            "max_length": MAX_LENGTH,
            "eos_token_id": end_token(self.models["target"]),
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

    def kept_row(self, arm: Arm, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """A line of the table, kept or measured. Raises WorkerError, OSError."""
        file, args = self.work / ROWS, self.args
        rows: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        head = self.heads[arm.head]["head_eyas"]
        what = arm.name, head, args.prompts, args.max_tokens, args.threads, args.data
        if (key := " ".join(map(str, what))) not in rows:
            rows[key] = self.row(arm, told)
            file.write_text(json.dumps(rows, indent=1))
        found: dict[str, Any] = rows[key]
        return found

    def row(self, arm: Arm, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
        answers = self.answers(arm)
        end = end_token(self.models["target"])
        kinds = [
            self.judged(prompt, own, without(end, one["tokens"]))
            for prompt, own, one in zip(self.prompts, self.own, answers, strict=True)
        ]
        expected = told[arm.head][arm.speculation]
        return {
            "engine": arm.engine,
            "head": arm.head,
            "speculation": arm.speculation,
            "fault": arm.fault,
            "equal": kinds.count("equal"),
            "ties": kinds.count("tie"),
            "answers": len(kinds),
            "foretold": round(expected["tau"], 3),
            **tau_figures(answers),
            "tokens_per_second": round(per_second(answers), 1),
        }

    def judged(self, prompt: list[int], own: list[int], theirs: list[int]) -> str:
        """equal, tie, or other."""
        if own == theirs:
            return "equal"
        both = zip(own, theirs, strict=False)
        shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], both))
        end = end_token(self.models["target"])
        one, other = (answer[shared] if shared < len(answer) else end for answer in (own, theirs))
        logits_V = self.target.logits(np.array([prompt + own[:shared]]))[0, -1]
        return "tie" if abs(float(logits_V[one] - logits_V[other])) < TIE else "other"


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
    lines = [f"{'engine, head, drafts':<58} {columns} {'tokens/s':>9}"]
    for one in rows:
        fault = f", {one['fault']}" if one["fault"] else ""
        name = f"{one['engine']}, {one['head']}, {one['speculation']}{fault}"
        equal = f"{one['equal'] + one['ties']}/{one['answers']}"
        equal += f" ({one['ties']} ties)" if one["ties"] else ""
        span = "-".join(f"{end:.2f}" for end in one["tau_interval"] or [])
        off = one["tau"] / one["foretold"] - 1
        unseen = "" if off < -NEAR else " <- the fault does not show"
        mark = unseen if one["fault"] else "" if abs(off) <= NEAR else " <- not as foretold"
        lines.append(
            f"{name:<58} {equal:>14} {one['tau']:>6.2f} {span:>13} {one['foretold']:>9.2f} "
            f"{off:>+7.1%} {one['tokens_per_second']:>9}{mark}"
        )
    return "\n".join([*lines, *(f"skipped {name}: {why}" for name, why in skipped.items())])


# The command


def place_of(args: argparse.Namespace, peer: str) -> str | None:
    """The Python of a peer's worker, or None for a peer that is not here."""
    if peer in ("eyas", "llama_cpp"):
        return sys.executable if peer == "eyas" or args.llama_cpp else None
    given: str | None = getattr(args, f"python_{peer}")
    return given


def parse() -> argparse.Namespace:
    parser = held_out.arguments(__doc__, prompts=24)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.set_defaults(max_tokens=64)
    parser.add_argument("--broken", action="store_true", help="wrong exports as well")
    parser.add_argument("--engines-folder", type=Path, default=Path(".engines"))
    parser.add_argument("--llama-cpp", help="its cmake build folder")
    for peer in ("openvino", "vllm", "sglang"):
        parser.add_argument(f"--python-{peer}", help="its Python")
    parser.add_argument("--only", type=lambda text: text.split(","), help="engines, by their names")
    parser.add_argument("--num-draft-steps", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, help="folder for heads, conversions and logs, kept")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 6), min(args.max_tokens, 32)
    made = args.engines_folder.resolve()
    for name, inside in {
        "llama_cpp": "llama.cpp/bin/llama-server",
        **{f"python_{peer}": f"{peer}/bin/python" for peer in ("openvino", "vllm", "sglang")},
    }.items():
        if getattr(args, name) is None and (made / inside).exists():
            found = made / "llama.cpp" if name == "llama_cpp" else made / inside
            setattr(args, name, str(found))
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
    return Run(args, work, {"target": folder}, heads, prompts, target)


def main() -> None:
    args = parse()
    set_num_threads(args.threads)
    wanted = [
        arm
        for arm in arms(args.num_draft_steps, args.broken)
        if args.only is None or arm.engine in args.only
    ]
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
        end = end_token(run.models["target"])
        plain = Arm("eyas", "eyas", "", "off")
        run.own = [without(end, one["tokens"]) for one in run.answers(plain)]
        for arm in wanted:
            print(f"{arm.name} ...", file=sys.stderr, flush=True)
            try:
                rows.append(run.kept_row(arm, told))
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
