"""A stage on the terminal: progress while it works, one line when it is done."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from eyas.artifact import Artifact
from eyas.bench.machine import has_gpu
from eyas.log import Track, console, progress_bar

IDENTITY_DIGITS = 8  # in a folder's name
WARNINGS = ("warnings", "placeholders", "unrefused")  # lists in a manifest's facts


class StageFolder(Artifact):
    """An artifact below `root` in a folder named by stage and identity."""

    def __init__(self, root: str, stage: str) -> None:
        super().__init__(f"{root}/{stage}")
        self._stem = self.url

    def is_done_for(self, identity: str) -> bool:
        """As Artifact.is_done_for, in the folder of this identity."""
        super().__init__(f"{self._stem}-{identity[:IDENTITY_DIGITS]}")
        return super().is_done_for(identity)


def advise_gpu(command: str, then: str) -> None:
    """Where there is a GPU, name engines that use it."""
    if has_gpu():
        lines = (
            "note: this machine has a GPU, and eyas' own engine computes on the CPU",
            f"  -> SGLang and vLLM use it: {command} ({then})",
        )
        console.out("\n".join(lines), style="yellow", highlight=False)


@contextmanager
def stage(name: str, output: Artifact) -> Iterator[Track]:
    """Give a Track to a block that does stage `name` into `output`; then print the stage's counts
    and warnings.
    """
    with progress_bar(name) as track:
        yield track
    manifest = output.manifest(name)
    counts = ", ".join(f"{what} {count:,}" for what, count in manifest.counts.items())
    state = "done already, skipped" if output.was_done else "done"
    console.out(f"{name:<9} {state}: {output.url} ({counts})", highlight=False)
    facts = manifest.facts
    for warning in itertools.chain(*(facts.get(name, ()) for name in WARNINGS)):
        console.out(f"warning: {warning}", style="yellow")
