"""`eyas generate`: prompts -> conversations answered by the target."""

from __future__ import annotations

import shlex
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import Output, StageOptions, TargetOption, with_flags
from eyas.cli.stage import advise_gpu, stage
from eyas.features.generate import GenerateConfig, generate

CONFIG = GenerateConfig


@with_flags(CONFIG)
def command(
    prompts: Annotated[str, typer.Argument(help="output of `eyas prompts`")],
    target: TargetOption,
    output: Output,
    *,
    stated: StageOptions,
) -> None:
    """Let the target answer every user turn, with its own chat template; one row per assistant
    turn.

    The target runs in this process, or on servers (SGLang, vLLM, `eyas serve`), which may come and
    go: finished answers are kept.
    """
    config = stated.config(GenerateConfig, "generate", target=target)
    if not config.servers:
        words = ["vllm", "serve", config.target, "--port", "8001"]
        advise_gpu(shlex.join(words), "then give --server http://127.0.0.1:8001/v1")
    artifact = Artifact(output)
    with stage("generate", artifact) as track:
        generate(config, Artifact(prompts), artifact, track)
