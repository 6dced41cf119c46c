"""The workload of a benchmark: prompts from a file or made up, and when requests arrive. Knows no
server; one counts the tokens of made-up prompts through a function that it is given.

A file holds JSON lines in any of three shapes:

    {"id", "turns": ["first user turn", ...], "system"?}          a row of eyas' prompts stage
    {"id"?, "messages": [{"role", "content"}, ...]}               a conversation in OpenAI's form
    {"question_id", "category", "turns": [...]}                   Spec-Bench

Each gives one request: what the user says before the assistant's first answer. Later turns are left
out, and Task.is_cut says so.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, dropwhile, takewhile
from typing import Any

import fsspec

from eyas.errors import ConfigError, CorruptError, EmptyInputError, InputError, MissingInputError
from eyas.records import Message

# Common words, for made-up prompts.
_TEXT = """
time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work number night point home water
room mother area money story fact month lot right study book eye job word business issue side kind
head house service friend father power hour game line end member law car city community name
president team minute idea body information back parent face others level office door health person
art war history party result change morning reason research girl guy moment air teacher force
education
"""
WORDS = _TEXT.split()
TRIES = 8  # for a prompt to get its length
TEMPLATE, TOKENS_A_WORD = 16, 1.3  # guesses to begin with
SLACK = 0.1  # of the length asked for, by which a prompt may miss it
CountTokens = Callable[[tuple[Message, ...]], Awaitable[int]]  # of a prompt, by the server


@dataclass(frozen=True, slots=True)
class Task:
    """One request of the benchmark. `category` is the row's own, its source, or nothing; is_cut:
    the user had more to say.
    """

    prompt_id: str
    category: str
    messages: tuple[Message, ...]
    is_cut: bool = False


def read_tasks(url: str, count: int, seed: int, skip_bad: bool = False) -> list[Task]:
    """`count` tasks, or all where there are fewer, drawn and ordered by the seed.

    Raises MissingInputError, EmptyInputError, CorruptError (no JSON) and InputError (another shape;
    an id used twice); with `skip_bad`, rows of these last three kinds are left out: raw sets such
    as the packaged one have some.
    """
    tasks: dict[str, Task] = {}
    for number, row in enumerate(_rows(url, skip_bad), start=1):
        try:
            task = _task(row, number, url)
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
        raise EmptyInputError(f"{url} has no prompts", "give a file with one JSON object a line")
    drawn = list(tasks.values())
    random.Random(seed).shuffle(drawn)
    return drawn[:count]


def _rows(url: str, skip_bad: bool) -> Iterator[Any]:
    try:
        with fsspec.open(url, "rt", compression="infer", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except json.JSONDecodeError as error:
                    if not skip_bad:
                        what = f"{url} line {number} is not JSON: {error}"
                        raise CorruptError(what, "give one JSON object a line") from error
                    row = None
                yield row
    except FileNotFoundError as error:
        raise MissingInputError(
            f"no prompts at {url}", "check the path; relative paths start at the current folder"
        ) from error
    except (gzip.BadGzipFile, EOFError, UnicodeDecodeError) as error:
        raise CorruptError(f"{url} cannot be read: {error}", "restore the file") from error


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
    num_turns = len(row["turns"]) if row.get("turns") else _num_user_turns(row["messages"])
    category = str(row.get("category", row.get("source", "")))
    return Task(str(prompt_id), category, tuple(messages), num_turns > _num_user_turns(messages))


def _num_user_turns(messages: Iterable[Mapping[str, Any]]) -> int:
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


# Made-up prompts


def lengths_of(prompts: str) -> tuple[int, int] | None:
    """(least, most) tokens of "synthetic(256)" or "synthetic(64,512)"; None for a path. Raises
    ConfigError for no lengths.
    """
    if not prompts.startswith("synthetic"):
        return None
    match = re.fullmatch(r"synthetic\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\)", prompts)
    least, most = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if least > most:
        raise ConfigError(
            f"prompts: {prompts!r}: the smaller number comes first",
            f"write synthetic({most},{least})",
        )
    if least < 1:
        raise ConfigError(
            f"prompts: {prompts!r} has no lengths",
            "write e.g. synthetic(256) or synthetic(64,512): tokens",
        )
    return least, most


async def synthetic_tasks(
    lengths: tuple[int, int], number: int, seed: int, count_tokens: CountTokens
) -> list[Task]:
    """So many prompts of between `lengths` tokens, template included. Raises ConfigError where a
    length cannot be reached.

    The server counts the tokens. While a length is searched for, the words come in another order
    than in the prompt, so that a cache of prefixes knows no more of it than its first word.
    """
    draw = random.Random(seed)
    tasks = []
    known = (0, TEMPLATE)  # words and tokens of the last prompt: where to begin with the next
    for place in range(number):
        length = draw.randint(*lengths)
        words = [draw.choice(WORDS) for _ in range(length)]
        known = await _fitted(words, length, known, count_tokens)
        category = f"{length} tokens" if lengths[0] == lengths[1] else ""
        tasks.append(Task(f"synthetic-{place}", category, _user_turn(words[: known[0]])))
    return tasks


async def _fitted(
    words: list[str], length: int, known: tuple[int, int], count_tokens: CountTokens
) -> tuple[int, int]:
    """How many of the words make a prompt of `length` tokens, and how many tokens they do make."""
    tried: dict[int, int] = {}
    num_words = round(known[0] + (length - known[1]) / TOKENS_A_WORD)
    for _ in range(TRIES):
        num_words = min(max(num_words, 1), len(words))
        if num_words in tried:
            break
        tried[num_words] = await count_tokens(_user_turn([words[0], *reversed(words[1:num_words])]))
        if tried[num_words] == length:
            break
        num_words = _between(tried, length)
    found = min(tried, key=lambda one: abs(tried[one] - length))
    if abs(tried[found] - length) > max(SLACK * length, 2):
        what = f"no prompt of {length} tokens was found: one of {found} words has {tried[found]}"
        raise ConfigError(what, "ask for longer prompts")
    return found, tried[found]


def _between(tried: dict[int, int], length: int) -> int:
    """On the line through the nearest number of words that is too few and the nearest that is too
    many.
    """
    few = max(
        (one for one in tried.items() if one[1] < length), default=(0, min(TEMPLATE, length - 1))
    )
    many = min((one for one in tried.items() if one[1] > length), default=None)
    if many is None:
        return few[0] + max(round((length - few[1]) / TOKENS_A_WORD), 1)
    place = few[0] + round((length - few[1]) * (many[0] - few[0]) / (many[1] - few[1]))
    return min(max(place, few[0] + 1), max(many[0] - 1, few[0] + 1))


def _user_turn(words: list[str]) -> tuple[Message, ...]:
    return ({"role": "user", "content": " ".join(words)},)


def arrival_times_s(rate: float, count: int, seed: int) -> list[float]:
    """Seconds from the beginning at which each of `count` requests is sent; the first at 0.

    Gaps are exponential with mean 1 / rate: a Poisson process, independent users.
    """
    draw = random.Random(f"{seed} {rate} {count}")
    gaps_s = (draw.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps_s, initial=0.0))
