"""Tool calls in the form of Hermes and Qwen, JSON between <tool_call> tags, and in that of SmolLM2,
whose tags hold a list of calls. Pure text.

auto       the answer is words, calls, or both: `CallReader` separates them
required   the prompt ends with the opening tag, and a JSON schema (`call_schema`) allows one call

A template that shows no tools gets the generic form: `in_text` writes tools, calls and results into
the messages, and a grammar (`answer_grammar`) holds the calls also in auto.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from eyas.engine.schemas import plain_schema
from eyas.engine.stop import StopFilter
from eyas.serve.limits import unsupported
from eyas.serve.protocol import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
REQUIRED_OPENING = f"{OPENING}\n"  # what the prompt of a required call ends with
_DEFINITIONS = ("$defs", "definitions")
_JOINS = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties")  # more arguments than are listed
_BLANKS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_HOW = """You may call these functions, of which each line describes one:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between tags:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>
What it returns comes back between <tool_response> tags. Where none helps, answer in words."""


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


def in_text(
    turns: Sequence[dict[str, Any]], tools: Sequence[Tool], takes_system: bool
) -> list[dict[str, Any]]:
    """The turns of a conversation for a template that knows no tools: these stand in the system's
    message, or in front of the first turn where the template takes none; calls in the assistant's
    text, and results, those of several calls together, in a message of the user.
    """
    written: list[dict[str, Any]] = []
    before = None
    for turn in turns:
        role, text = turn["role"], turn["content"]
        calls = [
            f"{OPENING}\n{_json(call['function'])}\n{CLOSING}"
            for call in turn.get("tool_calls", ())
        ]
        if role == "tool":
            text = f"<tool_response>\n{text}\n</tool_response>"
        if role == before == "tool":
            written[-1]["content"] += f"\n{text}"
        else:
            text = "\n".join([text, *calls] if text else calls) if calls else text
            named = {"role": "user" if role == "tool" else role, "content": text}
            kept = {name: turn[name] for name in turn.keys() - {*named, "tool_calls"}}
            written.append(kept | named)
        before = role
    if tools:
        how = _HOW.format(tools="\n".join(_json(tool.for_template()["function"]) for tool in tools))
        if takes_system and written[0]["role"] != "system":
            written.insert(0, {"role": "system", "content": how})
        else:
            parts = [written[0]["content"], how]
            parts = parts if written[0]["role"] == "system" else parts[::-1]
            written[0]["content"] = "\n\n".join(filter(None, parts))
    return written


def answer_grammar(tools: Sequence[Tool], may_repeat: bool) -> str:
    """The grammar, in llguidance's form, of an answer in words or with calls, which are written as
    `in_text` writes them: behind the first there is no word. Raises ApiError as `call_schema` does.
    """
    schema = {**json.loads(call_schema(tools)), "x-guidance": _BLANKS}
    more = f' ("\\n{OPENING}" one)*' if may_repeat else ""
    return (
        f"start: WORDS | first one{more}\n"
        f'first[lazy]: WORDS "{OPENING}"\n'
        f'one: "\\n" call "\\n{CLOSING}"\n'
        f"call: %json {_json(schema)}\n"
        "WORDS: /(.|\\n)*/\n"
    )


def call_schema(tools: Sequence[Tool]) -> str:
    """The JSON schema of a call of one of the tools, with no argument that its parameters do not
    name, unless they say otherwise. Raises ApiError for definitions that contradict each other.
    """
    definitions: dict[str, dict[str, Any]] = {}
    calls = []
    for tool in tools:
        parameters = plain_schema(dict(tool.function.parameters or {"type": "object"}))
        if "properties" in parameters and parameters.keys().isdisjoint(_JOINS):
            parameters.setdefault("additionalProperties", False)
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


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


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
            arguments = _json(arguments)
        if not isinstance(arguments, str):
            return []
        calls.append(Call(call["name"], arguments))
    return calls
