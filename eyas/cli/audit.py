"""`eyas audit`: which tokens of conversations a head is trained to draft, token by token, in the
terminal and as a page.
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import fsspec
import typer
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from eyas.artifact import storage_errors
from eyas.chat import Chat, Turn
from eyas.chat.picture import PageSample, page, paint, visible
from eyas.chat.supervision import MEANING, OPTIONS, MaskOption, token_kinds
from eyas.cli.options import override
from eyas.errors import CorruptError, EmptyInputError, MissingInputError, TemplateError
from eyas.hub import resolve_target
from eyas.log import progress_bar

EXAMPLES = Path(__file__).with_name("audit.yaml")
NOTE = (
    "A head's slot t takes the target's feature of token t, and token t + 1, and drafts token "
    "t + 2. Colours are on the token drafted."
)
DAY = "2026-01-01"  # the default of `eyas generate`


class ConversationRow(BaseModel):
    """A line of input. Other fields are ignored, so that rows of `eyas generate` are read too."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    id: str | None = None


@dataclass
class Audit:
    """Counts of answers (with a mask, refused), of tokens by mask option and kind, and the first
    samples.
    """

    num_conversations: int = 0
    num_answers: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: dict[MaskOption, Counter[str]] = field(
        default_factory=lambda: {option: Counter() for option in OPTIONS}
    )
    samples: list[tuple[str, Turn]] = field(default_factory=list)

    @property
    def num_masked(self) -> int:
        """Answers with a mask: both ways agree, since a disagreement ends the audit."""
        return self.num_answers - self.refused.total()


def command(
    target: Annotated[
        str, typer.Argument(help='folder of a target or of its tokenizer, hub id, or "smollm2"')
    ],
    conversations: Annotated[
        Path | None,
        typer.Argument(
            help="JSON lines (.gz too) with messages, perhaps tools; default: built-in examples"
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", help="write the picture as a page, too")
    ] = None,
    mask: Annotated[
        MaskOption | None, typer.Option("--mask", help="show this mask option only")
    ] = None,
    show: Annotated[
        int, typer.Option("--show", min=0, help="how many samples to show; all are checked")
    ] = 4,
    whole: Annotated[
        bool, typer.Option("--whole", help="do not cut long stretches between answers")
    ] = False,
    date: Annotated[
        str, typer.Option("--date", help="the date for a template that prints today's")
    ] = DAY,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--set", "-s", metavar="NAME=VALUE", help="for the template: enable_thinking=false"
        ),
    ] = None,
) -> None:
    """Show which tokens of conversations are supervised; find every mask in two ways and stop where
    they differ.
    """
    with progress_bar("audit") as track:
        chat = Chat(resolve_target(target), _day(date), override({}, options or ()))
        audit = Audit()
        for row in read(conversations) if conversations else examples():
            add_row(row, chat, audit, show)
            track(audit.num_conversations, None, f"{audit.num_answers} answers")
    if not audit.num_masked:
        reasons = (
            "; ".join(f"{count} x {reason}" for reason, count in audit.refused.items())
            or "no assistant turn"
        )
        raise EmptyInputError(
            f"none of {audit.num_answers} answers has an exact mask ({reasons})", "see the reasons"
        )
    shown: Sequence[MaskOption] = [mask] if mask else OPTIONS
    print_samples(audit, shown, whole)
    print_summary(audit, shown)
    if html:
        with storage_errors(str(html)):
            html.write_text(as_page(audit, target, shown), encoding="utf-8")
        Console(stderr=True).print(
            f"written: {html}", markup=False, highlight=False, soft_wrap=True
        )


def read(path: Path) -> Iterator[ConversationRow]:
    """The conversations of a file. Raises MissingInputError, and CorruptError that names the line,
    never its text.
    """
    if not path.is_file():
        raise MissingInputError(
            f"no conversations at {path}", "give a file of JSON lines with messages"
        )
    with fsspec.open(str(path), "rt", encoding="utf-8", compression="infer") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = ConversationRow.model_validate(json.loads(line))
                wrong = [one for one in row.messages if not isinstance(one.get("role"), str)]
            except (json.JSONDecodeError, ValidationError):
                wrong = [{}]
            if wrong:
                raise CorruptError(
                    f"{path}:{number} is no conversation",
                    'write {"messages": [{"role": ..., "content": ...}, ...]} in each line',
                )
            yield row


