"""Feature shards: samples with hidden states on disk, read one by one, or many ahead, from any
store.

Knows the format. Knows no model and no stage's work.

    sample   what a sample is              codecs   hidden states <-> bytes
    layout   a sample, a shard <-> bytes   writer   samples -> shards, resumed behind the last whole one
    reader   one sample by its number      stream   many, read ahead, in an order that seed, epoch and rank give
    cache    what was read from afar, on this disk             source   what training asks of features, stored or not
"""

from eyas.shards.cache import Cache
from eyas.shards.codecs import Codec, codec_of
from eyas.shards.layout import Entry, decode_sample, encode_sample
from eyas.shards.reader import Features
from eyas.shards.sample import CodecName, FeatureMeta, Sample, Split, taught
from eyas.shards.source import FeatureSource
from eyas.shards.stream import order_of
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
    "taught",
]
