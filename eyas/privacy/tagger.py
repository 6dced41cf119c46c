"""A linear-chain conditional random field over tokens: how likely each is part of a name, an
address, a place, a company (Lafferty et al., 2001).

recipes/entities.py finds the weights with CRFsuite on sentences of our own. Inference is ours:
CRFsuite takes 5.6 times as long on the same texts, since it looks every feature up by name.

    T tokens of a text, L labels, S stretches of tokens that are worth a look, W tokens of the
    longest of them, F facts of tokens, O offsets, R rules over neighbours
"""

from __future__ import annotations

import functools
import gzip
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.errors import CorruptError
from eyas.privacy.lexicon import FILES, Gazetteer, Token, describe, gazetteer, phrase_parts

TYPES = ("PERSON", "STREET_ADDRESS", "LOCATION", "ORGANIZATION")
LABELS = ("O", *(f"{part}-{type}" for type in TYPES for part in "BI"))
OFFSETS = (-3, -2, -1, 0, 1, 2, 3)  # neighbours whose facts count for a token, itself included
MARGIN = 3  # tokens on each side of an active one that are looked at too
LONGEST = 256  # tokens of a stretch
MOST_KNOWN = 1 << 16  # distinct tokens whose sums are kept
EDGE = ("edge", "edge")  # group and word beyond the text's ends


def neighbour_rules(tokens: Sequence[Token | None], index: int) -> tuple[str, ...]:
    """The features that join a token's group (g) with the groups and words (w) of its neighbours;
    None = beyond the text's ends.
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
    """Each label's probability. What a distinct token adds to the scores around it is summed once
    and kept.
    """

    def __init__(self, weights: dict[str, Any], lists: Gazetteer) -> None:
        """weights: see `read_weights`."""
        self._lists = lists
        self._transitions_LL = np.exp(np.array(weights["transitions"], np.float32))
        place_of = {str(offset): place for place, offset in enumerate(OFFSETS)}
        self._facts: dict[str, int] = {}  # row of each fact; row 0 is for those without weights
        self._rules: dict[str, int] = {}
        num_rows = len(weights["features"]) + 1
        facts_FOL = np.zeros((num_rows, len(OFFSETS), len(LABELS)), np.float32)
        rules_RL = np.zeros((num_rows, len(LABELS)), np.float32)
        for name, by_label in weights["features"].items():
            labels, values = [int(label) for label in by_label], list(by_label.values())
            offset, _, fact = name.partition("|")
            if offset in place_of:
                row = self._facts.setdefault(fact, len(self._facts) + 1)
                facts_FOL[row, place_of[offset], labels] = values
            else:
                rules_RL[self._rules.setdefault(name, len(self._rules) + 1), labels] = values
        self._facts_FOL = facts_FOL[: len(self._facts) + 1].copy()
        self._rules_RL = rules_RL[: len(self._rules) + 1].copy()
        self._known = functools.lru_cache(MOST_KNOWN)(self._described)
        self._edge_OL = self._sum(None)

    def _described(
        self, word: str, phrase_bits: int = 0, part: str = ""
    ) -> tuple[Token, NDArray[np.float32]]:
        token = describe(word, phrase_bits, part, self._lists)
        return token, self._sum(token)

    def probabilities(self, words: Sequence[str]) -> NDArray[np.float32]:
        """P(label | text) of each token, [T, L] in the order of LABELS; tokens far from any that
        may be a name are O.
        """
        phrases = phrase_parts(words, self._lists)
        known = [self._known(word, *phrases.get(index, ())) for index, word in enumerate(words)]
        tokens = [token for token, _ in known]
        result_TL = np.zeros((len(words), len(LABELS)), np.float32)
        result_TL[:, 0] = 1
        active = [index for index, token in enumerate(tokens) if token.active]
        spans = stretches(active, len(words))
        if spans:
            inside = np.concatenate([np.arange(start, end) for start, end in spans])
            edges = [self._edge_OL] * MARGIN
            sums_TOL = np.stack([*edges, *(sums for _, sums in known), *edges])
            scores_TL = np.zeros_like(result_TL)
            scores_TL[inside] = self._scores(sums_TOL, tokens, inside)
            found_SWL = marginals(scores_TL, spans, self._transitions_LL)
            for stretch, (start, end) in enumerate(spans):
                result_TL[start:end] = found_SWL[stretch, : end - start]
        return result_TL

    def _sum(self, token: Token | None) -> NDArray[np.float32]:
        """What a token adds to the scores of those from MARGIN before it to MARGIN after it, [O,
        L].
        """
        facts = ("edge",) if token is None else (*token.facts, f"w={token.word}")
        rows = [self._facts.get(fact, 0) for fact in facts]
        sums: NDArray[np.float32] = self._facts_FOL[rows].sum(axis=0)
        return sums

    def _scores(
        self, sums_TOL: NDArray[np.float32], tokens: Sequence[Token], inside: NDArray[np.int64]
    ) -> NDArray[np.float32]:
        """Scores of the tokens at the places `inside`, [len(inside), L].

        sums_TOL: what each token adds to its neighbours, with MARGIN edges on each side.
        """
        scores = np.repeat(self._rules_RL[[self._rules.get("bias", 0)]], len(inside), axis=0)
        for place, offset in enumerate(OFFSETS):
            scores += sums_TOL[inside + (MARGIN + offset), place]
        around = [None] * MARGIN + [*tokens] + [None] * MARGIN
        rules = self._rules
        found = [
            (place, rules[name])
            for place, index in enumerate(inside.tolist())
            for name in neighbour_rules(around, index + MARGIN)
            if name in rules
        ]
        if found:
            places, rows = np.array(found).T
            np.add.at(scores, places, self._rules_RL[rows])
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
    scores_TL: NDArray[np.float32],
    spans: Sequence[tuple[int, int]],
    transitions_LL: NDArray[np.float32],
) -> NDArray[np.float32]:
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
    result: NDArray[np.float32] = product / product.sum(axis=2, keepdims=True)
    return result


def read_weights(packed: bytes) -> dict[str, Any]:
    """From gzip JSON: `transitions` [L][L] and `features`, name -> {label index: weight}. Raises
    CorruptError for anything else.
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
    return Tagger(read_weights((FILES / "weights" / "entities.json.gz").read_bytes()), gazetteer())
