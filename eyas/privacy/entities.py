"""Names of people, street addresses and places in a text, from the tagger's probabilities: runs of
tokens, addresses whose lines are one entity, names that come again in the same text.
"""

from __future__ import annotations

import bisect
import dataclasses
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from eyas.privacy import tagger
from eyas.privacy.evidence import Surroundings, answers, borne_out
from eyas.privacy.lexicon import bare_word, gazetteer, tokenize

TYPES = ("PERSON", "STREET_ADDRESS", "LOCATION")
NAME_THRESHOLD = 0.3  # of a token's probability: recall before precision
BY_ITSELF = 0.6  # score from which a full name's parts are looked for elsewhere in the text
PIECE = 4000  # characters; longer texts are tagged piece by piece, cut at a line's or a word's end

# Between a street and a town; after a part of a street, a few words with a capital or of digits,
# such as a code; between two parts of a street on one line, a short word; a postcode at the end.
WITHIN_ADDRESS = re.compile(r"[\s,;.\-–|>]{0,12}")
AFTER_STREET = re.compile(r"[\s,.\-|(]{0,6}(?:(?=[^\Wa-z_])[^\W_]{1,16}[\s,\-|()]{1,6}){0,3}")
WITHIN_STREET = re.compile(r" ?[^\W_]{1,12}[ .]{1,2}")
POSTCODE = re.compile(r"[ ,\n]{1,3}(?:[A-Z]{1,2}-)?\d{4,6}(?=\s*(?:[\n.,;]|$))")
NO_NAME = frozenset("[]{}=`_|\\")  # signs that stand in code
# Letters of scripts that the tagger is not trained on: Greek, Cyrillic and what follows, without
# Latin Extended Additional.
OTHER_SCRIPT = re.compile(r"[\u0370-\u1dff\u2e80-\ufaff]")
PART = re.compile(r"[^\W\d_]{3,}")  # of a name, long enough to be looked for elsewhere


@dataclasses.dataclass(frozen=True, slots=True)
class Entity:
    """Characters [start, end) of a text that are a `type`, with a probability."""

    type: str
    start: int
    end: int
    score: float


def find_entities(
    text: str, conversation: str = "", threshold: float = NAME_THRESHOLD
) -> list[Entity]:
    """Names, street addresses and places of a text by place, without overlaps.

    conversation: see `evidence.Surroundings`. threshold: the least probability of a token's type. A
    street address takes in the town, the postcode and the country that follow it; a place by itself
    is a LOCATION. Texts mostly in other scripts than Latin are not searched.
    """
    found: list[Entity] = []
    for start, end in pieces(text):
        found += _find_in_piece(text[start:end], start, threshold)
    spans, here = join_addresses(text, found), Surroundings(text, conversation)
    said = [Entity(*one, BY_ITSELF) for one in answers(here)]
    crossings = [one for one in said if one.type == "STREET_ADDRESS"]
    weaker = {"LOCATION": said, "PERSON": crossings}  # than what was said
    kept = [
        one
        for one, is_kept in zip(
            spans, borne_out(here, map(dataclasses.astuple, spans)), strict=True
        )
        if is_kept and not _overlaps(one, weaker.get(one.type, ()))
    ]
    said = [one for one in said if not _overlaps(one, kept)]
    return repeat_names(text, sorted([*kept, *said], key=lambda one: one.start))


def pieces(text: str) -> list[tuple[int, int]]:
    """A text cut into pieces [start, end) of at most PIECE characters, at line ends or spaces where
    there are any.
    """
    found, start = [], 0
    while start < len(text):
        end = min(start + PIECE, len(text))
        if end < len(text):
            half = start + PIECE // 2
            end = text.rfind("\n", half, end) + 1 or text.rfind(" ", half, end) + 1 or end
        found.append((start, end))
        start = end
    return found


def _find_in_piece(text: str, offset: int, threshold: float) -> list[Entity]:
    tokens = tokenize(text)
    if not tokens or _in_other_script(text):
        return []
    words = [word for word, _, _ in tokens]
    probabilities_TL = tagger.tagger().probabilities(words)
    found = []
    for type, first, last, score in runs(probabilities_TL, threshold):
        first, last = _trim(words, first, last)
        if (
            type in TYPES
            and words[first][0].isalnum()
            and NO_NAME.isdisjoint(words[first : last + 1])
        ):
            found.append(Entity(type, offset + tokens[first][1], offset + tokens[last][2], score))
    return found


