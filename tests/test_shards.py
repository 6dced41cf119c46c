"""The feature format: exact bytes, exact ranges, corruption noticed, resume without loss."""

import errno
import hashlib
import math
import os
import random
import uuid
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from eyas.artifact import Artifact, File
from eyas.errors import CorruptError, InputError, MissingInputError, StorageFullError
from eyas.shards import Entry, FeatureMeta, Features, Sample, ShardWriter, decode_sample, encoded
from eyas.shards import reader as reader_module
from eyas.shards import writer as writer_module
from tests.tiny_features import write_shards

META = FeatureMeta(
    taps=(1, 2, 3), hidden_size=5, vocab_size=97, lm_head_sha256="ab", dtype="bfloat16", codec="raw"
)


def make_sample(
    number: int, length: int = 0, dtype: torch.dtype = torch.bfloat16, hidden_size: int = 5
) -> Sample:
    generator = torch.Generator().manual_seed(number)
    length = length or 1 + number % 7
    return Sample(
        key=f"sample-{number}",
        token_ids=torch.randint(
            0, META.vocab_size, (length,), generator=generator, dtype=torch.int32
        ),
        loss_mask=torch.rand(length, generator=generator) < 0.5,
        aux_hidden=torch.randn(length, 3 * hidden_size, generator=generator).to(dtype),
        last_hidden=torch.randn(length, hidden_size, generator=generator).to(dtype),
        source=f"source-{number % 3}",
        argmax=torch.randint(-1, 1 << 30, (length,), generator=generator, dtype=torch.int32),
    )


def write(place: object, samples: list[Sample], meta: FeatureMeta = META) -> Artifact:
    return write_shards(str(place), meta, samples)


def assert_same(left: Sample, right: Sample) -> None:
    assert (left.key, left.source) == (right.key, right.source)
    for name in ("token_ids", "loss_mask", "aux_hidden", "last_hidden", "argmax"):
        one, other = getattr(left, name), getattr(right, name)
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(
            one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)
        ), name


