"""Feature shards: samples with hidden states on disk, read one by one, or many ahead, from any
store.

Knows the format. Knows no model and no stage's work.

    sample   what a sample is, and what a source of samples offers
    codecs   hidden states <-> bytes
    layout   a sample, a shard <-> bytes
    writer   samples -> shards, resumed behind the last whole one
    reader   one sample by its number, or many in an order, read ahead; a cache for stores far away
"""

from eyas.shards.codecs import Codec, codec_of
from eyas.shards.layout import Entry, decode_sample, encode_sample
from eyas.shards.reader import Cache, Features, order_of
from eyas.shards.sample import CodecName, FeatureMeta, FeatureSource, Sample, Split, teacher_mask
from eyas.shards.writer import ShardWriter

__all__ = [
    "Cache",
    "Codec",
    "CodecName",
    "Entry",
    "FeatureMeta",
    "FeatureSource",
    "Features",
    "Sample",
    "ShardWriter",
    "Split",
    "codec_of",
    "decode_sample",
    "encode_sample",
    "order_of",
    "teacher_mask",
]
