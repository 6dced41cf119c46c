"""The prompts of a benchmark, from JSON lines in any of three shapes. Knows no server.

    {"id", "turns": ["first user turn", ...], "system"?}          a row of eyas' prompts stage
    {"id"?, "messages": [{"role", "content"}, ...]}               a conversation in OpenAI's form
    {"question_id", "category", "turns": [...]}                   Spec-Bench

Each gives one request: what the user says before the assistant's first answer. Later turns are left
out, and that is told.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import dropwhile, takewhile
from typing import Any

import fsspec

from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError
from eyas.records import Message


@dataclass(frozen=True, slots=True)
class Task:
    """One request of the benchmark. `category` is the row's own, its source, or nothing; is_cut:
    the user had more to say.
    """

    prompt_id: str
    category: str
    messages: tuple[Message, ...]
    is_cut: bool = False


def read_tasks(url: str, count: int, seed: int, pass_over: bool = False) -> list[Task]:
    """`count` tasks, or all where there are fewer, drawn and ordered by the seed.

    Raises MissingInputError, EmptyInputError, CorruptError (no JSON) and InputError (another shape;
    an id used twice); with `pass_over`, rows of these last three kinds are passed over: raw sets
    such as the packaged one have some.
    """
    tasks: dict[str, Task] = {}
    for number, row in enumerate(_rows(url, pass_over), start=1):
        try:
            task = _task(row, number, url)
            if task.prompt_id in tasks:
                raise InputError(
                    f"{url} has two prompts with the id {task.prompt_id!r}", "make the ids unique"
                )
        except InputError:
            if not pass_over:
                raise
        else:
            tasks[task.prompt_id] = task
    if not tasks:
        raise EmptyInputError(f"{url} has no prompts", "give a file with one JSON object a line")
    drawn = list(tasks.values())
    random.Random(seed).shuffle(drawn)
    return drawn[:count]


def _rows(url: str, pass_over: bool) -> Iterator[Any]:
    try:
        with fsspec.open(url, "rt", compression="infer", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _parsed(line, f"{url} line {number}", pass_over)
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no prompts at {url}", "check the path; relative paths start at the current folder"
        ) from error
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise CorruptError(f"{url} cannot be read: {error}", "restore the file") from error


def _parsed(line: str, where: str, pass_over: bool) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        if pass_over:
            return None
        raise CorruptError(
            f"{where} is not JSON: {error}", "give one JSON object a line"
        ) from error


def _task(row: Any, number: int, url: str) -> Task:
    row = row if isinstance(row, dict) else {}
    try:
        messages = _first_turns(row)
    except (KeyError, TypeError, IndexError, AttributeError):
        messages = []
    if not any(message["role"] == "user" for message in messages):
        raise InputError(
            f"{url} row {number} has no user turn", 'give rows with "turns" or with "messages"'
        )
    prompt_id = row.get("id", row.get("question_id", number))
    num_turns = len(row["turns"]) if row.get("turns") else _num_said(row["messages"])
    category = str(row.get("category", row.get("source", "")))
    return Task(str(prompt_id), category, tuple(messages), num_turns > _num_said(messages))


def _num_said(messages: Iterable[Mapping[str, Any]]) -> int:
    """Turns of the user's."""
    return sum(message["role"] == "user" for message in messages)


def _first_turns(row: dict[str, Any]) -> list[Message]:
    """System messages, and the user's turns before the first answer; an opening by the assistant is
    left out.
    """
    if row.get("turns"):
        system: list[Message] = (
            [{"role": "system", "content": row["system"]}] if row.get("system") else []
        )
        return [*system, {"role": "user", "content": str(row["turns"][0])}]
    messages = [
        Message(role=turn["role"], content=_text(turn["content"]))
        for turn in row.get("messages", ())
    ]
    system = [turn for turn in messages if turn["role"] == "system"]
    spoken = dropwhile(
        lambda turn: turn["role"] != "user", (turn for turn in messages if turn["role"] != "system")
    )
    return [*system, *takewhile(lambda turn: turn["role"] == "user", spoken)]


def _text(content: Any) -> str:
    """A turn's content: a string, or OpenAI's list of text parts. Raises KeyError, TypeError for
    anything else.
    """
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
