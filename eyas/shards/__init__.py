"""Feature shards: samples with hidden states on disk or in a store.

codecs   hidden states <-> bytes
sample   a sample, and what a source of samples offers
layout   a sample, a shard <-> bytes
writer   samples -> shards
reader   shards -> samples
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
