"""`eyas prompts`: raw conversation sets -> cleaned user prompts, a ledger and a data card."""

from __future__ import annotations

from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.builtin import packaged_prompts
from eyas.cli.options import OutputIfAny, StageOptions, with_flags
from eyas.cli.stage import stage
from eyas.data.ledger import show_dropped as dropped_rows
from eyas.data.prompts import PromptsConfig, make_prompts
from eyas.errors import ConfigError

CONFIG = PromptsConfig

Shown = Annotated[
    str | None,
    typer.Option(
        metavar="REASON",
        help="show dropped rows of OUTPUT, redacted, by the beginning of their reason: pii.phone; "
        '"" for all',
    ),
]


@with_flags(CONFIG)
def command(
    sources: Annotated[
        list[str] | None,
        typer.Argument(
            help="files, folders, globs, URLs or hub ids; default: the run file's",
            show_default=False,
        ),
    ] = None,
    output: OutputIfAny = None,
    licence: Annotated[
        str | None, typer.Option(help="licence of the given sources, e.g. CC-BY-4.0")
    ] = None,
    prompts_by: Annotated[
        str | None, typer.Option(help='who wrote their prompts: "human", or a model')
    ] = None,
    answers_by: Annotated[
        str | None, typer.Option(help='who wrote their answers: "human", or a model')
    ] = None,
    show_dropped: Shown = None,
    *,
    stated: StageOptions,
) -> None:
    """Keep the user turns of permitted conversations, without duplicates and personal data; count
    every dropped row.

    `eyas prompts OUTPUT --show-dropped REASON` shows dropped rows.
    """
    if show_dropped is not None:
        shown = [output, *(sources or [])] if output else sources or []
        if len(shown) != 1:
            raise ConfigError(
                "--show-dropped shows one result",
                "eyas prompts OUTPUT --show-dropped pii.phone",
            )
        artifact = Artifact(shown[0])
        # there are dropped rows too where no prompt was left
        if artifact.is_done() or not artifact.parts("dropped"):
            artifact.manifest("prompts")
        for line in dropped_rows(artifact.read_rows("dropped"), show_dropped):
            print(line)
        return
    if output is None:
        raise ConfigError("there is no place for the result", "give one: --output FOLDER")
    terms = {"licence": licence, "prompts_by": prompts_by, "answers_by": answers_by}
    given = [{"path": packaged_prompts(path), **terms} for path in sources] if sources else None
    if given is None and any(terms.values()):
        raise ConfigError(
            "a licence or an author is given, but no source",
            "give sources, or state them in the run file",
        )
    config = stated.config(PromptsConfig, "prompts", sources=given)
    artifact = Artifact(output)
    with stage("prompts", artifact) as track:
        make_prompts(config, artifact, track)
