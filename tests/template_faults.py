"""Faults planted in chat templates, in tokenizers and in the two ways to a mask, and a probe that
says where each is caught.
"""

from __future__ import annotations

import contextlib
import datetime
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from eyas.chat import Chat, MaskDisagreement
from eyas.chat.turn import TokenizedText
from eyas.errors import EyasError
from tests.chat_folders import (
    LIKE_GEMMA,
    LIKE_GRANITE,
    LIKE_LLAMA_2,
    LIKE_LLAMA_3,
    LIKE_MISTRAL,
    LIKE_QWEN,
    like_granite,
    like_llama_2,
    like_qwen,
)
from tests.tiny import TEMPLATE, tiny_tokenizer

DAY = datetime.date(2026, 1, 2)
ROWS = (
    ("Hi", "a table for two"),
    ("A table?", "For two?", "Yes", "caf\u00e9: 7 \u20ac"),
    ("List them", "1. San Jose\n2. North Street\n\nThat is all."),
    ("What is in the room?", "able for two"),
)
ENDS_THE_LINE = (("List them", "That is all.\n"),)
# what is there -> the same, with a fault
Plant = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Fault:
    """template, in the folder that `make` writes; or `plant`: a name to patch in eyas.chat once a
    chat is made, and how.
    """

    name: str
    template: str
    make: Callable[..., Any] = tiny_tokenizer
    date: datetime.date | None = DAY
    plant: tuple[str, Plant] | None = None
    rows: tuple[tuple[str, ...], ...] = ROWS
    system: bool = False
    where: str = "load"  # at load, on a row (refused), or where the two ways differ


def caught(fault: Fault, folder: Path) -> str:
    """Where a fault is caught and with what words; empty when masks come out as if nothing were
    wrong.
    """
    fault.make(
        folder, chat_template=fault.template
    ) if fault.make is tiny_tokenizer else fault.make(folder, fault.template)
    try:
        chat = Chat(folder, fault.date)
    except EyasError as error:
        return f"load: {_words(error, folder)}"
    with planted(fault):
        for row in fault.rows:
            messages = [{"role": "system", "content": "Be brief."}] if fault.system else []
            messages += [
                {"role": ("user", "assistant")[at % 2], "content": text}
                for at, text in enumerate(row)
            ]
            try:
                for at, message in enumerate(messages):
                    if message["role"] == "assistant":
                        chat.turn(messages[: at + 1])
            except MaskDisagreement as error:
                return f"differ: {_words(error, folder)}"
            except EyasError as error:
                return f"row: {_words(error, folder)}"
    return ""


@contextlib.contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """The fault in the code, where there is one, for as long as this lasts."""
    if fault.plant is None:
        yield
        return
    name, plant = fault.plant
    with mock.patch(name, plant(pkgutil.resolve_name(name))):
        yield


def _words(error: EyasError, folder: Path) -> str:
    return error.what.replace(str(folder), "").replace("the chat template of  ", "")


def _with_offsets(change: Callable[[TokenizedText], list[tuple[int, int]]]) -> Plant:
    def plant(encode: Callable[..., TokenizedText]) -> Callable[..., TokenizedText]:
        def wrong(*args: Any) -> TokenizedText:
            made = encode(*args)
            return replace(made, offsets=change(made))

        return wrong

    return plant


def _in_bytes(made: TokenizedText) -> list[tuple[int, int]]:
    return [
        (len(made.text[:start].encode()), len(made.text[:stop].encode()))
        for start, stop in made.offsets
    ]


