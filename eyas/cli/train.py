"""`eyas train`: features -> head; by one process, or by several that torchrun started."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, TargetOption, stage_config
from eyas.cli.stage import stage
from eyas.errors import ConfigError
from eyas.log import quiet
from eyas.shards import Features, FeatureSource
from eyas.shards.sample import Split
from eyas.train.ranks import is_first_rank
from eyas.train.trainer import TrainConfig, train

CONFIG = TrainConfig  # its fields are listed by `eyas train --help`


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
            help="with --online: address of a vLLM or SGLang server that computes the features, as "
            "for `eyas capture`; several may be given"
        ),
    ] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Train a head on captured features; interrupted, it resumes from its last checkpoint.

    With --online nothing is stored: the target works on the answers, in this process or in
    servers.
    On several devices: torchrun --nproc-per-node 8 -m eyas.cli.main train ... --set
    batches.per_step=8
    (--set start.head=HEAD for --start there: torchrun would read that as an option of its own)
    """
    if server and not online:
        raise ConfigError(
            "--server without --online: stored features need no server",
            "add --online, with the answers in place of the features",
        )
    assignments = [] if start is None else [f"start.head={json.dumps(start)}"]
    config = stage_config(TrainConfig, "train", run_file, [*assignments, *(overrides or ())])

    source, artifact = Artifact(features), Artifact(output)
    with stage("train", artifact) if is_first_rank() else nullcontext(quiet) as track:
        open_split: Callable[[Split], FeatureSource]
        if online:
            # imported here only: it loads the target's code, its tokenizer and its chat template
            online_features = importlib.import_module("eyas.features.online")
            capture = stage_config(
                online_features.CaptureConfig,
                "capture",
                run_file,
                [],
                target=target,
                servers=server or None,
            )
            open_split = online_features.OnlineTarget(capture, source).features
        else:
            open_split = partial(Features, source)
        train(config, target, open_split("train"), artifact, track, open_split("held_out"))
