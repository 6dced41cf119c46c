"""`eyas eval`: a head on what it has not seen -> tau, and what a server will give, before one runs."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.bench.workload import read_tasks
from eyas.cli.evaluation import headline, show_table
from eyas.cli.options import Output, Overrides, RunFile, Target, stage_config
from eyas.cli.stage import stage
from eyas.errors import ConfigError
from eyas.evaluate.evaluate import EvalConfig, HeldOut, evaluate
from eyas.evaluate.questions import Question
from eyas.shards import Features

CONFIG = EvalConfig


def command(
    head: Annotated[
        str,
        typer.Argument(help='output of `eyas train`, a head of any form, a hub id, or "builtin"'),
    ],
    target: Target,
    output: Output,
    features: Annotated[
        str | None, typer.Option(help="output of `eyas capture`: chains on its held-out answers")
    ] = None,
    prompts: Annotated[
        str | None, typer.Option(help="held-out prompts or conversations, JSON lines, as for bench")
    ] = None,
    trees: Annotated[
        str | None, typer.Option(help='such as "fixed(6,3,12) fixed(4,1,5) auto"')
    ] = None,
    temperatures: Annotated[str | None, typer.Option(help='such as "0 1"')] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Measure tau with its interval, by source, language, tree and temperature, and predict time
    per token by concurrency.
    """
    if features is None and prompts is None:
        raise ConfigError(
            "there is nothing to measure with",
            "give --prompts FILE, or --features, the output of `eyas capture`",
        )
    lists = {
        "trees": trees and trees.split(),
        "temperatures": temperatures and temperatures.split(),
    }
    config = stage_config(
        EvalConfig,
        "eval",
        run_file,
        overrides,
        **{name: given for name, given in lists.items() if given},
    )

    artifact = Artifact(output)
    with stage("eval", artifact) as track:
        source = Features(Artifact(features), "held_out") if features is not None else None
        questions = questions_of(prompts, config) if prompts is not None else ()
        evaluate(config, target, head, HeldOut(source, questions), artifact, track)
    result = artifact.read_json("eval.json")
    show_table(result)
    for row in result.get("predicted", {}).get("by_concurrency", []):
        if "withheld" in row:
            print(
                f"no speed-up of {row['speculation']} with {row['concurrency']} at a time: "
                f"{row['withheld']}"
            )
    print(json.dumps({**headline(result), "output": output}))


def questions_of(prompts: str, config: EvalConfig) -> list[Question]:
    """The prompts that `eyas bench` would draw from a file with the same number and seed. Raises
    what `read_tasks` raises.
    """
    tasks = read_tasks(prompts, config.num_prompts, config.seed)
    return [Question(task.prompt_id, task.category, task.messages) for task in tasks]
