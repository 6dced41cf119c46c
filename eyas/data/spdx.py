"""SPDX licence expressions, such as `MIT OR (Apache-2.0 AND CC-BY-4.0)`, as a tree. Knows the
grammar and no licence.

The grammar is that of the SPDX specification 2.3, annex D: `+` binds tightest, then WITH, AND, OR.
Ids are compared without regard to case, operators are written in capitals or in small letters.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

LONGEST = 300  # characters; also keeps the depth of brackets far from Python's limit
TOKEN = re.compile(r"\s*([()]|[A-Za-z0-9][A-Za-z0-9.:-]*\+?)")
OPERATORS = {"AND", "OR", "WITH", "and", "or", "with"}


@dataclass(frozen=True, slots=True)
class Licence:
    """One licence id; `exception` is what follows WITH."""

    id: str
    exception: str = ""

    def __str__(self) -> str:
        return f"{self.id} WITH {self.exception}" if self.exception else self.id


@dataclass(frozen=True, slots=True)
class AllOf:
    """Every one of the parts holds (AND)."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " AND ".join(
            f"({part})" if isinstance(part, OneOf) else str(part) for part in self.parts
        )


@dataclass(frozen=True, slots=True)
class OneOf:
    """Whoever uses the work chooses one of the parts (OR)."""

    parts: tuple[Expression, ...]

    def __str__(self) -> str:
        return " OR ".join(map(str, self.parts))


Expression = Licence | AllOf | OneOf
Parsed = tuple[Expression, list[str]]  # and the words that follow it


def parse(text: str) -> Expression:
    """The tree of an expression. Raises ValueError that says what is wrong with the text."""
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    words = _words(text)
    tree, rest = _choice(words)
    if rest:
        raise ValueError(f"{rest[0]!r} where AND, OR or the end was expected")
    return tree


def key(expression: Expression) -> str:
    """The same text for expressions that differ in case or in the order of their parts only."""
    if isinstance(expression, Licence):
        return str(expression).casefold()
    sign = "&" if isinstance(expression, AllOf) else "|"
    return f"({sign.join(sorted(map(key, expression.parts)))})"


def _words(text: str) -> list[str]:
    words, at = [], 0
    text = text.rstrip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match:
            raise ValueError(f"{text[at:].split()[0]!r} is no licence id")
        words.append(match.group(1))
        at = match.end()
    return words


# Each takes the words from its place on, and gives its tree and the words after it.


def _choice(words: list[str]) -> Parsed:
    return _joined(words, "OR", _union, OneOf)


def _union(words: list[str]) -> Parsed:
    return _joined(words, "AND", _single, AllOf)


def _joined(
    words: list[str],
    operator: str,
    part_of: Callable[[list[str]], Parsed],
    join: type[OneOf | AllOf],
) -> Parsed:
    part, words = part_of(words)
    parts = [part]
    while words and words[0] in (operator, operator.lower()):
        part, words = part_of(words[1:])
        parts.append(part)
    return (parts[0] if len(parts) == 1 else join(tuple(parts))), words


def _single(words: list[str]) -> Parsed:
    if words and words[0] == "(":
        inner, rest = _choice(words[1:])
        if not rest or rest[0] != ")":
            raise ValueError("a bracket without its end")
        return inner, rest[1:]
    name, rest = _id(words)
    if rest and rest[0] in ("WITH", "with"):
        exception, rest = _id(rest[1:])
        return Licence(name, exception), rest
    return Licence(name), rest


def _id(words: list[str]) -> tuple[str, list[str]]:
    if not words:
        raise ValueError("it ends where a licence id was expected")
    if words[0] in OPERATORS or words[0] in "()":
        raise ValueError(f"{words[0]!r} where a licence id was expected")
    return words[0], words[1:]