def examples() -> list[ConversationRow]:
    """Built-in conversations: several turns, a system prompt, tools, reasoning."""
    return TypeAdapter(list[ConversationRow]).validate_python(
        yaml.safe_load(EXAMPLES.read_text(encoding="utf-8"))
    )


def add_row(row: ConversationRow, chat: Chat, audit: Audit, show: int) -> None:
    """Find the masks of all answers of a conversation, and count. Raises MaskDisagreement."""
    audit.num_conversations += 1
    name = row.id or f"conversation {audit.num_conversations}"
    for first, last, turn in samples(row, chat, audit):
        for option in OPTIONS:
            audit.tokens[option].update(token_kinds(turn.mask, option))
        if len(audit.samples) < show:
            answers = f"answer {last}" if first == last else f"answers {first} to {last}"
            audit.samples.append((f"{name}: {answers}", turn))


def samples(row: ConversationRow, chat: Chat, audit: Audit) -> Iterator[tuple[int, int, Turn]]:
    """Training samples, with the numbers of their first and last answer. An answer that continues
    all tokens of the one before is in the same sample; where the template rewrites the past, each
    has its own.
    """
    waiting: tuple[int, int, Turn] | None = None
    ends = [at for at, message in enumerate(row.messages) if message["role"] == "assistant"]
    for number, at in enumerate(ends, 1):
        audit.num_answers += 1
        try:
            turn = chat.turn(row.messages[: at + 1], tools=row.tools)
        except TemplateError as error:
            audit.refused[error.what.removeprefix(f"the chat template of {chat.folder} ")] += 1
            continue
        if waiting and turn.continues(waiting[2]):
            waiting = (waiting[0], number, turn.with_mask_of(waiting[2]))
            continue
        if waiting:
            yield waiting
        waiting = (number, number, turn)
    if waiting:
        yield waiting


def print_samples(audit: Audit, options: Iterable[MaskOption], whole: bool) -> None:
    """Each sample under each option, to stdout."""
    console = Console(highlight=False, soft_wrap=True)
    for title, turn in audit.samples:
        for option in options:
            console.rule(Text(f"{visible(title)} · mask {option}"), align="left", style="dim")
            console.print(paint(turn.encoded, token_kinds(turn.mask, option), MEANING, whole))
            console.print()


def print_summary(audit: Audit, options: Iterable[MaskOption]) -> None:
    """Counts over all answers, to stdout."""
    table = Table("mask", "supervised", *MEANING, title="tokens of all samples")
    for option in options:
        tokens = audit.tokens[option]
        table.add_row(
            option,
            f"{tokens['drafted'] + tokens['beyond']:,}",
            *(f"{tokens[kind]:,}" for kind in MEANING),
        )
    console = Console(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(_summary(audit), markup=False)
    for reason, count in audit.refused.most_common():
        console.print(f"refused {count:,}: the template {reason}", markup=False)


def as_page(audit: Audit, target: str, options: Sequence[MaskOption]) -> str:
    """The samples as HTML, one view for each option."""
    drawn = [
        PageSample(
            visible(title),
            turn.encoded,
            {option: token_kinds(turn.mask, option) for option in options},
        )
        for title, turn in audit.samples
    ]
    tokens = {
        f"mask {option}": ", ".join(f"{kind} {audit.tokens[option][kind]:,}" for kind in MEANING)
        for option in options
    }
    refused = {
        f"refused {count:,}": f"the template {reason}"
        for reason, count in audit.refused.most_common()
    }
    facts = {"target": target, **tokens, **refused}
    return page("eyas audit", _summary(audit), drawn, dict.fromkeys(options, MEANING), facts, NOTE)


def _summary(audit: Audit) -> str:
    return (
        f"{audit.num_answers:,} answers of {audit.num_conversations:,} conversations: both ways to "
        f"the mask agree on {audit.num_masked:,}; {audit.refused.total():,} have none and are kept "
        "out of training."
    )


def _day(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is no date such as {DAY}") from error
