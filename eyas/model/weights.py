"""Safetensors on disk, single or sharded. Knows no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from eyas.errors import CorruptError, MissingInputError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def read_tensors(folder: str | Path, wanted: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a folder, by name, on the CPU in their stored dtype: all, or those `wanted` that are there.

    Raises MissingInputError, CorruptError.
    """
    root = Path(folder)
    if (root / INDEX).exists():
        shard_of = json.loads((root / INDEX).read_text())["weight_map"]
        names = sorted({shard for key, shard in shard_of.items() if wanted is None or key in wanted})
    elif (root / SINGLE).exists():
        names = [SINGLE]
    else:
        raise MissingInputError(f"{folder} has no safetensors weights", f"expected {SINGLE} or {INDEX} with its shards")
    tensors: dict[str, torch.Tensor] = {}
    for name in names:
        if not (root / name).exists():
            raise MissingInputError(f"{folder} lacks the shard {name}", "download the missing file")
        try:
            with safe_open(str(root / name), framework="pt") as shard:
                for key in shard.keys():  # noqa: SIM118  (safe_open is no mapping)
                    if wanted is None or key in wanted:
                        tensors[key] = shard.get_tensor(key)
        except SafetensorError as error:
            raise CorruptError(f"{root / name} cannot be read: {error}", "restore the file from its source") from error
    return tensors


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's values in bfloat16, so that precision at load does not change it."""
    return hashlib.sha256(
        tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()
