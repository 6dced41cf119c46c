"""`eyas train`: features -> head; by one process, or by several that torchrun started."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Annotated, Any

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, StageOptions, TargetOption, with_flags
from eyas.cli.stage import StageFolder, stage
from eyas.errors import ConfigError
from eyas.log import quiet
from eyas.settings import validated
from eyas.shards import Features, FeatureSource
from eyas.shards.sample import Split
from eyas.train import trainer
from eyas.train.ranks import is_first_rank
from eyas.train.trainer import TrainConfig

CONFIG = TrainConfig


@with_flags(CONFIG)
def command(
    features: Annotated[
        str, typer.Argument(help="output of `eyas capture`; of `eyas generate` with --online")
    ],
    target: TargetOption,
    output: Output,
    start: Annotated[
        str | None,
        typer.Option(
            "--start",
            help='a head to continue from, in any form: a folder, URL, hub id, or "smollm2"',
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="compute features with the target while training, by the run file's section "
            "`capture`",
        ),
    ] = False,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="with --online: address of a vLLM server that computes the features, as for `eyas "
            "capture`; several may be given"
        ),
    ] = None,
    *,
    stated: StageOptions,
) -> None:
    """Train a head on captured features; interrupted, it resumes from its last checkpoint.

    With --online nothing is stored: the target works on the answers, in this process or servers.
    On several devices: torchrun --nproc-per-node 8 -m eyas.cli.main train ... -s batches.per_step=8
    (there -s start.head=HEAD for --start, which torchrun would read as its own)
    """
    if server and not online:
        raise ConfigError(
            "--server without --online: stored features need no server",
            "add --online, with the answers in place of the features",
        )
    config = stated.config(TrainConfig, "train", **{"start.head": start})
    servers = {"servers": server} if server else {}
    capture = stated.section("capture") | servers if online else None
    train(features, target=target, output=output, online=capture, **dict(config))


def train(
    features: str | os.PathLike[str],
    *,
    target: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    online: Mapping[str, Any] | None = None,
    progress: bool = True,
    on_row: Callable[[Mapping[str, Any]], None] | None = None,
    **settings: Any,
) -> str:
    """Train a head, and return its folder or URL. The same call resumes from the last checkpoint;
    finished work returns at once.

    features: output of `eyas capture`; with `online` of `eyas generate`, and the target computes
    features while training. online: capture's settings ({}: the defaults). target: any name of the
    model. output: None takes a folder beside the features, named by the work's identity. progress:
    on stderr. on_row: called with each row of metrics.jsonl. settings: TrainConfig's fields,
    sections as dicts (docs/settings.md).

    Raises ConfigError, MissingInputError, MismatchError, and what training raises.
    """
    config = validated(TrainConfig, settings, "train")
    source, target = Artifact(str(features)), str(target)
    if output is None:
        artifact: Artifact = StageFolder(source.url.rpartition("/")[0] or ".", "train")
    else:
        artifact = Artifact(str(output))
    shown = stage("train", artifact) if progress and is_first_rank() else nullcontext(quiet)
    with shown as track:
        open_split: Callable[[Split], FeatureSource] = partial(Features, source)
        if online is not None:
            # loads the target's code, tokenizer and chat template
            module = importlib.import_module("eyas.features.online")
            capture = validated(module.CaptureConfig, {**online, "target": target}, "capture")
            open_split = module.OnlineTarget(capture, source).features
        splits = open_split("train"), open_split("held_out")
        trainer.train(config, target, splits[0], artifact, track, splits[1], on_row)
    return artifact.url
