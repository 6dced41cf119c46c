"""The draft's vocabulary, and the two matrices that a head borrows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import ConfigError, MissingInputError
from eyas.model.target import Target
from eyas.operators.tensors import tensor_of
from eyas.operators.vocab import TargetVocabulary, draft_vocabulary
from tests.tiny import tiny_target


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
@settings(max_examples=60)
def test_the_most_counted_tokens_are_kept_ids_ascending(counts, data):
    W = data.draw(st.integers(1, len(counts)))
    d2t_offset, t2d_mask = draft_vocabulary(torch.tensor(counts), W)
    ids = (torch.arange(W) + d2t_offset).tolist()
    assert d2t_offset.dtype == torch.int64
    assert t2d_mask.dtype == torch.bool
    assert ids == sorted(sorted(range(len(counts)), key=lambda token: (-counts[token], token))[:W])
    assert t2d_mask.nonzero().flatten().tolist() == ids


@pytest.mark.parametrize("V", [1, 15, 100, 9000])
def test_the_best_token_by_bf16_products_is_the_best_in_full(V):
    draws = torch.Generator().manual_seed(V)
    short_VH = torch.randn(V, 24, generator=draws).bfloat16()
    short_VH[V // 2] = short_VH[0]  # two equal logits
    vocabulary = TargetVocabulary(None, short_VH.float(), short_VH.float(), "made up", short_VH)
    hidden_RH = torch.randn(40, 24, generator=draws).bfloat16()
    hidden_RH[:20] = short_VH[torch.arange(20) % V]  # much longer, and close logits
    hidden_RH[20] = 0
    hidden_RH[21] = short_VH[0]
    expected_R = (hidden_RH.double() @ short_VH.double().T).argmax(-1)
    assert vocabulary.best(hidden_RH)[[20, 21]].tolist() == [0, 0]
    for sized in (hidden_RH, hidden_RH[21:]):  # with and without a row of equal logits
        assert torch.equal(vocabulary.best(sized), expected_R[-len(sized) :])
        assert torch.equal(vocabulary.best(sized.float()), expected_R[-len(sized) :])
    row_N, _ = vocabulary._blocks_of_best(hidden_RH[21:], short_VH)
    assert set(row_N.tolist()) == set(range(19)), "a row without a block"


@pytest.mark.parametrize("W", [0, 4])
def test_more_tokens_than_the_target_has(W):
    with pytest.raises(ConfigError, match=f"draft vocabulary of {W}"):
        draft_vocabulary(torch.zeros(3, dtype=torch.int64), W)


@pytest.mark.parametrize("tied", [True, False])
def test_matrices_are_the_targets(tmp_path, tied):
    folder = tiny_target(tmp_path, tie_word_embeddings=tied)
    vocabulary, target = TargetVocabulary.load(folder), Target.load(folder)
    assert torch.equal(vocabulary.embed_tokens, tensor_of(target.embed_tokens))
    assert torch.equal(vocabulary.lm_head, tensor_of(target.lm_head))
    assert torch.equal(vocabulary.lm_head, vocabulary.embed_tokens) == tied
    assert vocabulary.lm_head_sha256 == target.lm_head_sha256
    assert (vocabulary.lm_head is vocabulary.embed_tokens) == tied
    (folder / "model.safetensors").unlink()
    with pytest.raises(MissingInputError, match="no safetensors"):
        TargetVocabulary.load(folder)


def test_on_a_gpu_that_computes_in_bf16_a_matrix_of_bf16_is_held_once(tmp_path):
    """ "cpu:0" stands for one."""
    exact = torch.randn(9, 4).bfloat16().float()
    for embed, lm_head, dtypes in (
        (exact, exact, (torch.bfloat16, torch.bfloat16)),
        (exact / 3, exact, (torch.float32, torch.bfloat16)),
    ):
        vocabulary = TargetVocabulary(None, embed, lm_head, "made up", exact.bfloat16())
        there = vocabulary.to("cpu:0", torch.bfloat16)
        assert (there.embed_tokens.dtype, there.lm_head.dtype) == dtypes
        assert (there.embed_tokens is there.lm_head) == (embed is lm_head)
        assert torch.equal(there.lm_head.float(), exact)
        assert torch.equal(there.best(exact), vocabulary.best(exact))
        assert vocabulary.to("cpu").short_lm_head is vocabulary.short_lm_head
        assert vocabulary.to("cpu:0").lm_head.dtype == torch.float32
