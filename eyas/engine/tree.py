"""Trees of drafts: which candidates the target verifies, and the tree that they form.

    candidates, level by level       tree of N nodes: node 0, the root, is the last emitted token;
    (all children of all frontiers)  the kept candidates follow in their order, parents first

A node's path probability is the chance that it is emitted; the sum over a tree is its expected
number of extra tokens. So the best n nodes of all requests are the n most probable, and only n is
to be chosen: one sort gives one budget over all requests.

Letters: B requests, C candidates a request, n nodes kept in all, N nodes of a tree.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import numpy as np

from eyas.engine.request import DraftedTree, Source
from eyas.errors import ConfigError
from eyas.model.rows import HEAD, TEXT, NodesToVerify, Proposals

MAX_NODES = 63  # a request's nodes without the root: a row's mask has 64 bits

Mode = Literal["off", "fixed", "auto"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Whether trees are drafted, and their size: exact in fixed, a maximum in auto.

    num_draft_steps: levels; tree_topk: branches of a node, 1 for a chain; num_verify_tokens: tokens
    that the target judges, root included.
    """

    mode: Mode = "auto"
    num_draft_steps: int = 6
    tree_topk: int = 3
    num_verify_tokens: int = 12

    def __post_init__(self) -> None:
        limits = {"num_draft_steps": (1, 16), "tree_topk": (1, 16)}
        limits["num_verify_tokens"] = (2, MAX_NODES + 1)
        for name, (least, most) in limits.items():
            if not least <= getattr(self, name) <= most:
                raise ConfigError(
                    f"speculation: {name} is {getattr(self, name)}, not between {least} and {most}",
                    "for example fixed(6,3,12): draft steps, branches a step, tokens that the "
                    "target judges, root included",
                )
        most = MAX_NODES + 1
        if self.num_columns > most:
            raise ConfigError(
                f"speculation: {self} drafts {self.num_columns} nodes, more than {most}",
                f"take {most // self.tree_topk + 1} draft steps or fewer, or "
                f"{most // (self.num_draft_steps - 1)} branches or fewer: (steps - 1) x branches "
                f"may be {most}",
            )

    @classmethod
    def parse(cls, text: str) -> Speculation:
        """`off`, `auto`, `fixed`, the last two also with sizes: `fixed(6,3,12)`. Raises
        ConfigError.
        """
        number = r"\s*(\d+)\s*"
        sizes = rf"\({number},{number},{number}\)"
        match = re.fullmatch(rf"\s*(?:(off)|(fixed|auto)\s*(?:{sizes})?)\s*", text)
        if match is None:
            raise ConfigError(
                f"speculation is {text!r}",
                "write off, auto, fixed or fixed(6,3,12): draft steps, branches, tokens judged",
            )
        mode = cast(Mode, match[1] or match[2])
        return cls(mode, *map(int, match.groups()[2:])) if match[3] else cls(mode)

    @property
    def num_columns(self) -> int:
        """Columns behind the root that growing a tree writes to."""
        return (self.num_draft_steps - 1) * self.tree_topk

    def __str__(self) -> str:
        sizes = f"({self.num_draft_steps},{self.tree_topk},{self.num_verify_tokens})"
        return self.mode if self.mode == "off" else self.mode + sizes


# Which candidates are verified


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """kept bool [B, C] is connected. expected_tokens includes one token for each request."""

    kept: np.ndarray
    num_nodes: int
    expected_tokens: float
    predicted_ms: float


