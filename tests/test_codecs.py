"""Codecs: exact, or within their error, also with giants, NaN and few rows."""

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.artifact import Artifact
from eyas.errors import CorruptError
from eyas.evaluate.walks import num_greedy
from eyas.operators.batch import Batch
from eyas.shards import (
    CODECS,
    Codec,
    CodecName,
    FeatureMeta,
    Features,
    Sample,
    ShardWriter,
    teacher_mask,
)
from eyas.shards import writer as writer_module
from eyas.shards.codecs import LayerStates, Tables, calibrate, join_parts, split_parts
from eyas.shards.layout import layers_of
from eyas.train.loss import ObjectiveConfig, batch_loss, plan_of, teach
from tests.tiny_batch import made_up_samples, tiny_vocabulary, wavy_head
from tests.tiny_features import write_shards

NAMES = get_args(CodecName)
INEXACT = [name for name in NAMES if CODECS[name].error]
SIZE = 48


def test_every_name_has_an_entry():
    assert tuple(CODECS) == NAMES


def meta_of(codec: str, **settings: Any) -> FeatureMeta:
    defaults = {"taps": (1, 2, 3), "hidden_size": SIZE, "vocab_size": 97, "lm_head_sha256": "ab"}
    return FeatureMeta(**{**defaults, "codec": codec, **settings})


def coder_of(meta: FeatureMeta, layers: LayerStates, kept: torch.Tensor) -> Codec:
    return meta.coder(None if meta.is_exact else calibrate(meta.codec, [(layers, kept)]))


