"""Tree attention as a Triton kernel over the paged cache, for CUDA. Knows of no layer; `attention`
has the definition.

A program takes a tile of rows of one request with all query heads of one key head, so that they
share every load of a key:

    tile    row 0 | head 0 .. group-1, row 1 | head 0 .. group-1, ...    BLOCK_M lines of a product
    keys    columns that all rows of the tile have in their prefix       no mask
            columns up to the last one that a row of the tile sees       mask: prefix_len, bits

Scores, the running maximum and sums are fp32. Where there are few tiles the keys are split between
programs, and a second kernel adds up their parts. Planning and attending never wait for the device.
TRITON_INTERPRET=1, set before Triton is imported, runs all of it on CPU tensors.

Letters: M rows, B requests, T tiles, R rows of a tile, S splits, P pages, Hq and Hk query and key
heads, D head dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from eyas.model.rows import Rows

MAX_BLOCK_M = 64
MIN_SPLIT_COLUMNS = 256  # below this, adding up the parts costs more than it saves
MAX_SPLITS = 16
PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """The rows, and the tiles made of them at the first layer: how many rows go together depends on
    the heads.

    splits: over how many programs the keys of a tile are spread; None chooses by the device's size.
    """

    rows: Rows
    page_size: int
    splits: int | None = None
    _tiles: dict[int, Tiles] = field(default_factory=dict)

    @classmethod
    def of(cls, rows: Rows, page_size: int) -> TritonPlan:
        return cls(rows, page_size)

    def attend(self, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        """q [M, Hq, D], kv [num_slots, 2, Hk, D] -> [M, Hq, D]."""
        M, Hq, D = q.shape
        Hk = kv.shape[2]
        rows = self.rows
        if q.stride(-1) != 1:
            q = q.contiguous()
        assert kv.is_contiguous(), "a layer of a cache is contiguous"
        tiles = self._tiles_of(Hq // Hk)
        S = self.splits or _num_splits(
            len(tiles.first) * Hk, rows.page_table.shape[1] * self.page_size, q.device
        )
        mixed = torch.empty(M, Hq, D, dtype=q.dtype, device=q.device)
        parts = mixed if S == 1 else torch.empty(S, M, Hq, D, dtype=torch.float32, device=q.device)
        # log2 of each part's sum of exponentials
        weights = torch.empty(S, M, Hq, dtype=torch.float32, device=q.device)
        BLOCK_D, halves = triton.next_power_of_2(D), q.element_size() == 2
        _attend[(len(tiles.first), Hk, S)](
            q, kv, parts, weights, tiles.first, tiles.stop, tiles.order,
            rows.request, rows.prefix_len, rows.seen, rows.position, rows.page_table,
            M, Hk, rows.page_table.shape[1], rows.first_column, q.stride(0), q.stride(1),
            D**-0.5 * math.log2(math.e),
            GROUP=Hq // Hk, ROWS=tiles.R, D=D, PAGE=self.page_size, S=S,
            WINDOW=rows.window or 0, BLOCK_M=tiles.block_m(Hq // Hk),
            BLOCK_N=64 if halves else 32, BLOCK_D=BLOCK_D, DOT=_dot_dtype(q.dtype),
            num_warps=4 if halves else 8, num_stages=2, enable_fp_fusion=True,
        )  # fmt: skip
        if S > 1:
            _add_parts[(M, Hq)](
                parts,
                weights,
                mixed,
                M,
                Hq,
                D=D,
                S=S,
                BLOCK_S=triton.next_power_of_2(S),
                BLOCK_D=BLOCK_D,
                num_warps=1,
                enable_fp_fusion=True,
            )
        return mixed

    def _tiles_of(self, group: int) -> Tiles:
        if group not in self._tiles:
            self._tiles[group] = Tiles.of(self.rows, group)
        return self._tiles[group]


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile t is rows order[first[t]], ..., order[stop[t] - 1], at most R, all of one request. Some
    at the end are empty.

    order int64 [M] sorts the rows by request; first, stop int64 [T].
    """

    order: torch.Tensor
    first: torch.Tensor
    stop: torch.Tensor
    R: int

    @classmethod
    def of(cls, rows: Rows, group: int) -> Tiles:
        """T is the most that any division of M rows among B requests needs: the true number is
        known to the device alone.
        """
        M, B, device = len(rows), len(rows.page_table), rows.request.device
        R = max(1, min(triton.next_power_of_2(triton.cdiv(M, B)), MAX_BLOCK_M // group))
        request, order = rows.request.sort(stable=True)
        starts = torch.searchsorted(request, torch.arange(B + 1, device=device))
        tiles_before = torch.zeros(B + 1, dtype=torch.int64, device=device)
        torch.cumsum((starts.diff() + (R - 1)) // R, 0, out=tiles_before[1:])
        tile = torch.arange((M + min(M, B) * (R - 1)) // R, device=device)
        owner = torch.searchsorted(tiles_before[1:], tile, right=True).clamp_(max=B - 1)
        first = starts[owner] + (tile - tiles_before[owner]) * R
        return cls(order, first, torch.minimum(first + R, starts[owner + 1]), R)

    def block_m(self, group: int) -> int:
        """Lines of a tile's matrix product: a power of two, and 16 at least, as the tensor cores
        want it.
        """
        return max(16, int(triton.next_power_of_2(self.R * group)))


def _num_splits(programs: int, columns: int, device: torch.device) -> int:
    """As many as keep the whole device busy, unless the parts would become small."""
    if device.type != "cuda":
        return 1
    wanted = (
        PROGRAMS_PER_PROCESSOR
        * torch.cuda.get_device_properties(device).multi_processor_count
        // programs
    )
    return max(1, min(wanted, columns // MIN_SPLIT_COLUMNS, MAX_SPLITS))


def _dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """What matrix products take: the cache's type, but fp32 for bf16 in the interpreter, which
    multiplies the bits of bf16.
    """
    if dtype == torch.bfloat16:
        return tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16
    return tl.float16 if dtype == torch.float16 else tl.float32


@triton.jit
def _attend(
    q, kv, parts, weights, tile_first, tile_stop, order,
    request_M, prefix_len_M, seen_M, position_M, page_table,
    M, Hk, P, first_column, q_row, q_head, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, S: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """parts [S, M, Hq, D] and weights [S, M, Hq] from one tile, one key head, and one of S ranges
    of columns.
    """
    first, stop = tl.load(tile_first + tl.program_id(0)), tl.load(tile_stop + tl.program_id(0))
    if first >= stop:
        return
    head, split = tl.program_id(1), tl.program_id(2)
    line = tl.arange(0, BLOCK_M)
    real = (line // GROUP < ROWS) & (first + line // GROUP < stop)
    row = tl.load(order + first + line // GROUP, mask=real, other=0)
    prefix_len = tl.load(prefix_len_M + row, mask=real, other=0).to(tl.int32)
    seen = tl.load(seen_M + row, mask=real, other=0)
    request = tl.load(request_M + tl.load(order + first))
    query_head = head * GROUP + line % GROUP
    place = (split.to(tl.int64) * M + row) * (Hk * GROUP) + query_head

    bit = tl.arange(0, 64)
    bit_length = tl.max(((seen[:, None] >> bit[None, :]) & 1).to(tl.int32) * (bit + 1)[None, :], 1)
    end = tl.max(prefix_len + bit_length)  # one behind the last column that a row of the tile sees
    dense_end = tl.min(tl.where(real, prefix_len, end))
    begin, first_dense = first_column, first_column
    if WINDOW:
        position = tl.load(position_M + row, mask=real, other=0).to(tl.int32)
        first_seen = tl.maximum(position - WINDOW + 1, 0) + first_column
        first_seen = tl.minimum(first_seen, prefix_len)
        begin = tl.min(tl.where(real, first_seen, end))
        first_dense = tl.max(tl.where(real, first_seen, begin))
    span = tl.cdiv(tl.cdiv(end - begin, S), BLOCK_N) * BLOCK_N
    from_column = begin + split * span
    if (S > 1) & (from_column >= end):
        tl.store(weights + place, float("-inf"), mask=real)
        return
    to_column = tl.minimum(from_column + span, end)
    dense_blocks = tl.maximum(tl.minimum(to_column, dense_end) - from_column, 0) // BLOCK_N
    if WINDOW:
        dense_blocks = tl.where(from_column >= first_dense, dense_blocks, 0)
    masked_from = from_column + dense_blocks * BLOCK_N

    d = tl.arange(0, BLOCK_D)
    real_d = d < D
    q_lines = q + row * q_row + query_head * q_head
    q_MD = tl.load(
        q_lines[:, None] + d[None, :], mask=real[:, None] & real_d[None, :], other=0.0
    ).to(DOT)
    pages = page_table + request * P
    keys = kv + head * D + d
    best = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(from_column, masked_from, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        slot = tl.load(pages + column // PAGE).to(tl.int64) * PAGE + column % PAGE
        key = keys[None, :] + slot[:, None] * (2 * Hk * D)
        k_ND = tl.load(key, mask=real_d[None, :], other=0.0)
        v_ND = tl.load(key + Hk * D, mask=real_d[None, :], other=0.0)
        scores = tl.dot(q_MD, tl.trans(k_ND.to(DOT)), input_precision="ieee") * scale
        best, total, mixed = _take_in(scores, v_ND.to(DOT), best, total, mixed)
    for start in range(masked_from, to_column, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)
        real_n = column < to_column
        slot = (
            tl.load(pages + column // PAGE, mask=real_n, other=0).to(tl.int64) * PAGE
            + column % PAGE
        )
        key = keys[None, :] + slot[:, None] * (2 * Hk * D)
        k_ND = tl.load(key, mask=real_n[:, None] & real_d[None, :], other=0.0)
        v_ND = tl.load(key + Hk * D, mask=real_n[:, None] & real_d[None, :], other=0.0)
        e = column[None, :] - prefix_len[:, None]
        bits = (seen[:, None] >> tl.minimum(tl.maximum(e, 0), 63)) & 1
        visible = ((e < 0) | ((e < 64) & (bits != 0))) & real_n[None, :]
        if WINDOW:
            visible = visible & (column[None, :] >= first_seen[:, None])
        scores = tl.dot(q_MD, tl.trans(k_ND.to(DOT)), input_precision="ieee") * scale
        best, total, mixed = _take_in(
            tl.where(visible, scores, float("-inf")), v_ND.to(DOT), best, total, mixed
        )

    mixed = mixed / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(parts + place[:, None] * D + d[None, :], mixed, mask=real[:, None] & real_d[None, :])
    if S > 1:
        weight = tl.where(
            total == 0, float("-inf"), best + tl.log2(tl.where(total == 0, 1.0, total))
        )
        tl.store(weights + place, weight, mask=real)


@triton.jit
def _take_in(scores, v_ND, best, total, mixed):
    """The running maximum, sum and mix of values [M], [M], [M, D] after another block of scores [M,
    N], in units of log2.
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    # a line that has seen nothing yet: -inf - -inf is no number
    shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    p = tl.exp2(scores - shift[:, None])
    shrink = tl.exp2(best - shift)
    mixed = tl.dot(p.to(v_ND.dtype), v_ND, mixed * shrink[:, None], input_precision="ieee")
    return new_best, total * shrink + tl.sum(p, 1), mixed


@triton.jit
def _add_parts(
    parts, weights, mixed, M, Hq,
    D: tl.constexpr, S: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """mixed [M, Hq, D] from parts [S, M, Hq, D], weighted by 2 ** weights [S, M, Hq]."""
    place = tl.program_id(0).to(tl.int64) * Hq + tl.program_id(1)
    s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    places = s.to(tl.int64) * M * Hq + place
    weight = tl.load(weights + places, mask=s < S, other=float("-inf"))
    best = tl.max(weight, 0)
    share = tl.exp2(weight - tl.where(best == float("-inf"), 0.0, best))
    # A part without a weight may never have been written; it is not read.
    part = tl.load(
        parts + places[:, None] * D + d[None, :],
        mask=(share > 0)[:, None] & (d < D)[None, :],
        other=0.0,
    )
    total = tl.sum(share, 0)
    tl.store(
        mixed + place * D + d,
        tl.sum(part * share[:, None], 0) / tl.where(total == 0, 1.0, total),
        mask=d < D,
    )
