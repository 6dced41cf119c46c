"""A linear-chain conditional random field over tokens: how likely each is part of a name, an
address, a place, a company.

Knows tokens, what is said of each (its form, the word lists' bits, cue words) and how weights are
summed over them. Knows nothing of how the weights were found (recipes/entities.py trains them with
CRFsuite on sentences of our own) nor of what is done with a finding.

    T tokens of a text, L labels, S stretches of tokens that are worth a look, W tokens of the
    longest of them
"""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError
from eyas.privacy.cues import CUES, STREET_END, UPPER_CODES
from eyas.privacy.gazetteer import (
    CITY,
    CITY_LARGE,
    COUNTRY,
    DEMONYM,
    FAMILY,
    FAMILY_COMMON,
    FOREIGN,
    GIVEN,
    GIVEN_COMMON,
    MAX_PHRASE,
    REGION,
    Gazetteer,
    fold,
    gazetteer,
)

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

TYPES = ("PERSON", "STREET_ADDRESS", "LOCATION", "ORGANIZATION")
LABELS = ("O", *(f"{part}-{type}" for type in TYPES for part in "BI"))
OFFSETS = (-3, -2, -1, 0, 1, 2, 3)  # tokens seen from a token, itself included
PLACE_OF = {str(offset): place for place, offset in enumerate(OFFSETS)}
MARGIN = 3  # tokens beside one that may be a name, which are looked at too
LONGEST = 256  # tokens of a stretch
MOST_KNOWN = 1 << 16  # tokens whose sums are kept
NO_PHRASE = (0, "")
EDGE = ("edge", "edge")  # group and word beyond the text's ends

SIGNS = (
    {sign: sign for sign in ",.:;-()/#\"'%?!"}
    | dict.fromkeys("$€£", "money")
    | dict.fromkeys("+*=<>^~", "maths")
)
SIGNS |= {
    "\n": "newline",
    "'s": "'s",
    "’s": "'s",
    "–": "-",
    "—": "-",
    "`": "code",
    "|": "code",
    "{": "code",
    "[": "code",
}
TOKEN = re.compile(
    r"(?:https?://|www\.)\S+|[\w.+-]+@[\w-]+\.[\w.-]+|\n|['’]s\b|\d+(?:[.,:]\d+)+"
    r"|[^\W_]+(?:(?:['’](?!s\b)|[-_])[^\W_]+)*|[^\w\s]|_"
)


@dataclass(frozen=True, slots=True)
class Token:
    """What is said of a token, wherever it stands.

    group: one of some fifty kinds, for rules over neighbours; facts: features by name; active: may
    be part of what is sought.
    """

    group: str
    word: str
    facts: tuple[str, ...]
    active: bool


def tokenize(text: str) -> list[tuple[str, int, int]]:
    """Tokens with their places: words, numbers, addresses of the net, line breaks, every other sign
    by itself.
    """
    return [(match.group(), match.start(), match.end()) for match in TOKEN.finditer(text)]


def describe(token: str, bits: int, rank: int) -> Token:
    """What is said of a token to which the word lists gave `bits` and the rank class `rank`."""
    first = token[0]
    if first.isdigit() or (token.isalnum() and not token.isalpha()):
        return _describe_number(token)
    word = fold(token)
    if not first.isalpha():
        kind = SIGNS.get(token, "sign")
        return Token(kind, token if token != "\n" else "newline", (f"group={kind}",), False)
    if "@" in token or "://" in token or "_" in token or word.startswith("www."):
        return Token("code", "code", ("group=code",), False)
    return _describe_word(token, word, bits, rank)


def _describe_number(token: str) -> Token:
    if any(sign in token for sign in ".,:"):
        return Token("amount", "amount", ("group=amount",), False)
    shape = re.sub(r"[^\W\d_]", "a", re.sub(r"\d", "9", token))
    group = f"{min(len(token), 6)}d" if token.isdigit() else "number+"
    return Token(group, shape[:8], (f"number={shape[:8]}", f"group={group}"), False)


def _case(token: str) -> str:
    if token.isupper():
        return "X" if len(token) == 1 else "UP"
    if token[0].isupper():
        return "Cap" if token[1:].islower() or not token.isalpha() else "Mix"
    return "low" if token.islower() else "mix"


