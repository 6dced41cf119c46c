"""Tree attention against the definition, on odd shapes; and what a row may not see, it does not
see.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.model.rows import MAX_TREE_COLUMNS, rows_of, slots_of
from tests.oracle.attention import AttentionPlan
from tests.oracle.rows import TensorRows

TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def tree_attention_reference(
    q: torch.Tensor, kv: torch.Tensor, rows: TensorRows, page_size: int
) -> torch.Tensor:
    """The definition: softmax(q k^T / sqrt(D)) v over the columns that a row sees. The result is
    float64.
    """
    M, Hq, D = q.shape
    mixed = torch.empty(M, Hq, D, dtype=torch.float64, device=q.device)
    for m in range(M):
        prefix_len, bits, pages = (
            int(rows.prefix_len[m]),
            int(rows.seen[m]),
            rows.page_table[int(rows.request[m])].tolist(),
        )
        columns = list(range(int(rows.first_seen[m]), prefix_len))
        columns += [prefix_len + e for e in range(MAX_TREE_COLUMNS) if bits >> e & 1]
        slots = [pages[column // page_size] * page_size + column % page_size for column in columns]
        k, v = kv[slots].double().repeat_interleave(Hq // kv.shape[2], 2).unbind(1)
        scores = torch.einsum("hd,chd->hc", q[m].double(), k) * D**-0.5
        mixed[m] = torch.einsum("hc,chd->hd", scores.softmax(-1), v)
    return mixed


@dataclass(frozen=True)
class Tree:
    """A tree of `nodes` random nodes behind a prefix, of which the last `rows` are rows of the
    forward (default: all).
    """

    prefix: int
    nodes: int
    rows: int = 64
    chain: bool = False

    def lens_and_bits(self, rng: np.random.Generator, first_column: int) -> list[tuple[int, int]]:
        seen: list[int] = []
        for node in range(self.nodes):
            parent = node - 1 if self.chain else int(rng.integers(-1, node))
            seen.append(1 << node | (seen[parent] if parent >= 0 else 0))
        return [(max(self.prefix, first_column), bits) for bits in seen[-self.rows :]]


@dataclass(frozen=True)
class Prompt:
    """`tokens` tokens of a prompt, the first in column `start`."""

    start: int
    tokens: int

    def lens_and_bits(self, rng: np.random.Generator, first_column: int) -> list[tuple[int, int]]:
        start = max(self.start, first_column)
        return [(start + n + 1, 0) for n in range(self.tokens)]


Parts = list[Tree | Prompt]

MIXED: Parts = [Tree(15, 5), Prompt(0, 19), Tree(200, 13), Tree(17, 1), Prompt(40, 3), Tree(0, 5)]
CASES: dict[str, Parts] = {
    "one token behind nothing": [Tree(0, 1)],
    "one token behind itself": [Tree(1, 1)],
    "plain decoding": [Prompt(0, 1), Prompt(15, 1), Prompt(16, 1), Prompt(200, 1)],
    "a prompt alone": [Prompt(0, 37)],
    "a chunk of a prompt": [Prompt(31, 18)],
    "trees of one size": [Tree(1, 5), Tree(15, 5), Tree(16, 5), Tree(17, 5)],
    "trees of all sizes": [Tree(0, 13), Tree(16, 1), Tree(15, 5), Tree(200, 7)],
    "bit 63": [Tree(14, 64, rows=3), Tree(33, 64, rows=2, chain=True)],
    "mixed": MIXED,
}
# (Hk, queries per key head, D, first_column, dtype)
HEADS = [
    (1, 1, 64, 0, torch.float32),
    (2, 2, 96, 1, torch.float32),
    (2, 5, 64, 1, torch.float16),
    (1, 4, 128, 0, torch.bfloat16),
]


def laid_out(
    parts: Parts, page_size: int, first_column: int, seed: int, shuffled_rows: bool = False
) -> TensorRows:
    """The rows of a forward over shuffled pages; each page table line ends in pages of other
    requests.
    """
    rng = np.random.default_rng(seed)
    request, prefix_len, bits = [], [], []
    for b, part in enumerate(parts):
        for length, seen in part.lens_and_bits(rng, first_column):
            request.append(b)
            prefix_len.append(length)
            bits.append(seen)
    order = rng.permutation(len(request)) if shuffled_rows else np.arange(len(request))
    request_M, prefix_len_M = np.asarray(request)[order], np.asarray(prefix_len)[order]
    seen_M = np.asarray(bits, dtype=np.uint64).view(np.int64)[order]
    ends = [0] * len(parts)
    for b, length, seen in zip(request, prefix_len, bits, strict=True):
        ends[b] = max(ends[b], length + seen.bit_length())
    pages = [-(-end // page_size) for end in ends]
    free = rng.permutation(sum(pages)).astype(np.int32)
    page_table = rng.integers(0, sum(pages), (len(parts), max(pages))).astype(np.int32)
    for b, count in enumerate(pages):
        page_table[b, :count], free = free[:count], free[count:]
    unused = np.zeros(len(request), dtype=np.int64)
    # of a prompt's token the last of its prefix, of a node as many behind as it has ancestors
    depth_M = np.array([int(seen).bit_count() for seen in seen_M.view(np.uint64)])
    position_M = prefix_len_M - 1 - first_column + depth_M
    rows = rows_of(
        (unused, request_M, position_M, unused, prefix_len_M, seen_M), page_table, first_column
    )
    return TensorRows.of(rows)


def tensors(
    rows: TensorRows, page_size: int, heads: tuple[int, int, int], dtype: torch.dtype, seed: int
):
    """Random q [M, Hq, D] and kv [num_slots, 2, Hk, D]."""
    Hk, group, D = heads
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(len(rows), Hk * group, D, generator=generator)
    kv = torch.randn((int(rows.page_table.max()) + 1) * page_size, 2, Hk, D, generator=generator)
    return q.to(dtype), kv.to(dtype)


def slots_seen(rows: TensorRows, page_size: int, m: int) -> np.ndarray:
    prefix_len, bits = int(rows.prefix_len[m]), int(rows.seen[m])
    columns = [
        *range(int(rows.first_seen[m]), prefix_len),
        *(prefix_len + e for e in range(64) if bits >> e & 1),
    ]
    request = np.full(len(columns), int(rows.request[m]))
    return slots_of(rows.page_table.cpu().numpy(), request, np.asarray(columns), page_size)


def assert_equals_definition(rows, page_size, heads, dtype) -> None:
    q, kv = tensors(rows, page_size, heads, dtype, seed=len(rows))
    mixed = AttentionPlan.of(rows, page_size).attend(q, kv)
    assert mixed.dtype == dtype
    expected = tree_attention_reference(q, kv, rows, page_size)
    torch.testing.assert_close(
        mixed.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


# Each case with one shape of heads, the mixed batch with all; the property test below draws both.
PAIRS = [
    *((case, HEADS[number % len(HEADS)]) for number, case in enumerate(CASES) if case != "mixed"),
    *(("mixed", heads) for heads in HEADS),
]


@pytest.mark.parametrize(("case", "heads"), PAIRS, ids=str)
def test_equals_the_definition(case, heads):
    *shape, first_column, dtype = heads
    rows = laid_out(CASES[case], 16, first_column, seed=len(case))
    assert_equals_definition(rows, 16, tuple(shape), dtype)


@pytest.mark.parametrize("page_size", [1, 7, 32])
def test_equals_the_definition_for_any_page_size_and_order_of_rows(page_size):
    rows = laid_out(MIXED, page_size, 1, seed=page_size, shuffled_rows=True)
    assert_equals_definition(rows, page_size, (2, 3, 64), torch.float32)


@pytest.mark.parametrize("window", [64, 65, 100])
def test_a_window_sees_the_last_positions(window):
    """Also where rows of one tile begin at different columns, and where some see all."""
    parts = [Tree(15, 5), Prompt(0, 70), Tree(200, 13), Tree(66, 1), Prompt(140, 3), Tree(64, 5)]
    rows = replace(laid_out(parts, 16, 1, seed=window, shuffled_rows=True), window=window)
    for m in range(len(rows)):  # said in another way than `Rows.first_seen` says it
        own = int(rows.position[m])
        seen = [c for c in range(1, int(rows.prefix_len[m])) if own - window < c - 1 <= own]
        assert int(rows.prefix_len[m]) - int(rows.first_seen[m]) == len(seen)
    assert_equals_definition(rows, 16, (2, 3, 64), torch.float32)


parts = st.one_of(
    st.builds(
        Tree,
        prefix=st.integers(0, 40),
        nodes=st.integers(1, 64),
        rows=st.integers(1, 9),
        chain=st.booleans(),
    ),
    st.builds(Prompt, start=st.integers(0, 40), tokens=st.integers(1, 20)),
)


@settings(max_examples=8)
@given(
    parts=st.lists(parts, min_size=1, max_size=4),
    heads=st.sampled_from(HEADS),
    seed=st.integers(0, 999),
)
def test_equals_the_definition_whatever_the_batch(parts, heads, seed):
    *shape, first_column, dtype = heads
    rows = laid_out(parts, 16, first_column, seed, shuffled_rows=bool(seed % 2))
    assert_equals_definition(rows, 16, tuple(shape), dtype)


@pytest.mark.parametrize(
    ("dtype", "large", "first_column"),
    [(torch.float32, 1e30, 0), (torch.float16, 6e4, 1), (torch.bfloat16, 1e30, 1)],
)
def test_what_a_row_does_not_see_never_changes_it_to_the_bit(first_column, dtype, large):
    rows = laid_out([Tree(15, 5), Prompt(0, 19), Tree(70, 7)], 16, first_column, seed=3)
    q, kv = tensors(rows, 16, (1, 2, 64), dtype, seed=4)
    plan = AttentionPlan.of(rows, 16)
    expected = plan.attend(q, kv)
    # a root, the first of a prompt and one inside it, and a leaf
    for m in (0, 5, 21, len(rows) - 1):
        spoilt = torch.full_like(kv, large)
        spoilt[::2] *= -1
        own = torch.from_numpy(slots_seen(rows, 16, m))
        spoilt[own] = kv[own]
        assert torch.equal(plan.attend(q, spoilt)[m], expected[m])


def test_a_row_that_sees_nothing_gets_zeros():
    rows = laid_out([Tree(1, 1), Tree(20, 2)], 16, 1, seed=0)
    rows.seen[0] = 0  # prefix_len 1 from column 1 on: nothing
    q, kv = tensors(rows, 16, (1, 2, 64), torch.float32, seed=1)
    mixed = AttentionPlan.of(rows, 16).attend(q, kv)
    assert not mixed[0].any()
    assert mixed[1:].any(-1).all()
