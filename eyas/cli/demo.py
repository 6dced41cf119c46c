"""`eyas demo`: a run of all stages on packaged models and prompts (demo.yaml, demo_quick.yaml)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eyas.artifact import Artifact
from eyas.cli.options import AsJson, OutputIfAny, Overrides, override, read_run_file
from eyas.cli.run import local_output, run
from eyas.model.variants import processor_features

SETTINGS = Path(__file__).with_name("demo.yaml")
QUICK_SETTINGS = Path(__file__).with_name("demo_quick.yaml")
RUN_FILE = "run.yaml"  # a copy of SETTINGS, beside the results
# New weights need more epochs, and the usual rate for their width.
FROM_NOTHING = ("train.start=null", "train.epochs=4", "train.learning_rate=null")
# Features that multiply bfloat16 in hardware; other processors are several times as fast with the
# file's own blocks.
HAS_BF16 = {"avx512_bf16", "bf16"}
IN_BLOCKS = ("generate.dtype=auto", "serve.dtype=auto")


def command(
    quick: Annotated[
        bool,
        typer.Option("--quick", help="use a very small model: a check, not a measurement"),
    ] = False,
    from_nothing: Annotated[
        bool, typer.Option("--from-nothing", help="train a head from new weights")
    ] = False,
    output: OutputIfAny = None,
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Measure SmolLM2's packaged head on prompts for SQL, adapt it to them by all stages, and
    measure it again. Results are in out/demo.
    """
    content = read_run_file(QUICK_SETTINGS if quick else SETTINGS)
    lacks_bf16 = not quick and not HAS_BF16 & processor_features()
    own = [*(FROM_NOTHING if from_nothing else ()), *(IN_BLOCKS if lacks_bf16 else ())]
    content = override(content, [*own, *(overrides or ())])
    content = {**content, "output": output} if output else content
    folder = local_output(str(content["output"]))
    options = [" --quick"] * quick + [" --from-nothing"] * from_nothing
    own_model = [
        f"# the same for a model and prompts of yours: copy {folder}/{RUN_FILE} to mine.yaml,",
        "# change the lines that are marked (*), then",
        "eyas plan mine.yaml",
        "eyas run mine.yaml",
        "eyas serve --target MODEL --head out/mine/export-*/sglang",
    ]
    run(content, f"eyas demo{''.join(options)}", own=own_model, as_json=as_json)
    Artifact(folder).write(RUN_FILE, SETTINGS.read_bytes())
