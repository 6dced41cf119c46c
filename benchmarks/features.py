"""The feature store on real features: bytes per token and speed by codec, and side by side with a
file for each sample.

    python benchmarks/features.py [--quick] [--features URL] [--folder out/features]

codecs: bytes per token and share of bf16; encoding and decoding in MB of bf16 a second on one core.
layouts: the same samples in our shards and as SpecForge writes them, one `data_N.ckpt` each by
torch.save, gzipped (level 6) with its --compress. MB of bf16 a second: written (our writing
includes the codec and its checksums, theirs is torch.save), and read at random, each in one thread,
from files that the system has cached: the format is measured, not the disk. training: what two
cores read for training: decoded MB a second by our stream, checksums verified.

The last line of stdout is one JSON object.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import real_features
import torch

from eyas.artifact import Artifact
from eyas.bench.machine import machine
from eyas.shards import CodecName, FeatureMeta, Features, Sample, ShardWriter, codec_of, order_of
from eyas.shards.codecs import calibrate, needs_tables
from eyas.shards.layout import layers_of
from eyas.shards.writer import CALIBRATION_TOKENS

REPEATS = 3


def seconds(work: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    """The fastest of REPEATS: what the machine can do when it is left alone."""
    taken = []
    for _ in range(REPEATS):
        started = clock()
        work()
        taken.append(clock() - started)
    return min(taken)


def of_codec(
    name: CodecName, samples: Sequence[Sample], meta: FeatureMeta, num_bytes: int
) -> dict[str, float]:
    """Share of bf16, bytes per token (8 of them the token) and MB/s of processor time."""
    meta = meta.model_copy(update={"codec": name})
    layers = [layers_of(sample, meta) for sample in samples]
    tokens = sum(len(sample.token_ids) for sample in samples)
    first = [one for one, sample in zip(layers, samples, strict=True) if len(sample.token_ids)][
        : CALIBRATION_TOKENS // 90
    ]
    coder = codec_of(meta, calibrate(name, first) if needs_tables(name) else None)
    encoded = [coder.encode(*one) for one in layers]
    size = sum(map(len, encoded))
    encoding = seconds(lambda: [coder.encode(*one) for one in layers], time.process_time)
    decoding = seconds(
        lambda: [
            coder.decode(memoryview(data), kept)
            for data, (_, kept) in zip(encoded, layers, strict=True)
        ],
        time.process_time,
    )
    return {
        "share_of_bf16": round(size / num_bytes, 4),
        "bytes_per_token": round(8 + size / tokens, 1),
        "encode_MB_s": round(num_bytes / encoding / 1e6),
        "decode_MB_s": round(num_bytes / decoding / 1e6),
    }


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def write_shards(folder: Path, samples: Sequence[Sample], meta: FeatureMeta) -> None:
    """Our layout, from nothing to the done marker."""
    shutil.rmtree(folder, ignore_errors=True)
    artifact = Artifact(str(folder))
    artifact.begin("benchmark")
    for split in ("train", "held_out"):
        writer = ShardWriter(artifact, split, meta)  # type: ignore[arg-type]
        for sample in samples if split == "train" else ():
            writer.add(sample)
        writer.close()
    artifact.finish("capture", {}, {}, {})


def ckpt_path(folder: Path, number: int, compress: bool) -> Path:
    first = number // 2000 * 2000
    return (
        folder / f"rows_{first}-{first + 2000}" / f"data_{number}.ckpt{'.gz' if compress else ''}"
    )


def write_ckpts(folder: Path, samples: Sequence[Sample], compress: bool) -> None:
    """SpecForge's: rows_0-2000/data_0.ckpt, ... with these keys, int64 tokens and a leading
    dimension of 1.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for number, sample in enumerate(samples):
        record = {
            "input_ids": sample.token_ids.long(),
            "loss_mask": sample.loss_mask.long(),
            "hidden_state": sample.last_hidden[None],
            "aux_hidden_state": sample.aux_hidden[None],
        }
        path = ckpt_path(folder, number, compress)
        path.parent.mkdir(parents=True, exist_ok=True)
        if compress:
            with gzip.open(path, "wb", compresslevel=6) as stream:
                torch.save(record, stream)
        else:
            torch.save(record, path)


