"""Exact verification of a tree: the target draws, the tree only saves it forwards. Pure function; knows no model.

The next token is drawn from the target's own distribution at the current node. If it is a child of the node, it is
accepted and the walk goes on from there; otherwise it is the bonus token and the walk ends. Every emitted token is a draw
of the target given what precedes it, so the output's distribution is the target's, whatever the tree (EAGLE3.md,
section 4).
"""

from __future__ import annotations

from collections.abc import Callable

from eyas.engine.tree import Tree


def accept(tree: Tree, draw: Callable[[int], int]) -> tuple[list[int], list[int]]:
    """Walk the tree. draw(node) gives the target's next token after the path to `node`, and is called once a node.

    Returns the accepted nodes in order, root excluded, and the emitted tokens: those of the nodes, then the bonus token.
    num_accepted_drafts is the length of the first; accept_length that of the second.
    """
    children = tree.children()
    node, path, emitted = 0, [], []
    while True:
        token = draw(node)
        emitted.append(token)
        if token not in children[node]:
            return path, emitted
        node = children[node][token]
        path.append(node)
