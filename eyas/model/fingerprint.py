"""Which target it is: a hash of the files of its folder, fast enough to ask before every stage.
Knows no tensor.

Stages put it into their identity in place of the folder's path, so that a moved target is the same
and a retrained one is another.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from eyas.errors import MissingInputError

_SMALL = (".json", ".jinja", ".txt", ".model")
_BLOCK, _NUM_BLOCKS = 1 << 16, 256


def fingerprint(folder: str | Path) -> str:
    """16 hex digits over config, tokenizer and template in full, and over 256 even samples of each
    weight file.

    Weight files up to 16 MiB are read whole; of a larger one 64 KiB at 256 places, so an 8B target
    takes well under a second. A single changed value can escape, a training step cannot. Raises
    MissingInputError.
    """
    root = Path(folder)
    weights = sorted(root.glob("*.safetensors"))
    if not weights:
        hint = "give a folder in Hugging Face's form (config.json, *.safetensors)"
        raise MissingInputError(f"{folder} has no safetensors weights", hint)
    digest = hashlib.sha256()
    for path in sorted(path for path in root.iterdir() if path.suffix in _SMALL):
        digest.update(f"{path.name} ".encode() + hashlib.sha256(path.read_bytes()).digest())
    for path in weights:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        with path.open("rb") as stream:
            for number in range(_NUM_BLOCKS):
                stream.seek(
                    number * max(size - _BLOCK, _BLOCK * (_NUM_BLOCKS - 1)) // (_NUM_BLOCKS - 1)
                )
                digest.update(stream.read(_BLOCK))
    return digest.hexdigest()[:16]
