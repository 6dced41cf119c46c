"""tau of heads by task, greedy, with a chain of five and the default tree.

    python benchmarks/tau.py [--quick] [--target smollm2] [--head smollm2 ANOTHER ...]
    [--prompts 80] [--max-tokens 128] [--data FOLDER]

FOLDER (by default ../shared/data) holds text that no head was trained on: Spec-Bench's six tasks,
and dialogues, word problems and commands; prompts without room for an answer are left out. tau is
over all rounds of a group, its 95 % interval over answers. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import held_out

from eyas import hub
from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import EvalPrompt, ModelsConfig
from eyas.log import progress_bar

TREES = ("fixed(5,1,6)", "fixed(6,3,12)")
MAX_LENGTH = 2048


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a minute's worth")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--head", nargs="+", default=["smollm2"])
    parser.add_argument("--prompts", type=int, default=80, help="of each task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--data", type=Path, default=held_out.DATA)
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 6), min(args.max_tokens, 48)
    return args


def asked(args: argparse.Namespace) -> dict[str, list[EvalPrompt]]:
    chat = Chat(hub.resolve_target(args.target))
    groups = {
        "Spec-Bench": held_out.spec_bench(args.data),
        "other sets": held_out.not_trained_on(args.data, args.prompts),
    }
    return {
        group: [
            EvalPrompt(f"{task}-{number}", task, tuple(messages))
            for task, prompts in by_task.items()
            for number, messages in enumerate(prompts[: args.prompts])
            if len(chat.prompt_ids(messages)) + args.max_tokens <= MAX_LENGTH
        ]
        for group, by_task in groups.items()
    }


def measured(args: argparse.Namespace, head: str, prompts: list[EvalPrompt]) -> dict[str, Any]:
    """By tree and task, and over all tasks."""
    config = EvalConfig(
        trees=TREES,
        temperatures=(0.0,),
        num_prompts=len(prompts),
        max_tokens=args.max_tokens,
        models=ModelsConfig(dtype="bfloat16", max_length=MAX_LENGTH),
    )
    with TemporaryDirectory() as folder, progress_bar(Path(head).name) as track:
        output = Artifact(folder)
        evaluate(config, args.target, head, output, None, prompts, track)
        trees = output.read_json("eval.json")["trees"]
    return {
        row["speculation"]: {
            name: {
                "tau": round(one["tau"], 3),
                "interval": one["tau_interval"] and [round(end, 2) for end in one["tau_interval"]],
                "answers": one["answers"],
            }
            for name, one in {"all": row, **row["by_source"]}.items()
        }
        for row in trees
    }


def main() -> None:
    args = arguments()
    groups = asked(args)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for head in args.head:
        found[head] = {group: measured(args, head, prompts) for group, prompts in groups.items()}
        print(f"{head}, {held_out.machine()}")
        for group, by_tree in found[head].items():
            for tree, by_task in by_tree.items():
                for task, one in by_task.items():
                    interval = "-".join(map(str, one["interval"] or ["?"]))
                    tau = f"{one['tau']:.2f} ({interval}) of {one['answers']}"
                    print(f"  {group:12} {tree:14} {task:14} {tau}")
    print(json.dumps({"target": args.target, "max_tokens": args.max_tokens, "tau": found}))


if __name__ == "__main__":
    main()
