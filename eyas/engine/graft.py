"""Text's chains in the head's trees: one trie of candidates for each request.

Knows proposals and chains. A text's token that the head proposes at the same place is the same
candidate: it has both kinds of evidence. A candidate that only text gives hangs on its parent, at
the end of its level.

    evidence   -1: the head's own. Otherwise the cell of what text says, and of what others say
               about it: kind of the text, another text's company, and the head's opinion
    company    0 no other text has a token at this place, 1 one before it has another, 2 one behind
               it has the same
    opinion    0 it was not asked (it grew nothing behind the parent), 1 it proposed other tokens,
               2 .. 5 it proposed this one, with a probability above .78, .37, .11, or below

Letters: B lines, C candidates of the head, C' of both, one line's unused ones among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

import numpy as np

from eyas.engine.text import NUM_KINDS, TextChain
from eyas.model.rows import PAD, Proposals, TextEvidence

NUM_OPINIONS = 6
NUM_COMPANIES = 3
NUM_CELLS = NUM_KINDS * NUM_COMPANIES * NUM_OPINIONS
_UNLIKELY = 100.0  # of a log-probability: what the head did not propose
UNPROPOSED = -_UNLIKELY / 2  # the score of a path that it did not propose is below it
SOURCES = ("head", "text", "both")


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
    """What text adds to one line. agreed: evidence of the head's candidates by their index. new:
    level, token, parent, score and evidence of others; the j-th is node C + j.
    """

    agreed: dict[int, int] = field(default_factory=dict)
    new: list[tuple[int, int, int, float, int]] = field(default_factory=list)


def _added(head: Proposals, starts: list[int], line: int, chains: Sequence[TextChain]) -> _Added:
    added, C, levels = _Added(), starts[-1], len(starts) - 1
    if line < 0:
        levels = 0
    tokens, parents, scores = (
        (head.tokens[line].tolist(), head.parents[line].tolist(), head.scores[line].tolist())
        if levels
        else ([], [], [])
    )
    nodes: dict[tuple[int, int], int] = {}  # text's so far, by parent and token
    with_text: set[int] = set()  # their parents
    for chain in chains:
        parent, score = -1, 0.0
        for level, (token, kind) in enumerate(zip(chain.tokens, chain.kinds, strict=True)):
            node = nodes.get((parent, token))
            if node is None:
                found, opinion = -1, 0
                if level < levels and parent < C:
                    place = range(starts[level], starts[level + 1])
                    found, opinion = _among(tokens, parents, place, (parent, token))
                if found >= 0:
                    opinion = opinion_of(score - scores[found])
                cell = cell_of(kind, int(parent in with_text), opinion)
                node = found if found >= 0 else C + len(added.new)
                if found >= 0:
                    added.agreed[node] = cell
                else:
                    added.new.append((level, token, parent, score - _UNLIKELY, cell))
                nodes[parent, token] = node
                with_text.add(parent)
            elif node < C:
                added.agreed[node] = in_company(added.agreed[node])
            else:
                known = added.new[node - C]
                added.new[node - C] = (*known[:4], in_company(known[4]))
            parent, score = node, scores[node] if node < C else added.new[node - C][3]
    return added


def _among(
    tokens: list[int], parents: list[int], level: range, wanted: tuple[int, int]
) -> tuple[int, int]:
    """The head's candidate of a level with this parent and token, -1 for none, and whether it has
    proposed anything there. The children of a node stand together.
    """
    parent, token = wanted
    try:
        c = parents.index(parent, level.start, level.stop)
    except ValueError:
        return -1, 0
    while c < level.stop and parents[c] == parent:
        if tokens[c] == token:
            return c, 1
        c += 1
    return -1, 1


def cell_of(kind: int, company: int, opinion: int) -> int:
    """Where a candidate of this evidence is counted."""
    return (NUM_COMPANIES * kind + company) * NUM_OPINIONS + opinion


def in_company(cell: int) -> int:
    """The cell of a candidate that another text has too."""
    kind, opinion = cell // (NUM_COMPANIES * NUM_OPINIONS), cell % NUM_OPINIONS
    return cell_of(kind, 2, opinion)


def is_proposed(cell: int) -> bool:
    """Whether the head proposes this candidate of text too."""
    return cell % NUM_OPINIONS >= 2


def opinion_of(surprise: float) -> int:
    """Of a token that the head proposed; surprise: -log of its probability there."""
    return 2 + min(3, int(2.0 * math.sqrt(max(surprise, 0.0))))


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
    cells = np.full(tokens.shape, -1, np.int32)
    depths = np.repeat(np.arange(1, depth + 1, dtype=np.int32), list(map(add, widths, extra)))
    # a node -> the place in the result; the last one is the root's
    moved = [place for d in range(levels) for place in range(begins[d], begins[d] + widths[d])]
    at = np.array([*moved, -1], dtype=np.int32)
    for b, (line, one) in enumerate(zip(lines, added, strict=True)):
        if line >= 0 and C:
            tokens[b, at[:-1]], scores[b, at[:-1]] = head.tokens[line], head.scores[line]
            parents[b, at[:-1]] = at[head.parents[line]]
        for node, cell in one.agreed.items():
            cells[b, moved[node]] = cell
        own = [
            begins[level] + widths[level] + place
            for (level, *_), place in zip(one.new, places[b], strict=True)
        ]
        for c, (_, token, parent, score, cell) in zip(own, one.new, strict=True):
            above = parent if parent < 0 else moved[parent] if parent < C else own[parent - C]
            tokens[b, c], parents[b, c], scores[b, c], cells[b, c] = token, above, score, cell
    is_grown = np.array([line >= 0 for line in lines], dtype=bool)
    return Proposals(tokens, scores, parents, depths, TextEvidence(cells, is_grown, levels))


def accepted_by_source(proposals: Proposals, emitted: Sequence[Sequence[int]]) -> dict[str, int]:
    """Of the tokens emitted by each line, how many were drafts of each of SOURCES: all but a line's
    last one, whatever has been drafted there.
    """
    text, counts = proposals.text, dict.fromkeys(SOURCES, 0)
    if text is None:
        counts["head"] = sum(max(0, len(tokens) - 1) for tokens in emitted)
        return counts
    for b, row in enumerate(emitted):
        parents, tokens, node = proposals.parents[b].tolist(), proposals.tokens[b].tolist(), -1
        for token in row[:-1]:
            node = next(
                (
                    c
                    for c in range(node + 1, len(parents))
                    if parents[c] == node and tokens[c] == token
                ),
                len(parents),
            )
            if node == len(parents):
                break
            cell = int(text.cells[b, node])
            counts["head" if cell < 0 else "both" if is_proposed(cell) else "text"] += 1
    return counts
