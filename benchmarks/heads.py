"""A leaderboard of recipes for heads: each trains a head on the same features.

    python benchmarks/heads.py [--quick] [--features URL] [--passes 1 3 10] [--seeds 0 1 2]
    [--recipe "7 steps: objective.num_ttt_steps=7"] [--speculators] [--spec-bench 20]

Features are made once, or given. `default` is `eyas train`; a recipe is a name and settings of it.
--speculators trains a head with its model, collation, loss (eager, with PyTorch's attention, as
without a GPU), optimizers, schedule and defaults, and our draft vocabulary. All have --tokens
tokens a step. tau is `eyas eval`'s on held-out features: chains of 5 and the default tree, greedy;
--spec-bench adds that many prompts of each of Spec-Bench's tasks, also at temperature 1. A cut run
continues from --folder. The last line is one JSON object: by passes and recipe, tau of each seed,
its mean (also by that of the first recipe), and CPU seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from torch.optim import _muon
from transformers import AutoConfig, get_linear_schedule_with_warmup

from eyas import hub
from eyas.artifact import Artifact
from eyas.cli.options import override
from eyas.evaluate.evaluate import EvalConfig, evaluate
from eyas.evaluate.trees import EvalPrompt
from eyas.gguf.checkpoint import whole_folder
from eyas.log import progress_bar
from eyas.operators.decoder import default_device
from eyas.operators.tensors import multiplies_bf16
from eyas.operators.vocab import draft_vocabulary
from eyas.settings import validated
from eyas.shards import Features, Sample
from eyas.train.batches import survey
from eyas.train.muon import orthogonalised
from eyas.train.start import covering_size
from eyas.train.trainer import TrainConfig, train

EVAL = EvalConfig(num_draft_steps=5, trees=("fixed(6,3,12)",))
IN_ENGINE = EvalConfig(
    trees=("fixed(5,1,6)", "fixed(6,3,12)"), temperatures=(0.0, 1.0), max_tokens=96
)
STOP = {"measurements": 2}  # runs are short here
OPEN_PACKS = 32  # rows that still take samples
CLIP = 1.0  # as in the loop of speculators' trainer


def plan_packs(lengths: Sequence[int], num_tokens: int, seed: str) -> list[list[int]]:
    """Numbers of the samples of each row, every sample once: lengths sum to num_tokens at most,
    unless one sample alone is longer. Shuffled samples go to the first of the last rows with room.
    """
    rng = random.Random(seed)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    packs: list[list[int]] = []
    rooms: list[int] = []
    for number in order:
        begun = range(max(0, len(packs) - OPEN_PACKS), len(packs))
        place = next((pack for pack in begun if rooms[pack] >= lengths[number]), len(packs))
        if place == len(packs):
            packs.append([])
            rooms.append(num_tokens)
        packs[place].append(number)
        rooms[place] -= lengths[number]
    rng.shuffle(packs)
    return packs


def arguments() -> argparse.Namespace:
    parser = held_out.feature_arguments(__doc__, prompts=1000)
    parser.set_defaults(data=held_out.DATA / "instructions.jsonl.gz", folder=Path("out/heads"))
    parser.add_argument("--recipe", action="append", default=[], help="NAME: FIELD=VALUE ...")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, prompts included")
    parser.add_argument("--speculators", action="store_true")
    parser.add_argument("--spec-bench", type=int, default=0, help="prompts of each task")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.passes = min(args.prompts, 60), [1]
    return args


@dataclass(frozen=True, slots=True)
class Try:
    """One head. settings: None is speculators. of: what else its figures depend on."""

    recipe: str
    settings: tuple[str, ...] | None
    passes: int
    seed: int
    of: str

    def folder(self, args: argparse.Namespace) -> Path:
        digest = hashlib.sha256(f"{self.of} {self.settings}".encode()).hexdigest()[:8]
        name = f"{self.recipe}-{self.passes}-{self.seed}-{digest}"
        return Path(args.folder) / name.replace(" ", "-").replace("/", "-")


def our_head(args: argparse.Namespace, features: Artifact, one: Try, output: Artifact) -> None:
    batches = {"tokens": args.tokens}
    settings = {"epochs": one.passes, "seed": one.seed, "batches": batches, "stop": STOP}
    config = validated(TrainConfig, override(settings, one.settings or ()), one.recipe)
    train_on, held = Features(features, "train"), Features(features, "held_out")
    with progress_bar(f"{one.recipe}, {one.passes} passes") as track:
        train(config, args.target, train_on, output, track, held)


def their_sample(sample: Sample) -> dict[str, Any]:
    """A sample for speculators' collation, in its dtype."""
    length = len(sample.token_ids)
    return {
        "hidden_states": sample.aux_hidden.float(),
        "input_ids": sample.token_ids,
        "verifier_last_hidden_states": sample.last_hidden.float(),
        "loss_mask": sample.loss_mask,
        "lengths": torch.tensor([length]),
        "position_ids": torch.arange(length),
    }


