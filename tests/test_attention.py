"""Tree attention against its plain definition, and the mask against the definition of an ancestor."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.model.attention import ancestor_matrix, prefix_mask, tree_attention, tree_attention_reference


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 12))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]


@given(parent_lists())
def test_a_node_sees_exactly_itself_and_its_ancestors(parents: list[int]) -> None:
    seen = ancestor_matrix(parents)
    for node in range(len(parents)):
        lineage, at = {node}, node
        while parents[at] >= 0:
            at = parents[at]
            lineage.add(at)
        assert set(np.flatnonzero(seen[node])) == lineage


def test_the_mask_shows_each_prefix_and_hides_what_lies_behind() -> None:
    seen = np.stack([ancestor_matrix([-1, 0, 0]), ancestor_matrix([-1, 0, 1])])
    mask = prefix_mask(seen, [4, 1], 7)
    assert mask.shape == (2, 1, 3, 7)
    shown = (mask == 0)[:, 0].int().tolist()
    assert shown[0] == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1]]
    assert shown[1] == [[1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize(("query_heads", "key_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("head_dim", [16, 64, 96])
@pytest.mark.parametrize(("lens", "parents"), [([5], [-1]), ([0], [-1, 0, 0, 1]), ([17, 3], [-1, 0, 0, 1, 1, 2, 5])])
def test_equals_the_reference(dtype, tolerance, query_heads, key_heads, head_dim, lens, parents) -> None:
    B, N = len(lens), len(parents)
    columns = max(lens) + N
    q = torch.randn(B, query_heads, N, head_dim).to(dtype)
    k, v = (torch.randn(B, key_heads, columns, head_dim).to(dtype) for _ in range(2))
    mask = prefix_mask(np.stack([ancestor_matrix(parents)] * B), lens, columns).to(dtype)
    torch.testing.assert_close(
        tree_attention(q, k, v, mask), tree_attention_reference(q, k, v, mask), rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(
        tree_attention(q, k, v, None), tree_attention_reference(q, k, v, None), rtol=tolerance, atol=tolerance
    )
