"""One answer of the target with everything before it, as tokens; and messages as servers hand them
to a template. Knows neither templates nor tokenizers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")  # its names in messages

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """A text and its tokens [T]: their ids, and for each its characters [start, stop) of `text`."""

    text: str
    ids: list[int]
    offsets: list[Span]


@dataclass(frozen=True, slots=True)
class Turn:
    """A conversation up to one answer.

    mask [T]: the tokens that the target wrote. num_prompt_tokens: those that it saw.
    """

    encoded: TokenizedText
    mask: list[bool]
    num_prompt_tokens: int

    @property
    def ids(self) -> list[int]:
        return self.encoded.ids

    def continues(self, other: Turn) -> bool:
        """True when this one begins with all tokens of the other."""
        return self.ids[: len(other.ids)] == other.ids

    def with_mask_of(self, other: Turn) -> Turn:
        """This turn, the mask of the other, which it continues, added to its own."""
        mask = [
            mine or theirs for mine, theirs in zip(self.mask, other.mask, strict=False)
        ] + self.mask[len(other.mask) :]
        return Turn(self.encoded, mask, self.num_prompt_tokens)


@dataclass(frozen=True, slots=True)
class Wording:
    """An answer as it goes into the template.

    text: what the target wrote, where the message has it in one string; None where the template
    puts it together from reasoning and tool calls. parts: strings that the rendered answer must
    hold, as often as they are here. has_reasoning: the message has the reasoning, so a thinking
    block is the target's and not the template's.
    """

    text: str | None
    parts: tuple[str, ...]
    has_reasoning: bool

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Wording:
        """The wording of an assistant message, in OpenAI's form; reasoning under any of its
        usual names.
        """
        content, reasoning = message.get("content") or "", reasoning_of(message)
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        if not reasoning and not calls:
            return cls(content, (), False)
        parts = [reasoning.strip(), content.strip()]
        for call in calls:
            parts += [str(call.get("name", "")), *_leaves(_as_object(call.get("arguments")))]
        return cls(None, tuple(part for part in parts if part), bool(reasoning))

    def is_within(self, body: str) -> bool:
        """Whether a rendered answer holds all parts, as they are or spelled as JSON; one that
        another part holds too, once more.
        """
        for part in {*self.parts}:
            times = sum(other.count(part) for other in self.parts)
            forms = {part, *(json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (True, False))}
            if sum(map(body.count, forms)) < times:
                return False
        return True


def reasoning_of(message: Mapping[str, Any]) -> str:
    """The reasoning of an assistant message, under any of its names; "" without."""
    return next((str(message[name]) for name in REASONING if message.get(name)), "")


def as_served(message: Mapping[str, Any], reasoning_names: Sequence[str]) -> dict[str, Any]:
    """A message in OpenAI's form as servers (vLLM, SGLang) hand it to a chat template.

    A content that is null or absent, as beside tool calls, is an empty text; arguments of calls
    are objects; an empty list of calls or a null reasoning is not there; a reasoning is there
    under all of reasoning_names.
    """
    served = {name: value for name, value in message.items() if name not in REASONING}
    if served.get("content") is None:
        served["content"] = ""
    if calls := served.pop("tool_calls", None):
        served["tool_calls"] = [_call_as_served(call) for call in calls]
    if reasoning := reasoning_of(message):
        served |= dict.fromkeys(reasoning_names, reasoning)
    return served


def _call_as_served(call: Mapping[str, Any]) -> dict[str, Any]:
    called = call.get("function", call)
    function = {**called, "arguments": _as_object(called.get("arguments"))}
    return {**call, "function": function} if "function" in call else function


def _as_object(arguments: Any) -> Any:
    """Arguments of a call, which OpenAI's protocol writes as JSON; what is none stays a text."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        read = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return read if isinstance(read, dict) else arguments


def _leaves(value: Any) -> Iterator[str]:
    """Texts and whole numbers in a value of JSON; how others are written is up to the template."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield str(value)
