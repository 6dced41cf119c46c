"""Exact verification of a tree: the target draws, the tree only saves it forwards. Pure function;
knows no model.

The next token is drawn from the target's own distribution at the current node. If it is a child of
the node, it is accepted and the walk goes on from there; otherwise it is the bonus token and the
walk ends. Every emitted token is a draw of the target given what precedes it, so the output's
distribution is the target's, whatever the tree (EAGLE3.md, section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(
    tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int]
) -> tuple[list[int], list[int]]:
    """Walk the tree of nodes 0 .. N-1 (0 the root, parents[n] < n). draw(node) gives the target's
    next token after the path to `node`, and is called once a node.

    Returns the accepted nodes in order, root excluded, and the emitted tokens: those of the nodes,
    then the bonus token. num_accepted_drafts is the length of the first; accept_length that of the
    second.
    """
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    while True:
        token = draw(node)
        emitted.append(token)
        child = children.get((node, token))
        if child is None:
            return path, emitted
        node = child
        path.append(node)