def _names(bits: int) -> str:
    given = "G" if bits & GIVEN_COMMON else "g" if bits & GIVEN else ""
    return given + ("F" if bits & FAMILY_COMMON else "f" if bits & FAMILY else "")


def _places(bits: int) -> str:
    kinds = ((COUNTRY, "k"), (REGION, "r"), (CITY_LARGE, "C"), (CITY, "c"), (DEMONYM, "d"))
    return next((letter for bit, letter in kinds if bits & bit), "")


def _describe_word(token: str, word: str, bits: int, rank: int) -> Token:
    case, cue, names, places = _case(token), CUES.get(word, ""), _names(bits), _places(bits)
    common = "top" if rank in (1, 2) else "known" if rank else "rare"
    if not cue and case not in ("X", "UP") and len(word) > 6 and STREET_END.search(word):
        cue = "street+"
    kind = (
        ("both" if names and places else "name" if names else "place" if places else "word")
        if common != "top"
        else "top"
    )
    group = f"{cue}^" if cue and case != "low" else cue
    if not group:
        group = f"{case}:{kind}" if case != "X" else "X"
    if case == "UP" and token in UPPER_CODES:
        group = "CODE"
    listed = f"{names}/{places}/{common}/{case}"
    facts = [
        f"group={group}",
        f"case={case}",
        f"listed={listed}",
        f"cue={cue}",
        f"rank={rank}{case}",
    ]
    if bits & FOREIGN:
        facts.append(f"foreign={case}{'+' if names or places else ''}{'+' if rank else ''}")
    if case != "low" or names or places:
        facts += [
            f"end={word[-3:]}",
            f"end2={word[-2:]}",
            f"begin={word[:2]}",
            f"names={names}",
            f"places={places}",
        ]
    seen = common != "top" and bool(names or places)
    capital = case != "low" and (rank == 0 or bool(names or places))
    active = seen or capital or cue in ("street+", "box", "unit", "name", "postcode")
    active = active or (cue == "street" and (case != "low" or len(word) <= 4))
    return Token(group, word, tuple(facts), active)


def phrases(words: Sequence[str], lists: Gazetteer) -> dict[int, tuple[int, str]]:
    """Bits and part (`begin` or `in`) of each token within a place of several words, such as New
    York, by its index.
    """
    found: dict[int, tuple[int, str]] = {}
    for index, word in enumerate(words):
        if fold(word) in lists.starts and index not in found:
            length, bits = lists.phrase_at(words[index : index + MAX_PHRASE])
            for inner in range(length):
                found[index + inner] = (bits, "in" if inner else "begin")
    return found


def described(words: Sequence[str], lists: Gazetteer) -> list[Token]:
    """Each token of a text, described with the word lists."""
    within = phrases(words, lists)
    return [
        looked_up(word, *within.get(index, NO_PHRASE), lists) for index, word in enumerate(words)
    ]


def looked_up(word: str, phrase_bits: int, part: str, lists: Gazetteer) -> Token:
    """A token described with the word lists; `part` is its part in a listed place of several words,
    "" = in none.
    """
    bits, rank = lists.look_up(word) if word[0].isalpha() else (0, 0)
    token = describe(word, bits, rank)
    return in_phrase(token, phrase_bits, part) if part else token


def in_phrase(token: Token, bits: int, part: str) -> Token:
    """A token's description where it is part of a listed place of several words."""
    facts = (
        *token.facts,
        f"phrase={part}",
        f"phrase={part}{_places(bits)}{token.group.partition(':')[0]}",
    )
    return Token(token.group, token.word, facts, active=True)


def features(tokens: Sequence[Token]) -> list[list[str]]:
    """Every feature of each token by name, as the weights are trained on; `Tagger` sums the same
    without the names.
    """
    padded = [None] * MARGIN + list(tokens) + [None] * MARGIN
    rows = []
    for index in range(MARGIN, len(tokens) + MARGIN):
        seen = [name for offset in OFFSETS for name in names_at(offset, padded[index + offset])]
        rows.append(["bias", *seen, *joined(padded, index)])
    return rows


def names_at(offset: int, token: Token | None) -> list[str]:
    """The features that a token gives to the one `offset` tokens before it; None = beyond the
    text's ends.
    """
    if token is None:
        return [f"{offset}|edge"]
    if abs(offset) == 3:
        return [f"{offset}|group={token.group}"]
    facts = (
        token.facts
        if offset == 0
        else [fact for fact in token.facts if not fact.startswith(("begin", "end="))]
    )
    return [f"{offset}|{fact}" for fact in facts] + [f"{offset}|w={token.word}"]


