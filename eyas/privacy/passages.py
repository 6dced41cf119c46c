"""The passages of a text: prose, where names are searched for, and code, where only
patterns are.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from eyas.code import code_spans
from eyas.language import CODE_ONLY, language


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """Characters [start, end) of a text. language: of `eyas.language`, UNKNOWN, or CODE_ONLY for
    code, formulas and links.
    """

    start: int
    end: int
    language: str

    @property
    def is_code(self) -> bool:
        return self.language == CODE_ONLY


def passages(texts: Sequence[str]) -> list[list[Passage]]:
    """The passages of each text of a conversation, without gaps; prose has its language."""
    spoken = language("\n".join(filter(None, texts)))
    found: list[list[Passage]] = []
    for text in texts:
        code = (span for span in code_spans(text) if not is_foreign(text[slice(*span)]))
        edges = [0, *itertools.chain.from_iterable(code), len(text)]
        parts = (
            Passage(start, end, CODE_ONLY if number % 2 else spoken)
            for number, (start, end) in enumerate(itertools.pairwise(edges))
        )
        found.append([one for one in parts if one.start < one.end])
    return found


def is_foreign(text: str) -> bool:
    """Whether most letters are not ASCII: a Greek question ends in the sign of a statement."""
    letters = [*filter(str.isalpha, text)]
    return 2 * sum(map(str.isascii, letters)) < len(letters)
