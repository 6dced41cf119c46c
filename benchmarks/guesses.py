"""What a draft gains by knowing the numbers that tokens are drawn with, without a clock.

    python benchmarks/guesses.py [--quick] [--target smollm2] [--head smollm2] [--prompts 3]
    [--settings "T 1" "T 1 penalties"]

Answers to some of Spec-Bench's prompts are recorded with what the head proposes at every token
(eyas/evaluate/recording.py), twice: by a draft that knows the numbers and by one that does not. The
answers are the same, so the proposals are all that differs. Of each: tau of trees of fixed size, of
the head alone, and the speed-up of `auto`, of the best fixed tree and of an oracle at one and four
requests, on the first cost table of `arena_rules.py`. The last line of stdout is one JSON.
"""

from __future__ import annotations

import functools
import json
from types import SimpleNamespace

import held_out
from arena import MACHINES, MOST_CHARACTERS, STEPS, TOPK, cell
from temperature import SETTINGS, BlindDraft

from eyas.chat import Chat
from eyas.engine.engine import Engine
from eyas.engine.request import Request, SamplingParams
from eyas.engine.tree import most_probable
from eyas.evaluate.recording import RecordedRounds, record
from eyas.evaluate.trees import Models, ModelsConfig
from eyas.hub import resolve_head, resolve_target
from eyas.log import progress_bar

TREES = [(1, 1), (1, 3), (2, 3), (3, 5), (4, 7), (6, 11)]
ROUNDS = {1: 500, 4: 200}  # by requests


def main() -> None:
    parser = held_out.arguments(__doc__, prompts=3)
    parser.set_defaults(data=held_out.DATA)
    parser.add_argument("--settings", nargs="+", default=[one for one in SETTINGS if SETTINGS[one]])
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.max_tokens = 1, 32
    models = Models.load(
        resolve_target(args.target),
        resolve_head(args.head),
        ModelsConfig(dtype="bfloat16", max_batch=16),
    )
    chat = Chat(resolve_target(args.target))
    prompts = [
        chat.prompt_ids(messages)
        for many in held_out.spec_bench(args.data).values()
        for messages in held_out.short(many, MOST_CHARACTERS)[: args.prompts]
    ]
    rows = {}
    for name in args.settings:
        asked = [
            Request(
                f"{n}",
                tuple(ids),
                SamplingParams(**{"max_tokens": args.max_tokens, "seed": n} | SETTINGS[name]),
            )
            for n, ids in enumerate(prompts)
        ]
        found = {way: recorded(models, asked, way == "blind") for way in ("knowing", "blind")}
        answers = [
            {name: one.token_ids for name, one in rounds.answers.items()}
            for rounds in found.values()
        ]
        assert answers[0] == answers[1], "what is proposed has changed a token"
        rows[name] = {way: figures(rounds) for way, rounds in found.items()}
        print(name, json.dumps(rows[name]), flush=True)
    print(json.dumps({"by_setting": rows, "answers": len(asked), "machine": held_out.machine()}))


def recorded(models: Models, asked: list[Request], blind: bool) -> RecordedRounds:
    made = SimpleNamespace(
        config=models.config, engine=functools.partial(engine_of, models, blind=blind)
    )
    with progress_bar("record") as track:
        return record(made, STEPS, TOPK, asked, track)


def engine_of(models: Models, speculation: str, blind: bool) -> Engine:
    engine = models.engine(speculation)
    if blind:
        engine.rounds.head.draft = BlindDraft(engine.rounds.head.draft)
    return engine


def figures(rounds: RecordedRounds) -> dict[str, object]:
    names = [name for name, answer in rounds.answers.items() if len(answer.token_ids) > 1]
    machine = next(iter(MACHINES.values()))
    tau, speedup = {}, {}
    for steps, nodes in TREES:
        played = rounds.play(
            lambda _, proposals, nodes=nodes: most_probable(proposals.scores, nodes), steps
        )
        accepted = [count for one in played.values() for count in one]
        tau[f"({steps},{nodes})"] = round(1 + sum(accepted) / len(accepted), 3)
    for count, num_rounds in ROUNDS.items():
        row = cell(rounds, names, machine, count, num_rounds)
        speedup[count] = {
            "auto": float(row["ours"]["speedup"]),
            "best fixed": float(row["best fixed"]["speedup"]),
            "oracle": float(row["oracle"]),
        }
    return {"tau": tau, "speedup": speedup}


if __name__ == "__main__":
    main()