def choose(
    path_probs: np.ndarray,
    ms_of_nodes: np.ndarray,
    num_tokens: int,
    fixed_ms: float,
    max_nodes: int,
    rate: float,
) -> NodeChoice:
    """The prefix of the sorted candidates with the highest tokens - rate * ms.

    path_probs [B, C]: level by level, a child's at most its parent's. ms_of_nodes[n]: the verifying
    forward with n nodes besides the roots; its length limits n. num_tokens: emitted without any
    node. max_nodes: per request. rate: long-run tokens/ms; total tokens over total time are highest
    when each round stops where a node earns less than the average round.
    """
    B, C = path_probs.shape
    width = min(C, max_nodes)
    # Stable: at equal scores a parent, whose index is lower, comes before its child.
    order = np.argsort(-path_probs, axis=1, kind="stable")[:, :width]
    if B == 1:
        best = path_probs[0, order[0]]
        flat = order[0]
    else:
        ranked = np.take_along_axis(path_probs, order, 1).ravel()
        pooled = np.argsort(-ranked, kind="stable")
        best = ranked[pooled]
        flat = (order + C * np.arange(B)[:, None]).ravel()[pooled]
    limit = min(best.size, len(ms_of_nodes) - 1)
    tokens = np.empty(limit + 1)
    tokens[0] = num_tokens
    tokens[1:] = best[:limit]
    np.cumsum(tokens, out=tokens)  # in the library's order: a tie here is a tie there
    ms = ms_of_nodes[: limit + 1] + fixed_ms
    n = int((tokens - rate * ms).argmax())
    kept = np.zeros(B * C, dtype=bool)
    kept[flat[:n]] = True
    return NodeChoice(kept.reshape(B, C), n, float(tokens[n]), float(ms[n]))


def most_probable(scores: np.ndarray, num_nodes: int) -> np.ndarray:
    """The tree of a fixed size, kept bool [B, C]: each request's `num_nodes` best (EAGLE-2, arXiv
    2406.16858, section 4.2). A child never scores above its parent and stands behind it: the kept
    nodes are connected.
    """
    kept = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(kept, np.argsort(-scores, axis=1, kind="stable")[:, :num_nodes], True, axis=1)
    return kept


def goes_on(frontier_Bk: np.ndarray, thresholds: Sequence[float], level: int) -> bool:
    """Whether a level grows from these frontiers, scores [B, k]; level: 0 for depth 2.

    thresholds [K]: the last is the path probability from which a node is worth its time. A level
    grows while the requests' best paths exceed it, in sum, by the level's threshold.
    """
    best_B = np.exp(frontier_Bk.max(axis=1).astype(np.float64))
    return float(np.maximum(best_B - thresholds[-1], 0.0).sum()) >= thresholds[level]


# The tree that they form


@dataclass(slots=True)
class Tree:
    """N nodes: token and parent, -1 for node 0, the root."""

    tokens: list[int]
    parents: list[int]

    @classmethod
    def of_root(cls, token: int) -> Tree:
        """Without proposals: its round is plain decoding."""
        return cls([token], [-1])

    def __len__(self) -> int:
        return len(self.tokens)


def tree_of(root: int, proposals: Proposals, b: int, kept: Sequence[int]) -> Tree:
    """The tree of request b's candidates `kept`, ascending connected indices."""
    tree = Tree.of_root(root)
    tokens, parents, node_of = proposals.tokens[b], proposals.parents[b], {-1: 0}
    for node, candidate in enumerate(kept, start=1):
        node_of[candidate] = node
        tree.tokens.append(int(tokens[candidate]))
        tree.parents.append(node_of[int(parents[candidate])])
    return tree


def tree_of_line(root: int, chosen: NodesToVerify, b: int) -> Tree:
    """The tree of request b of a round: its root alone where it does not draft."""
    line = chosen.line[b]
    kept = chosen.kept[line].nonzero()[0].tolist() if line >= 0 else []
    return tree_of(root, chosen.proposals, line, kept) if kept else Tree.of_root(root)


def drafted_tree(
    proposals: Proposals, b: int, kept_C: np.ndarray, emitted: Sequence[int]
) -> DraftedTree:
    """The update's form of request b's candidates `kept_C`, bool [C], with the accepted ones."""
    kept = kept_C.nonzero()[0].tolist()
    tree, scores = tree_of(-1, proposals, b, kept), [0.0, *proposals.scores[b, kept].tolist()]
    tokens, parents = tree.tokens[1:], tree.parents[1:]
    children = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True), 1)}
    accepted, node = [], 0
    for token in emitted:
        if (child := children.get((node, token))) is None:
            break
        accepted.append(child - 1)
        node = child
    named: dict[int, Source] = {HEAD: "head", TEXT: "text", HEAD | TEXT: "both"}
    given = [HEAD] * len(kept) if proposals.sources is None else proposals.sources[b, kept].tolist()
    sources = [named[one] for one in given]
    probabilities = [
        None if source == "text" else math.exp(score - scores[parent])
        for score, parent, source in zip(scores[1:], parents, sources, strict=True)
    ]
    above = [parent - 1 for parent in parents]
    return DraftedTree(tokens, above, probabilities, accepted, sources)
