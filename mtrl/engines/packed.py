"""Weights as arrays of bytes, which processes can share in a read-only memory without copies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedTensor:
    """A tensor of any dtype."""

    data: np.ndarray
    """Bytes of the tensor [bytes]."""
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(weights: Mapping[str, Tensor]) -> dict[str, PackedTensor]:
    """Return the bytes of tensors on the CPU. They share the tensors' memory where that is contiguous."""
    packed = {}
    for name, tensor in weights.items():
        flat = tensor.detach().contiguous().view(-1)
        packed[name] = PackedTensor(flat.view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))
    return packed


def unpack(packed: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """Return the tensors in new memory, because a tensor must not share an array that is read-only."""
    return {name: torch.from_numpy(one.data.copy()).view(one.dtype).view(one.shape) for name, one in packed.items()}
