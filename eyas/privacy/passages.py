"""The passages of a text: code, and prose by language.

Names are searched for in prose of a known language, patterns in everything. Code, commands, paths
and formulas are recognised by their form; English word by word, so that a German text below an
English request is a passage of its own. Other prose has the language that `eyas.language` detects.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Sequence

import yaml

from eyas.code import code_spans
from eyas.language import CODE_ONLY, UNKNOWN, spoken_language
from eyas.privacy.lexicon import FILES, FOREIGN, STREET_END, bare_word, gazetteer

ENGLISH = "en"

UNIT = re.compile(r"\n|(?<=[.!?:;。！？：])[ \t]|[\"“”«»„]")
WORD = re.compile(r"[^\W\d_]+")
FORM = re.compile(r"\n|\d")
ENOUGH, SURE = 0.4, 3.0  # evidence for English in a passage
VETO = 40  # characters without names from which the detector outweighs the words
SWITCH = 1.5  # evidence that a change between English and other prose costs


@dataclasses.dataclass(frozen=True, slots=True)
class Passage:
    """Characters [start, end) of a text, in one language of `eyas.language`, UNKNOWN, or CODE_ONLY
    for code, formulas and addresses of pages.
    """

    start: int
    end: int
    language: str

    @property
    def is_code(self) -> bool:
        return self.language == CODE_ONLY


def passages(texts: Sequence[str]) -> list[list[Passage]]:
    """The passages of each text of a conversation, by place, without gaps.

    A text that says too little has the language of what stands beside it in the conversation.
    """
    code = [code_spans(text) for text in texts]
    units = [
        (number, start, end)
        for number, text in enumerate(texts)
        for start, end in _units(text, code[number])
    ]
    evidence = [english_evidence(texts[number][start:end]) for number, start, end in units]
    is_english = smoothed(evidence)
    spoken: list[list[Passage]] = [[Passage(*span, CODE_ONLY) for span in spans] for spans in code]
    first = 0
    while first < len(units):
        last = first
        while last + 1 < len(units) and is_english[last + 1] == is_english[first]:
            last += 1
        of_run = units[first : last + 1]
        said = " ".join(texts[number][start:end] for number, start, end in of_run)
        code_of_run = run_language(said, is_english[first], sum(evidence[first : last + 1]))
        for number, start, end in of_run:
            spoken[number].append(Passage(start, end, code_of_run))
        first = last + 1
    return [_joined(parts) for parts in spoken]


def run_language(text: str, is_english: bool, evidence: float) -> str:
    """The language of prose that its words say is English or not; `evidence` of 0 says nothing.

    English is in doubt when the detector takes the words without a capital, so without most names,
    for another language.
    """
    ordinary = " ".join(filter(_is_ordinary, WORD.findall(text)))
    without_names = spoken_language(ordinary) if len(ordinary) >= VETO else UNKNOWN
    if (is_english and evidence >= ENOUGH) or is_form(text):
        return ENGLISH if without_names == UNKNOWN or evidence >= SURE else without_names
    return spoken_language(text)


def _is_ordinary(word: str) -> bool:
    """Whether a word is no name, as far as lists and capitals say."""
    bits, rank = gazetteer().look_up(word)
    return word.islower() and (rank > 0 or not bits & ~FOREIGN)


def is_form(text: str) -> bool:
    """Whether a text is lines or numbers with names: an address, a signature. They are alike in all
    languages.
    """
    words = [word for word in WORD.findall(text) if len(word) > 2]
    capitals = sum(word[0].isupper() for word in words)
    return capitals > 1 and 3 * capitals >= 2 * len(words) and bool(FORM.search(text.strip()))


def _joined(parts: list[Passage]) -> list[Passage]:
    found: list[Passage] = []
    for one in sorted(parts, key=lambda one: one.start):
        if found and found[-1].language == one.language:
            found[-1] = dataclasses.replace(found[-1], end=one.end)
        else:
            found.append(one)
    return found


# English or not


@functools.cache
def _words() -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Words of English besides those of the gazetteer, of other languages, and of both."""
    lists = yaml.safe_load((FILES / "languages.yaml").read_text(encoding="utf-8"))
    shared = frozenset(lists["shared"].split())
    other = frozenset(word for words in lists["other"].values() for word in words.split())
    return frozenset(lists["english"].split()), other - shared, shared


def english_evidence(text: str) -> float:
    """Above 0: English; below: another language; 0: nothing says either."""
    return sum(map(_evidence, WORD.findall(text)))


@functools.lru_cache(1 << 16)
def _evidence(word: str) -> float:
    folded = bare_word(word)
    english, other, shared = _words()
    is_capital = word[0].isupper()
    if not folded.isascii():  # another script
        return 0 if is_capital else -float(min(len(word), 5))
    if folded in shared:
        return 0
    if folded in english:
        return 1
    bits, rank = gazetteer().look_up(word)
    if folded in other:
        return 0 if rank in (1, 2) else -0.5 if is_capital else -1.2
    is_name = bool(bits & ~FOREIGN)
    if rank in (1, 2):
        return 1
    if is_capital:
        return 0.3 if rank and not is_name else 0
    if STREET_END.search(folded) and len(word) > 6 and not rank:
        return 0
    if not word.isascii():
        return 0 if rank else -0.2 if is_name else -1.5
    return 0.6 if rank == 3 else 0.3 if rank else -0.2 if is_name or len(word) == 1 else -1


def smoothed(evidence: Sequence[float]) -> list[bool]:
    """Whether each unit is English: the most likely way through them, where a change costs SWITCH
    (Viterbi, two states).
    """
    if not evidence:
        return []
    scores, came_from = (0.0, 0.0), []  # of other, of English
    for one in evidence:
        other, english = scores
        came_from.append((english - SWITCH > other, english >= other - SWITCH))
        scores = (max(other, english - SWITCH) - one / 2, max(english, other - SWITCH) + one / 2)
    state = scores[1] >= scores[0]
    found = []
    for from_english in reversed(came_from):
        found.append(state)
        state = from_english[state]
    return found[::-1]


def _units(text: str, code: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The prose between code, cut at ends of lines and sentences and at quotes."""
    edges = [0, *(edge for span in code for edge in span), len(text)]
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        while start < end:
            match = UNIT.search(text, start + 1, end)
            stop = match.end() if match else end
            yield start, stop
            start = stop
