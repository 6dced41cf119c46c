"""Exact verification of a tree of drafts, as a pure function.

The target draws every token from its own distribution at the current node; the tree only saves
forwards. If the token is a child of the node, it is accepted and the walk goes on there; otherwise
it is the bonus token and the walk ends. Every emitted token is a draw of the target given what
precedes it, by numbers that follow from the request's seed: the output is that of plain decoding,
whatever the tree, even a tree that follows from the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


def accept(
    tokens: Sequence[int], parents: Sequence[int], draw: Callable[[int], int | None]
) -> tuple[list[int], list[int]]:
    """Walk the tree from its root along the target's own draws.

    tokens, parents: of nodes 0 .. N-1; node 0 is the root, parents[n] < n. draw(node): the target's
    next token after the path to `node`, called once for each node on the path, in order; None: not
    known yet, and the walk ends before it. Returns the accepted nodes in order, root excluded, and
    the emitted tokens: those of the nodes, then the bonus token.
    """
    children = {(parents[node], tokens[node]): node for node in range(1, len(tokens))}
    node = 0
    path: list[int] = []
    emitted: list[int] = []
    while True:
        token = draw(node)
        if token is None:  # the last token takes the bonus token's place: its node is not accepted
            return path[:-1], emitted
        emitted.append(token)
        child = children.get((node, token))
        if child is None:
            return path, emitted
        node = child
        path.append(node)
