"""`eyas demo`: a run of all stages on what ships in the package; settings are in demo.yaml and
demo_quick.yaml.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eyas.cli.options import Overrides, override, read_run_file
from eyas.cli.run import run


def command(
    quick: Annotated[
        bool, typer.Option("--quick", help="very small: shows that everything works, not how fast")
    ] = False,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="folder of the results (out/demo)")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """The whole pipeline on the built-in target: prompts, generate, capture, train, eval, export,
    check, serve, bench.
    """
    run_file = Path(__file__).with_name("demo_quick.yaml" if quick else "demo.yaml")
    content = override(read_run_file(run_file), overrides or ())
    run(
        {**content, "output": output} if output else content,
        "eyas demo --quick" if quick else "eyas demo",
    )
