"""The draft's tree of proposals as plain lists, and the choice of its nodes. Pure functions; know no model.

candidates, level by level        tree of N nodes, the root being the last emitted token
(every child of every frontier)   kept: the N - 1 best by path probability
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Tree:
    """N nodes in an order where parents come first: node 0 is the root, parents[0] is -1."""

    tokens: list[int]
    parents: list[int]
    depths: list[int]

    @classmethod
    def of_root(cls, token: int) -> Tree:
        """A tree that proposes nothing: its round is plain decoding."""
        return cls([token], [-1], [0])

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(slots=True)
class Candidates:
    """All nodes the draft has scored: log-probability of the path from the root, parent (-1: the root), depth from 1."""

    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def expand(self, parent: int, tokens: list[int], log_probs: list[float]) -> None:
        """Add a node's children, given each child's own log-probability."""
        score, depth = (self.scores[parent], self.depths[parent]) if parent >= 0 else (0.0, 0)
        self.tokens += tokens
        self.scores += [score + log_prob for log_prob in log_probs]
        self.parents += [parent] * len(tokens)
        self.depths += [depth + 1] * len(tokens)

    def best(self, start: int, count: int) -> list[int]:
        """The `count` best candidates from index `start` on, in index order."""
        return sorted(sorted(range(start, len(self.tokens)), key=self._rank)[:count])

    def tree(self, root: int, num_verify_tokens: int) -> Tree:
        """The root and the num_verify_tokens - 1 best candidates: the rerank of EAGLE-2 (arXiv 2406.16858, section 4.2).

        A child never scores above its parent, and at equal scores the shallower goes first, so the kept nodes hang together.
        """
        kept = self.best(0, num_verify_tokens - 1)
        node_of = {candidate: node for node, candidate in enumerate(kept, start=1)} | {-1: 0}
        return Tree(
            [root, *(self.tokens[candidate] for candidate in kept)],
            [-1, *(node_of[self.parents[candidate]] for candidate in kept)],
            [0, *(self.depths[candidate] for candidate in kept)],
        )

    def _rank(self, candidate: int) -> tuple[float, int]:
        return (-self.scores[candidate], self.depths[candidate])
