"""Tiny random heads for tiny random targets, without training one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from eyas.model.checkpoint import expected_shapes
from eyas.model.config import HeadConfig, HeadOptions
from eyas.model.dialects import Form
from eyas.model.forms import Verifier
from eyas.operators.tensors import array_of, write_head
from eyas.operators.vocab import TargetVocabulary, draft_vocabulary

PLAIN_NORMS = {"fc_norm": False, "norm_output": False}  # EAGLE-3's own norms
FLAGS: list[dict[str, bool]] = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True},
    {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    # what speculators trains by default
    {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
]
with_flags = pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "+".join(flags) or "plain")


def tiny_head(
    target: Path,
    draft_vocab_size: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **flags: Any,
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """A random head for a target: config, and tensors by EAGLE's names. flags: HeadConfig's."""
    vocabulary = TargetVocabulary.load(target)
    options = HeadOptions(draft_vocab_size=draft_vocab_size, **PLAIN_NORMS)
    config = HeadConfig.for_target(vocabulary.config, options)
    config = config.model_copy(update={"target_lm_head_sha256": vocabulary.lm_head_sha256, **flags})
    generator = torch.Generator().manual_seed(seed)
    counts_V = torch.randint(100, (config.vocab_size,), generator=generator)
    counts_V[list(vocabulary.config.eos_token_ids)] = 1000
    tensors = {
        name: (0.3 * torch.randn(shape, generator=generator)).to(dtype)
        for name, shape in expected_shapes(config).items()
        if name not in ("d2t", "t2d")
    }
    for name in tensors:
        if len(tensors[name].shape) == 1:
            tensors[name] += 1
    tensors["d2t"], tensors["t2d"] = draft_vocabulary(counts_V, draft_vocab_size)
    return config, tensors


def write_folder(files: dict[str, bytes], folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def head_folder(target: Path, folder: Path, form: Form = "eyas", **options) -> Path:
    """A random head on disk, in vLLM's form with the target's embeddings. options: tiny_head's."""
    (config, tensors), embed_tokens = tiny_head(target, **options), None
    if form == "vllm":
        lent = TargetVocabulary.load(target).embed_tokens
        embed_tokens = array_of(lent.to(tensors["fc.weight"].dtype))
    verifier = Verifier(str(target), ("LlamaForCausalLM",), embed_tokens)
    return write_folder(write_head(config, tensors, form, verifier), folder)


def edit_config(folder: Path, path: str = "", **changes: Any) -> Path:
    """Change keys of a head's config.json, at the top or below the key `path`; None deletes."""
    config = json.loads((folder / "config.json").read_text())
    section = config[path] if path else config
    section.update(changes)
    for key in [key for key, value in changes.items() if value is None]:
        section.pop(key, None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, changes: dict[str, Tensor | None]) -> Path:
    """Replace, add or (None) delete tensors of a head."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.torch.save_file(kept, folder / "model.safetensors")
    return folder
