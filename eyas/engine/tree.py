"""The trees that a round verifies: chosen candidates as nodes, requests beside each other. Pure
functions; know no model.

candidates, level by level        tree of N nodes, the root being the last emitted token
(every child of every frontier)   node 0, then the kept candidates in their order: parents come first
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eyas.engine.request import DraftedTree
from eyas.model.rows import Proposals


@dataclass(slots=True)
class Tree:
    """N nodes: token, parent (-1 for node 0, the root), depth, and the nodes it sees as bits,
    itself among them.
    """

    tokens: list[int]
    parents: list[int]
    depths: list[int]
    seen: list[int]

    @classmethod
    def of_root(cls, token: int) -> Tree:
        """A tree that proposes nothing: its round is plain decoding."""
        return cls([token], [-1], [0], [1])

    def __len__(self) -> int:
        return len(self.tokens)


def tree_of(root: int, proposals: Proposals, b: int, kept: Sequence[int]) -> Tree:
    """The tree of request b's candidates `kept`, ascending indices that hang together."""
    tree = Tree.of_root(root)
    tokens, parents, depths = proposals.tokens[b], proposals.parents[b], proposals.depths
    node_of = {-1: 0}
    for node, candidate in enumerate(kept, start=1):
        parent = node_of[int(parents[candidate])]
        node_of[candidate] = node
        tree.tokens.append(int(tokens[candidate]))
        tree.parents.append(parent)
        tree.depths.append(int(depths[candidate]))
        tree.seen.append(tree.seen[parent] | 1 << node)
    return tree


def drafted_tree(
    proposals: Proposals, b: int, kept_C: np.ndarray, emitted: Sequence[int]
) -> DraftedTree:
    """Request b's candidates `kept`, bool [C], as they are told, and which of them became the
    tokens that were emitted.
    """
    kept = kept_C.nonzero()[0].tolist()
    tree, scores = tree_of(-1, proposals, b, kept), [0.0, *proposals.scores[b, kept].tolist()]
    parents = tree.parents[1:]
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(zip(parents, tree.tokens[1:], strict=True), 1)
    }
    accepted, node = [], 0
    for token in emitted:
        if (child := children.get((node, token))) is None:
            break
        accepted.append(child - 1)
        node = child
    probabilities = [
        math.exp(score - scores[parent]) for score, parent in zip(scores[1:], parents, strict=True)
    ]
    return DraftedTree(tree.tokens[1:], [parent - 1 for parent in parents], probabilities, accepted)


def best_candidates(scores_C: np.ndarray, count: int) -> list[int]:
    """The `count` candidates of the most probable paths, ascending: the rerank of EAGLE-2 (arXiv
    2406.16858, section 4.2).

    A child never scores above its parent and stands behind it, so at equal scores too the kept
    nodes hang together.
    """
    kept: list[int] = np.sort(np.argsort(-scores_C, kind="stable")[:count]).tolist()
    return kept
