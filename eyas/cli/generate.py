"""`eyas generate`: prompts -> conversations answered by the target."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, Overrides, RunFile, TargetOption, stage_config
from eyas.cli.stage import advise_gpu, stage
from eyas.features.generate import GenerateConfig, generate

CONFIG = GenerateConfig


def command(
    prompts: Annotated[str, typer.Argument(help="output of `eyas prompts`")],
    target: TargetOption,
    output: Output,
    head: Annotated[
        str | None, typer.Option(help='head to speculate with, or "smollm2": faster, same answers')
    ] = None,
    server: Annotated[
        list[str] | None,
        typer.Option(
            help="address of an OpenAI-compatible server of the target; several may be given"
        ),
    ] = None,
    run_file: RunFile = None,
    overrides: Overrides = None,
) -> None:
    """Let the target answer every user turn, with its own chat template; one row per assistant
    turn.

    In this process, or by servers (SGLang, vLLM, `eyas serve`), which may come and go: what was
    answered is kept.
    """
    options = {"target": target, "head": head, "servers": server or None}
    config = stage_config(GenerateConfig, "generate", run_file, overrides, **options)
    if not config.servers:
        words = ["vllm", "serve", config.target, "--port", "8001"]
        advise_gpu(shlex.join(words), "then give --server http://127.0.0.1:8001/v1")
    artifact = Artifact(output)
    with stage("generate", artifact) as track:
        generate(config, Artifact(prompts), artifact, track)
