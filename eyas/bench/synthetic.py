"""Prompts of given lengths in tokens, drawn from common words by seed, for servers whose tokenizer
is not at hand.

A server counts for us: it is asked for one token, and tells how long the prompt was, its chat
template included. What it is asked while a length is found has the words in another order than the
prompt itself, so that a cache of prefixes knows no more of the prompt than its first word.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from random import Random

from eyas.bench.workload import Task
from eyas.errors import ConfigError
from eyas.records import Message

_TEXT = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part "
    "place case week company system program question work number night point home water room "
    "mother area money story fact "
    "month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line "
    "end member law car city community name president team minute idea body information back "
    "parent face others level office "
    "door health person art war history party result change morning reason research girl guy "
    "moment air teacher force education"
)
WORDS = _TEXT.split()
TRIES = 8  # a prompt, until its length is as asked or as near as it gets
TEMPLATE, TOKENS_A_WORD = 16, 1.3  # guesses to begin with
SLACK = 0.1  # of the length asked for, by which a prompt may miss it
CountTokens = Callable[[tuple[Message, ...]], Awaitable[int]]  # of a prompt, by the server


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
    length cannot be had.
    """
    random = Random(seed)
    tasks = []
    known = (0, TEMPLATE)  # words and tokens of the last prompt: where to begin with the next
    for place in range(number):
        length = random.randint(*lengths)
        words = [random.choice(WORDS) for _ in range(length)]
        known = await _fitted(words, length, known, count_tokens)
        category = f"{length} tokens" if lengths[0] == lengths[1] else ""
        tasks.append(Task(f"synthetic-{place}", category, _said(words[: known[0]])))
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
        tried[num_words] = await count_tokens(_said([words[0], *reversed(words[1:num_words])]))
        if tried[num_words] == length:
            break
        num_words = _between(tried, length)
    found = min(tried, key=lambda one: abs(tried[one] - length))
    if abs(tried[found] - length) > max(SLACK * length, 2):
        what = (
            f"no prompt of {length} tokens was found: of {found} words, chat template "
            "included, "
            f"it has {tried[found]}"
        )
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


def _said(words: list[str]) -> tuple[Message, ...]:
    return ({"role": "user", "content": " ".join(words)},)
