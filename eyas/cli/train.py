"""`eyas train`: features -> head; by one process, or by several that torchrun started."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from eyas.artifact import Artifact, Manifest
from eyas.cli.options import Output, Overrides, RunFile, Target, stage_config
from eyas.cli.stage import perform
from eyas.features.capture import CaptureConfig
from eyas.features.online import OnlineTarget
from eyas.log import Track, quiet
from eyas.shards import Features
from eyas.train.ranks import is_first_rank
from eyas.train.trainer import TrainConfig, train

CONFIG = TrainConfig


def command(
    features: Annotated[
        str, typer.Argument(help="output of `eyas capture`; of `eyas generate` with --online")
    ],
    target: Target,
    output: Output,
    start: Annotated[
        str | None,
        typer.Option(
            "--start", help='a head to go on from, in any form: a folder, URL, hub id, or "builtin"'
        ),
    ] = None,
    keep_mix: Annotated[
        str | None,
        typer.Option(
            "--keep-mix",
            help="features of the mix that --start was trained on, on which it must not lose tau",
        ),
    ] = None,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="the target computes features as they are wanted, by the run file's section "
            "`capture`",
        ),
    ] = False,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Train a head on captured features; interrupted, it resumes from its last checkpoint.

    With --online nothing is stored: the target works in this process, on the answers. On several
    devices: torchrun --nproc-per-node 8 -m eyas.cli.main train ... --set batches.per_step=8
    """
    named = {"start.head": start, "start.keep_mix": keep_mix}
    given = [f"{name}={json.dumps(value)}" for name, value in named.items() if value is not None]
    config = stage_config(TrainConfig, "train", run_file, [*given, *(overrides or ())])

    def work(artifact: Artifact, track: Track) -> Manifest:
        source = Artifact(features)
        if online:
            at_hand = OnlineTarget(
                stage_config(CaptureConfig, "capture", run_file, [], target=target), source
            )
            return train(
                config,
                target,
                at_hand.features("train"),
                artifact,
                track,
                at_hand.features("held_out"),
            )
        return train(
            config, target, Features(source, "train"), artifact, track, Features(source, "held_out")
        )

    if is_first_rank():
        perform("train", Artifact(output), work)
    else:
        work(Artifact(output), quiet)
