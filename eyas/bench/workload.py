"""The workload of a benchmark: prompts from a file, and when requests arrive.

A file holds JSON lines in any of three shapes:

    {"id", "turns": ["first user turn", ...], "system"?}          a row of eyas' prompts stage
    {"id"?, "messages": [{"role", "content"}, ...]}               a conversation in OpenAI's form
    {"question_id", "category", "turns": [...]}                   Spec-Bench

Each gives one request: the user's turns before the first answer. A missing id is the row's number.
"""

from __future__ import annotations

import gzip
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, dropwhile, takewhile
from typing import Any

import fsspec

from eyas.builtin import BUILTIN, packaged_prompts
from eyas.client import unbroken
from eyas.errors import CorruptError, EmptyInputError, InputError, MissingInputError
from eyas.records import Message


@dataclass(frozen=True, slots=True)
class Task:
    """One request. category: the row's own, its source, or "". has_later_turns: not asked."""

    prompt_id: str
    category: str
    messages: tuple[Message, ...]
    has_later_turns: bool = False


def read_tasks(prompts: str, count: int, seed: int) -> list[Task]:
    """`count` tasks, or all where there are fewer, drawn and ordered by the seed.

    prompts: a file, or "builtin", whose bad rows are left out. Raises MissingInputError,
    EmptyInputError, CorruptError (no JSON), InputError (another shape; an id used twice).
    """
    url, skip_bad = packaged_prompts(prompts), prompts == BUILTIN
    tasks: dict[str, Task] = {}
    for number, row in enumerate(_rows(url, skip_bad), start=1):
        try:
            task = task_of(row, number, url)
            if task.prompt_id in tasks:
                raise InputError(
                    f"{url} has two prompts with the id {task.prompt_id!r}", "make the ids unique"
                )
        except InputError:
            if not skip_bad:
                raise
        else:
            tasks[task.prompt_id] = task
    if not tasks:
        raise EmptyInputError(f"{url} has no prompts", "give one JSON object a line")
    drawn = list(tasks.values())
    random.Random(seed).shuffle(drawn)
    return drawn[:count]


def _rows(url: str, skip_bad: bool) -> Iterator[Any]:
    try:
        with fsspec.open(url, "rt", compression="infer", encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = unbroken(json.loads(line))
                except (ValueError, RecursionError) as error:
                    if not skip_bad:
                        what = f"{url} line {number} is not JSON: {error}"
                        raise CorruptError(what, "give one JSON object a line") from error
                    row = None
                yield row
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no prompts at {url}", "check the path; relative paths start at the current folder"
        ) from error
    except IsADirectoryError as error:
        raise InputError(f"{url} is a folder", "give a file of JSON lines in it") from error
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError, zlib.error) as error:
        what = f"{url} cannot be read: {error}"
        raise CorruptError(what, "give whole JSON lines in UTF-8") from error


def task_of(row: Any, number: int, url: str) -> Task:
    """The task of the number-th row of a file or list. Raises InputError."""
    row = row if isinstance(row, dict) else {}
    try:
        messages = _first_turns(row)
    except (KeyError, TypeError, IndexError, AttributeError):
        messages = []
    if not any(message["role"] == "user" for message in messages):
        what = f"{url} row {number} has no user turn"
        raise InputError(what, 'give "turns", a list of texts, or "messages"')
    prompt_id = row.get("id", row.get("question_id", number))
    num_turns = len(row["turns"]) if row.get("turns") else _num_user_turns(row["messages"])
    category = str(row.get("category", row.get("source", "")))
    return Task(str(prompt_id), category, tuple(messages), num_turns > _num_user_turns(messages))


def _num_user_turns(messages: Iterable[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "user" for message in messages)


def _first_turns(row: dict[str, Any]) -> list[Message]:
    """System messages and the user's turns before the first answer; an opening by the assistant is
    left out.
    """
    if row.get("turns"):
        system: list[Message] = (
            [{"role": "system", "content": row["system"]}] if row.get("system") else []
        )
        first = row["turns"][0]
        if not (isinstance(row["turns"], list) and isinstance(first, str)):
            raise TypeError("turns is a list of texts")
        return [*system, {"role": "user", "content": first}]
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
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def arrival_times_s(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the beginning at which each of `count` requests is sent, the first at 0; a
    Poisson process.
    """
    draw = random.Random(f"{seed} {rate} {count}")
    gaps_s = (draw.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps_s, initial=0.0))
