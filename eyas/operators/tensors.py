"""PyTorch's tensors that share their memory with NumPy's arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from eyas.model import checkpoint, forms
from eyas.model.arrays import BFLOAT16, Array
from eyas.model.config import HeadConfig, TargetShape
from eyas.model.dialects import Form


def multiplies_bf16(device: str) -> bool:
    """Whether PyTorch multiplies bfloat16 faster than float32: on GPUs, and CPUs with AVX-512, AMX
    or ARM's bfloat16; others take twenty times as long.
    """
    return device != "cpu" or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def tensor_of(array: Array) -> Tensor:
    """The same numbers as a tensor."""
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def array_of(tensor: Tensor) -> Array:
    """The same numbers as an array; copied from another device."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(BFLOAT16)
    array: Array = tensor.numpy()
    return array


def tensors_of(arrays: Mapping[str, Array]) -> dict[str, Tensor]:
    """`tensor_of` by name."""
    return {name: tensor_of(array) for name, array in arrays.items()}


def arrays_of(tensors: Mapping[str, Tensor]) -> dict[str, Array]:
    """`array_of` by name."""
    return {name: array_of(tensor) for name, tensor in tensors.items()}


def read_head(
    folder: str | Path, target: TargetShape | None = None
) -> tuple[HeadConfig, dict[str, Tensor]]:
    """As `checkpoint.read_head`."""
    config, arrays = checkpoint.read_head(folder, target)
    return config, tensors_of(arrays)


def write_head(
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    form: Form,
    verifier: forms.Verifier | None = None,
    max_shard_bytes: int | None = None,
) -> dict[str, bytes]:
    """As `forms.write_head`; the verifier's embeddings are an array."""
    return forms.write_head(config, arrays_of(tensors), form, verifier, max_shard_bytes)
