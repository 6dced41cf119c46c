"""The head: its names, its order of operations, its cache, and its way to disk and back."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from eyas.engine.draft import Draft
from eyas.errors import MismatchError
from eyas.model import checkpoint
from eyas.model.checkpoint import expected_shapes
from eyas.model.config import HeadConfig, HeadOptions
from eyas.model.rows import prompt_rows
from eyas.operators.head import Head, head_files, load_head
from eyas.operators.tensors import array_of, arrays_of, tensor_of
from eyas.operators.ttt import Slots, unroll
from eyas.operators.vocab import TargetVocabulary
from tests.oracle.target import features_of
from tests.plain_eagle import PlainHead, weights_of
from tests.tiny import tiny_target
from tests.tiny_batch import (
    TINY_TARGET,
    as_examples,
    doubled,
    made_up_batch,
    made_up_samples,
    tiny_vocabulary,
    wavy_head,
)
from tests.tiny_engine import load_as
from tests.tiny_head import (
    FLAGS,
    PLAIN_NORMS,
    edit_config,
    edit_tensors,
    head_folder,
    tiny_head,
    with_flags,
    write_folder,
)

WIDE = {"rtol": 1e-9, "atol": 1e-9}


@pytest.mark.parametrize("flags", [{}, {"norm_before_fc": True}, {"fc_norm": True}], ids=str)
def test_weights_have_eagles_names_and_start_as_nan(flags):
    config = HeadConfig.for_target(TINY_TARGET, HeadOptions(draft_vocab_size=24, **PLAIN_NORMS))
    config = config.model_copy(update=flags)
    head = Head(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    assert shapes == expected_shapes(config)
    for name, weight in head.named_parameters():
        assert weight.isnan().all(), name
        assert weight.dtype == torch.float32
        assert weight.requires_grad


@with_flags
def test_forward_equals_the_loops(flags):
    head, vocabulary = wavy_head(**flags).double(), tiny_vocabulary(torch.float64)
    (example,) = as_examples(made_up_samples([[True] * 7]))
    plain = PlainHead(weights_of(head), head.config)
    hidden_BTH, (keys, values) = head(
        vocabulary.embed_tokens[example.tokens[1:]][None], head.fuse(example.aux[:6])[None]
    )
    assert hidden_BTH.shape == (1, 6, 12)
    assert keys.shape == values.shape == (1, 6, 2, 4)
    for slot in range(6):
        (expected,) = plain.unroll(example, vocabulary.embed_tokens, slot, 1, lambda step, _: 0)
        torch.testing.assert_close(hidden_BTH[0, slot], expected, **WIDE)
        logits = head.logits(hidden_BTH[0, slot])
        torch.testing.assert_close(logits, plain.logits(expected), **WIDE)


@with_flags
def test_an_unroll_equals_the_loops(flags):
    """Three steps of TTT; norm_output feeds back the layer's output after the norm."""
    head, vocabulary = wavy_head(**flags).double(), tiny_vocabulary(torch.float64)
    batch = doubled(made_up_batch([[True] * 7]))
    (example,) = as_examples(made_up_samples([[True] * 7]))
    plain = PlainHead(weights_of(head), head.config)
    embeds = vocabulary.embed_tokens[batch.tokens_BT.roll(-1, dims=1)]
    slots = Slots.where(torch.tensor([[True] * 4 + [False] * 3]))

    def next_embeds(step, _):
        return vocabulary.embed_tokens[batch.tokens_BT[0, slots.slot_N + 1 + step]]

    outputs = list(unroll(head, batch.aux_hidden_BTA, embeds, [slots] * 3, next_embeds))
    for slot in range(4):
        tokens = example.tokens[slot + 1 :]
        expected = plain.unroll(
            example, vocabulary.embed_tokens, slot, 3, lambda step, _, of=tokens: of[step]
        )
        for step, output in enumerate(expected):
            torch.testing.assert_close(outputs[step][slot], output, **WIDE)


def test_every_flag_changes_the_logits():
    """Two that ignore a flag would be equal."""
    vocabulary = tiny_vocabulary()
    tokens, aux_hidden = torch.arange(6)[None], torch.linspace(-1, 1, 6 * 36).sin().view(1, 6, 36)

    def logits(**flags):
        head = wavy_head(**flags)
        # the same weights, beside other norms
        for name, weight in wavy_head().named_parameters():
            head.get_parameter(name).data.copy_(weight)
        hidden, past = head(vocabulary.embed_tokens[tokens], head.fuse(aux_hidden))
        return head.logits(head(vocabulary.embed_tokens[tokens[:, -1:]], hidden[:, -1:], past)[0])

    with torch.no_grad():
        for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
            assert not torch.allclose(logits(), logits(**{flag: True}), atol=1e-2), flag


@pytest.mark.parametrize("cuts", [(1, 2, 3), (4, 5), (5,)])
def test_a_forward_in_pieces_equals_the_whole(cuts):
    head = wavy_head().double()
    generator = torch.Generator().manual_seed(0)
    embeds, feature = torch.randn(2, 2, 6, 12, dtype=torch.float64, generator=generator)
    whole, _ = head(embeds, feature)
    past, pieces = None, []
    for start, end in zip((0, *cuts), (*cuts, 6), strict=True):
        piece, past = head(embeds[:, start:end], feature[:, start:end], past)
        pieces.append(piece)
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=1e-12, atol=1e-12)


