"""Exact verification of a tree of drafts, as a pure function.

The target draws every token from its own distribution. A drawn token that is a child of the current
node is accepted; any other is the bonus token and ends the walk. Every emitted token is the
target's own draw after those before it, by numbers that follow from the request's seed: the output
is that of plain decoding, whatever the tree, even one that follows from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(
    tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int | None]
) -> tuple[list[int], list[int]]:
    """Walk the tree from its root along the target's own draws.

    tokens, parents: of nodes 0 .. N-1; node 0 is the root, parents[n] < n. draw(node): the target's
    next token after `node`, called once for each node of the path, in order; None where it is not
    known yet, which ends the walk before it. Returns the accepted nodes, root excluded, and the
    emitted tokens: the nodes', then the bonus token.
    """
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    while True:
        token = draw(node)
        if token is None:  # the last emitted token becomes the bonus token
            return path[:-1], emitted
        emitted.append(token)
        child = children.get((node, token))
        if child is None:
            return path, emitted
        node = child
        path.append(node)
