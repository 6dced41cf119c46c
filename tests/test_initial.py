"""The weights that a head starts from."""

from __future__ import annotations

import pytest
import torch

from eyas.train.start import initialise, of_width
from tests.tiny_batch import tiny_vocabulary, wavy_head


@pytest.mark.parametrize(
    "options",
    [{}, {"fc_norm": True}, {"norm_before_fc": True}, {"hidden_size": 8}, {"hidden_size": 16}],
)
def test_every_weight_is_drawn_and_the_seed_decides(options):
    heads = [wavy_head(**options) for _ in range(3)]
    for head, seed in zip(heads, (0, 0, 1), strict=True):
        with torch.no_grad():
            for weight in head.parameters():
                weight.fill_(float("nan"))
        initialise(head, tiny_vocabulary(), seed)
        assert all(weight.isfinite().all() for weight in head.parameters())
    one, same, other = (head.state_dict() for head in heads)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_lm_head_is_the_targets_rows():
    head = wavy_head()
    initialise(head, tiny_vocabulary(), 0)
    assert torch.equal(head.lm_head.weight, tiny_vocabulary().lm_head[head.target_ids_W])


def test_a_narrower_matrix_keeps_what_tells_the_rows_apart():
    torch.manual_seed(0)
    rows_RH = torch.randn(50, 3) @ torch.randn(3, 12)  # of rank 3
    narrow = of_width(rows_RH, 5)
    assert narrow.shape == (50, 5)
    torch.testing.assert_close(narrow @ narrow.T, rows_RH @ rows_RH.T, rtol=1e-4, atol=1e-4)
    wide = of_width(rows_RH, 15)
    assert torch.equal(wide[:, :12], rows_RH)
    assert not wide[:, 12:].any()
