"""The unroll: what a slot sees, and equality with drafting step by step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as flex

from eyas.operators import ttt
from eyas.operators.chain import free_running_drafts
from eyas.operators.ttt import Slots, unroll
from tests.plain_eagle import PlainHead, weights_of
from tests.tiny_batch import (
    as_examples,
    doubled,
    made_up_batch,
    made_up_samples,
    tiny_vocabulary,
    waves,
    wavy_head,
)

K = 5
LENGTHS = (9, 6, 7)


def everywhere(lengths=LENGTHS):
    T = max(lengths)
    return torch.tensor([[t < length - 1 for t in range(T)] for length in lengths])


@pytest.fixture
def head():
    return wavy_head().double()


@pytest.fixture
def batch():
    return doubled(made_up_batch([[True] * length for length in LENGTHS]))


def next_embeds_of(batch):
    embed_tokens = tiny_vocabulary(torch.float64).embed_tokens
    return F.embedding(batch.tokens_BT.roll(-1, dims=1), embed_tokens)


def test_slots_know_their_place_and_tiles_look_at_their_own_rows():
    active_BT = torch.tensor([[False, True, True, False], [False] * 4, [True, False, False, True]])
    slots = Slots.where(active_BT)
    assert slots.flat_N.tolist() == [1, 2, 8, 11]
    assert slots.slot_N.tolist() == [1, 2, 0, 3]
    assert slots.first_N.tolist() == [0, 0, 8, 8]
    assert slots.tiles == ((0, 4, 0, 12),)
    assert torch.equal(slots.take(active_BT), torch.ones(4, dtype=torch.bool))
    tiles = Slots.where(torch.ones(100, 40, dtype=torch.bool)).tiles
    assert sum(end - begin for begin, end, _, _ in tiles) == 4000
    assert all(high - low <= 128 + 40 + 2 * ttt.COLUMNS_IN_STEPS_OF for _, _, low, high in tiles)


def dense_flex(queries, keys, values, block_mask, enable_gqa, return_aux):
    """FlexAttention written out: torch's has a gradient on GPUs only."""
    N, M, groups = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
    assert enable_gqa == (groups > 1)
    keys, values = (one.repeat_interleave(groups, dim=1) for one in (keys, values))
    seen = block_mask.mask_mod(None, None, torch.arange(N)[:, None], torch.arange(M))
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5
    scores = scores.masked_fill(~seen, float("-inf"))
    return scores.softmax(-1) @ values, flex.AuxOutput(lse=scores.logsumexp(-1))