def residual_streams(rows: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> LayerStates:
    """Four layers that build on each other; channels of very different sizes, giants in row 0."""
    generator = torch.Generator().manual_seed(seed)
    channel = torch.logspace(-1, 1.5, SIZE)
    layers = [torch.randn(rows, SIZE, generator=generator) * channel]
    for _ in range(3):
        added = torch.randn(rows, SIZE, generator=generator) * channel
        layers.append(0.9 * layers[-1] + 0.4 * added)
    for layer in layers:
        layer[0, 5] = 3000.0
    return [layer.to(dtype) for layer in layers]


def sample_of(number: int, length: int, dtype: torch.dtype = torch.bfloat16) -> Sample:
    layers = residual_streams(length, number, dtype)
    mask = torch.arange(length) % 7 > 4
    ids = torch.arange(length, dtype=torch.int32)
    return Sample(f"sample-{number}", ids, mask, torch.cat(layers[:3], dim=1), layers[3], "source")


def features_of(place: Path, meta: FeatureMeta, samples: list[Sample]) -> Features:
    return Features(write_shards(str(place), meta, samples, samples_per_shard=3))


def relative_error(sample: Sample, read: Sample) -> torch.Tensor:
    """Of each layer, in units of each channel's size, without giants: [4]."""
    before, after = (
        torch.cat([one.aux_hidden, one.last_hidden], dim=1)[1:].float() for one in (sample, read)
    )
    error = (after - before).square().mean(0).sqrt() / before.square().mean(0).sqrt()
    return error.view(4, SIZE).square().mean(1).sqrt()


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("codec", NAMES)
def test_features_come_back_within_the_codecs_error(tmp_path, codec, dtype):
    samples = [sample_of(number, 300 + number, getattr(torch, dtype)) for number in range(4)]
    features = features_of(tmp_path / "features", meta_of(codec, dtype=dtype), samples)
    for sample, read in zip(samples, features, strict=True):
        assert torch.equal(read.token_ids, sample.token_ids)
        assert torch.equal(read.loss_mask, sample.loss_mask)
        assert read.aux_hidden.dtype == read.last_hidden.dtype == getattr(torch, dtype)
        if CODECS[codec].error == 0:
            assert bits(read.aux_hidden) == bits(sample.aux_hidden)
            assert bits(read.last_hidden) == bits(sample.last_hidden)
        else:
            error = relative_error(sample, read)
            assert (error < 1.15 * CODECS[codec].error).all(), error
            assert (error > 0.7 * CODECS[codec].error).all(), "finer than it needs to be"


@pytest.mark.parametrize("codec", INEXACT)
def test_giants_come_back_to_the_bit(codec):
    layers = residual_streams(400)
    kept = torch.ones(400, dtype=torch.bool)
    coder = coder_of(meta_of(codec), layers, kept)
    read = coder.decode(memoryview(coder.encode(layers, kept)), kept)
    for before, after in zip(layers, read, strict=True):
        assert before[0, 5] == after[0, 5]
        channel = before[1:, 5].float()
        error = (after[1:, 5].float() - channel).square().mean().sqrt()
        assert error < 1.2 * CODECS[codec].error * channel.square().mean().sqrt()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("codec", NAMES)
def test_what_is_no_number_is_kept_for_those_who_look_for_it(codec, dtype):
    """The trainer names samples whose features are not finite."""
    layers = residual_streams(50, dtype=getattr(torch, dtype))
    kept = torch.ones(50, dtype=torch.bool)
    coder = coder_of(meta_of(codec, dtype=dtype), layers, kept)
    layers[0][7, 3], layers[1][8, 4], layers[3][9, 5] = float("nan"), float("inf"), -float("inf")
    read = coder.decode(memoryview(coder.encode(layers, kept)), kept)
    assert read[0][7, 3].isnan()
    assert read[1][8, 4] == float("inf")
    assert read[3][9, 5] == -float("inf")


@settings(max_examples=60)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["bfloat16", "float32"]),
    st.lists(st.booleans(), min_size=1, max_size=9),
    st.data(),
)
def test_any_rows_any_bits(codec, dtype, kept_rows, data):
    kept = torch.tensor(kept_rows)
    kind = getattr(torch, dtype)
    meta = meta_of(codec, dtype=dtype, hidden_size=3)
    layers = []
    for rows in (len(kept), len(kept), len(kept), int(kept.sum())):
        size = rows * 3 * kind.itemsize
        raw = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
        numbers = torch.frombuffer(raw or bytearray(kind.itemsize), dtype=kind)
        layers.append(numbers[: rows * 3].view(rows, 3))
    coder = coder_of(meta, layers, kept)
    encoded = coder.encode(layers, kept)
    assert len(encoded) % 8 == 0
    read = coder.decode(memoryview(encoded), kept)
    for before, after in zip(layers, read, strict=True):
        assert before.shape == after.shape
        assert before.dtype == after.dtype
        if CODECS[codec].error == 0:
            assert bits(before) == bits(after)


def test_a_codec_takes_the_bytes_that_its_entry_says():
    layers, kept = residual_streams(2000), torch.ones(2000, dtype=torch.bool)
    for codec in NAMES:
        coded = coder_of(meta_of(codec), layers, kept).encode(layers, kept)
        assert len(coded) / (8 * SIZE * 2000) == pytest.approx(CODECS[codec].share, abs=0.05)


@pytest.mark.parametrize("codec", NAMES)
def test_a_teacher_is_kept_where_someone_asks_it(tmp_path, codec):
    samples = [sample_of(number, 41 + number) for number in range(3)]
    everywhere = features_of(tmp_path / "everywhere", meta_of(codec), samples)
    meta = meta_of(codec, teacher="supervised")
    supervised = features_of(tmp_path / "supervised", meta, samples)
    sizes = [sum(entry.size for entry in one.entries) for one in (supervised, everywhere)]
    assert sizes[0] < 0.95 * sizes[1]
    for sample, read in zip(samples, supervised, strict=True):
        mask, kept = sample.loss_mask, teacher_mask(sample.loss_mask)
        near = [mask[max(0, at - 1) : at + 2].any().item() for at in range(len(mask))]
        assert kept.tolist() == near
        assert not read.last_hidden[~kept].any()
        if codec not in INEXACT:
            assert torch.equal(read.last_hidden[kept], sample.last_hidden[kept])
            assert torch.equal(read.aux_hidden, sample.aux_hidden)


