"""Text to replay a head on: prompts answered by the target itself, or answers that somebody kept.
Knows chat and the engine.

Does not know heads: the target decodes plainly.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from eyas.chat import Chat
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import CorruptError, EmptyInputError, MissingInputError, TemplateError
from eyas.model.target import Target

NUM_CONVERSATIONS = 32  # some 800 tokens of the built-in target's answers
ANSWER_TOKENS = 48
PROMPT_TOKENS = 160  # longer ones would be most of the time
# of a conversation with its answer; the rest is cut off, so that hidden states of all layers fit
MOST_TOKENS = 2048
BATCH = 8
ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True)
class Answered:
    """Tokens of a conversation [T] and which of them the target wrote [T]."""

    token_ids: list[int]
    mask: list[bool]


def answered(
    target: Target, folder: str | Path, text: Path, num_conversations: int = NUM_CONVERSATIONS
) -> list[Answered]:
    """The first conversations of a file that can be used. A last turn of the assistant's is kept,
    others are answered greedily.

    text: JSON lines with `messages` or `conversations`, may be gzipped; any other file is one
    prompt a line. Raises MissingInputError, EmptyInputError, CorruptError.
    """
    chat = Chat(folder)
    kept: list[Answered] = []
    prompts: list[list[int]] = []
    for messages in islice(conversations(text), 4 * num_conversations):
        if len(kept) + len(prompts) == num_conversations:
            break
        try:
            if messages[-1]["role"] == "assistant":
                token_ids, mask = chat.answered(messages)
                kept.append(Answered(token_ids[:MOST_TOKENS], mask[:MOST_TOKENS]))
            else:
                prompts.append(chat.prompt_ids(messages))
        except TemplateError:
            continue
        if prompts and len(prompts[-1]) > PROMPT_TOKENS:
            prompts.pop()
    found = kept + (decoded(target, folder, prompts) if prompts else [])
    usable = [
        one
        for one in found
        if any(a and b for a, b in zip(one.mask[1:], one.mask[2:], strict=False))
    ]
    if not usable:
        hint = "give prompts that fit its chat template"
        raise EmptyInputError(f"{text} holds no conversation that the target can answer", hint)
    return usable


def decoded(target: Target, folder: str | Path, prompts: list[list[int]]) -> list[Answered]:
    """What the target answers to prompts, greedily, in the order of the prompts."""
    longest = max(map(len, prompts)) + ANSWER_TOKENS + 1
    engine = Engine(
        target, None, EngineConfig(max_batch=BATCH, max_length=longest, speculation="off"), folder
    )
    params = SamplingParams(max_tokens=ANSWER_TOKENS)
    results = engine.run(
        Request(str(number), tuple(ids), params) for number, ids in enumerate(prompts)
    )
    answers = {int(result.request_id): list(result.token_ids) for result in results}
    return [
        Answered(ids + answers[number], [False] * len(ids) + [True] * len(answers[number]))
        for number, ids in enumerate(prompts)
    ]


def conversations(text: Path) -> Iterator[list[dict[str, str]]]:
    """Messages of each row of a file; a row that is no conversation is passed over.

    Raises MissingInputError, and CorruptError for what is no text.
    """
    if not text.is_file():
        raise MissingInputError(
            f"no text at {text}", "give JSON lines with messages, or a file of one prompt a line"
        )
    is_json = ".jsonl" in text.suffixes or ".json" in text.suffixes
    for line in filter(str.strip, text_lines(text)):
        try:
            messages = (
                list(turns(json.loads(line)))
                if is_json
                else [{"role": "user", "content": line.strip()}]
            )
        except (ValueError, TypeError, AttributeError, KeyError):
            continue
        if messages:
            yield messages


def text_lines(text: Path) -> Iterator[str]:
    """The lines of a file, gzipped or not. Raises CorruptError."""
    try:
        with (
            gzip.open(text, "rt", encoding="utf-8")
            if text.suffix == ".gz"
            else text.open(encoding="utf-8") as lines
        ):
            yield from lines
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptError(
            f"{text} is no text: {type(error).__name__}",
            "give UTF-8 text, gzipped if it ends in .gz",
        ) from error


def turns(row: dict[str, Any]) -> Iterator[dict[str, str]]:
    """The turns of a row in either of the two usual shapes."""
    for turn in row.get("messages") or row.get("conversations") or []:
        content = turn.get("content", turn.get("value"))
        if isinstance(content, str) and content.strip():
            yield {"role": ROLES[turn.get("role", turn.get("from"))], "content": content}
