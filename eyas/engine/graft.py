"""Text's chains in the head's trees: one trie of candidates for each request.

A text's token that the head proposes at the same place is the same candidate, proposed by both. A
candidate that only text gives hangs on its parent, at the end of its level.

Letters: B lines, C candidates of the head, and then of both, one line's unused ones among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import numpy as np

from eyas.engine.text import TextChain
from eyas.model.rows import PAD, Proposals

_UNLIKELY = 100.0  # of a log-probability: what the head did not propose
UNPROPOSED = -_UNLIKELY / 2  # the score of a path that it did not propose is below it


def graft(
    head: Proposals, lines: Sequence[int], chains: Sequence[Sequence[TextChain]]
) -> Proposals:
    """The head's proposals and text's chains together.

    lines: for each of the B lines of the result, the head's line of it, -1 for none. chains: of
    each line; earlier ones have the say about a candidate's kind. A line without a candidate at
    some place has PAD there as its parent, and -1 as its token.
    """
    depth = int(head.depths[-1]) if len(head.depths) else 0
    starts = np.searchsorted(head.depths, np.arange(1, depth + 2)).tolist() or [0]
    added = [_added(head, starts, line, own) for line, own in zip(lines, chains, strict=True)]
    return _laid_out(head, starts, lines, added)


@dataclass(slots=True)
class _Added:
    """What text adds to one line. agreed: kinds of the head's candidates by their index. new:
    level, token, parent, score and kind of others; the j-th is node C + j.
    """

    agreed: dict[int, int] = field(default_factory=dict)
    new: list[tuple[int, int, int, float, int]] = field(default_factory=list)


def _added(head: Proposals, starts: list[int], line: int, chains: Sequence[TextChain]) -> _Added:
    added, C = _Added(), starts[-1]
    levels = len(starts) - 1 if line >= 0 else 0
    tokens, parents, scores = (
        (head.tokens[line].tolist(), head.parents[line].tolist(), head.scores[line].tolist())
        if levels
        else ([], [], [])
    )
    nodes: dict[tuple[int, int], int] = {}  # text's so far, by parent and token
    for chain in chains:
        parent, score = -1, 0.0
        for level, (token, kind) in enumerate(zip(chain.tokens, chain.kinds, strict=True)):
            node = nodes.get((parent, token), -1)
            if node < 0 and level < levels and parent < C:
                place = range(starts[level], starts[level + 1])
                node = _among(tokens, parents, place, (parent, token))
                if node >= 0:
                    added.agreed[node] = kind
            if node < 0:
                node = C + len(added.new)
                added.new.append((level, token, parent, score - _UNLIKELY, kind))
            nodes[parent, token] = node
            parent, score = node, scores[node] if node < C else added.new[node - C][3]
    return added


def _among(tokens: list[int], parents: list[int], level: range, wanted: tuple[int, int]) -> int:
    """The head's candidate of a level with this parent and token, -1 for none. The children of a
    node stand together.
    """
    parent, token = wanted
    try:
        c = parents.index(parent, level.start, level.stop)
    except ValueError:
        return -1
    while c < level.stop and parents[c] == parent:
        if tokens[c] == token:
            return c
        c += 1
    return -1


def _laid_out(
    head: Proposals, starts: list[int], lines: Sequence[int], added: list[_Added]
) -> Proposals:
    """Level by level: the head's candidates, then the new ones of the line that has most."""
    B, C, levels = len(lines), starts[-1], len(starts) - 1
    depth = max([levels, *(1 + level for one in added for level, *_ in one.new)])
    # of each line's new nodes: how many of its own are before it in its level
    places: list[list[int]] = []
    extra = [0] * depth
    for one in added:
        counts = [0] * depth
        places.append([])
        for level, *_ in one.new:
            places[-1].append(counts[level])
            counts[level] += 1
        extra = list(map(max, extra, counts))
    widths = [starts[d + 1] - starts[d] if d < levels else 0 for d in range(depth)]
    begins = [0, *accumulate(map(add, widths, extra))]
    tokens, parents = np.full((B, begins[-1]), -1), np.full((B, begins[-1]), PAD, np.int32)
    scores = np.full(tokens.shape, -np.inf, np.float32)
    kinds = np.full(tokens.shape, -1, np.int32)
    depths = np.repeat(np.arange(1, depth + 1, dtype=np.int32), list(map(add, widths, extra)))
    # a node -> the place in the result; the last one is the root's
    moved = [place for d in range(levels) for place in range(begins[d], begins[d] + widths[d])]
    at = np.array([*moved, -1], dtype=np.int32)
    for b, (line, one) in enumerate(zip(lines, added, strict=True)):
        if line >= 0 and C:
            tokens[b, at[:-1]], scores[b, at[:-1]] = head.tokens[line], head.scores[line]
            parents[b, at[:-1]] = at[head.parents[line]]
        for node, kind in one.agreed.items():
            kinds[b, moved[node]] = kind
        own = [
            begins[level] + widths[level] + place
            for (level, *_), place in zip(one.new, places[b], strict=True)
        ]
        for c, (_, token, parent, score, kind) in zip(own, one.new, strict=True):
            above = parent if parent < 0 else moved[parent] if parent < C else own[parent - C]
            tokens[b, c], parents[b, c], scores[b, c], kinds[b, c] = token, above, score, kind
    return Proposals(tokens, scores, parents, depths, kinds)
