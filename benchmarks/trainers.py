"""Our trainer against speculators' own code, on the same features: tau on held-out conversations.

    python benchmarks/trainers.py [--quick] [--features URL] [--passes 1 3 10] [--set FIELD=VALUE]

The target's answers to real prompts and their features are made once and kept, or given. Then, for
each number of passes, `eyas train` with its defaults trains a head, and so does speculators (its
model, data collation, loss, optimizers, schedule and defaults; PyTorch's attention and its eager
loss, which is what runs without a GPU), both with --tokens tokens a step, the same draft
vocabulary (ours) and one seed. All heads are measured by `eyas eval` on the features that were held
out: chains of 5 and the default tree, greedy. What is done is kept in --folder, so that a cut run
goes on. --set changes our settings, under the name of --arm. The last line of stdout is one JSON
object: tau with its interval, CPU seconds and our tau by theirs, paired over answers.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import held_out
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.config.schema import TrainConfig as TheirConfig
from speculators.train.data import CollateFn
from speculators.train.optimizers import build_optimizers
from speculators.train.trainer import TrainerConfig, _resolve_scheduler_steps
from transformers import AutoConfig, get_linear_schedule_with_warmup

from eyas import hub
from eyas.artifact import Artifact
from eyas.cli.options import override
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.gguf.checkpoint import whole_folder
from eyas.log import progress_bar
from eyas.operators.batch import plan_packs
from eyas.operators.tensors import read_head
from eyas.settings import validated
from eyas.shards import Features, Sample
from eyas.train.trainer import TrainConfig, train

EVAL = EvalConfig(num_draft_steps=5, trees=("fixed(6,3,12)",))
CLIP = 1.0  # speculators' trainer has it as a number in its loop


def arguments() -> argparse.Namespace:
    parser = held_out.feature_arguments(__doc__, prompts=1000)
    parser.set_defaults(data=held_out.DATA / "instructions.jsonl.gz", folder=Path("out/trainers"))
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, prompts included")
    parser.add_argument("--arm", default="eyas", help="name of ours")
    parser.add_argument("--set", action="append", default=[], help="a setting of eyas train")
    parser.add_argument("--ours-only", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.passes = min(args.prompts, 60), [1]
    return args


def our_head(args: argparse.Namespace, features: Artifact, passes: int, output: Artifact) -> None:
    settings = {"epochs": passes, "batches": {"tokens": args.tokens, "packed": True}}
    config = validated(TrainConfig, override(settings, args.set), "--set")
    with progress_bar(f"{args.arm}, {passes} passes") as track:
        train(
            config,
            args.target,
            Features(features, "train"),
            output,
            track,
            Features(features, "held_out"),
        )


class TheirSamples(torch.utils.data.Dataset[dict[str, Any]]):
    """Our features as speculators' data set hands them to its collation, in its dtype."""

    def __init__(self, samples: list[Sample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> dict[str, Any]:
        sample = self.samples[number]
        length = len(sample.token_ids)
        return {
            "hidden_states": sample.aux_hidden.float(),
            "input_ids": sample.token_ids,
            "verifier_last_hidden_states": sample.last_hidden.float(),
            "loss_mask": sample.loss_mask,
            "lengths": torch.tensor([length]),
            "position_ids": torch.arange(length),
        }


def their_head(
    args: argparse.Namespace, features: Artifact, passes: int, ours: str, folder: Path
) -> None:
    """Train with speculators' parts in the order of its `Trainer.train_epoch`, which itself asks
    for an accelerator. ours: the head whose draft vocabulary is taken.
    """
    target = str(whole_folder(hub.resolve_target(args.target)))
    defaults = TheirConfig.from_flat(
        {
            "verifier_name_or_path": target,
            "speculator_type": "eagle3",
            "draft_attn_impl": "sdpa",
            "loss_implementation": "eager",
            "epochs": passes,
        }
    ).flatten()
    flat = dict(defaults if isinstance(defaults, dict) else vars(defaults))
    _, tensors = read_head(ours)
    torch.manual_seed(0)
    shape = AutoConfig.from_pretrained(target)
    shape.num_hidden_layers = 1
    model = Eagle3DraftModel.from_training_args(
        shape,
        **{**flat, "t2d": tensors["t2d"], "d2t": tensors["d2t"]}
        | {"draft_vocab_size": len(tensors["d2t"])},
    ).float()
    model.verifier_norm = torch.nn.Identity()  # our last hidden states are behind the norm
    source = Features(features, "train")
    samples = [one for batch in source.batches([[n] for n in range(len(source))]) for one in batch]
    data = TheirSamples(samples)
    collate = CollateFn(args.tokens, shape.hidden_size, 3, torch.float32, shift_batch)
    plans = [
        plan
        for epoch in range(passes)
        for plan in plan_packs(source.lengths, args.tokens, f"{epoch}")
    ]
    config = TrainerConfig(
        num_epochs=passes,
        save_path=str(folder),
        **{name: flat[name] for name in ("lr", "optimizer", "weight_decay", "scheduler_type")},
        **{name: flat[name] for name in flat if name.startswith("muon_") and name != "muon_lr"},
        muon_lr=flat["muon_lr"] or flat["lr"],
    )
    optimizers = build_optimizers(model, config)
    warmup, total = _resolve_scheduler_steps(config._replace(max_steps=len(plans)), len(plans))
    schedules = [get_linear_schedule_with_warmup(one, warmup, total) for one in optimizers]
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**flat)
    model.train()
    with progress_bar(f"speculators, {passes} passes") as track:
        for step, plan in enumerate(plans, 1):
            batch = collate([data[number] for number in plan])
            _, loss, _ = model(**batch, **call)
            for one in optimizers:
                one.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for one, schedule in zip(optimizers, schedules, strict=True):
                one.step()
                schedule.step()
            track(step, len(plans), f"loss {loss.item():.3f}")
    model.save_pretrained(str(folder))


def measured(
    args: argparse.Namespace, features: Artifact, head: str, folder: Path
) -> dict[str, Any]:
    """tau of chains and of the tree, each with its interval."""
    output = Artifact(str(folder))
    evaluate(EVAL, args.target, head, output, Features(features, "held_out"))
    found = output.read_json("eval.json")
    tree = found["trees"][0]
    return {
        "chain": round(found["tau"], 3),
        "chain_interval": [round(end, 3) for end in found["tau_interval"]],
        "tree": round(tree["tau"], 3),
        "tree_interval": [round(end, 3) for end in tree["tau_interval"]],
    }


def arm(args: argparse.Namespace, features: Artifact, name: str, passes: int) -> dict[str, Any]:
    """The figures of one head, trained if it was not."""
    folder = args.folder / f"{name.replace(' ', '-')}-{passes}"
    kept = folder / "figures.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        began, head = time.process_time(), folder / "head"
        if name == "speculators":
            theirs = str(args.folder / f"{args.arm.replace(' ', '-')}-{passes}" / "head")
            their_head(args, features, passes, theirs, head)
        else:
            our_head(args, features, passes, Artifact(str(head)))
        spent = round(time.process_time() - began)
        figures = {"cpu_s": spent, **measured(args, features, str(head), folder / "eval")}
        kept.write_text(json.dumps(figures))
    return json.loads(kept.read_text())


def main() -> None:
    logging.disable(logging.INFO)
    args = arguments()
    features = held_out.captured(args, held_out_share=0.1)
    names = [args.arm] if args.ours_only else [args.arm, "speculators"]
    found: dict[str, Any] = {}
    for passes in args.passes:
        rows = {name: arm(args, features, name, passes) for name in names}
        if len(rows) > 1:
            ours, theirs = (rows[name] for name in names)
            rows["ratio"] = {
                kind: round(ours[kind] / theirs[kind], 3) for kind in ("chain", "tree")
            }
        found[str(passes)] = rows
        print(json.dumps({passes: rows}), flush=True)
    source = Features(features, "train")
    size = {"samples": len(source), "tokens": sum(source.lengths)}
    print(json.dumps({"target": args.target, **size, "passes": found}))


if __name__ == "__main__":
    main()
