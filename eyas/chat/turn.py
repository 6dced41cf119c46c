"""One answer of the target with everything before it, as tokens. Knows neither templates nor
tokenizers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
    hold. has_reasoning: the message has the reasoning, so a thinking block is the target's and not
    the template's.
    """

    text: str | None
    parts: tuple[str, ...]
    has_reasoning: bool

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Wording:
        """The wording of an assistant message, in OpenAI's form; reasoning under either of its
        usual names.
        """
        content = message.get("content") or ""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
        if not reasoning and not calls:
            return cls(content, (), False)
        parts = (reasoning.strip(), content.strip(), *(str(call.get("name", "")) for call in calls))
        return cls(None, tuple(part for part in parts if part), bool(reasoning))
