"""What one forward reads and writes: rows of tokens, the paged caches, and the results.

    PagedCache.data [L, num_slots, W]     slot = page * page_size + offset; W: keys [Hk, D], values
    FeatureCache.data [num_slots, A]      the target's features of the same tokens

A target's cache, its features and its draft's cache share one page table: column c of request b is
slot page_table[b, c // page_size] * page_size + c % page_size. A row sees a dense prefix of its
request's columns and, behind it, the columns of its tree that its bits name:

    columns   first_column ....... prefix_len-1 | prefix_len + 0, + 1, ... + 63
    row m     all seen, or the last of a window | those whose bit is set in seen[m], its own too

A token of a prompt sees its prefix with itself (prefix_len = column + 1, no bits); a node of a tree
its ancestors' bits. Prefix first and bits ascending, a row's keys stand in the order of plain
decoding.

Letters: M rows, R rows whose logits are asked for, B requests, P pages of the longest request, C
candidates, L layers, Hk key heads, D head dimension, A = 3 * Ht, Ht target hidden size, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from eyas.model.arrays import Array

MAX_TREE_COLUMNS = 64

# token, request, position, slot, prefix_len, seen: int64 [M] each
RowArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Rows:
    """The M rows (tokens) of one forward.

    All int64 [M], but page_table int32 [B, P]. request: the row's line of page_table. position: of
    the rotation. slot: where its key and value are written. seen: 64 bits as a signed number.
    first_column is 0 for a target; a draft has no entry in column 0.
    """

    token: np.ndarray
    request: np.ndarray
    position: np.ndarray
    slot: np.ndarray
    prefix_len: np.ndarray
    seen: np.ndarray
    page_table: np.ndarray
    first_column: int = 0

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True, slots=True)
class Roots:
    """The roots of the trees of B requests, and the tokens before them that lack a draft entry.

    lens: the root's column. starts: the first column without an entry of the draft; lens for the
    target alone. tokens: those of columns starts[b] .. lens[b], request by request. page_table:
    int32 [B, P].
    """

    lens: list[int]
    starts: list[int]
    tokens: list[int]
    page_table: np.ndarray


def slots_of(
    page_table: np.ndarray, request: np.ndarray, column: np.ndarray, page_size: int
) -> np.ndarray:
    """The slots int64 of columns [...] of requests [...] under an int32 [B, P] page table."""
    slots: np.ndarray = (
        page_table[request, column // page_size].astype(np.int64) * page_size + column % page_size
    )
    return slots


def prompt_rows(
    tokens: Sequence[Sequence[int]],
    starts: Sequence[int],
    page_table: np.ndarray,
    page_size: int,
    first_column: int = 0,
) -> Rows:
    """Rows of consecutive tokens, each of which sees all before it.

    Those of request b go to columns starts[b], starts[b] + 1, ... With first_column 1, the draft's
    entries: column c is rotated by c - 1, the position of its feature.
    """
    # for the few rows of a round, lists take half the time of small array operations
    token: list[int] = []
    request: list[int] = []
    column: list[int] = []
    for b, (row, start) in enumerate(zip(tokens, starts, strict=True)):
        token += row
        request += [b] * len(row)
        column += range(start, start + len(row))
    arrays = np.zeros((6, len(token)), dtype=np.int64)
    arrays[0], arrays[1], arrays[2] = token, request, column
    arrays[3] = slots_of(page_table, arrays[1], arrays[2], page_size)
    arrays[4] = arrays[2] + 1
    arrays[2] -= first_column
    return rows_of(arrays, page_table, first_column)


def rows_of(arrays: RowArrays | np.ndarray, page_table: np.ndarray, first_column: int = 0) -> Rows:
    """Rows from their six arrays, in the order of Rows' fields."""
    joined = np.ascontiguousarray(arrays, dtype=np.int64)
    token, request, position, slot, prefix_len, seen = joined
    pages = np.ascontiguousarray(page_table)
    return Rows(token, request, position, slot, prefix_len, seen, pages, first_column)


class PagedCache:
    """What `num_layers` layers keep of num_pages * page_size tokens: keys and values, or what a
    convolution reads.
    """

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, slot_width: int, dtype: np.dtype[Any]
    ) -> None:
        """Memory: num_layers * num_pages * page_size * slot_width numbers, allocated here, once."""
        self.num_pages, self.page_size = num_pages, page_size
        # Zeros, not empty: a masked slot may still take part in a product, and 0 * NaN is NaN.
        self.data: Array = np.zeros((num_layers, num_pages * page_size, slot_width), dtype)

    def move(self, sources: list[int], destinations: list[int]) -> None:
        """Copy slots to slots in every layer; the sources are read before anything is written."""
        self.data[:, destinations] = self.data[:, sources]


class FeatureCache:
    """The target's features of every cached token, in the pages of its keys and values."""

    def __init__(self, num_slots: int, width: int, dtype: np.dtype[Any]) -> None:
        """Memory: num_slots * width numbers, allocated here, once."""
        self.data: Array = np.zeros((num_slots, width), dtype)

    def write(self, slots: np.ndarray, features: Array) -> None:
        """Put features [M, A] into slots int64 [M]."""
        self.data[slots] = features

    def read(self, slots: np.ndarray) -> Array:
        """The features [M, A] in slots int64 [M], copied."""
        features: Array = self.data[slots]
        return features

    def move(self, sources: list[int], destinations: list[int]) -> None:
        """As `PagedCache.move`."""
        self.data[destinations] = self.data[sources]


@dataclass(frozen=True, slots=True)
class TargetOutput:
    """aux_hidden: the features [M, 3 * Ht]; None without taps, or if they went to a FeatureCache.
    logits: [R, V]. best: int64 [R], the argmax of each row; of equal logits the smallest id.
    """

    aux_hidden: Array | None
    logits: np.ndarray
    best: np.ndarray


class Growth(NamedTuple):
    """Levels, K; candidates of a row of a draft step, k; rows of a request in a step, w: the best
    of the last level's candidates, k at most.
    """

    num_draft_steps: int
    tree_topk: int
    width: int


HEAD, TEXT = 1, 2  # bits of a candidate's sources; 0: there is no candidate at this place


@dataclass(frozen=True, slots=True)
class Proposals:
    """All candidates of B trees, level by level: k in the first, w * k in every further level.

    tokens int64 [B, C]; scores fp32 [B, C]: log-probability of the whole path; parents int32 [B,
    C]: a candidate's index, -1 for the root; depths int32 [C], from 1. The children of the
    frontier's place j stand at j * k .. j * k + k - 1 of the level's candidates.

    Where text was drafted too: sources int8 [B, C], who proposes each (HEAD, TEXT, both or 0), and
    kinds int32 [B, C], of what TEXT proposes. Candidates of text alone stand behind the head's,
    level by level (`engine/drafters.py`), and have their parents' scores.
    """

    tokens: np.ndarray
    scores: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    sources: np.ndarray | None = None
    kinds: np.ndarray | None = None

    def proposed_by(self, source: int) -> np.ndarray:
        """bool [B, C]: whether HEAD, or TEXT, proposes a candidate."""
        if self.sources is None:
            return np.full(self.scores.shape, source == HEAD)
        proposed: np.ndarray = self.sources & source > 0
        return proposed


@dataclass(frozen=True, slots=True)
class NodesToVerify:
    """Which candidates of B' drafting requests are verified, for the B requests of a round.

    line[b]: request b's line of proposals and kept, -1 for none. kept: bool [B', C].
    """

    line: list[int]
    proposals: Proposals
    kept: np.ndarray
