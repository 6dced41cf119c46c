"""Tool calls in the form of Hermes and Qwen, JSON between <tool_call> tags, and in that of SmolLM2,
whose tags hold a list of calls. Pure text.

auto       the answer is words, calls, or both: `CallReader` separates them
required   the prompt ends with the opening tag, and a JSON schema (`call_schema`) allows one call
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.stop import StopFilter
from eyas.serve.limits import unsupported
from eyas.serve.protocol import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
REQUIRED_OPENING = f"{OPENING}\n"  # what the prompt of a required call ends with
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Call:
    """One call; arguments are JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Separates words and calls in a text as it arrives. What looks like a call and cannot be read
    stays text.
    """

    def __init__(self, is_open: bool = False) -> None:
        """is_open: the text begins behind an opening tag."""
        self.num_calls = 0
        self._is_open = is_open
        self._inside = is_open
        self._block = ""
        self._words = StopFilter([OPENING])
        self._blanks = ""  # shown when more words follow, not before a call

    def push(self, text: str) -> list[str | Call]:
        """The words that are certain now and the calls that are complete, in their order."""
        parts: list[str | Call] = []
        while text:
            if not self._inside:
                parts.append(self._spaced(self._words.push(text)))
                if not self._words.hit:
                    break
                text, self._inside, self._block = self._words.rest, True, ""
                continue
            before = len(self._block)
            self._block += text
            end = self._block.find(CLOSING, max(before - len(CLOSING), 0))
            if end < 0:
                break
            text = self._block[end + len(CLOSING) :]
            parts += self._calls_of(f"{OPENING}{self._block[:end]}{CLOSING}", self._block[:end])
            self._inside, self._words = False, StopFilter([OPENING])
        return [part for part in parts if part]

    def finish(self) -> list[str | Call]:
        """What was held back: an answer may end without the closing tag."""
        if not self._inside:
            words = self._spaced(self._words.finish())
            return [words if self.num_calls else words + self._blanks]
        shown = self._block if self._is_open else OPENING + self._block
        parts = self._calls_of(shown, self._block)
        return parts if self.num_calls else [*parts, self._blanks]

    def _calls_of(self, shown: str, block: str) -> list[str | Call]:
        """The calls in a block; where there are none it is shown as words."""
        calls = _read(block)
        if not calls:
            return [self._spaced(shown)]
        self.num_calls += len(calls)
        self._blanks = ""
        return [*calls]

    def _spaced(self, words: str) -> str:
        """Words behind the blanks that were held back; blanks at their end are held back."""
        words = self._blanks + words
        shown = words.rstrip()
        self._blanks = words[len(shown) :]
        return shown


def call_schema(tools: Sequence[Tool]) -> str:
    """The JSON schema of a call of one of the tools. Raises ApiError for definitions that
    contradict each other.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = dict(tool.function.parameters or {"type": "object"})
        for name in _DEFINITIONS:
            defined = parameters.pop(name, {})
            if not isinstance(defined, dict):
                raise unsupported("tools", f"{name} of a tool's parameters is no object")
            for key, schema in defined.items():
                if definitions.setdefault(name, {}).setdefault(key, schema) != schema:
                    raise unsupported(
                        "tools", f"two tools define {name} of the same name differently"
                    )
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        calls.append(
            {
                "type": "object",
                "properties": properties,
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    return json.dumps({**definitions, **(calls[0] if len(calls) == 1 else {"anyOf": calls})})


def _read(block: str) -> list[Call]:
    """The call of a block, or the calls of a list; nothing where one of them cannot be read."""
    try:
        found = json.loads(block)
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in found if isinstance(found, list) else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            return []
        calls.append(Call(call["name"], arguments))
    return calls
