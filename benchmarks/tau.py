"""tau of heads by task: emitted tokens a round, greedy, of a chain of five and of the default tree.

    python benchmarks/tau.py [--quick] [--target smollm2] [--head smollm2 ANOTHER ...]
    [--prompts 80] [--max-tokens 128] [--data FOLDER] [--features URL --widths 1024 2048 4096]

FOLDER (by default ../shared/data) holds what no head was trained on: Spec-Bench (its six tasks:
chat, translation, summarization, questions, maths, retrieval) and dialogues, word problems and
commands. As many prompts of each task as asked for; those that leave no room for an answer are
left out. tau is over all rounds of a group, its 95 % interval over answers. With --widths the
first head is also cut to so many draft tokens, those most frequent in the answers of --features: a
head of that width trained as long would be a little better. The last line of stdout is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import held_out
import torch

from eyas import hub
from eyas.artifact import Artifact
from eyas.chat import Chat
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import EvalPrompt, ModelsConfig
from eyas.log import progress_bar
from eyas.operators.head import Head, head_files, load_head
from eyas.operators.vocab import TargetVocabulary
from eyas.shards import Features
from eyas.train.batches import survey
from eyas.train.start import recount

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
    parser.add_argument("--features", help="a capture artifact, for --widths")
    parser.add_argument("--widths", type=int, nargs="+", default=[], help="draft vocabularies")
    args = parser.parse_args()
    if args.widths and not args.features:
        parser.error("--widths needs --features, whose answers say which tokens are frequent")
    if args.quick:
        args.prompts, args.max_tokens = min(args.prompts, 6), min(args.max_tokens, 48)
    return args


def asked(args: argparse.Namespace) -> dict[str, list[EvalPrompt]]:
    """The prompts of each group that leave room for an answer."""
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
    """By tree: tau of the group with its interval, and of each task."""
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


def narrower(url: str, width: int, counts_V: torch.Tensor, vocabulary: TargetVocabulary) -> Head:
    """A head without all but its `width` most frequent draft tokens."""
    head = load_head(hub.resolve_head(url), vocabulary.config, vocabulary.lm_head)
    if width > (own := head.config.draft_vocab_size):
        raise SystemExit(f"error: {url} drafts {own} tokens\n  -> give --widths of fewer")
    # tokens that it does not draft come last
    recount(head, vocabulary, counts_V.where(head.t2d, -1), width)
    return head


def heads(args: argparse.Namespace, folder: Path) -> dict[str, str]:
    """The heads to measure by name, with narrower ones, which are written into the folder."""
    found = {head: head for head in args.head}
    if args.widths:
        counts_V, _ = survey(Features(Artifact(args.features), "train"))
        vocabulary = TargetVocabulary.load(hub.resolve_target(args.target))
    for width in args.widths:
        made = folder / str(width)
        made.mkdir()
        head = narrower(args.head[0], width, counts_V, vocabulary)
        for name, data in head_files(head).items():
            (made / name).write_bytes(data)
        found[f"{args.head[0]}, {width} draft tokens"] = str(made)
    return found


def main() -> None:
    args = arguments()
    groups = asked(args)
    with TemporaryDirectory() as folder:
        found = shown(args, groups, heads(args, Path(folder)))
    print(json.dumps({"target": args.target, "max_tokens": args.max_tokens, "tau": found}))


def shown(
    args: argparse.Namespace, groups: dict[str, list[EvalPrompt]], urls: dict[str, str]
) -> dict[str, dict[str, dict[str, Any]]]:
    """What each head has, by name, printed as it comes."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for head, url in urls.items():
        found[head] = {group: measured(args, url, prompts) for group, prompts in groups.items()}
        print(f"{head}, {held_out.machine()}")
        for group, by_tree in found[head].items():
            for tree, by_task in by_tree.items():
                for task, one in by_task.items():
                    interval = "-".join(map(str, one["interval"] or ["?"]))
                    print(
                        f"  {group:12} {tree:14} {task:14} {one['tau']:.2f} ({interval}) "
                        f"of {one['answers']}"
                    )
    return found


if __name__ == "__main__":
    main()
