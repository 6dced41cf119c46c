"""Tool calls as JSON between <tool_call> tags (Hermes, Qwen); SmolLM2's tags hold a list of calls.

auto: `CallReader` separates words and calls as they arrive. required: the prompt ends with the
opening tag, and `call_schema` allows one call. A template without tools gets the generic form:
`in_text` writes tools, calls and results into messages, and `answer_grammar` constrains the calls.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from eyas.engine.grammar_process import BLANKS
from eyas.engine.schemas import plain_schema
from eyas.engine.stop import StopFilter
from eyas.serve.limits import ApiError
from eyas.serve.protocol import Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
REQUIRED_OPENING = f"{OPENING}\n"  # the end of a required call's prompt
# A call up to its arguments, also in a list, within MAX_BEGIN characters; and the marks that show
# whether a closing tag stands in a JSON string, which a line's end ends.
BEGIN = re.compile(
    r"""[\s\[},]*\{\s*"name"\s*:\s*"""
    r"""(?P<name>"(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")\s*,"""
    r"""\s*"(?:arguments|parameters)"\s*:\s*(?=\{)"""
)
MAX_BEGIN = 300
MARKS = re.compile(rf"""{CLOSING}|\\["\\]|["\n]""")
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
    """A call, or a piece of one: the first piece has its name, later pieces (name None) more of its
    arguments, JSON as the model wrote it.
    """

    name: str | None
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def to_json(self) -> dict[str, Any]:
        if self.name is None:
            return {"function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def whole_calls(parts: Sequence[str | Call]) -> list[str | Call]:
    """The parts of an answer with the pieces of each call joined."""
    whole: list[str | Call] = []
    for part in parts:
        begun = whole[-1] if whole else ""
        if isinstance(part, Call) and part.name is None and isinstance(begun, Call):
            whole[-1] = replace(begun, arguments=begun.arguments + part.arguments)
        else:
            whole.append(part)
    return whole


class CallReader:
    """Separates words and calls in a text as it arrives. A call begins with its arguments; an
    answer may be cut within them. What looks like a call and cannot be read stays text.

    is_open: the text begins after an opening tag. takes_one: its first call sets `is_over`.
    """

    def __init__(self, is_open: bool = False, takes_one: bool = False) -> None:
        self.num_calls, self.is_over = 0, False
        self._is_open, self._takes_one = is_open, takes_one
        self._inside = is_open
        self._keep("")
        self._has_begun = False  # a call of the block
        self._arguments: _Arguments | None = None  # of an unfinished call
        self._words = StopFilter([OPENING])
        self._blanks = ""  # shown when more words follow, not before a call

    def _keep(self, block: str) -> None:
        self._block = block
        self._seen, self._is_quoted = 0, False  # searched for a closing tag up to here

    def push(self, text: str) -> list[str | Call]:
        """The words that are certain now, calls and more of their arguments, in order."""
        parts: list[str | Call] = []
        while text and not self.is_over:
            if self._inside:
                more, text = self._read_block(text)
                parts += more
            else:
                parts.append(self._spaced(self._words.push(text)))
                text = self._words.rest
                if self._words.hit:
                    self._inside, self._words = True, StopFilter([OPENING])
        return whole_calls([part for part in parts if part])

    def finish(self) -> list[str | Call]:
        """What was held back."""
        if not self._inside:
            words = self._spaced(self._words.finish())
            return [words if self.num_calls else words + self._blanks]
        if self._has_begun:
            return []
        # a required call that was cut before its name is no words
        shown = "" if self._is_open else OPENING + self._block
        parts = self._calls_of(shown, self._block)
        return parts if self.num_calls else [*parts, self._blanks]

    def _read_block(self, text: str) -> tuple[list[str | Call], str]:
        """What more text after an opening tag adds; and the text after the closing tag."""
        parts: list[str | Call] = []
        self._block += text
        while True:
            if self._arguments is not None:
                more, rest = self._arguments.push(self._block)
                parts += [Call(None, more, "")] if more else []
                self._keep(rest)
                if not self._arguments.is_over:
                    break
                self._arguments = None
            elif begin := BEGIN.match(self._block, 0, MAX_BEGIN):
                self._begin()
                self._arguments = _Arguments()
                parts.append(Call(_text(json.loads(begin["name"])), ""))
                self._block = self._block[begin.end() :]
            else:
                if (tag := self._closing()) is None:
                    break
                block, rest = self._block[: tag.start()], self._block[tag.end() :]
                if not self._has_begun:
                    parts += self._calls_of(OPENING + block + CLOSING, block)
                self._inside = self._has_begun = False
                self._keep("")
                self.is_over = self._takes_one and self.num_calls > 0
                return parts, rest
        return parts, ""

    def _closing(self) -> re.Match[str] | None:
        """The closing tag, if it has come; each character is read once."""
        for mark in MARKS.finditer(self._block, self._seen):
            self._seen = mark.end()
            if mark[0] == CLOSING and not self._is_quoted:
                return mark
            self._is_quoted = mark[0] != "\n" and self._is_quoted != (mark[0] == '"')
        self._seen = max(self._seen, len(self._block) - len(CLOSING) + 1)
        return None

    def _calls_of(self, shown: str, block: str) -> list[str | Call]:
        calls = _read(block)
        if not calls:
            return [self._spaced(shown)]
        self._begin(len(calls))
        return [*calls]

    def _begin(self, count: int = 1) -> None:
        self._has_begun, self._blanks = True, ""
        self.num_calls += count

    def _spaced(self, words: str) -> str:
        words = self._blanks + words
        shown = words.rstrip()
        self._blanks = words[len(shown) :]
        return shown


class _Arguments:
    def __init__(self) -> None:
        self.is_over = False
        self._depth, self._is_text, self._is_escaped = 0, False, False

    def push(self, text: str) -> tuple[str, str]:
        """What belongs to the object, with control characters in strings escaped; and the rest,
        empty unless `is_over`.
        """
        written = ""
        for at, one in enumerate(text):
            if self._is_text:
                self._is_text = self._is_escaped or one != '"'
                self._is_escaped = one == "\\" and not self._is_escaped
                written += one if one >= " " else json.dumps(one)[1:-1]
                continue
            self._is_text = one == '"'
            self._depth += (one in "{[") - (one in "}]")
            # "<" is no JSON: the closing tag of an object that was left open
            written += one if one != "<" else ""
            if self._depth == 0 or one == "<":
                self.is_over = True
                return written, text[at + (one != "<") :]
        return written, ""


def in_text(
    turns: Sequence[dict[str, Any]], tools: Sequence[Tool], takes_system: bool
) -> list[dict[str, Any]]:
    """The turns for a template without tools: tools in the system message, or before the first turn
    where the template takes none; calls in the assistant's text; results in user messages.
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


def answer_grammar(tools: Sequence[Tool], may_repeat: bool, schema: str | None = None) -> str:
    """The grammar, in llguidance's form, of an answer in words or of a schema, or of words and then
    calls as `in_text` writes them. Raises ApiError for a schema that is no JSON.
    """
    calls = {**json.loads(call_schema(tools)), "x-guidance": _BLANKS}
    more = f' ("\\n{OPENING}" one)*' if may_repeat else ""
    first, answer = f'first[lazy]: WORDS "{OPENING}"', "WORDS"
    if schema is not None:
        try:
            wanted = plain_schema(json.loads(schema))
        except (ValueError, RecursionError):
            raise ApiError(400, "the json_schema is no JSON", "json_schema") from None
        if isinstance(wanted, dict):
            wanted = {"x-guidance": {"whitespace_pattern": BLANKS}, **wanted}
        first, answer = f'first: "{OPENING}"', f"%json {_json(wanted)}"
    return (
        f"start: answer | first one{more}\n"
        f"answer: {answer}\n"
        f"{first}\n"
        f'one: "\\n" call "\\n{CLOSING}"\n'
        f"call: %json {_json(calls)}\n"
        "WORDS: /(.|\\n)*/\n"
    )


def call_schema(tools: Sequence[Tool]) -> str:
    """The JSON schema of a call of one of the tools; arguments that its parameters do not name need
    additionalProperties, and a tool without parameters has no arguments.
    """
    calls: list[dict[str, Any]] = []
    for tool in tools:
        name, given = tool.function.name, tool.function.parameters
        parameters = plain_schema(given or {"type": "object", "properties": {}})
        if "properties" in parameters and parameters.keys().isdisjoint(_JOINS):
            parameters.setdefault("additionalProperties", False)
        # with an id, "#" in a $ref is the parameters' own root; draft 7 ignores an id beside $ref
        parameters["$id"] = f"tool:{len(calls)}"  # names may stand twice
        parameters.pop("$schema", None)
        properties = {"name": {"const": name}, "arguments": parameters}
        call = {"type": "object", "properties": properties, "required": ["name", "arguments"]}
        calls.append({**call, "additionalProperties": False})
    return json.dumps(calls[0] if len(calls) == 1 else {"anyOf": calls})


def readable(part: str | Call) -> str | Call:
    """A part of a whole answer: a call whose arguments are no JSON becomes words."""
    if isinstance(part, Call):
        try:
            json.loads(part.arguments)
        except (ValueError, RecursionError):
            call = f'{OPENING}\n{{"name": {_json(part.name)}, "arguments": {part.arguments}'
            return call if CLOSING in call else f"{call}}}\n{CLOSING}"
    return part


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(text: str) -> str:
    """Without lone surrogates, which JSON can spell and UTF-8 cannot."""
    return text.encode(errors="replace").decode()


def _read(block: str) -> list[Call]:
    """The calls of a block; none where one cannot be read."""
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
        calls.append(Call(_text(call["name"]), _text(arguments)))
    return calls