def test_flex_attention_is_what_it_is_taken_for(monkeypatch):
    monkeypatch.setattr(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    sizes = (5, 4, 6), (8, 2, 6), (8, 2, 6), (5, 2, 6), (5, 2, 6)
    tensors = [waves(*size, seed=number) for number, size in enumerate(sizes)]
    slots = Slots.of(torch.tensor([0, 2, 3, 5, 7]), (2, 4), None, "cuda")
    made = ttt.attend(slots, *tensors[:3], tensors[3:])
    monkeypatch.setattr(ttt, "flex_kernel", lambda kind: dense_flex)
    torch.testing.assert_close(made, ttt.attend(slots, *tensors[:3], tensors[3:]))


@given(
    mask=st.lists(st.booleans(), min_size=1, max_size=45),
    T=st.integers(1, 9),
    num_own=st.integers(0, 3),
    window=st.sampled_from([None, 4]),
    block=st.sampled_from([2, 16]),
)
@settings(max_examples=40)
def test_a_gpus_attention_equals_the_plain_one(mask, T, num_own, window, block):
    """Outputs and gradients, also for rows of one token and repeated slots."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ttt, "BLOCK", block)
        patched.setattr(ttt, "flex_kernel", lambda kind: dense_flex)
        size = -(-len(mask) // T), T
        flat_N = torch.tensor(mask).nonzero().squeeze(1)
        flat_N = F.pad(flat_N, (0, 3), value=int(flat_N[-1]) if len(flat_N) else 0)
        N, M = len(flat_N), size[0] * T
        sizes = [(N, 4, 6), (M, 2, 6), (M, 2, 6), *[(N, 2, 6)] * (2 * num_own)]
        tensors = [
            waves(*size, seed=number).double().requires_grad_() for number, size in enumerate(sizes)
        ]
        results = []
        for kind in ("cpu", "cuda"):
            slots = Slots.of(flat_N, size, window, kind)
            assert bool(slots.blocks) == (kind == "cuda")
            mixed = ttt.attend(slots, *tensors[:3], tensors[3:])
            results.append([mixed, *torch.autograd.grad(mixed.sin().sum(), tensors)])
        for plain, fused in zip(*results, strict=True):
            torch.testing.assert_close(fused, plain, rtol=1e-9, atol=1e-9)
        # only the kernel uses the mask's blocks, by slot and by token
        seen = torch.arange(M) <= slots.flat_N[:, None]
        seen &= torch.arange(M) >= slots.first_N[:, None]
        if window is not None:
            seen &= torch.arange(M) > slots.flat_N[:, None] - window
        padded = F.pad(seen, (0, -M % block, 0, -N % block))
        by_block = padded.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
        inside = F.pad(torch.ones_like(seen), (0, -M % block, 0, -N % block))
        inside = inside.unflatten(0, (-1, block)).unflatten(2, (-1, block)).transpose(1, 2)
        tables = [as_dense(*slots.blocks[at : at + 2]) for at in range(0, 8, 2)]
        some, whole = tables[0], tables[1]
        assert torch.equal(tables[2].T, some)
        assert torch.equal(tables[3].T, whole)
        assert not (some & whole).any()
        assert not (by_block.flatten(2).any(-1) & ~some & ~whole).any(), "seen and left out"
        assert (by_block | ~inside).flatten(2).all(-1)[whole].all(), "not seen as a whole"


def as_dense(number, order):
    """The blocks of a BlockMask's table: bool [rows, columns]."""
    first = torch.arange(order.shape[-1]) < number[0, 0, :, None]
    return torch.zeros_like(first).scatter(1, order[0, 0].long(), first)


def test_gradients_past_a_slot_and_from_other_rows_are_exactly_zero(head, batch):
    aux = batch.aux_hidden_BTA.requires_grad_()
    embeds = next_embeds_of(batch).requires_grad_()
    slots = Slots.where(everywhere())
    true = {step: torch.randn(len(slots.slot_N), 12, dtype=torch.float64) for step in range(1, K)}
    outputs = list(unroll(head, aux, embeds, [slots] * K, lambda step, _: true[step]))
    rows = slots.flat_N // max(LENGTHS)
    for step in (0, 1, K - 1):
        for n in (0, 3, len(rows) - 1):
            row, slot = int(rows[n]), int(slots.slot_N[n])
            total = outputs[step][n].sum()
            for grad in torch.autograd.grad(total, (aux, embeds), retain_graph=True):
                seen = grad.abs().sum(-1) > 0
                expected = torch.zeros_like(seen)
                expected[row, : slot + 1] = True
                assert torch.equal(seen, expected), (step, row, slot)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("columns", [1, 32])
def test_equals_the_loops(head, batch, window, columns, monkeypatch):
    monkeypatch.setattr(ttt, "COLUMNS_IN_STEPS_OF", columns)
    monkeypatch.setattr(ttt, "BLOCK", 3)
    head.config = head.config.model_copy(update={"sliding_window": window})
    examples = as_examples(made_up_samples([[True] * length for length in LENGTHS]))
    vocabulary = tiny_vocabulary(torch.float64)
    plain = PlainHead(weights_of(head), head.config)
    slots = Slots.where(everywhere(), window=window)
    after = {step: F.pad(batch.tokens_BT[:, 1 + step :], (0, 1 + step)) for step in range(K)}

    def true_embeds(step, _):
        return vocabulary.embed_tokens[slots.take(after[step])]

    given = batch.aux_hidden_BTA, next_embeds_of(batch), [slots] * K
    outputs = torch.stack(list(unroll(head, *given, true_embeds)))
    assert outputs.shape == (K, len(slots.slot_N), 12)
    rows = slots.flat_N // max(LENGTHS)
    for n, (row, slot) in enumerate(zip(rows.tolist(), slots.slot_N.tolist(), strict=True)):
        tokens = [*examples[row].tokens, *[0] * K][slot + 1 :]
        expected = plain.unroll(
            examples[row], vocabulary.embed_tokens, slot, K, lambda step, _, of=tokens: of[step]
        )
        torch.testing.assert_close(outputs[:, n], torch.stack(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_free_running_equals_drafting_step_by_step_with_a_cache(dtype):
    head, vocabulary = wavy_head().to(dtype), tiny_vocabulary(dtype)
    batch = made_up_batch([[True] * length for length in LENGTHS])
    slots = Slots.where(everywhere())
    drafts_NK = free_running_drafts(head, vocabulary.embed_tokens, batch, slots, K)
    assert drafts_NK.shape == (len(slots.slot_N), K)
    assert head.t2d[drafts_NK].all()
    places = zip(slots.flat_N.tolist(), slots.slot_N.tolist(), strict=True)
    for n, (flat, slot) in enumerate(places):
        row = flat // max(LENGTHS)
        fed = batch.tokens_BT[row, 1 : slot + 2]
        embeds = vocabulary.embed_tokens[fed][None]
        feature = head.fuse(batch.aux_hidden_BTA[row, : slot + 1].to(dtype))[None]
        hidden, cache = head(embeds, feature)
        chain = []
        for _ in range(K):
            chain.append(int(head.target_ids_W[head.logits(hidden[:, -1]).argmax()]))
            embeds = vocabulary.embed_tokens[chain[-1]][None, None]
            hidden, cache = head(embeds, hidden[:, -1:], cache)
        assert drafts_NK[n].tolist() == chain
