"""Trees in tensors of fixed shape: grown, chosen, laid out as rows and walked.

The twins of `Draft.propose`, `eyas.engine.tree` and `verify` for a device whose values the host
does not learn. Pure functions of tensors, and `Foresight`, which says how large the trees are; they
know the head's forward and no request.

    lines    b = 0 .. B-1 samples; line B is the void: its pages belong to no sample
    rows     m = 0 .. B-1 the roots, then N nodes by line, in each line by candidate: parents first

Lines, nodes and places of a path that a fixed shape has too many of run in the void: they see their
own column only.

Letters: B lines, k tree_topk, C candidates of a line, N nodes of all lines, M = B + N rows, D
depth, P pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from eyas.engine.draft import Draft
from eyas.model.rows import PagedCache, Proposals, Rows

NEWEST_WEIGHT = 0.1  # of the newest round in the means of `Foresight`


@dataclass(frozen=True, slots=True)
class BatchLines:
    """What a round starts from. root, length int64 [B]: the last emitted token and its column;
    page_table int32 [B + 1, P].
    """

    root: torch.Tensor
    length: torch.Tensor
    page_table: torch.Tensor
    page_size: int

    def __len__(self) -> int:
        return len(self.root)

    def indices(self) -> torch.Tensor:
        return torch.arange(len(self.root), device=self.root.device)

    def slots(self, line: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """int64 [...] slots of columns [...] of lines [...]."""
        return (
            self.page_table[line, column // self.page_size].long() * self.page_size
            + column % self.page_size
        )

    def rows(
        self,
        token: torch.Tensor,
        line: torch.Tensor,
        column: torch.Tensor,
        sight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> Rows:
        """Rows of a target; sight: their positions, prefix_len and seen. Line B is the void."""
        position, prefix_len, seen = sight
        return Rows(
            token, line, position, self.slots(line, column), prefix_len, seen, self.page_table
        )

    def entries(
        self, token: torch.Tensor, line: torch.Tensor, column: torch.Tensor, real: torch.Tensor
    ) -> Rows:
        """Rows of a draft for tokens that have all before them as prefix; those not real go to the
        void.
        """
        line, column = torch.where(real, line, len(self)), torch.where(real, column, 1)
        slot, nothing = self.slots(line, column), torch.zeros_like(column)
        return Rows(
            token, line, column - 1, slot, column + 1, nothing, self.page_table, first_column=1
        )


@dataclass(frozen=True, slots=True)
class TensorProposals:
    """As `Proposals`: tokens int64, scores fp32 and parents int64 [B, C], level by level; C = k + L
    * k * k.
    """

    tokens: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor
    topk: int

    def depths(self) -> torch.Tensor:
        """int64 [C], from 1."""
        index = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return torch.where(
            index < self.topk,
            1,
            2 + torch.div(index - self.topk, self.topk**2, rounding_mode="floor"),
        )


def num_candidates(depth: int, topk: int) -> int:
    """C of a line after so many levels."""
    return topk + (depth - 1) * topk * topk


def grow(
    draft: Draft, cache: PagedCache, lines: BatchLines, h_BH: torch.Tensor, sizes: tuple[int, int]
) -> TensorProposals:
    """Trees of D levels behind the roots' entries, whose outputs h_BH are. sizes: (D, k). All
    levels are drafted.
    """
    D, k = sizes
    B = len(lines)
    ids, log_probs = draft.proposals(h_BH, k)
    tokens, scores, parents = [ids], [log_probs], [torch.full_like(ids, -1)]
    line = lines.indices().repeat_interleave(k)
    start = lines.length.repeat_interleave(k)
    within = torch.arange(k, device=ids.device)
    frontier_Bk = within.expand(B, k)
    seen_Bk = torch.zeros_like(ids)
    h = h_BH.repeat_interleave(k, 0)
    for level in range(D - 1):
        place = level * k + within
        seen_Bk = seen_Bk | (torch.ones_like(place) << place)
        token = torch.cat(tokens, 1).gather(1, frontier_Bk)
        column = start + 1 + place.repeat(B)
        slot = lines.slots(line, column)
        h = draft.step(
            Rows(
                token.flatten(),
                line,
                start + level,
                slot,
                start + 1,
                seen_Bk.flatten(),
                lines.page_table,
                1,
            ),
            h,
            cache,
        )
        ids, log_probs = draft.proposals(h, k)
        above_Bk = torch.cat(scores, 1).gather(1, frontier_Bk)
        new = (above_Bk[:, :, None] + log_probs.view(B, k, k)).flatten(1)
        tokens.append(ids.view(B, k * k))
        scores.append(new)
        parents.append(frontier_Bk.repeat_interleave(k, 1))
        # A stable sort, not topk: of equal paths the first.
        best_Bk = new.sort(dim=1, descending=True, stable=True).indices[:, :k].sort(dim=1).values
        frontier_Bk = best_Bk + num_candidates(level + 1, k)
        parent_Bk = torch.div(best_Bk, k, rounding_mode="floor")
        seen_Bk = seen_Bk.gather(1, parent_Bk)
        h = h[(lines.indices()[:, None] * k + parent_Bk).flatten()]
    return TensorProposals(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), k)


def choose(
    scores_BC: torch.Tensor, drafts_B: torch.Tensor, max_nodes: int, num_nodes: int
) -> torch.Tensor:
    """The num_nodes best candidates of the lines that draft, at most max_nodes a line: b * C + c,
    ascending, int64 [N].

    Too few of them leave places at the end that say B * C. A child never scores above its parent
    and stands behind it, so by stable sorts the chosen hang together, at equal scores too.
    """
    B, C = scores_BC.shape
    ranked = scores_BC.sort(dim=1, descending=True, stable=True)
    scores = torch.where(drafts_B[:, None], ranked.values[:, :max_nodes], float("-inf"))
    flat = ranked.indices[:, :max_nodes] + C * torch.arange(B, device=scores.device)[:, None]
    flat = torch.where(drafts_B[:, None], flat, B * C)
    assert num_nodes <= flat.numel(), "more nodes are asked for than there are candidates"
    best = scores.flatten().sort(descending=True, stable=True).indices[:num_nodes]
    return flat.flatten()[best].sort().values


@dataclass(frozen=True, slots=True)
class TensorTrees:
    """The trees of all lines as int64 [M]: parent is a row (a root's: itself), node the place in
    the line's own tree.
    """

    token: torch.Tensor
    line: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    node: torch.Tensor
    seen: torch.Tensor
    num_lines: int

    def rows(self, lines: BatchLines) -> Rows:
        """As the target's forward takes them."""
        real = self.line < self.num_lines
        length = torch.where(
            real, torch.cat((lines.length, lines.length.new_zeros(1)))[self.line], 0
        )
        prefix_len = torch.where(real, length, 1)
        column = torch.where(real, length + self.node, 0)
        return lines.rows(
            self.token, self.line, column, (length + self.depth, prefix_len, self.seen)
        )


def roots(lines: BatchLines) -> TensorTrees:
    """Trees of roots only: plain decoding."""
    index, nothing = lines.indices(), torch.zeros_like(lines.root)
    return TensorTrees(
        lines.root, index, index, nothing, nothing, torch.ones_like(index), len(lines)
    )


def trees_of(
    lines: BatchLines, candidates: TensorProposals, chosen_N: torch.Tensor, depth: int
) -> TensorTrees:
    """The trees of chosen candidates: ascending b * C + c, at the end perhaps B * C for nodes in
    the void.
    """
    B, C = candidates.tokens.shape
    N = len(chosen_N)
    root = roots(lines)
    real = chosen_N < B * C
    safe = torch.where(real, chosen_N, 0)
    row = B + torch.arange(N, device=chosen_N.device)
    line = torch.where(real, torch.div(safe, C, rounding_mode="floor"), B)
    row_of = torch.zeros(B * C + 1, dtype=torch.int64, device=chosen_N.device).scatter(
        0, chosen_N, row
    )
    above = candidates.parents.flatten()[safe]
    parent = torch.where(above < 0, line, row_of[torch.where(above < 0, B * C, line * C + above)])
    # In the void each is its own root.
    parent = torch.where(real, parent, row)
    node = row - B + 1 - torch.searchsorted(chosen_N, line * C)
    own = torch.where(real, torch.ones_like(node) << torch.where(real, node, 0), 0)
    trees = TensorTrees(
        torch.cat((root.token, torch.where(real, candidates.tokens.flatten()[safe], 0))),
        torch.cat((root.line, line)),
        torch.cat((root.parent, parent)),
        torch.cat((root.depth, torch.where(real, candidates.depths()[safe % C], 0))),
        torch.cat((root.node, torch.where(real, node, 0))),
        torch.cat((root.seen, own)),
        B,
    )
    own, seen = trees.seen, trees.seen
    for _ in range(depth):
        seen = own | seen[trees.parent]
    return TensorTrees(trees.token, trees.line, trees.parent, trees.depth, trees.node, seen, B)


@dataclass(frozen=True, slots=True)
class AcceptedPaths:
    """int64 [B, D + 1] each, of which count [B] hold: emitted tokens, and the rows after which they
    were drawn.
    """

    tokens: torch.Tensor
    rows: torch.Tensor
    count: torch.Tensor

    def taken(self) -> torch.Tensor:
        """bool [B, D + 1]: the places that hold."""
        return torch.arange(self.rows.shape[1], device=self.rows.device) < self.count[:, None]

    def last(self, places: torch.Tensor) -> torch.Tensor:
        """[B] of [B, D + 1]: at the last place that holds."""
        return places.gather(1, self.count[:, None] - 1)[:, 0]


def walk(
    trees: TensorTrees, depth: int, draw: Callable[[torch.Tensor, int], torch.Tensor]
) -> AcceptedPaths:
    """`verify.accept` for all lines at once. draw(rows [B], place) gives the target's next tokens
    there.
    """
    B = trees.num_lines
    row = torch.arange(B, device=trees.token.device)
    going = torch.ones_like(row, dtype=torch.bool)
    tokens, rows, count = [], [], torch.ones_like(row)
    node_token, node_parent = trees.token[B:], trees.parent[B:]
    for place in range(depth + 1):
        token = draw(row, place)
        tokens.append(token)
        rows.append(row)
        if place == depth or not len(node_token):
            continue
        is_child = (node_parent == row[:, None]) & (node_token == token[:, None])
        going = going & is_child.any(1)
        row = torch.where(going, B + is_child.long().argmax(1), row)
        count = count + going
    return AcceptedPaths(torch.stack(tokens, 1), torch.stack(rows, 1), count)


def move_accepted(cache: PagedCache, rows: Rows, lines: BatchLines, walked: AcceptedPaths) -> None:
    """Bring the keys and values of each path together behind its prefix. Roots lie where they
    belong.
    """
    if walked.rows.shape[1] == 1:
        return
    taken = walked.taken()[:, 1:]
    place = torch.arange(1, walked.rows.shape[1], device=taken.device)
    void = lines.page_table[-1, 0].long() * lines.page_size
    source = torch.where(taken, rows.slot[walked.rows[:, 1:]], void)
    column = torch.where(taken, lines.length[:, None] + place, 0)
    destination = torch.where(taken, lines.slots(lines.indices()[:, None], column), void)
    cache.move(source.flatten(), destination.flatten())


class Foresight:
    """How large the next round's trees are, where the host must say so before they grow.

    The policy's rule for one more level (`eyas.engine.tree.goes_on`) is applied to the frontiers of
    past rounds, and the number of nodes is that of the last rounds: means over rounds, by request.
    Letters: S requests that draft.
    """

    def __init__(self, num_draft_steps: int) -> None:
        # what the best path has above the worth of a node, by level
        self._frontiers = 0.7 ** np.arange(1, num_draft_steps)
        self._num_nodes: float | None = None

    def depth(self, thresholds: list[float], num_requests: int) -> int:
        """Levels, the first included, for `thresholds` as `Draft.propose` takes them."""
        expected = (num_requests * self._frontiers).tolist()
        for level, (sum_of_best, least) in enumerate(
            zip(expected, thresholds[:-1], strict=True), start=1
        ):
            if sum_of_best < least:
                return level
        return len(thresholds)

    def num_nodes(self, num_requests: int, max_nodes: int) -> int:
        """Of all trees, roots excluded: at least one."""
        each = max_nodes if self._num_nodes is None else self._num_nodes
        return max(1, math.ceil(num_requests * each))

    def observe(self, proposals: Proposals, num_nodes: int, unworthy: float) -> None:
        """num_nodes: how many of these candidates would have been worth it. unworthy: the last of
        the round's thresholds.
        """
        S = len(proposals.scores)
        for level in range(min(int(proposals.depths[-1]), len(self._frontiers))):
            best = np.exp(proposals.scores[:, proposals.depths == level + 1].max(1))
            above = float(np.maximum(best - unworthy, 0.0).mean())
            self._frontiers[level] += NEWEST_WEIGHT * (above - self._frontiers[level])
        each = num_nodes / S
        self._num_nodes = (
            each
            if self._num_nodes is None
            else self._num_nodes + NEWEST_WEIGHT * (each - self._num_nodes)
        )
