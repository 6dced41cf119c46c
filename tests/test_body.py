"""Padded targets and heads compute what those compute that they are made of."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from benchmarks import random_models
from eyas.builtin import SMOLLM2, smollm2_file
from eyas.engine.engine import Engine, EngineConfig
from eyas.engine.request import Request, SamplingParams
from eyas.errors import MismatchError
from eyas.export.check import check
from eyas.gguf.file import open_file
from eyas.hub import resolve_head, resolve_target
from eyas.model.target import Target
from eyas.operators.head import load_head
from tests.gguf_files import gguf_file
from tests.test_head import FLAGS
from tests.tiny import tiny_target
from tests.tiny_head import head_folder

body = random_models.body
OWN = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 8}
OWN |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
LARGER = [
    {"hidden_size": 60},
    {"intermediate_size": 96},
    {"num_hidden_layers": 11},
    {"head_dim": 16},
    {"num_attention_heads": 8},  # groups of three in groups of four
    {"num_attention_heads": 12, "num_key_value_heads": 4},
    {"hidden_size": 112, "intermediate_size": 96, "num_hidden_layers": 9}
    | {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 24},
]
ALL = OWN | LARGER[-1]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "original_max_position_embeddings": 32}
LLAMA3 |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHARE = 1e-4  # of the greatest number, in float32


def near(found, expected):
    assert np.abs(found - expected).max() <= SHARE * np.abs(expected).max()


def kept(padded, width, count=1):
    """The original's part of `count` streams; what is padded is exactly 0."""
    streams = padded.reshape(*padded.shape[:-1], count, -1)
    assert not streams[..., width:].any()
    return streams[..., :width].reshape(*padded.shape[:-1], -1)


def same_target(own, padded, tokens_BT):
    width, taps = own.config.hidden_size, own.config.default_taps
    near(padded.logits(tokens_BT), own.logits(tokens_BT))
    aux_hidden, last_hidden = own.features(tokens_BT, taps)
    found = padded.features(tokens_BT, taps)
    near(kept(found[0], width, 3), aux_hidden)
    near(kept(found[1], width), last_hidden)
    return aux_hidden, found[0]


@pytest.mark.parametrize("larger", LARGER, ids=str)
def test_logits_and_features_are_the_originals(tmp_path, larger):
    own, sizes = tiny_target(tmp_path / "own", **OWN), OWN | larger
    body.write_target(str(own), sizes, tmp_path / "body", "float32")
    padded = Target.load(tmp_path / "body")
    assert {name: getattr(padded.config, name) for name in sizes} == sizes
    same_target(Target.load(own), padded, np.arange(60).reshape(2, 30) * 5)


@pytest.mark.parametrize("kind", [{"tie_word_embeddings": True}, {"rope_parameters": LLAMA3}])
def test_other_llamas(tmp_path, kind):
    own = tiny_target(tmp_path / "own", **OWN, **kind)
    body.write_target(str(own), ALL, tmp_path / "body", "float32")
    tokens_BT = np.arange(60).reshape(2, 30) * 5
    same_target(Target.load(own), Target.load(tmp_path / "body"), tokens_BT)


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")
def test_drafts_are_the_original_heads(tmp_path, flags):
    """Logits of a step on features, and of one that is fed back; the head fits its target."""
    own = tiny_target(tmp_path / "own", **OWN)
    head = head_folder(own, tmp_path / "head", **flags)
    body.write_target(str(own), ALL, tmp_path / "body", "float32")
    body.write_body_head(str(head), ALL, tmp_path / "body", tmp_path / "body-head", "float32")
    tokens_BT = np.arange(30)[None] * 5
    features = same_target(Target.load(own), Target.load(tmp_path / "body"), tokens_BT)
    outputs = []
    for target, folder, aux in zip(
        (own, tmp_path / "body"), (head, tmp_path / "body-head"), features, strict=True
    ):
        loaded, embeds = load_head(folder), Target.load(target).embed_tokens
        embeds_BTH = torch.from_numpy(np.array(embeds))[torch.from_numpy(tokens_BT)]
        with torch.inference_mode():
            hidden, past = loaded(embeds_BTH, loaded.fuse(torch.from_numpy(aux)))
            again, _ = loaded(embeds_BTH, hidden, past)
            outputs.append([loaded.logits(one).numpy() for one in (hidden, again)])
            outputs[-1].append(again.numpy())
    for found, expected in zip(*outputs[::-1], strict=True):
        near(kept(found, expected.shape[-1]), expected)
    (warned,) = (
        one.what
        for one in check(str(tmp_path / "body-head"), str(tmp_path / "body"))
        if one.level != "note"
    )
    assert warned == "the head taps the outputs of layers (1, 3, 4), the default is (1, 3, 5)"


