"""One stage as people see it: a progress bar while it works, one line when it is done. Knows no stage in particular."""

from __future__ import annotations

from collections.abc import Callable

from rich.markup import escape

from eyas.artifact import Artifact, Manifest
from eyas.log import Track, console, progress_bar, quiet

Work = Callable[[Artifact, Track], Manifest]


def perform(stage: str, url: str, work: Work) -> Artifact:
    """Do the work of a stage into `url`, or say that it is done already; which of the two is the work's own decision."""
    output = Artifact(url)
    was_done = output.is_done()
    if was_done:
        work(output, quiet)  # checks that what is there is this very work
    else:
        with progress_bar(stage) as track:
            work(output, track)
    counts = ", ".join(f"{name} {count:,}" for name, count in output.manifest().counts.items())
    state = "done already, skipped" if was_done else "done"
    console.print(f"{stage:<9} {state}: {escape(url)} ({escape(counts)})", highlight=False, soft_wrap=True)
    return output