def joined(tokens: Sequence[Token | None], index: int) -> tuple[str, ...]:
    """The features of a token that join it with its neighbours: groups (g) and words (w), by how
    far they are.
    """
    before2, before, here, after, after2 = tokens[index - 2 : index + 3]
    assert here is not None
    group = here.group
    group_2, word_2 = (before2.group, before2.word) if before2 else EDGE
    group_1, word_1 = (before.group, before.word) if before else EDGE
    group1, word1 = (after.group, after.word) if after else EDGE
    group2 = after2.group if after2 else EDGE[0]
    return (
        f"g-1g|{group_1}|{group}",
        f"g-2g|{group_2}|{group}",
        f"gg1|{group}|{group1}",
        f"g-2g-1g|{group_2}|{group_1}|{group}",
        f"g-1gg1|{group_1}|{group}|{group1}",
        f"gg1g2|{group}|{group1}|{group2}",
        f"w-1g|{word_1}|{group}",
        f"gw1|{group}|{word1}",
        f"w-2w-1g|{word_2}|{word_1}|{group}",
    )


class Tagger:
    """Sums weights over a text's tokens and gives each label's probability; what a token adds is
    worked out once and kept.
    """

    def __init__(self, weights: dict[str, Any], lists: Gazetteer) -> None:
        self._lists = lists
        self._transitions_LL = np.exp(np.array(weights["transitions"], np.float32))
        self._facts: dict[str, int] = {}
        self._rules: dict[str, int] = {}
        self._fact_weights_FOL = np.zeros(
            (len(weights["features"]) + 1, len(OFFSETS), len(LABELS)), np.float32
        )
        self._rule_weights_RL = np.zeros((len(weights["features"]) + 1, len(LABELS)), np.float32)
        for name, by_label in weights["features"].items():
            labels, values = [int(label) for label in by_label], list(by_label.values())
            offset, _, fact = name.partition("|")
            if offset in PLACE_OF:
                row = self._facts.setdefault(fact, len(self._facts) + 1)
                self._fact_weights_FOL[row, PLACE_OF[offset], labels] = values
            else:
                self._rule_weights_RL[
                    self._rules.setdefault(name, len(self._rules) + 1), labels
                ] = values
        self._fact_weights_FOL = self._fact_weights_FOL[: len(self._facts) + 1].copy()
        self._rule_weights_RL = self._rule_weights_RL[: len(self._rules) + 1].copy()
        self._clear()

    def _clear(self) -> None:
        self._known: dict[tuple[str, int, str], int] = {}
        self._tokens: list[Token | None] = [None]
        self._given_NOL = np.zeros((1 << 10, len(OFFSETS), len(LABELS)), np.float32)
        self._given_NOL[0] = self._sums(None)

    def probabilities(self, words: Sequence[str]) -> Floats:
        """P(label | text) of each token, [T, L] in the order of LABELS; tokens far from any that
        may be a name are O.
        """
        if len(self._tokens) > MOST_KNOWN:
            self._clear()
        ids_T = self._look_up(words)
        tokens = [self._tokens[id] for id in ids_T]
        result_TL = np.zeros((len(words), len(LABELS)), np.float32)
        result_TL[:, 0] = 1
        spans = stretches(
            [index for index, token in enumerate(tokens) if token is not None and token.active],
            len(words),
        )
        if spans:
            inside = np.concatenate([np.arange(start, end) for start, end in spans])
            scores_TL = np.zeros_like(result_TL)
            scores_TL[inside] = self._scores(ids_T, tokens, inside)
            _fill(result_TL, marginals(scores_TL, spans, self._transitions_LL), spans)
        return result_TL

    def _look_up(self, words: Sequence[str]) -> list[int]:
        within = phrases(words, self._lists)
        return [self._id(word, *within.get(index, NO_PHRASE)) for index, word in enumerate(words)]

    def _id(self, word: str, bits: int, part: str) -> int:
        known = self._known.get((word, bits, part))
        if known is None:
            known = self._known[word, bits, part] = len(self._tokens)
            self._tokens.append(looked_up(word, bits, part, self._lists))
            if known == len(self._given_NOL):
                self._given_NOL = np.concatenate([self._given_NOL, np.zeros_like(self._given_NOL)])
            self._given_NOL[known] = self._sums(self._tokens[-1])
        return known

    def _sums(self, token: Token | None) -> Floats:
        """What a token adds to the scores of those from MARGIN before it to MARGIN after it, [O,
        L].
        """
        facts = ("edge",) if token is None else (*token.facts, f"w={token.word}")
        sums: Floats = self._fact_weights_FOL[[self._facts.get(fact, 0) for fact in facts]].sum(
            axis=0
        )
        return sums

    def _scores(self, ids_T: list[int], tokens: list[Token | None], inside: Ints) -> Floats:
        padded = np.array([0] * MARGIN + ids_T + [0] * MARGIN)
        scores = np.repeat(self._rule_weights_RL[[self._rules.get("bias", 0)]], len(inside), axis=0)
        for place, offset in enumerate(OFFSETS):
            scores += self._given_NOL[padded[inside + (MARGIN + offset)], place]
        around = [None] * MARGIN + tokens + [None] * MARGIN
        rules = self._rules
        found = [
            (place, rules[name])
            for place, index in enumerate(inside.tolist())
            for name in joined(around, index + MARGIN)
            if name in rules
        ]
        if found:
            places, rows = np.array(found).T
            np.add.at(scores, places, self._rule_weights_RL[rows])
        return scores