def test_target_ids_are_draft_ids_plus_offset():
    head = wavy_head()
    ids = head.target_ids_W.tolist()
    assert ids == sorted(set(ids))
    assert head.t2d.nonzero().flatten().tolist() == ids
    assert ids != list(range(len(ids)))


def test_bf16_files_load_as_float32(tmp_path):
    head = wavy_head().to(torch.bfloat16)
    loaded = load_head(write_folder(head_files(head), tmp_path / "head"))
    assert loaded.fc.weight.dtype == torch.float32
    assert torch.equal(loaded.fc.weight, head.fc.weight.float())


@with_flags
def test_computes_what_the_engines_draft_computes(tmp_path, flags):
    """Six entries from the target's features, then one fed back."""
    folder = tiny_target(tmp_path / "target", num_hidden_layers=8)
    head = load_head(head_folder(folder, tmp_path / "head", **flags))
    target = load_as("native", folder)
    draft = Draft(*checkpoint.read_head(tmp_path / "head"), target)
    tokens_T = torch.arange(20, 28)
    aux_hidden, _ = (features.clone() for features in features_of(target, tokens_T[None]))
    cache, page_table = draft.new_cache(1), np.zeros((1, 1), dtype=np.int32)
    first, last = (
        prompt_rows([tokens.tolist()], [start], page_table, cache.page_size, first_column=1)
        for tokens, start in ((tokens_T[1:7], 1), (tokens_T[7:], 7))
    )
    with torch.no_grad():
        h = draft.extend(first, array_of(aux_hidden[0, :6]), cache)
        after = draft.step(last, h[-1:], cache)
        extended, stepped, embed_tokens = map(tensor_of, (h, after, target.embed_tokens))
        ours, past = head(embed_tokens[tokens_T[1:7]][None], head.fuse(aux_hidden[:, :6]))
        fed_back, _ = head(embed_tokens[tokens_T[7:]][None], ours[:, -1:], past)
        torch.testing.assert_close(ours[0], extended, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fed_back[0], stepped, rtol=1e-4, atol=1e-4)
        ids, log_probs = map(tensor_of, draft.proposals(after, 5))
        best, places = head.logits(fed_back[0]).log_softmax(-1).topk(5)
    assert torch.equal(ids, head.target_ids_W[places])
    torch.testing.assert_close(log_probs, best, rtol=1e-4, atol=1e-4)


def test_the_engines_draft_uses_own_embeddings_and_the_targets_lm_head(tmp_path):
    folder = tiny_target(tmp_path / "target", num_hidden_layers=8)
    config, tensors = tiny_head(folder, draft_vocab_size=320)
    target = load_as("native", folder)
    page_table = np.zeros((1, 1), dtype=np.int32)
    rows = prompt_rows([[5, 6, 7]], [1], page_table, 16, first_column=1)
    aux_hidden = torch.linspace(-1, 1, 3 * 96).sin().view(3, 96)

    def proposed(changes):
        draft = Draft(config, arrays_of(tensors) | changes, target)
        h = draft.extend(rows, array_of(aux_hidden), draft.new_cache(1))
        return draft.proposals(h, 4)[1]

    lm_head, embed_tokens = target.lm_head, target.embed_tokens
    shared = proposed({"lm_head.weight": lm_head, "embed_tokens.weight": embed_tokens})
    own = proposed({"lm_head.weight": lm_head, "embed_tokens.weight": np.roll(embed_tokens, 1, 0)})
    del tensors["lm_head.weight"]
    assert np.array_equal(proposed({}), shared)
    assert not np.allclose(own, shared)


def test_a_head_without_lm_head_needs_its_targets_and_may_have_embeddings_of_its_own(tmp_path):
    target = tiny_target(tmp_path / "target")
    folder = head_folder(target, tmp_path / "head", "sglang", draft_vocab_size=320)
    edit_tensors(edit_config(folder, draft_vocab_size=None), {"lm_head.weight": None})
    with pytest.raises(MismatchError, match="uses its target's"):
        load_head(folder)
    lm_head = TargetVocabulary.load(target).lm_head
    assert torch.equal(load_head(folder, target_lm_head=lm_head).lm_head.weight, lm_head)
    own = torch.arange(320 * 32.0).view(320, 32)
    folder = head_folder(target, tmp_path / "own")
    head = load_head(edit_tensors(folder, {"embed_tokens.weight": own}))
    assert torch.equal(head.embed_tokens, own)
    assert "embed_tokens.weight" not in head.state_dict()
    assert load_head(head_folder(target, tmp_path / "shared")).embed_tokens is None


def test_norms_of_features_exclude_each_other():
    with pytest.raises(ValidationError, match="both set"):
        HeadOptions(norm_before_fc=True, fc_norm=True)


def test_what_was_chosen_is_in_the_checkpoint(tmp_path):
    chosen = {**FLAGS[5], "train_lm_head": False}
    head = wavy_head(**chosen)
    assert not head.lm_head.weight.requires_grad
    written = json.loads(head_files(head)["eyas_head.json"])
    assert {name: written[name] for name in chosen} == chosen
    assert not json.loads(head_files(wavy_head())["eyas_head.json"]).keys() & chosen.keys()
    loaded = load_head(write_folder(head_files(head), tmp_path / "head"))
    assert loaded.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert head_files(loaded) == head_files(head)
    assert not loaded.lm_head.weight.requires_grad
