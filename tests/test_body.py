"""Padded targets and heads compute what those compute that they are made of."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks import random_models
from eyas.builtin import SMOLLM2, smollm2_file
from eyas.errors import MismatchError
from eyas.export.check import check
from eyas.gguf.file import open_file
from eyas.hub import resolve_target
from eyas.model.target import Target
from eyas.operators.head import load_head
from tests.gguf_files import gguf_file
from tests.tiny import LLAMA3, tiny_target
from tests.tiny_head import FLAGS, head_folder

body = random_models.body
OWN = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 8}
OWN |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
LARGER = {"hidden_size": 112, "intermediate_size": 96, "num_hidden_layers": 9}
LARGER |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 24}
SMALL = {"hidden_size": 608, "intermediate_size": 1568, "num_hidden_layers": 31}
SMALL |= {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 64}
TOKENS_BT = np.arange(60).reshape(2, 30) * 5


def near(found, expected):
    """Within 1e-4 of the greatest number."""
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()


def kept(padded, width, count=1):
    """The original's part of `count` streams; what is padded is exactly 0."""
    streams = padded.reshape(*padded.shape[:-1], count, -1)
    assert not streams[..., width:].any()
    return streams[..., :width].reshape(*padded.shape[:-1], -1)


def same_features(own, padded):
    width, taps = own.config.hidden_size, own.config.default_taps
    near(padded.logits(TOKENS_BT), own.logits(TOKENS_BT))
    (expected, last), (found, padded_last) = (
        one.features(TOKENS_BT, taps) for one in (own, padded)
    )
    near(kept(found, width, 3), expected)
    near(kept(padded_last, width), last)
    return expected, found


@pytest.mark.parametrize(
    ("model", "larger"),
    [
        *(({}, {name: LARGER[name]}) for name in list(LARGER)[:3]),
        ({}, {"head_dim": 16}),
        ({}, {"num_attention_heads": 8}),  # groups of three in groups of four
        ({}, {"num_attention_heads": 12, "num_key_value_heads": 4}),
        ({}, LARGER),
        ({"tie_word_embeddings": True}, LARGER),
        ({"rope_parameters": LLAMA3}, LARGER),
    ],
    ids=str,
)
def test_logits_and_features_are_the_originals(tmp_path, model, larger):
    own, sizes = tiny_target(tmp_path / "own", **OWN, **model), OWN | larger
    body.write_target(str(own), sizes, tmp_path / "body", "float32")
    padded = Target.load(tmp_path / "body")
    assert {name: getattr(padded.config, name) for name in sizes} == sizes
    same_features(Target.load(own), padded)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def test_drafts_are_the_original_heads(tmp_path, flags):
    folders = [tmp_path / name for name in ("own", "head", "body", "body-head")]
    tiny_target(folders[0], **OWN)
    head_folder(folders[0], folders[1], **flags)
    body.write_target(str(folders[0]), LARGER, folders[2], "float32")
    body.write_body_head(str(folders[1]), LARGER, *folders[2:], "float32")
    targets = [Target.load(folder) for folder in folders[::2]]
    outputs = []
    for target, head, aux in zip(targets, folders[1::2], same_features(*targets), strict=True):
        head = load_head(head)
        embeds_BTH = torch.from_numpy(target.embed_tokens[TOKENS_BT])
        with torch.inference_mode():
            hidden, past = head(embeds_BTH, head.fuse(torch.from_numpy(aux)))
            again, _ = head(embeds_BTH, hidden, past)
            outputs.append([head.logits(hidden), head.logits(again), again])
    for expected, found in zip(*outputs, strict=True):
        near(kept(found.numpy(), expected.shape[-1]), expected.numpy())
    found = check(str(folders[3]), str(folders[2]))
    (warned,) = (one.what for one in found if one.level != "note")
    assert warned == "the head taps the outputs of layers (1, 3, 4), the default is (1, 3, 5)"


@pytest.mark.parametrize(
    ("family", "sizes", "what"),
    [
        ("llama", {"hidden_size": 42}, "hidden_size 48 does not fit into 42"),
        ("llama", {"num_hidden_layers": 7}, "num_hidden_layers 8 does not fit into 7"),
        ("llama", {"head_dim": 12}, "head_dim 12 is no multiple of 8"),
        ("llama", {"num_key_value_heads": 3}, "fewer query heads share"),
        ("llama", {"num_key_value_heads": 4}, "not shared evenly"),
        ("llama", {"attention_bias": True}, "bias has no place in a body"),
        ("qwen3", {}, "qwen3 model"),
    ],
)
def test_what_has_no_body_is_refused(tmp_path, family, sizes, what):
    bias = sizes.get("attention_bias", False)
    own = tiny_target(tmp_path / "own", family, **OWN, attention_bias=bias)
    with pytest.raises(MismatchError, match=what):
        body.write_target(str(own), {name: sizes.get(name, OWN[name]) for name in OWN}, tmp_path)


def test_a_gguf_file_of_a_body(tmp_path):
    own = gguf_file(tiny_target(tmp_path / "own", **OWN), tmp_path / "own.gguf")
    shape = random_models.Shape("", "llama", *LARGER.values(), 320, False, body_of=str(own))
    random_models.write_target(shape, "F32", tmp_path / "body.gguf")
    body.write_target(str(own), LARGER, tmp_path / "folder", "float32")
    original, file, folder = (
        Target.load(resolve_target(str(one)), "float32")
        for one in (own, tmp_path / "body.gguf", tmp_path / "folder")
    )
    same_features(original, file)
    same_features(original, folder)


@pytest.mark.parametrize(("kind", "error"), [(Kind.Q4_K, 0.09), (Kind.Q6_K, 0.022)])
def test_k_quants_are_the_nearest_codes(kind, error):
    values = np.random.default_rng(0).standard_normal((16, 512), np.float32)
    values[:4], values[5, :300] = 0, 0
    found = gguf.dequantize(body.nearest(values, kind), kind)
    assert not found[:4].any()
    assert not found[5, :288].any()
    assert np.linalg.norm(found - values) <= error * np.linalg.norm(values)


def test_smollm2s_blocks_are_the_files_own():
    stored = open_file(smollm2_file()).tensors["blk.3.ffn_down.weight"].data
    found = body.Blocks(SMOLLM2, SMALL).blocks("blk.3.ffn_down", (608, 1568), Kind.Q4_1)
    assert np.array_equal(found[: len(stored), : stored.shape[1]], stored)
    assert not found[len(stored) :].any()
