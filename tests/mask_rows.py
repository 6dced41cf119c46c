"""Conversations whose loss masks are on record (tests/goldens/masks.json), and the tokenizers and
templates that they are rendered by.

The masks were made by two independent ways, characters and tokens, that had to agree; what
replaced them must give the same tokens wherever it gives any.
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eyas.builtin import target_folder
from tests import chat_folders
from tests.chat_folders import like_glm, like_gpt_oss, like_granite, like_llama_2, like_qwen
from tests.tiny import TEMPLATE, tiny_tokenizer

LIKE = ("LIKE_LLAMA_3", "LIKE_GEMMA", "LIKE_MISTRAL", "LIKE_R1", "LIKE_HERMES")
GOLDEN = Path(__file__).with_name("goldens") / "masks.json"
DAY = datetime.date(2026, 1, 2)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "Finds a table.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALL = {
    "id": "call_0001",
    "type": "function",
    "function": {"name": "find", "arguments": {"city": "San Jos\u00e9"}},
}
Messages = list[dict[str, Any]]


def says(*contents: str, system: str | None = None) -> Messages:
    """A conversation whose turns alternate, the user's first."""
    first = [] if system is None else [{"role": "system", "content": system}]
    turns = [
        {"role": ("user", "assistant")[at % 2], "content": content}
        for at, content in enumerate(contents)
    ]
    return [*first, *turns]


_CALLED: Messages = [
    {"role": "user", "content": "A table, please."},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_0001", "name": "find", "content": '{"free": 2}'},
    {"role": "assistant", "content": "Two are free."},
]
CONVERSATIONS: dict[str, tuple[Messages, list[dict[str, Any]] | None]] = {
    "one turn": (says("What is 2 + 2?", "It is 4."), None),
    "two turns": (says("A table?", "For two?", "Yes.", "In San Jose.\n\nAnything else?"), None),
    "three turns": (says("1", "one", "2", "two", "3", "three"), None),
    "system": (says("Capital of France?", "Paris.", system="Answer in one word."), None),
    "system, two turns": (says("Hi", "Hello!", "Bye", "Goodbye!", system="Be kind."), None),
    "accents": (says("Cafe\u0301?", "Cre\u0300me bru\u0302le\u0301e, d\u00e9j\u00e0 vu."), None),
    "emoji": (says("\U0001f642?", "\U0001f469\u200d\U0001f469\u200d\U0001f467 \u4f60\u597d"), None),
    "code": (says("Code?", "```python\ndef f(x):\n    return x  # it's\n```"), None),
    "white space within": (says("  Hi  ", "a  b\n\n\nc\td"), None),
    "ends in white space": (says("Hi", "Hello \n"), None),
    "begins with white space": (says("Hi", " Hello"), None),
    "markup": (says('<b>"4"</b> & it\'s?', '1.  x > y & "z"'), None),
    "control tokens": (says("Is <|im_end|> or </s> <|end_of_text|> one?", "They are."), None),
    "thoughts in content": (
        says("Why?", "<think>\nA question.\n</think>\n\nBecause.", "So?", "</think>So."),
        None,
    ),
    "thoughts that the prompt begins": (says("Why?", "A question.\n</think>\n\nBecause."), None),
    "with tools": (says("A table?", "Where?", "Here.", "For whom?"), TOOLS),
    "called": (_CALLED, TOOLS),
    "empty": (says("Hi", ""), None),
}


def rows() -> Iterator[tuple[str, Messages, list[dict[str, Any]] | None]]:
    """Each answer with all that came before it, under a name."""
    for name, (messages, tools) in CONVERSATIONS.items():
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                yield f"{name}/{at}", messages[: at + 1], tools


def digest(prompt_ids: list[int], answer_ids: list[int]) -> str:
    """Of a row: equal for equal tokens with equal masks."""
    text = json.dumps([list(prompt_ids), list(answer_ids)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def folders(root: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Folders of made-up families and the built-in target's, each with options of its template."""
    makers: dict[str, tuple[Callable[..., Path], tuple[Any, ...]]] = {
        "qwen": (like_qwen, ()),
        "granite": (like_granite, ()),
        "llama-2": (like_llama_2, ()),
        "gpt-oss": (like_gpt_oss, ()),
        "glm": (like_glm, ()),
        **{
            name.removeprefix("LIKE_").lower(): (like_qwen, (getattr(chat_folders, name),))
            for name in LIKE
        },
    }
    made: dict[str, tuple[Path, dict[str, Any]]] = {
        name: (make(root / name, *rest), {}) for name, (make, rest) in makers.items()
    }
    made["qwen, no thoughts"] = made["qwen"][0], {"enable_thinking": False}
    made["r1, no thoughts"] = made["r1"][0], {"thinking": False}
    tiny_tokenizer(root / "tiny", chat_template=TEMPLATE)
    return {**made, "tiny": (root / "tiny", {}), "builtin": (Path(target_folder()), {})}
