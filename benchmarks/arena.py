"""Rules of drafting side by side on recorded rounds of real traffic, on real cost tables.

    python benchmarks/arena.py --quick
    python benchmarks/arena.py --prompts 12 --output out/arena
    python benchmarks/arena.py --rounds out/arena/rounds.npz --requests 4 --rounds-each 2000

Answers of the target to prompts of nine tasks are recorded once, greedy and at temperature 1, with
what the head proposes at every token (recording.py); --rounds reads them again. Then
each rule plays the same requests in the same order, B at a time, without a model: what it keeps
gives tokens, a cost table gives milliseconds (arena_rules.py). Rules know the table as it is;
a round takes Python's time and noise beside it. The figure is the speed-up over plain decoding.

The oracle knows what the target will draw: it drafts for the requests that gain by it, as deep as
they do, and verifies nothing else. No rule can reach it; the question is who comes nearest. `share`
is the part of the oracle's gain in time that a rule has. Writes rounds.npz and arena.json into the
output folder. The last line is one JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import held_out
import numpy as np
from arena_rules import (
    MACHINES,
    Fixed,
    Machine,
    MovingAverage,
    OneBudget,
    Oracle,
    Ours,
    Plain,
    Rule,
    Under,
)
from recording import RecordedAnswer, RecordedRounds, num_accepted, record

from eyas.chat import Chat
from eyas.engine.request import Request, SamplingParams
from eyas.evaluate.trees import Models, ModelsConfig
from eyas.hub import resolve_head, resolve_target
from eyas.log import progress_bar

STEPS, TOPK, MOST_NODES = 6, 3, 11
MOST_CHARACTERS = 1500
# what dialogues are mixed with: everything, as a public server gets it
TRAFFIC = {"all tasks": None, "dialogues": "dialogues", "translation": "translation"}
FIXED = [(1, 1), (1, 3), (2, 2), (2, 3), (3, 3), (3, 5), (4, 4), (4, 7), (6, 7), (6, 11)]
NOISE = 0.05  # of the log of a round's time


@dataclass(frozen=True)
class Played:
    """Tokens per ms over all rounds, and of dialogues by the time that one was under way."""

    rate: float
    of_dialogues: float
    nodes: float


def play(
    rounds: RecordedRounds, names: list[str], rule: Rule, machine: Machine, B: int, num_rounds: int
) -> Played:
    """B requests at a time, each followed by the next of `names`, round and round."""
    noise = np.random.default_rng(0)
    queue = 0
    under: list[Under] = []
    tokens = nodes = 0
    total_ms = dialogue_tokens = dialogue_ms = 0.0
    for _ in range(num_rounds):
        while len(under) < B:
            under.append(Under(names[queue % len(names)]))
            queue += 1
        proposals = rounds.proposals([(one.name, one.at) for one in under], STEPS)
        following = [rounds.answers[one.name].token_ids[one.at + 1 :] for one in under]
        turn = rule.turn(under, proposals, following)
        lengths = []
        for line, left in enumerate(following):
            count = num_accepted(proposals, line, turn.kept[line], left) if turn.drafts else 0
            lengths.append(min(count, len(left) - 1) + 1)
        ms = machine.round_ms(under, turn, proposals.depths) * np.exp(noise.normal(0, NOISE))
        rule.learn([left[:n] for left, n in zip(following, lengths, strict=True)], ms)
        total_ms += ms
        tokens += sum(lengths)
        nodes += int(turn.kept.sum())
        for line, (one, n) in enumerate(zip(under, lengths, strict=True)):
            if one.name.startswith("dialogues"):
                dialogue_tokens += n
                dialogue_ms += ms
            one.advance(n, bool(turn.drafting[line]))
        under = [one for one in under if one.at + 1 < len(rounds.answers[one.name].token_ids)]
    rate_of_dialogues = dialogue_tokens / dialogue_ms if dialogue_ms else 0.0
    return Played(tokens / total_ms, rate_of_dialogues, nodes / num_rounds / B)


def rules(machine: Machine, depths: np.ndarray) -> dict[str, Callable[[], Rule]]:
    """A new player of each rule."""
    tree = (STEPS, TOPK, MOST_NODES)
    fixed = {f"fixed({d},{n})": lambda d=d, n=n: Fixed(d, n, depths) for d, n in FIXED}
    return {
        "ours": lambda: Ours(machine.table, *tree),
        "one budget (vLLM)": lambda: OneBudget(machine.table, depths),
        "moving average (SGLang)": lambda: MovingAverage(depths),
        **fixed,
    }


def cell(
    rounds: RecordedRounds, names: list[str], machine: Machine, B: int, num_rounds: int
) -> dict[str, Any]:
    """All rules at one load: speed-ups over plain rounds."""

    def played(rule: Rule) -> Played:
        return play(rounds, names, rule, machine, B, num_rounds)

    plain = played(Plain())
    found = {name: played(make()) for name, make in rules(machine, rounds.depths).items()}
    rate = plain.rate
    for _ in range(3):  # Dinkelbach: the best rounds for a rate, then the rate of these rounds
        oracle = played(Oracle(machine, rate))
        rate = oracle.rate
    best = max((name for name in found if name.startswith("fixed")), key=lambda n: found[n].rate)
    row: dict[str, Any] = {"best_fixed_tree": best, "oracle": round(oracle.rate / plain.rate, 3)}
    saved = 1 - plain.rate / oracle.rate
    for name, one in {**found, "best fixed": found[best]}.items():
        if not name.startswith("fixed"):
            speedup = one.rate / plain.rate
            row[name] = {
                "speedup": round(speedup, 3),
                "share": round((1 - 1 / speedup) / saved, 3) if saved > 0 else 0.0,
                "nodes": round(one.nodes, 2),
                "of_dialogues": round(one.of_dialogues / plain.of_dialogues, 3)
                if plain.of_dialogues
                else None,
            }
    return row


# The rounds


def recorded(args: Any) -> dict[float, RecordedRounds]:
    """By temperature: the answers to some prompts of each task, ids `task-number`."""
    config = ModelsConfig(dtype="bfloat16", max_batch=16)
    models = Models.load(resolve_target(args.target), resolve_head(args.head), config)
    chat, by_temperature = Chat(resolve_target(args.target)), {}
    folder = args.data if args.data.is_dir() else held_out.DATA
    tasks = held_out.spec_bench(folder) | held_out.not_trained_on(folder, 4 * args.prompts)
    prompts = {
        f"{task}-{number}": chat.prompt_ids(messages)
        for task, many in tasks.items()
        for number, messages in enumerate(held_out.short(many, MOST_CHARACTERS)[: args.prompts])
    }
    for temperature in args.temperatures:
        how = {"max_tokens": args.max_tokens, "temperature": temperature}
        asked = [
            Request(name, tuple(ids), SamplingParams(**how, seed=seed))
            for seed, (name, ids) in enumerate(prompts.items())
        ]
        with progress_bar(f"record at T = {temperature:g}") as track:
            by_temperature[temperature] = record(models, STEPS, TOPK, asked, track)
    return by_temperature


def write(path: Path, by_temperature: dict[float, RecordedRounds]) -> None:
    """One file of arrays: of each answer its tokens, and its roots' candidates."""
    arrays: dict[str, np.ndarray] = {}
    for temperature, rounds in by_temperature.items():
        arrays[f"{temperature}/depths"] = rounds.depths
        for name, answer in rounds.answers.items():
            if len(answer.token_ids) > 1:
                arrays[f"{temperature}/{name}/ids"] = np.array(answer.token_ids)
                for part, stacked in enumerate(zip(*answer.candidates, strict=True)):
                    arrays[f"{temperature}/{name}/{part}"] = np.stack(stacked)
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]


