"""What ships inside the package: a small chat model, a head for it, and prompts. Knows their
places, not their contents.

The name "builtin" stands for the packaged target, or head, wherever the folder of one is asked for;
so does an id of the Hugging Face hub for the folder that it is cached in.
"""

from __future__ import annotations

from pathlib import Path

from eyas.builtin.hub import hub_folder, is_hub_id
from eyas.errors import MissingInputError

BUILTIN = "builtin"
_HERE = Path(__file__).parent


def target_folder() -> Path:
    """The packaged target, in Hugging Face's form. Raises MissingInputError in a checkout without
    its weights.
    """
    return _packaged(_HERE / "target", "config.json")


def head_folder() -> Path:
    """The packaged head of the packaged target, in our own form. Raises MissingInputError where it
    is absent.
    """
    return _packaged(_HERE / "head", "eyas_head.json")


def demo_prompts() -> Path:
    """The packaged prompts, gzip JSON lines. Raises MissingInputError where they are absent."""
    return _packaged(_HERE, "demo_prompts.jsonl.gz") / "demo_prompts.jsonl.gz"


def resolve_target(name_or_path: str) -> str:
    """The folder of a target given by path, by hub id or as "builtin". Raises MissingInputError."""
    if name_or_path == BUILTIN:
        return str(target_folder())
    if is_hub_id(name_or_path):
        return hub_folder(name_or_path)
    if not Path(name_or_path).is_dir():
        raise MissingInputError(
            f"no target folder at {name_or_path}",
            f'give a folder with config.json, *.safetensors and a tokenizer, or "{BUILTIN}" for '
            "the packaged model",
        )
    return name_or_path


def resolve_head(name_or_path: str) -> str:
    """The folder of a head given by path, by hub id or as "builtin". Raises MissingInputError."""
    if name_or_path == BUILTIN:
        return str(head_folder())
    if is_hub_id(name_or_path):
        return hub_folder(name_or_path)
    if not Path(name_or_path).is_dir():
        raise MissingInputError(
            f"no head folder at {name_or_path}",
            "give the folder of a head: the output of train, or an export",
        )
    return name_or_path


def place_of_head(name: str) -> str:
    """As resolve_head for "builtin" and ids of the hub; any other name, of a folder or a URL, as it
    is.
    """
    return resolve_head(name) if name == BUILTIN or is_hub_id(name) else name


def _packaged(folder: Path, name: str) -> Path:
    if not (folder / name).is_file():
        raise MissingInputError(
            f"this installation has no packaged {folder.name}/{name}",
            "install eyas again, from a complete checkout or wheel",
        )
    return folder
