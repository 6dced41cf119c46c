"""A head of any form, wherever it is: the output of `train` in a store, a folder, an id of the hub,
the one in the package.

Knows how its files come into one folder of this machine and what identifies them. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from eyas.artifact import DONE, Artifact, Manifest
from eyas.builtin import resolve_head
from eyas.lineage import HEAD_FILES, head_files, source_manifest


@contextmanager
def head_folder(head: str) -> Iterator[tuple[Path, Manifest]]:
    """A folder with the head's files, and its manifest: of the stage that made it, else as a
    source, by its files.

    Raises MissingInputError, and CorruptError for an artifact whose files are not what its manifest
    says.
    """
    made = Artifact(head)
    if "://" in head or Path(head, DONE).exists():
        manifest = made.manifest("train")
        with TemporaryDirectory() as folder:
            for name in manifest.files:
                if name.endswith(HEAD_FILES) and "/" not in name:
                    Path(folder, name).write_bytes(made.read(name))
            yield Path(folder), manifest
    else:
        files = Path(resolve_head(head))
        source = Artifact(str(files))
        yield files, source_manifest(source, head_files(source), {})