def read_ckpt(path: Path) -> Any:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as stream:
            return torch.load(io.BytesIO(stream.read()), weights_only=True)
    return torch.load(path, weights_only=True)


def of_layouts(
    samples: Sequence[Sample], meta: FeatureMeta, folder: Path, num_bytes: int
) -> dict[str, dict[str, float]]:
    """Bytes on disk, and MB of bf16 a second written and read at random, of our layout and of
    theirs.
    """
    order = order_of(len(samples), 0, 0)
    rows: dict[str, dict[str, float]] = {}

    def row(
        name: str,
        where: Path,
        write: Callable[[], None],
        reader: Callable[[], Callable[[int], Any]],
    ) -> None:
        writing = seconds(write)
        read = reader()
        reading = seconds(lambda: [read(number) for number in order])
        rows[name] = {
            "MB_on_disk": round(folder_bytes(where) / 1e6, 2),
            "files": sum(path.is_file() for path in where.rglob("*")),
            "write_MB_s": round(num_bytes / writing / 1e6),
            "random_read_MB_s": round(num_bytes / reading / 1e6),
        }

    for codec in ("raw", "lossless", "within2"):
        where, own = folder / f"shards-{codec}", meta.model_copy(update={"codec": codec})
        row(
            f"eyas {codec}",
            where,
            lambda where=where, own=own: write_shards(where, samples, own),
            lambda where=where: Features(Artifact(str(where))).__getitem__,
        )
    for compress in (False, True):
        where = folder / f"ckpt-{compress}"
        row(
            f"one .ckpt{'.gz' if compress else ''} a sample",
            where,
            lambda where=where, compress=compress: write_ckpts(where, samples, compress),
            lambda where=where, compress=compress: (
                lambda number: read_ckpt(ckpt_path(where, number, compress))
            ),
        )
    return rows


def of_training(
    samples: Sequence[Sample], meta: FeatureMeta, folder: Path, num_bytes: int
) -> dict[str, float]:
    """Decoded MB/s of a whole epoch in shuffled order."""
    rates = {}
    for codec in get_args(CodecName):
        where = folder / f"shards-{codec}"
        write_shards(where, samples, meta.model_copy(update={"codec": codec}))
        features = Features(Artifact(str(where)))
        order = order_of(len(samples), 0, 1) * max(1, int(3e8 // num_bytes))
        taken = seconds(
            lambda features=features, order=order: [None for _ in features.stream(order)]
        )
        rates[codec] = round(num_bytes * len(order) / len(samples) / taken / 1e6)
    return rates


def exact_samples(args: argparse.Namespace) -> tuple[list[Sample], FeatureMeta]:
    features = Features(real_features.captured(args, held_out_share=0.05))
    numbers = range(min(len(features), 100 if args.quick else 600))
    return list(features.stream(numbers)), features.meta


def main() -> None:
    args = real_features.arguments(__doc__, prompts=300).parse_args()
    samples, meta = exact_samples(args)
    num_bytes = sum(2 * (one.aux_hidden.numel() + one.last_hidden.numel()) for one in samples)
    lengths = [len(sample.token_ids) for sample in samples]
    print(
        f"{len(samples)} samples, {sum(lengths):,} tokens, median "
        f"{statistics.median(lengths):.0f}, {num_bytes / 1e6:.0f} MB"
    )
    codecs = {name: of_codec(name, samples, meta, num_bytes) for name in get_args(CodecName)}
    for name, row in codecs.items():
        print(f"{name:10}", row)
    layouts = of_layouts(samples, meta, args.folder, num_bytes)
    for name, row in layouts.items():
        print(f"{name:24}", row)
    training = of_training(samples, meta, args.folder, num_bytes)
    print("decoded MB/s for training:", training)
    cores = len(os.sched_getaffinity(0))
    figures = {
        "codecs": codecs,
        "layouts": layouts,
        "training_MB_s": training,
        "cores": cores,
        "machine": machine(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