def in_float32(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """torch.optim.Muon's iteration for CPUs without fast bfloat16."""
    group = {"ns_coefficients": coefficients, "ns_steps": steps, "eps": eps}
    return orthogonalised(gradient.bfloat16(), group)


def their_head(args: argparse.Namespace, features: Artifact, one: Try, folder: Path) -> None:
    """Train as speculators' `Trainer.train_epoch`, which needs an accelerator."""
    passes, device = one.passes, default_device()
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
    source = Features(features, "train")
    counts_V, _ = survey(source)
    d2t, t2d = draft_vocabulary(counts_V, covering_size(counts_V))
    torch.manual_seed(one.seed)
    shape = AutoConfig.from_pretrained(target)
    shape.num_hidden_layers, shape.tie_word_embeddings = 1, False
    chosen = {**flat, "t2d": t2d, "d2t": d2t, "draft_vocab_size": len(d2t)}
    model = Eagle3DraftModel.from_training_args(shape, **chosen).float().to(device)
    model.verifier_norm = torch.nn.Identity()  # our last hidden states are normed
    numbers = [[number] for number in range(len(source))]
    samples = [sample for batch in source.batches(numbers) for sample in batch]
    collate = CollateFn(args.tokens, shape.hidden_size, 3, torch.float32, shift_batch)
    orders = [plan_packs(source.lengths, args.tokens, f"{one.seed}/{n}") for n in range(passes)]
    plans = [plan for order in orders for plan in order]
    config = TrainerConfig(
        num_epochs=passes,
        save_path=str(folder),
        **{name: flat[name] for name in ("lr", "optimizer", "weight_decay", "scheduler_type")},
        **{name: flat[name] for name in flat if name.startswith("muon_") and name != "muon_lr"},
        muon_lr=flat["muon_lr"] or flat["lr"],
    )
    if not multiplies_bf16(device):
        _muon._zeropower_via_newtonschulz = in_float32
    optimizers = build_optimizers(model, config)
    warmup, total = _resolve_scheduler_steps(config._replace(max_steps=len(plans)), len(plans))
    schedules = [get_linear_schedule_with_warmup(each, warmup, total) for each in optimizers]
    call, _ = Eagle3DraftModel.get_trainer_kwargs(**flat)
    model.train()
    with progress_bar(f"speculators, {passes} passes") as track:
        for step, plan in enumerate(plans, 1):
            collated = collate([their_sample(samples[number]) for number in plan])
            batch = {
                name: of.to(device) if isinstance(of, torch.Tensor) else of
                for name, of in collated.items()
            }
            _, loss, _ = model(**batch, **call)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
            track(step, len(plans), f"loss {loss.item():.3f}")
    model.save_pretrained(str(folder))


def measured(
    args: argparse.Namespace, features: Artifact, head: str, folder: Path
) -> dict[str, Any]:
    """tau and interval of chains, the tree, and Spec-Bench."""
    output = Artifact(str(folder))
    evaluate(EVAL, args.target, head, output, Features(features, "held_out"))
    found = output.read_json("eval.json")
    tau = {"chain": found, "tree": found["trees"][0]}
    if args.spec_bench:
        asked = [
            EvalPrompt(f"{task}-{number}", task, tuple(messages))
            for task, prompts in held_out.spec_bench(held_out.DATA).items()
            for number, messages in enumerate(held_out.short(prompts, 3000)[: args.spec_bench])
        ]
        in_engine = Artifact(f"{folder}-spec-bench")
        config = IN_ENGINE.model_copy(update={"num_prompts": len(asked)})
        evaluate(config, args.target, head, in_engine, None, asked)
        for row in in_engine.read_json("eval.json")["trees"]:
            tau[f"Spec-Bench {row['speculation']} T={row['temperature']:g}"] = row
    return {
        name: {
            "tau": round(row["tau"], 3),
            "interval": row["tau_interval"] and [round(end, 3) for end in row["tau_interval"]],
        }
        for name, row in tau.items()
    }


def figures(args: argparse.Namespace, features: Artifact, one: Try) -> dict[str, Any]:
    """Of one head, trained unless it was before."""
    folder = one.folder(args)
    kept = folder / "figures.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        began, head = time.process_time(), folder / "head"
        if one.settings is None:
            their_head(args, features, one, head)
        else:
            our_head(args, features, one, Artifact(str(head)))
        spent = round(time.process_time() - began)
        found = {"cpu_s": spent, "tau": measured(args, features, str(head), folder / "eval")}
        kept.write_text(json.dumps(found))
    return dict(json.loads(kept.read_text()))


def line(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A recipe's line, over its seeds."""
    taus = {name: [row["tau"][name]["tau"] for row in rows] for name in rows[0]["tau"]}
    return {
        "cpu_s": [row["cpu_s"] for row in rows],
        "tau": {
            name: {"mean": round(statistics.mean(of), 3), "seeds": of} for name, of in taus.items()
        },
        "intervals": {name: one["interval"] for name, one in rows[0]["tau"].items()},
    }


def main() -> None:
    logging.disable(logging.INFO)
    args = arguments()
    features = held_out.captured(args, held_out_share=0.1)
    recipes: dict[str, tuple[str, ...] | None] = {"default": ()}
    for recipe in args.recipe:
        name, _, settings = recipe.partition(":")
        recipes[name] = tuple(settings.split())
    if args.speculators:
        recipes["speculators"] = None
    of = f"{features.manifest().identity} {args.target} {args.tokens} {args.spec_bench}"
    board: dict[str, Any] = {}
    for passes in args.passes:
        lines = board[str(passes)] = {}
        for recipe, settings in recipes.items():
            tries = [Try(recipe, settings, passes, seed, of) for seed in args.seeds]
            lines[recipe] = line([figures(args, features, one) for one in tries])
            first = lines["default"]["tau"]
            for name, tau in lines[recipe]["tau"].items():
                tau["by_default"] = round(tau["mean"] / first[name]["mean"], 3)
            print(json.dumps({"passes": passes, recipe: lines[recipe]}), flush=True)
    source = Features(features, "train")
    size = {"samples": len(source), "tokens": sum(source.lengths)}
    print(
        json.dumps({"target": args.target, **size, "machine": held_out.machine(), "passes": board})
    )


if __name__ == "__main__":
    main()