def stretches(active: Sequence[int], num_tokens: int) -> list[tuple[int, int]]:
    """Runs of tokens [start, end) that hold the active ones and MARGIN on each side, none longer
    than LONGEST.
    """
    spans: list[tuple[int, int]] = []
    for index in active:
        start, end = max(index - MARGIN, 0), min(index + MARGIN + 1, num_tokens)
        if spans and start <= spans[-1][1] and end - spans[-1][0] <= LONGEST:
            spans[-1] = (spans[-1][0], end)
        else:
            spans.append((max(start, spans[-1][1]) if spans else start, end))
    return spans


def marginals(
    scores_TL: Floats, spans: Sequence[tuple[int, int]], transitions_LL: Floats
) -> Floats:
    """Forward and backward over all stretches at once: [S, W, L], rows past a stretch's end without
    meaning.

    scores_TL: sums of weights; transitions_LL: exp of the weight from one label to the next.
    """
    starts = np.array([start for start, _ in spans])
    lengths = np.array([end - start for start, end in spans])
    width = int(lengths.max())
    places_SW = np.minimum(starts[:, None] + np.arange(width), len(scores_TL) - 1)
    local_SWL = scores_TL[places_SW]
    local_SWL = np.exp(local_SWL - local_SWL.max(axis=2, keepdims=True))
    forward_SWL, backward_SWL = local_SWL.copy(), np.ones_like(local_SWL)
    for step in range(1, width):
        here = forward_SWL[:, step]
        here *= forward_SWL[:, step - 1] @ transitions_LL
        here /= here.sum(axis=1, keepdims=True)
    back_LL = np.ascontiguousarray(transitions_LL.T)
    for step in range(width - 2, -1, -1):
        before = (local_SWL[:, step + 1] * backward_SWL[:, step + 1]) @ back_LL
        before /= before.sum(axis=1, keepdims=True)
        before[lengths <= step + 1] = 1  # the stretch ends here
        backward_SWL[:, step] = before
    product = forward_SWL * backward_SWL
    result: Floats = product / product.sum(axis=2, keepdims=True)
    return result


def _fill(result_TL: Floats, found_SWL: Floats, spans: Sequence[tuple[int, int]]) -> None:
    for stretch, (start, end) in enumerate(spans):
        result_TL[start:end] = found_SWL[stretch, : end - start]


def read_weights(packed: bytes) -> dict[str, Any]:
    """From gzip JSON: `transitions` [L][L] and `features`, name -> {label index: weight}. Raises
    CorruptError if it is not.
    """
    try:
        weights: dict[str, Any] = json.loads(gzip.decompress(packed))
    except (OSError, EOFError, ValueError) as error:
        raise CorruptError(
            "the packed weights of eyas.privacy cannot be read", "install eyas again"
        ) from error
    return weights


@functools.cache
def tagger() -> Tagger:
    """The tagger that comes with eyas, read once a process."""
    packed = (resources.files("eyas.privacy") / "weights" / "entities.json.gz").read_bytes()
    return Tagger(read_weights(packed), gazetteer())
