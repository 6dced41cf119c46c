"""`eyas plan`: what a run will need before anything runs. Knows sizes, no speeds: those depend on the machine.

An upper bound: every answer is counted at its full `max_tokens`, no row is dropped, and no two turns share their beginning.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from eyas.artifact import Artifact
from eyas.builtin import resolve_target
from eyas.cli.options import read_run_file, validated
from eyas.cli.run import RunConfig
from eyas.model.config import TargetConfig
from eyas.records import Prompt
from eyas.shards import FeatureMeta

CHARACTERS_PER_TOKEN = 4  # English under a vocabulary of 32 k or more; a small vocabulary needs more tokens


@dataclasses.dataclass(frozen=True)
class Plan:
    """Totals of a run."""

    num_answers: int
    num_prompt_tokens: int
    num_answer_tokens: int
    feature_bytes: int


def plan(num_answers: int, num_prompt_tokens: int, max_tokens: int, bytes_per_token: int) -> Plan:
    """Totals from counts. `num_prompt_tokens` is the sum over all answers: a prompt counts once for each that follows it."""
    num_answer_tokens = num_answers * max_tokens
    return Plan(num_answers, num_prompt_tokens, num_answer_tokens, (num_prompt_tokens + num_answer_tokens) * bytes_per_token)


def estimated_prompt_tokens(prompts: list[Prompt], max_tokens: int) -> int:
    """Tokens before each answer, summed over all answers: turn i is preceded by i user turns and i - 1 answers."""
    total = 0
    for prompt in prompts:
        before = len(prompt.system or "") // CHARACTERS_PER_TOKEN
        for turn in prompt.turns:
            before += -(-len(turn) // CHARACTERS_PER_TOKEN)
            total += before
            before += max_tokens
    return total


def command(
    run_file: Annotated[Path, typer.Argument(help="run file")],
    prompts: Annotated[str | None, typer.Option(help="finished prompts artifact to count")] = None,
    num_prompts: Annotated[int, typer.Option(help="without one: how many prompts, of one turn each")] = 1000,
    characters: Annotated[int, typer.Option(help="without one: characters in a prompt")] = 400,
) -> None:
    """Print the tokens and bytes that a run file will need, as upper bounds."""
    config = validated(RunConfig, read_run_file(run_file), str(run_file))
    target = TargetConfig.from_folder(resolve_target(config.target))
    features = FeatureMeta(
        taps=target.default_taps,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        lm_head_sha256="",
        dtype=config.capture.store_dtype,
        codec=config.capture.codec,
    )
    max_tokens = config.generate.max_tokens
    if prompts:
        artifact = Artifact(prompts)
        artifact.manifest("prompts")
        rows = [Prompt.from_json(row) for row in artifact.read_rows("prompts")]
    else:
        rows = [Prompt(str(index), "", "", ("x" * characters,)) for index in range(num_prompts)]
    num_answers = sum(len(row.turns) for row in rows)
    needed = plan(num_answers, estimated_prompt_tokens(rows, max_tokens), max_tokens, features.bytes_per_token)
    table = Table("needed at most", "", title=str(run_file))
    table.add_row("answers", f"{needed.num_answers:,}")
    table.add_row("prompt tokens", f"{needed.num_prompt_tokens:,}")
    table.add_row("answer tokens", f"{needed.num_answer_tokens:,}")
    table.add_row("features", f"{needed.feature_bytes / 2**30:,.2f} GiB")
    Console().print(table)