def read(path: Path) -> dict[float, RecordedRounds]:
    """What `write` wrote."""
    found: dict[float, RecordedRounds] = {}
    with np.load(path) as arrays:
        for key in (name for name in arrays.files if name.endswith("/depths")):
            found[float(key.split("/")[0])] = RecordedRounds(arrays[key], {})
        for key in (name for name in arrays.files if name.endswith("/ids")):
            temperature, name, _ = key.split("/")
            parts = [arrays[f"{temperature}/{name}/{part}"] for part in range(3)]
            found[float(temperature)].answers[name] = RecordedAnswer(
                (), arrays[key].tolist(), list(zip(*parts, strict=True))
            )
    return found


# What is shown


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of ours against each goal, and how often each rule is nearest to the oracle."""
    nearest: dict[str, int] = defaultdict(int)
    adaptive = ("ours", "one budget (vLLM)", "moving average (SGLang)")
    for row in rows:
        nearest[max(adaptive, key=lambda name: row[name]["speedup"])] += 1
    alone = {
        (row["machine"], row["temperature"], row["requests"]): row["ours"]["of_dialogues"]
        for row in rows
        if row["traffic"] == "dialogues"
    }
    kept = [
        row["ours"]["of_dialogues"] / alone[key]
        for row in rows
        if row["traffic"] == "all tasks"
        and row["ours"]["of_dialogues"] is not None
        and (key := (row["machine"], row["temperature"], row["requests"])) in alone
    ]
    return {
        "nearest_to_the_oracle": dict(nearest),
        "worst_of_ours_to_best_fixed": min(
            round(row["ours"]["speedup"] / max(1.0, row["best fixed"]["speedup"]), 3)
            for row in rows
        ),
        "worst_of_ours_to_plain": min(row["ours"]["speedup"] for row in rows),
        "least_kept_by_dialogues_in_the_mixture": round(min(kept), 3) if kept else None,
    }


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=12)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--rounds-each", type=int, help="of a rule at a load; by default by load")
    parser.add_argument("--rounds", type=Path, help="recorded before: rounds.npz")
    parser.add_argument("--output", default=f"out/arena-{time.strftime('%Y%m%d-%H%M%S')}")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens, args.requests = 3, min(args.max_tokens, 40), [1, 4, 32]
        args.rounds_each = args.rounds_each or 250
    folder = Path(args.output)
    folder.mkdir(parents=True, exist_ok=True)
    rounds = read(args.rounds) if args.rounds else recorded(args)
    if not args.rounds:
        write(folder / "rounds.npz", rounds)
    rows: list[dict[str, Any]] = []
    for machine_name, machine in MACHINES.items():
        for temperature, all_rounds in rounds.items():
            for traffic, task in TRAFFIC.items():
                names = [
                    name for name in all_rounds.answers if task is None or name.startswith(task)
                ]
                np.random.default_rng(0).shuffle(names)
                for B in args.requests:
                    num_rounds = args.rounds_each or max(100, 1200 // B)
                    row = cell(all_rounds, names, machine, B, num_rounds)
                    key = {
                        "machine": machine_name,
                        "temperature": temperature,
                        "traffic": traffic,
                        "requests": B,
                    }
                    rows.append(key | row)
                    print(*key.values(), json.dumps(row), sep="  ", flush=True)
    result = summary(rows) | {"rows": rows, "command": " ".join(sys.argv)}
    (folder / "arena.json").write_text(json.dumps(result, indent=1), encoding="utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
