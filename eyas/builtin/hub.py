"""Models by their Hugging Face id: the folder in the local hub cache, downloaded when it is not
there yet.

Knows names of files, not what is in them. Nothing is asked of the network before a model is loaded,
nor for one that is cached in full.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError

from eyas.errors import MissingInputError

# What the hub's client raises, its HTTP client's own errors included: another client in other
# versions.
HTTP_FAULTS = cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)
FAULTS: tuple[type[Exception], ...] = (OSError, ValueError, *HTTP_FAULTS)
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "pytorch_model*.bin"]
CONFIGS, WEIGHTS = ("config.json", "eyas_head.json"), ("model.safetensors", "pytorch_model.bin")


def is_hub_id(name: str) -> bool:
    """Whether this can be a model of the hub: `owner/name`, and no folder of that path here."""
    return HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def hub_folder(name: str) -> str:
    """The folder of a hub model, in the cache's latest snapshot. Raises MissingInputError when it
    cannot be had.
    """
    cached = snapshot(name, local_files_only=True)
    if isinstance(cached, str) and is_complete(Path(cached)):
        return cached
    loaded = snapshot(name, local_files_only=False)
    if isinstance(loaded, str) and is_complete(Path(loaded)):
        return loaded
    # Without a network the hub's own answer is what is cached, complete or not.
    reason = (
        "a part of it is all there is"
        if isinstance(loaded, str)
        else next(iter(str(loaded).strip().splitlines()), "")
    )
    raise MissingInputError(
        f"no folder {name} here, and no model of this name in full in the hub's cache; nor could "
        f"it be downloaded: {reason}",
        f"`hf download {name}` where there is a network (HF_TOKEN for a gated model), or give a "
        "folder",
    )


def snapshot(name: str, local_files_only: bool) -> str | Exception:
    """The snapshot's folder, or why there is none."""
    try:
        found = huggingface_hub.snapshot_download(
            name, allow_patterns=FILES, ignore_patterns=["*/*"], local_files_only=local_files_only
        )
    except FAULTS as error:
        return error
    return str(found)


def is_complete(folder: Path) -> bool:
    """Whether config and weights are all there: another tool may have cached some files only."""
    if not any((folder / name).exists() for name in CONFIGS):
        return False
    for weights in WEIGHTS:
        index = folder / f"{weights}.index.json"
        if index.exists():
            return all(
                (folder / shard).exists()
                for shard in json.loads(index.read_text())["weight_map"].values()
            )
        if (folder / weights).exists():
            return True
    return False
