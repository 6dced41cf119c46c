"""What ships inside the package: a small chat model, a head for it, and prompts.

Knows where they are, not their contents. `eyas.hub` resolves their name, "builtin".
"""

from __future__ import annotations

from pathlib import Path

from eyas.errors import MissingInputError

BUILTIN = "builtin"
_HERE = Path(__file__).parent


def target_folder() -> Path:
    """The packaged target, in Hugging Face's form. Raises MissingInputError where its weights are
    absent.
    """
    return _packaged(_HERE / "target", "config.json").parent


def head_folder() -> Path:
    """The packaged head of the packaged target, in our own form. Raises MissingInputError."""
    return _packaged(_HERE / "head", "eyas_head.json").parent


def demo_prompts() -> Path:
    """The packaged prompts, gzip JSON lines. Raises MissingInputError."""
    return _packaged(_HERE, "demo_prompts.jsonl.gz")


def _packaged(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise MissingInputError(
            f"this installation has no packaged {folder.name}/{name}",
            "install eyas again, from a complete checkout or wheel",
        )
    return folder / name
