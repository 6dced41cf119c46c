"""The head: its names, its order of operations, its cache, and its way to disk and back."""

from __future__ import annotations

import pytest
import torch

from eyas.engine.draft import Draft
from eyas.errors import MismatchError
from eyas.model.checkpoint import expected_shapes
from eyas.model.config import HeadConfig
from eyas.model.head import Head, head_files, load_head
from eyas.model.target import Target
from tests.plain_eagle import PlainHead, weights_of
from tests.tiny import tiny_target
from tests.tiny_batch import TINY_TARGET, as_examples, made_up_samples, tiny_vocabulary, wavy_head
from tests.tiny_head import head_folder, write_folder


def test_weights_have_eagles_names_and_start_as_nan():
    config = HeadConfig.for_target(TINY_TARGET, 24)
    head = Head(config)
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == expected_shapes(config)
    for name, weight in head.named_parameters():
        assert weight.isnan().all(), name
        assert weight.dtype == torch.float32
        assert weight.requires_grad


def test_forward_equals_the_loops():
    """Embedding first, feature second; the residual is the feature before hidden_norm; the output is un-normed."""
    head, vocabulary = wavy_head().double(), tiny_vocabulary(torch.float64)
    (example,) = as_examples(made_up_samples([[True] * 7]))
    plain = PlainHead(weights_of(head), head.config)
    hidden_BTH, (keys, values) = head(vocabulary.embed_tokens[example.tokens[1:]][None], head.fuse(example.aux[:6])[None])
    assert hidden_BTH.shape == (1, 6, 12)
    assert keys.shape == values.shape == (1, 6, 2, 4)
    for slot in range(6):
        (expected,) = plain.unroll(example, vocabulary.embed_tokens, slot, 1, lambda step, _: 0)
        torch.testing.assert_close(hidden_BTH[0, slot], expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(head.logits(hidden_BTH[0, slot]), plain.logits(expected), rtol=1e-9, atol=1e-9)


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


def test_files_and_back(tmp_path):
    head = wavy_head()
    loaded = load_head(write_folder(head_files(head), tmp_path / "head"))
    assert loaded.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert head_files(loaded) == head_files(head)


def test_bf16_files_load_as_float32(tmp_path):
    head = wavy_head().to(torch.bfloat16)
    loaded = load_head(write_folder(head_files(head), tmp_path / "head"))
    assert loaded.fc.weight.dtype == torch.float32
    assert torch.equal(loaded.fc.weight, head.fc.weight.float())


@pytest.mark.parametrize("form", ["eyas", "sglang", "vllm"])
def test_every_form_gives_the_same_head(tmp_path, form):
    target = tiny_target(tmp_path / "target", num_hidden_layers=8)
    ours = load_head(head_folder(target, tmp_path / "ours"))
    other = load_head(head_folder(target, tmp_path / form, form)) if form != "eyas" else ours
    for name, tensor in ours.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_computes_what_the_engines_draft_computes(tmp_path):
    folder = tiny_target(tmp_path / "target", num_hidden_layers=8)
    head = load_head(head_folder(folder, tmp_path / "head"))
    target = Target.load(folder)
    draft = Draft(head.config, head.state_dict(), target)
    tokens_T = torch.arange(20, 27)
    aux_hidden, _ = (features.clone() for features in target.features(tokens_T[None]))
    positions = torch.arange(6).numpy()[None]
    mask = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    with torch.no_grad():
        at = draft.rope.place(0, 6, positions, positions, mask)
        theirs = draft.forward(tokens_T[1:], draft.fuse(aux_hidden[0, :6]), at, draft.new_cache(1, 8))
        ours, _ = head(target.embed_tokens[tokens_T[1:]][None], head.fuse(aux_hidden[:, :6]))
    torch.testing.assert_close(ours[0], theirs, rtol=1e-4, atol=1e-5)


def test_a_head_of_another_width_is_refused():
    config = HeadConfig.for_target(TINY_TARGET, 24).model_copy(update={"hidden_size": 16})
    with pytest.raises(MismatchError, match="hidden size 16 for a target of 12"):
        Head(config)
