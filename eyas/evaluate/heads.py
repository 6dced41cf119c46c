"""A head of any form, wherever it is: the output of `train` in a store, a folder, an id of the hub, the one in the package.

Knows how its files come into one folder of this machine and what identifies them. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from eyas.artifact import DONE, Artifact, Manifest, file_identity, identity
from eyas.builtin import resolve_head

READ = (".json", ".safetensors", ".bin")


@contextmanager
def head_folder(head: str) -> Iterator[tuple[Path, Manifest]]:
    """A folder with the head's files, and its manifest: of the stage that made it, or one that names its files by hash.

    Raises MissingInputError, and CorruptError for an artifact whose files are not what its manifest says.
    """
    made = Artifact(head)
    if "://" in head or Path(head, DONE).exists():
        manifest = made.manifest("train")
        with TemporaryDirectory() as folder:
            for name in manifest.files:
                if name.endswith(READ) and "/" not in name:
                    Path(folder, name).write_bytes(made.read(name))
            yield Path(folder), manifest
    else:
        files = Path(resolve_head(head))
        yield files, published(files)


def published(folder: Path) -> Manifest:
    """The manifest of a head that no stage of ours made, or that was exported: known by its files alone."""
    files = sorted(path for path in folder.iterdir() if path.suffix in READ and path.name != "manifest.json")
    known_by = {path.name: file_identity(str(path)) for path in files}
    return Manifest(
        stage="head", identity=identity("head", known_by, {}), config=known_by, counts={"files": len(files)}, files={}
    )
