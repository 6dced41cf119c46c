"""Drafts from text: what followed the last tokens before, in this request or in recent answers.

    TextIndex      the request's own prompt and answer: the longest match, then the most recent
    RecentAnswers  recent answers, by salt: the longest match, of three tokens or more

Prompt lookup (github.com/apoorvumang/prompt-lookup-decoding) with the match of Deflate (RFC 1951,
section 4): chains of earlier places by hash; the most recent are compared. It takes microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

CHAIN = 8  # tokens: verifying 8 rows costs hardly more than one
_LONGEST = 16  # tokens of a match: longer ones come true no more often
_PLACES = 24  # earlier places that are compared
_KEY = 3  # tokens by which they are found
RECENT_TOKENS = 1 << 16  # hundreds of answers, some 25 MB
_SALTS = 256  # remembered: an empty index takes memory too

# A candidate's kind: its source, the length of its match (with the chain's tokens before it: 1, 2,
# 3, 4-5, ...), and whether it is a chain's first token.
_MATCHES = (2, 3, 4, 6, 9, 14)
NUM_MATCHES = len(_MATCHES) + 1
_CLASS_OF = [bisect_right(_MATCHES, length) for length in range(_LONGEST + CHAIN + 1)]
_RECENT = NUM_MATCHES  # first class of matches in other answers
NUM_KINDS = 2 * (_RECENT + NUM_MATCHES)
# acceptance by class in 270 greedy answers of SmolLM2: the first belief
FIRST_ACCEPTANCE = 2 * (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class TextChain:
    """Candidates, each the child of the one before, and the kind of each."""

    tokens: list[int]
    kinds: list[int]


class TextIndex:
    """The tokens of one request, and the last place of each run of three, two and one of them. A
    place is the index of the token behind a run.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._last: tuple[dict[int, int], dict[int, int]] = ({}, {})  # by one token, by two
        self._last_3: dict[int, int] = {}
        self._before: list[int] = []  # by place: the place before it with the same three tokens

    def extend(self, tokens: Sequence[int]) -> None:
        ones, twos = self._last
        threes, before, known = self._last_3, self._before, self.tokens
        for token in tokens:
            place = len(known)
            if place >= 1:
                ones[known[-1]] = place
            if place >= 2:
                twos[known[-2] << 32 | known[-1]] = place
            if place >= _KEY:
                key = (known[-3] << 32 | known[-2]) << 32 | known[-1]
                before.append(threes.get(key, -1))
                threes[key] = place
            else:
                before.append(-1)
            known.append(token)

    def match(self) -> tuple[int, int]:
        """The place behind the longest earlier match of the last tokens (then the most recent), and
        its length up to _LONGEST; (-1, 0) for none.
        """
        known, n = self.tokens, len(self.tokens)
        found, best = self.match_of(known)
        if found >= 0:
            return found, best
        if n > 2 and (place := self._last[1].get(known[-2] << 32 | known[-1], -1)) >= 0:
            return place, 2
        if n > 1 and (place := self._last[0].get(known[-1], -1)) >= 0:
            return place, 1
        return -1, 0

    def match_of(self, tokens: Sequence[int]) -> tuple[int, int]:
        """As `match`, for the last of these tokens, three or more of them."""
        known, n = self.tokens, len(tokens)
        if n < _KEY:
            return -1, 0
        key = (tokens[-3] << 32 | tokens[-2]) << 32 | tokens[-1]
        place = self._last_3.get(key, -1)
        best, found, left, longest = 0, -1, _PLACES, min(_LONGEST, n)
        while place >= 0 and left and best < longest:
            length = _KEY
            while (
                length < longest
                and length < place
                and known[place - 1 - length] == tokens[n - 1 - length]
            ):
                length += 1
            if length > best:
                best, found = length, place
            place, left = self._before[place], left - 1
        return found, best

    def chain(self) -> TextChain | None:
        """What followed the match; repeated where the text ends, as repetition tends to go on."""
        place, length = self.match()
        if place < 0:
            return None
        tokens = self.tokens[place : place + CHAIN]
        if len(tokens) < CHAIN:
            tokens = (tokens * CHAIN)[:CHAIN]
        return TextChain(tokens, kinds_of(length, CHAIN))


class RecentAnswers:
    """Recent answers of the engine, each found under its own salt alone.

    A salt has two generations: when the newer holds half of the limit, the older is dropped. Where
    all salts hold too much, the one longest without a new answer is dropped.
    """

    def __init__(self, most_tokens: int = RECENT_TOKENS) -> None:
        self._most = most_tokens
        self._by_salt: OrderedDict[str | None, list[TextIndex]] = OrderedDict()

    @property
    def num_tokens(self) -> int:
        return sum(len(one.tokens) for indexes in self._by_salt.values() for one in indexes)

    def add(self, salt: str | None, tokens: Sequence[int]) -> None:
        """An answer's tokens, its end token the last."""
        generations = self._by_salt.setdefault(salt, [TextIndex()])
        self._by_salt.move_to_end(salt)
        if generations[0].tokens and len(generations[0].tokens) + len(tokens) > self._most // 2:
            generations.insert(0, TextIndex())
            del generations[2:]
        generations[0].extend(tokens[-(self._most // 2) :])
        while len(self._by_salt) > _SALTS or self.num_tokens > self._most:
            self._by_salt.popitem(last=False)

    def chain(self, salt: str | None, tokens: Sequence[int]) -> TextChain | None:
        """What followed the longest match of the last tokens, up to the end of the text."""
        last = tokens[-_LONGEST:]
        found: tuple[int, list[int]] = 0, []
        for index in self._by_salt.get(salt, ()):
            place, length = index.match_of(last)
            if length > found[0]:
                found = length, index.tokens[place : place + CHAIN]
        length, following = found
        if not following:
            return None
        return TextChain(following, kinds_of(length, len(following), _RECENT))


def kinds_of(length: int, count: int, first: int = 0) -> list[int]:
    """Kinds of a chain of `count` tokens behind a match of `length`; first: the source's first
    class.
    """
    return [2 * (first + _CLASS_OF[length + depth]) + (depth > 0) for depth in range(count)]
