"""The tokens of one forward and where they sit in a paged cache. Knows no model and no request.

A request's keys and values lie in columns 0, 1, 2, ... of its own; column c is slot page_table[b, c
// page_size] * page_size + c % page_size. A row sees a dense prefix of its request's columns and,
behind it, the columns of its tree that its bits name:

    columns   first_column ....... prefix_len-1 | prefix_len + 0, + 1, ... + 63
    row m     all seen                          | those whose bit is set in seen[m], its own among them

A token of a prompt sees its prefix with itself (prefix_len = column + 1, no bits); a node of a tree
its ancestors' bits. Read in this order, prefix first and bits ascending, a row's keys stand in the
order of plain decoding.

Letters: M rows, B requests, P pages of the longest request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

MAX_TREE_COLUMNS = 64

# token, request, position, slot, prefix_len, seen: int64 [M] each
RowArrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Rows:
    """The M rows of one forward, on the device of the model. All int64 [M], but page_table int32
    [B, P].

    request: the row's line of page_table. position: of the rotation. slot: where its key and value
    are written. seen holds 64 bits as a signed number. first_column is 0 for a target; a draft has
    no entry in column 0.
    """

    token: torch.Tensor
    request: torch.Tensor
    position: torch.Tensor
    slot: torch.Tensor
    prefix_len: torch.Tensor
    seen: torch.Tensor
    page_table: torch.Tensor
    first_column: int = 0

    def __len__(self) -> int:
        return len(self.token)


@dataclass(frozen=True, slots=True)
class Roots:
    """Where the trees of B requests grow from: the target has the columns below lens[b], and
    lens[b] is to be the root's.

    starts: the first column without an entry of the draft; tokens: those of columns starts[b] ..
    lens[b], one request after the other. page_table int32 [B, P].
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
    device: str,
    first_column: int = 0,
) -> Rows:
    """Rows of consecutive tokens: those of request b go to columns starts[b], starts[b] + 1, ...
    and see all before them.

    With first_column 1, the draft's entries: column c is rotated by c - 1, the position of its
    feature.
    """
    # Lists first: for the few rows of a round they take half the time of as many small array
    # operations.
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
    return rows_of(arrays, page_table, device, first_column)


def rows_of(
    arrays: RowArrays | np.ndarray, page_table: np.ndarray, device: str, first_column: int = 0
) -> Rows:
    """Rows from their six arrays, in the order of the fields of Rows, moved to the device together."""
    joined = torch.from_numpy(np.ascontiguousarray(arrays, dtype=np.int64))
    pages = torch.from_numpy(page_table)
    if device != "cpu":
        joined, pages = joined.to(device, non_blocking=True), pages.to(device, non_blocking=True)
    token, request, position, slot, prefix_len, seen = joined.unbind()
    return Rows(token, request, position, slot, prefix_len, seen, pages, first_column)