@pytest.mark.parametrize("store", ["file", "memory"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_samples_come_back_bit_for_bit_from_any_store(tmp_path, store, dtype):
    meta = META.model_copy(update={"dtype": dtype})
    url = str(tmp_path / "features") if store == "file" else f"memory://{uuid.uuid4()}"
    samples = [make_sample(number, dtype=getattr(torch, dtype)) for number in range(11)]
    features = Features(write(url, samples, meta))
    assert features.meta == meta
    assert features.inputs == {"features": Artifact(url).manifest("capture")}
    assert features.lengths == [len(sample.token_ids) for sample in samples]
    assert len(features) == len(samples)
    tokens = features.all_tokens()
    for sample, read, (token_ids, loss_mask) in zip(samples, features, tokens, strict=True):
        assert_same(sample, read)
        assert torch.equal(token_ids, sample.token_ids)
        assert torch.equal(loss_mask, sample.loss_mask)
    assert_same(samples[-1], features[-1])
    assert len(Features(Artifact(url), "held_out")) == 0


def test_features_of_version_2_are_read_and_know_no_best_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "FORMAT", 2)
    old = [replace(make_sample(n), argmax=torch.full((1 + n % 7,), -1).int()) for n in range(5)]
    artifact = write(tmp_path / "features", old)
    entry, data = Features(artifact).entries[0], artifact.read("train-00000.safetensors")
    labels = np.frombuffer(data[entry.start + 4 * entry.length :], "<i4", entry.length)
    assert labels.tolist() == old[0].loss_mask.int().tolist()
    assert artifact.read_json("train.index.json")["format"] == 2
    for sample, read in zip(old, Features(Artifact(artifact.url)), strict=True):
        assert_same(sample, read)


def test_every_bfloat16_survives_numpy_and_back():
    """Subnormals, both zeros, infinities and every NaN payload."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.bfloat16)
    meta = META.model_copy(update={"hidden_size": 4})
    length = len(patterns) // (4 * meta.hidden_size)
    aux_hidden = patterns[: 12 * length].view(length, 12)
    last_hidden = patterns[12 * length :].view(length, 4)
    ids = torch.zeros(length, dtype=torch.int32)
    sample = Sample("all", ids, ids.bool(), aux_hidden, last_hidden)
    data = encoded(sample, meta, meta.coder()).data
    entry = Entry(key="all", source="", shard="", start=0, size=len(data), length=length, sha256="")
    assert_same(sample, decode_sample(data, entry, meta))


@settings(max_examples=30)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.integers(1, 4),
    st.sampled_from(["bfloat16", "float32"]),
)
def test_a_shard_is_an_ordinary_safetensors_file(lengths, hidden, dtype):
    """Odd sizes: the other reader insists on alignment without gaps."""
    meta = META.model_copy(update={"hidden_size": hidden, "dtype": dtype})
    artifact = Artifact(f"memory://{uuid.uuid4()}")
    writer = ShardWriter(artifact, "train", meta)
    for number, length in enumerate(lengths):
        features = torch.full((length, 4 * hidden), math.pi * number, dtype=getattr(torch, dtype))
        ids = torch.arange(length, dtype=torch.int32)
        states = features[:, hidden:], features[:, :hidden]
        writer.add(Sample(f"{number}", ids, ids % 2 == 0, *states))
    writer.close()
    data = artifact.read("train-00000.safetensors")
    assert int.from_bytes(data[:8], "little") % 8 == 0
    tensors = load(data)
    for number, length in enumerate(lengths):
        assert tensors[f"{number:03d}.token_ids"].tolist() == list(range(length))
        assert tensors[f"{number:03d}.labels"].tolist() == [1 - at % 2 for at in range(length)]
        expected = torch.full((length, 3 * hidden), math.pi * number, dtype=getattr(torch, dtype))
        assert torch.equal(tensors[f"{number:03d}.aux_hidden"], expected)


def test_reading_one_sample_asks_for_its_bytes_only(tmp_path, monkeypatch):
    artifact = write(f"memory://{tmp_path.name}", [make_sample(number) for number in range(6)])
    asked = []
    read_range = Artifact.read_range

    def counted(artifact: Artifact, name: str, start: int, end: int) -> bytes:
        asked.append((name, end - start))
        return read_range(artifact, name, start, end)

    monkeypatch.setattr(Artifact, "read_range", counted)
    features = Features(artifact)
    assert features[5].key == "sample-5"
    assert asked == [("train-00001.safetensors", 6 * META.bytes_per_token)]


@settings(max_examples=25)
@given(st.data())
def test_a_flipped_bit_in_a_sample_is_noticed_and_named(data):
    url = f"memory://{uuid.uuid4()}"
    artifact = write(url, [make_sample(number) for number in range(6)])
    entry = data.draw(st.sampled_from(Features(artifact).entries))
    size = entry.length * META.bytes_per_token
    at = entry.start + data.draw(st.integers(0, size - 1))
    shard = bytearray(artifact.read(entry.shard))
    shard[at] ^= 1 << data.draw(st.integers(0, 7))
    artifact._fs.pipe_file(artifact._path(entry.shard), bytes(shard))
    features = Features(Artifact(url))
    for number, other in enumerate(features.entries):
        if other.key != entry.key:
            assert features[number].key == other.key
            continue
        with pytest.raises(CorruptError) as raised:
            features[number]
        assert entry.key in raised.value.what
        assert entry.shard in raised.value.what


def test_a_changed_index_is_noticed(tmp_path):
    folder = tmp_path / "features"
    write(folder, [make_sample(0)])
    index = folder / "train.index.json"
    index.write_text(index.read_text().replace("sample-0", "sample-1"))
    with pytest.raises(CorruptError, match=r"train\.index\.json"):
        Features(Artifact(str(folder)))


def test_features_want_a_finished_capture(tmp_path):
    artifact = Artifact(str(tmp_path / "features"))
    with pytest.raises(MissingInputError, match="does not exist"):
        Features(artifact)
    artifact.begin("test")
    with pytest.raises(MissingInputError, match="unfinished"):
        Features(artifact)
    artifact.finish("prompts", {}, {}, {})
    with pytest.raises(InputError, match="'prompts', not 'capture'"):
        Features(Artifact(artifact.url))
    other = Artifact(str(tmp_path / "other"))
    other.write_json("train.index.json", {"meta": {}, "samples": []})
    other.finish("capture", {}, {}, {})
    with pytest.raises(InputError, match="another version"):
        Features(other)


def failing(number):
    def fail(*_, **__):
        raise OSError(number, os.strerror(number))

    return fail


def pairs(artifact: Artifact, *numbers: int) -> ShardWriter:
    """A writer of shards of two samples, to which these were added."""
    writer = ShardWriter(artifact, "train", META, samples_per_shard=2)
    for number in numbers:
        writer.add(make_sample(number))
    return writer


def test_a_full_disk_keeps_the_whole_shards(tmp_path, monkeypatch):
    artifact = Artifact(str(tmp_path / "features"))
    writer = pairs(artifact, 0, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", failing(errno.ENOSPC))
        with pytest.raises(StorageFullError, match="no room left"):
            writer.add(make_sample(3))
    assert artifact.names() == ["train-00000.safetensors"]
    assert pairs(artifact).keys == {"sample-0", "sample-1"}


@pytest.mark.parametrize("keep", [0, 7, 300, -1])
def test_half_a_shard_is_written_again_and_one_that_was_whole_is_named(tmp_path, keep):
    """A store may show half of an upload, without a note."""
    artifact, name = Artifact(str(tmp_path / "features")), "train-00001.safetensors"
    pairs(artifact, *range(4))
    whole = artifact.read(name)
    artifact.write(name, whole[:keep])
    with pytest.raises(CorruptError, match=name):
        pairs(artifact)
    artifact.delete(f"work/{name}.json")
    assert pairs(artifact).keys == {"sample-0", "sample-1"}
    pairs(artifact, 2, 3)
    assert artifact.read(name) == whole


@pytest.mark.parametrize("place", ["{}/features", "memory://{}/features"])
def test_a_shard_that_was_cut_short_is_named_at_once(tmp_path, place):
    artifact = write(place.format(tmp_path), [make_sample(n) for n in range(4)])
    name = next(name for name in artifact.names() if name.endswith(".safetensors"))
    artifact._fs.pipe_file(artifact._path(name), artifact.read(name)[:-40])
    features = Features(Artifact(artifact.url))
    for read in (lambda: features[3], lambda: [*features.all_tokens()]):
        with pytest.raises(CorruptError, match=rf"{name} holds [\d,]+ bytes, not") as raised:
            read()
        assert "this one shard" in raised.value.hint
    artifact.delete(name)
    with pytest.raises(MissingInputError, match=name):
        features[3]


def test_bytes_that_came_damaged_once_are_read_again(tmp_path, monkeypatch):
    artifact = write(tmp_path / "features", [make_sample(n) for n in range(2)])
    features, fresh = Features(artifact), Artifact(artifact.url)
    fresh.manifest()
    calls = []

    def once(read):
        def damaged(*asked, **options):
            data = bytearray(read(*asked, **options))
            if not calls:
                data[-1] ^= 1
            calls.append(asked)
            return bytes(data)

        return damaged

    monkeypatch.setattr(features, "_read_range", once(features._read_range))
    assert features[1].key == "sample-1"
    assert len(calls) == 2
    calls.clear()
    monkeypatch.setattr(fresh._fs, "cat_file", once(fresh._fs.cat_file))
    assert fresh.read_json("train.index.json")
    assert len(calls) > 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written_is_one_error(tmp_path, monkeypatch, number):
    artifact = Artifact(str(tmp_path / "features"))
    monkeypatch.setattr(os, "makedirs", failing(number))
    for use in (lambda: artifact.write("a", b"b"), lambda: artifact.held_alone().__enter__()):
        with pytest.raises(InputError, match="cannot be read or written"):
            use()


def test_a_large_sample_ends_its_shard(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 10 * META.bytes_per_token)
    samples = [make_sample(number, length) for number, length in enumerate((4, 4, 2, 30, 1))]
    features = Features(write(tmp_path / "features", samples))
    assert [int(entry.shard[6:11]) for entry in features.entries] == [0, 0, 0, 1, 2]


def test_a_resumed_run_does_not_read_whole_shards_for_their_checksums(tmp_path, monkeypatch):
    artifact = Artifact(str(tmp_path / "features"))
    pairs(artifact, *range(4))
    again = Artifact(artifact.url)
    pairs(again).close()
    with monkeypatch.context() as patched:
        patched.setattr(Artifact, "checksummed", lambda *_: pytest.fail("a shard is read again"))
        manifest = again.finish("capture", {}, {}, {})
    for name in ("train-00000.safetensors", "train-00001.safetensors"):
        data = artifact.read_range(name, 0, 1 << 20)
        sha256 = hashlib.sha256(data).hexdigest()
        assert manifest.files[name] == File(bytes=len(data), sha256=sha256)
    assert not (tmp_path / "features" / "work").exists()


# Streams


def test_a_stream_goes_on_at_an_exact_sample(tmp_path):
    samples = [make_sample(number) for number in range(13)]
    features = Features(write(tmp_path / "features", samples))
    order = random.Random(1).sample(range(13), 13)
    whole = list(features.stream(order))
    for number, sample in zip(order, whole, strict=True):
        assert_same(sample, samples[number])
    for done in (0, 1, 12, 13):
        rest = list(features.stream(order[done:]))
        assert [sample.key for sample in rest] == [sample.key for sample in whole[done:]]
    assert [len(batch) for batch in features.batches([[3, 1], [], [4]])] == [2, 0, 1]


def test_a_broken_sample_is_an_error_in_its_place(tmp_path):
    features = Features(write(tmp_path / "features", [make_sample(number) for number in range(6)]))
    entry = features.entries[3]
    shard = tmp_path / "features" / entry.shard
    data = bytearray(shard.read_bytes())
    data[entry.start + 3] ^= 128  # its first token is negative
    shard.write_bytes(data)
    with pytest.raises(CorruptError, match=r"sample-3 .* is damaged"):
        list(features.all_tokens())
    samples = features.stream(range(6))
    assert [next(samples).key for _ in range(3)] == ["sample-0", "sample-1", "sample-2"]
    with pytest.raises(CorruptError, match="sample-3"):
        next(samples)


def test_no_more_is_read_ahead_than_the_bound(monkeypatch):
    begun: list[int] = []
    sizes = [30, 40, 90, 5, 5, 5, 300, 50, 50]

    def read(number: int) -> int:
        begun.append(number)
        return number

    numbers = reader_module.ahead(read, range(len(sizes)), sizes.__getitem__, 3, 100)
    for place, number in enumerate(numbers):
        assert number == place
        held = sum(sizes[number] for number in begun if number >= place)
        assert held <= max(100, sizes[place])
    assert sorted(begun) == list(range(len(sizes)))
