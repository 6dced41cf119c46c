"""The weights that a head starts from."""

from __future__ import annotations

import pytest
import torch

from eyas.train.start import initialise
from tests.tiny_batch import tiny_vocabulary, wavy_head


@pytest.mark.parametrize("options", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
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
