"""Feature shards: samples with hidden states on disk, read one by one, or many ahead, from any
store.

    codecs   hidden states <-> bytes
    sample   a sample, and what a source of samples offers
    layout   a sample, a shard <-> bytes
    writer   samples -> shards, resumed after the last whole one
    reader   one sample by its number, or many in an order, read ahead
"""

from eyas.shards.codecs import CODECS, Codec, CodecName
from eyas.shards.layout import EncodedSample, Entry, decode_sample, encoded
from eyas.shards.reader import Features
from eyas.shards.sample import FeatureMeta, FeatureSource, Sample, Split, teacher_mask
from eyas.shards.writer import ShardWriter

__all__ = [
    "CODECS",
    "Codec",
    "CodecName",
    "EncodedSample",
    "Entry",
    "FeatureMeta",
    "FeatureSource",
    "Features",
    "Sample",
    "ShardWriter",
    "Split",
    "decode_sample",
    "encoded",
    "teacher_mask",
]