@pytest.mark.parametrize(
    ("sizes", "what"),
    [
        ({"hidden_size": 42}, "hidden_size 48 does not fit into 42"),
        ({"num_hidden_layers": 7}, "num_hidden_layers 8 does not fit into 7"),
        ({"head_dim": 12}, "head_dim 12 is no multiple of 8"),
        ({"num_key_value_heads": 3}, "fewer query heads share"),
        ({"num_key_value_heads": 4}, "not shared evenly"),
    ],
)
def test_a_body_that_is_too_small_is_refused(tmp_path, sizes, what):
    own = tiny_target(tmp_path / "own", **OWN)
    with pytest.raises(MismatchError, match=what):
        body.write_target(str(own), OWN | sizes, tmp_path / "body")
    assert not (tmp_path / "body").exists()


@pytest.mark.parametrize(("family", "bias"), [("qwen3", False), ("llama", True)])
def test_what_is_no_plain_llama_is_refused(tmp_path, family, bias):
    own = tiny_target(tmp_path / "own", family, **OWN, attention_bias=bias)
    with pytest.raises(MismatchError, match=r"qwen3 model|no place in a body"):
        body.write_target(str(own), OWN, tmp_path / "body")


def test_a_gguf_file_of_a_body(tmp_path):
    """Heads and rows in ggml's order, norms and eps, a layer of zeros."""
    own = gguf_file(tiny_target(tmp_path / "own", **OWN), tmp_path / "own.gguf")
    sizes = {"hidden": 256, "intermediate": 256, "layers": 9, "heads": 8, "key_heads": 2}
    sizes |= {"head_dim": 32, "vocabulary": 320, "tied": False}
    shape = random_models.Shape("a body", "llama", **sizes, body_of=str(own))
    random_models.write_target(shape, "F32", tmp_path / "body.gguf")
    tokens_BT = np.arange(30)[None] * 5
    files = (Target.load(resolve_target(str(one))) for one in (own, tmp_path / "body.gguf"))
    expected, found = (one.logits(tokens_BT) for one in files)
    near(found, expected)


@pytest.mark.parametrize(("kind", "error"), [(Kind.Q4_K, 0.09), (Kind.Q6_K, 0.022)])
def test_k_quants_are_the_nearest_codes(kind, error):
    """Normal numbers; a step of 1/15 of the range alone would give .072 and .018."""
    values = np.random.default_rng(0).standard_normal((16, 512), np.float32)
    values[:4], values[5, :300] = 0, 0
    found = gguf.dequantize(body.nearest(values, kind), kind)
    assert not found[:4].any()
    assert not found[5, :288].any()
    assert np.linalg.norm(found - values) <= error * np.linalg.norm(values)


SMALL = {"hidden_size": 672, "intermediate_size": 1568, "num_hidden_layers": 31}
SMALL |= {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 128}


def test_smollm2s_blocks_are_the_files_own():
    """Nothing is rounded anew where nothing is scaled."""
    stored = open_file(smollm2_file()).tensors["blk.3.ffn_down.weight"]
    found = body.Blocks(SMOLLM2, SMALL).blocks("blk.3.ffn_down", (672, 1568), Kind.Q4_1)
    rows, width = stored.data.shape
    assert np.array_equal(found[:rows, :width], stored.data)
    assert not found[rows:].any()


def test_smollm2s_answers_and_rounds(tmp_path):
    body.write_target(SMOLLM2, SMALL, tmp_path / "target", "float32")
    body.write_body_head(SMOLLM2, SMALL, tmp_path / "target", tmp_path / "head", "float32")
    asked = [Request("0", tuple(range(300, 320)), SamplingParams(max_tokens=24))]
    own, padded = (
        Engine.load(*folders, "float32", EngineConfig(max_batch=1, speculation="fixed(4,2,8)"))
        for folders in (
            (resolve_target(SMOLLM2), resolve_head(SMOLLM2)),
            (tmp_path / "target", tmp_path / "head"),
        )
    )
    (expected,), (found,) = (list(engine.run(asked)) for engine in (own, padded))
    assert len(expected.token_ids) == 24
    assert (found.token_ids, found.accept_hist) == (expected.token_ids, expected.accept_hist)