def _in_other_script(text: str) -> bool:
    return not text.isascii() and 2 * len(OTHER_SCRIPT.findall(text)) > sum(map(str.isalpha, text))


def _trim(words: Sequence[str], first: int, last: int) -> tuple[int, int]:
    """A run without the signs at its ends; a full stop stays after a short word, as in `St.` and
    `Jr.`.
    """
    while last > first and not words[last][0].isalnum():
        if words[last] == "." and words[last - 1].isalpha() and len(words[last - 1]) < 4:
            break
        last -= 1
    while last > first and not words[first][0].isalnum():
        first += 1
    return first, last


def runs(
    probabilities_TL: NDArray[np.float32], threshold: float
) -> list[tuple[str, int, int, float]]:
    """Runs of tokens of one type: (type, first token, last token, mean probability).

    A token is of the likeliest type that reaches the threshold, beginning or continuing an
    entity, whichever is likelier.
    """
    begins, inside = probabilities_TL[:, 1::2], probabilities_TL[:, 2::2]
    of_type = begins + inside
    best = of_type.argmax(axis=1)
    found: list[tuple[str, int, int, float]] = []
    last_type, scores = -1, list[float]()
    for index in np.flatnonzero(of_type.max(axis=1) >= threshold).tolist():
        type = int(best[index])
        continues = (
            bool(found)
            and found[-1][2] == index - 1
            and type == last_type
            and begins[index, type] <= inside[index, type]
        )
        scores = [*(scores if continues else []), float(of_type[index, type])]
        first = found.pop()[1] if continues else index
        found.append((tagger.TYPES[type], first, index, sum(scores) / len(scores)))
        last_type = type
    return found


def join_addresses(text: str, spans: Sequence[Entity]) -> list[Entity]:
    """Spans where a street address and the parts of addresses and places beside it are one."""
    joined: list[Entity] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last and _are_one(text, last, span):
            joined[-1] = Entity("STREET_ADDRESS", last.start, span.end, max(last.score, span.score))
        else:
            joined.append(span)
    return [
        _with_postcode(text, span) if span.type == "STREET_ADDRESS" else span for span in joined
    ]


def _with_postcode(text: str, span: Entity) -> Entity:
    follows = POSTCODE.match(text, span.end)
    return dataclasses.replace(span, end=follows.end()) if follows else span


def _are_one(text: str, first: Entity, second: Entity) -> bool:
    types = {first.type, second.type}
    if "STREET_ADDRESS" not in types:
        return False
    # a street named after a person: the name follows, on the same line and after no comma
    if "PERSON" in types:
        return second.type == "PERSON" and text[first.end : second.start] == " "
    between = text[first.end : second.start]
    if first.type == "LOCATION":
        return bool(WITHIN_ADDRESS.fullmatch(between)) and "." not in between
    within = second.type == first.type and WITHIN_STREET.fullmatch(between)
    return bool(within or WITHIN_ADDRESS.fullmatch(between) or AFTER_STREET.fullmatch(between))


def repeat_names(text: str, spans: list[Entity]) -> list[Entity]:
    """The spans, and the parts of a full name wherever else they stand with a capital: Ada Berg
    ... Berg ... Ada's.
    """
    parts: dict[str, float] = {}
    for span in spans:
        words = PART.findall(text, span.start, span.end)
        if span.type == "PERSON" and span.score >= BY_ITSELF and len(words) > 1:
            parts |= {
                word: span.score for word in words if word[0].isupper() and not _is_ordinary(word)
            }
    if not parts:
        return spans
    more = [
        Entity("PERSON", match.start(), match.end(), parts[match.group()])
        for match in PART.finditer(text)
        if match.group() in parts
    ]
    return sorted(
        [*spans, *(one for one in more if not _overlaps(one, spans))], key=lambda one: one.start
    )


def _is_ordinary(word: str) -> bool:
    return 0 < gazetteer().words.get(bare_word(word), (0, 0))[1] <= 2


def _overlaps(one: Entity, spans: Sequence[Entity]) -> bool:
    """Whether a span overlaps any of others that lie one after the other."""
    before = bisect.bisect_left(spans, one.end, key=lambda other: other.start)
    return before > 0 and spans[before - 1].end > one.start