@pytest.mark.parametrize("cut_after", [1, 4, 7])
def test_a_cut_writer_goes_on_with_the_same_tables(tmp_path, monkeypatch, cut_after):
    monkeypatch.setattr(writer_module, "CALIBRATION_TOKENS", 150)
    samples = [sample_of(number, 40) for number in range(11)]
    whole = features_of(tmp_path / "whole", meta_of("within4"), samples)
    for added in (samples[:cut_after], samples):
        cut = Artifact(str(tmp_path / "cut"))
        writer = ShardWriter(cut, "train", meta_of("within4"), samples_per_shard=3)
        for sample in added:
            if sample.key not in writer.keys:
                writer.add(sample)
    writer.close()
    for name in ("train.index.json", *(entry.shard for entry in whole.entries)):
        cut = (tmp_path / "cut" / name).read_bytes()
        assert cut == (tmp_path / "whole" / name).read_bytes()


def test_tables_are_the_same_on_both_sides():
    tables = calibrate("within4", [(residual_streams(99), torch.ones(99, dtype=torch.bool))])
    again = Tables.from_text(tables.to_text(), SIZE)
    assert np.array_equal(tables.step, again.step)
    assert np.array_equal(tables.weight, again.weight)
    assert (tables.weight[1:].mean(1) > 0.8).all(), "each layer builds on the one below"
    assert not tables.weight[0].any()
    with pytest.raises(ValueError, match="reshape"):
        Tables.from_text(tables.to_text(), SIZE + 1)


@pytest.mark.parametrize("codec", ["lossless", "within4"])
def test_bytes_of_another_making_are_an_error(tmp_path, codec):
    """Right by their checksum and wrong by their codec."""
    features = features_of(tmp_path / "features", meta_of(codec), [sample_of(0, 30)])
    other = meta_of("raw")
    layers, kept = layers_of(sample_of(0, 30), other)
    features.codec = Lying(other.coder().encode(layers, kept), features.codec)
    with pytest.raises(CorruptError, match="sample-0"):
        features[0]


class Lying:
    def __init__(self, data: bytes, codec: Any) -> None:
        self._data, self._codec = data, codec

    def decode(self, data: memoryview, kept: torch.Tensor) -> LayerStates:
        return self._codec.decode(memoryview(self._data), kept)


@given(st.lists(st.binary(max_size=20), min_size=1, max_size=6))
def test_parts_are_found_again(parts):
    joined = join_parts(parts)
    assert len(joined) % 8 == 0
    assert [bytes(part) for part in split_parts(memoryview(joined), len(parts))] == parts
    with pytest.raises(ValueError, match="length"):
        list(split_parts(memoryview(joined)[: 4 * len(parts) - 1], len(parts)))


def test_a_teacher_kept_where_it_is_asked_for_gives_the_same_loss_and_the_same_tau():
    head, vocabulary = wavy_head(), tiny_vocabulary()
    turns = [False] * 4 + [True] * 5 + [False] * 3 + [True] * 4
    samples = made_up_samples([turns, [False, True, True, False, True], [True] * 6])
    kept = [
        replace(one, last_hidden=one.last_hidden * teacher_mask(one.loss_mask)[:, None])
        for one in samples
    ]
    whole, thin = Batch.of(samples), Batch.of(kept)
    assert not torch.equal(whole.last_hidden_BTH, thin.last_hidden_BTH)
    config = ObjectiveConfig(num_ttt_steps=3)
    plan = plan_of(whole, config, head.config)
    teachers = [teach(batch, vocabulary, head, plan) for batch in (whole, thin)]
    losses = [
        batch_loss(head, vocabulary.embed_tokens, batch, teacher, config).loss
        for batch, teacher in zip((whole, thin), teachers, strict=True)
    ]
    assert losses[0] == losses[1]
    assert num_greedy(vocabulary, whole) == num_greedy(vocabulary, thin)