def _shifted(by: int) -> Plant:
    def plant(find: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
        def wrong(*args: Any) -> list[bool]:
            mask = find(*args)
            return [False] * by + mask[:-by] if by > 0 else mask[-by:] + [False] * -by

        return wrong

    return plant


def _without(which: str) -> Plant:
    """The mask without its first or last token, or with everything after its first."""

    def plant(find: Callable[..., list[bool]]) -> Callable[..., list[bool]]:
        def wrong(*args: Any) -> list[bool]:
            mask = list(find(*args))
            first, last = mask.index(True), len(mask) - 1 - mask[::-1].index(True)
            if which == "rest":
                return [at >= first for at in range(len(mask))]
            mask[first if which == "first" else last] = False
            return mask

        return wrong

    return plant


def _says(what: str) -> str:
    return TEMPLATE.replace("message['content'] +", f"{what} +")


_LOOP = "{% for message in messages %}"
_ANSWERS = "(message['content'] {} if message['role'] == 'assistant' else message['content'])"
FAULTS = (
    # The template changes what was said
    Fault("upper case", _says("message['content'] | upper")),
    Fault("escaped for HTML", _says("message['content'] | e")),
    Fault("trims answers", _says(_ANSWERS.format("| trim")), rows=ENDS_THE_LINE, where="row"),
    Fault("collapses empty lines", _says("message['content'] | replace('\n\n', '\n')")),
    Fault("cuts long turns", _says("message['content'][:12]")),
    Fault("answer twice", _says(_ANSWERS.format("* 2"))),
    Fault("quotes answers", _says(_ANSWERS.format("| tojson"))),
    Fault("words after the answer", TEMPLATE.replace("+ '<|im_end|>'", "+ ' Bye.<|im_end|>'")),
    # It loses or moves turns
    Fault(
        "drops the last turn",
        TEMPLATE.replace(_LOOP, "{% for message in messages[:-1] or messages %}"),
    ),
    Fault(
        "drops the question",
        TEMPLATE.replace(_LOOP, "{% for message in messages if message['role'] != 'user' %}"),
    ),
    Fault(
        "drops earlier answers",
        TEMPLATE.replace(
            _LOOP,
            "{% for message in messages if message['role'] != 'assistant' or message == "
            "messages[-1] %}",
        ),
    ),
    Fault(
        "drops system prompts",
        TEMPLATE.replace(_LOOP, "{% for message in messages if message['role'] != 'system' %}"),
        system=True,
        where="row",
    ),
    Fault("newest first", TEMPLATE.replace(_LOOP, "{% for message in messages | reverse %}")),
    Fault(
        "sorted by role",
        TEMPLATE.replace(_LOOP, "{% for message in messages | sort(attribute='role') %}"),
    ),
    Fault(
        "sorted by text",
        TEMPLATE.replace(_LOOP, "{% for message in messages | sort(attribute='content') %}"),
    ),
    Fault(
        "system prompt in the last question", LIKE_MISTRAL, like_llama_2, system=True, where="row"
    ),
    # What is around an answer depends on what cannot be known when it is asked for
    Fault("number of turns", "{{ messages | length }} " + TEMPLATE),
    Fault(
        "today's date, no day given",
        "{{ strftime_now('%d %b %Y') }}\n" + TEMPLATE,
        date=None,
        where="row",
    ),
    Fault("the time by the second", "{{ strftime_now('%s.%f') }}\n" + TEMPLATE),
    Fault("a format that it makes up", "{% set f = '%d' %}{{ strftime_now(f) }}\n" + TEMPLATE),
    Fault(
        "today's date like Granite, no day given",
        LIKE_GRANITE,
        like_granite,
        date=None,
        where="row",
    ),
    # Role and end tokens
    Fault("no end token", TEMPLATE.replace("+ '<|im_end|>'", "")),
    Fault(
        "no end token on the last turn",
        TEMPLATE.replace("'<|im_end|>'", "('' if loop.last else '<|im_end|>')"),
    ),
    Fault("another end token", TEMPLATE.replace("'<|im_end|>'", "'<|endoftext|>'")),
    Fault(
        "BOS doubled",
        LIKE_LLAMA_2.replace("{{ bos_token + '[INST] '", "{{ bos_token + bos_token + '[INST] '"),
        like_llama_2,
    ),
    Fault("no generation prompt", TEMPLATE.split("{% if add_generation_prompt %}")[0]),
    Fault(
        "generation prompt of another role",
        TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>user\n'"),
    ),
    Fault(
        "generation prompt without its line break",
        TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant'"),
    ),
    Fault(
        "always opens another turn",
        TEMPLATE.replace("{% if add_generation_prompt %}", "{% if true %}"),
    ),
    Fault(
        "thoughts after the end token",
        LIKE_QWEN.replace("content.lstrip('\\n') }}", "'<|im_end|>' + content.lstrip('\\n') }}"),
        like_qwen,
    ),
    # Tokens that reach over the boundary
    Fault(
        "prompt and answer in one token",
        TEMPLATE.replace("message['role'] + '\n' +", "message['role'] + ' t' +").replace(
            "assistant\n'", "assistant t'"
        ),
        like_qwen,
        where="row",
    ),
    Fault(
        "the white space of the answer and of the template in one token",
        TEMPLATE.replace("+ '<|im_end|>'", "+ '\\n<|im_end|>'"),
        like_qwen,
        rows=ENDS_THE_LINE,
        where="row",
    ),
    # Not the template: the tokenizer, or one of the two ways
    Fault(
        "offsets count bytes",
        TEMPLATE,
        plant=("eyas.chat.tokenizer.TargetTokenizer.encode", _with_offsets(_in_bytes)),
        where="differ",
    ),
    Fault(
        "offsets one character on",
        TEMPLATE,
        plant=(
            "eyas.chat.tokenizer.TargetTokenizer.encode",
            _with_offsets(lambda made: [(start + 1, stop + 1) for start, stop in made.offsets]),
        ),
        where="row",
    ),
    *(
        Fault(
            f"{name}, {way}",
            TEMPLATE,
            plant=(f"eyas.chat.chat.mask_by_{way}", plant),
            where="differ",
        )
        for way in ("spans", "prefixes")
        for name, plant in {
            "mask one token on": _shifted(1),
            "mask one token back": _shifted(-1),
            "the first token forgotten": _without("first"),
            "the end token forgotten": _without("last"),
            "all that follows": _without("rest"),
        }.items()
    ),
)
SOUND = (
    Fault("ChatML", TEMPLATE),
    Fault("like Qwen3", LIKE_QWEN, like_qwen),
    Fault("like Granite", LIKE_GRANITE, like_granite),
    Fault("like Llama 2", LIKE_LLAMA_2, like_llama_2),
    Fault("like Llama 3", LIKE_LLAMA_3, like_qwen),
    Fault("like Gemma", LIKE_GEMMA, like_qwen),
    Fault("like Mistral", LIKE_MISTRAL, like_llama_2),
)
