"""One stage as people see it: a progress bar while it works, one line when it is done. Knows no
stage in particular.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from rich.markup import escape

from eyas.artifact import Artifact, Manifest
from eyas.log import Track, console, progress_bar

Work = Callable[[Artifact, Track], Manifest]


def perform(stage: str, output: Artifact, work: Work) -> Artifact:
    """Do the work of a stage into `output`, or say that it is done already: the work's `begin`
    decides which.

    The bar appears with the first progress, so a stage that has nothing to do shows none.
    """
    with ExitStack() as open_bar:
        bar: Track | None = None

        def track(done: int, total: int | None = None, note: str = "") -> None:
            nonlocal bar
            bar = bar or open_bar.enter_context(progress_bar(stage))
            bar(done, total, note)

        manifest = work(output, track)
    counts = ", ".join(f"{name} {count:,}" for name, count in manifest.counts.items())
    state = "done already, skipped" if output.was_done else "done"
    console.print(
        f"{stage:<9} {state}: {escape(output.url)} ({escape(counts)})",
        highlight=False,
        soft_wrap=True,
    )
    return output
