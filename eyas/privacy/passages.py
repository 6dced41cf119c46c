"""What of a text is prose, in which language, and what is code.

Names are searched for in prose of a language that is known; everything else is searched for
patterns only. Knows no recogniser and no list of names.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from eyas.language import CODE_ONLY, language

CODE = re.compile(r"```.*?(?:```|\Z)|~~~.*?(?:~~~|\Z)|`[^`\n]*`", re.S)


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """Characters [start, end) of a text in one language: a code of `eyas.language`, UNKNOWN, or
    CODE_ONLY for code, formulas and addresses.
    """

    start: int
    end: int
    language: str

    @property
    def is_code(self) -> bool:
        return self.language == CODE_ONLY


def passages(texts: Sequence[str]) -> list[list[Passage]]:
    """The passages of each text of a conversation, by place, without gaps."""
    return [_passages(text) for text in texts]


def _passages(text: str) -> list[Passage]:
    found, start, spoken = [], 0, language(text)
    for match in CODE.finditer(text):
        found += [
            Passage(start, match.start(), spoken),
            Passage(match.start(), match.end(), CODE_ONLY),
        ]
        start = match.end()
    return [one for one in (*found, Passage(start, len(text), spoken)) if one.start < one.end]
