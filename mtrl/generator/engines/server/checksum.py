"""One short word for all weights, by which both sides of a sync see whether they mean the same ones.

Torch and hashlib only: it also runs inside an engine's environment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

_ROW = 4096
"""Words of 8 bytes that are folded into one."""
_ROWS = 32
"""Rows at a time: what lies between them stays in a processor's cache."""


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> str:
    """64 hexadecimal digits over names, dtypes, shapes and bytes; the order of the tensors does not matter.

    Each row of 32 KiB is folded into 8 bytes where the tensor lives (a multilinear hash modulo 2^64, Carter and Wegman
    1979, with fixed odd factors), and SHA-256 goes over those: a GPU's weights need not travel to be compared. It finds
    accidents (a lost, stale, torn or misnamed tensor), and is no proof against somebody who wants to deceive.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(_folded(tensor.contiguous().reshape(-1).view(torch.uint8)))
    return digest.hexdigest()


def _folded(data: Tensor) -> bytes:
    """8 bytes per row of `data` [n] uint8; the last row is filled up with zeros (its length is in the shape)."""
    factors = _factors().to(data.device)
    folds = []
    for part in data.split(8 * _ROW * _ROWS):
        words = torch.nn.functional.pad(part, (0, -part.numel() % (8 * _ROW))).view(torch.int64)
        mixed = words + (words >> 32)  # one to one; an odd factor alone would let two changed top bits cancel
        folds.append(mixed.view(-1, _ROW).mul_(factors).sum(1))
    return torch.cat(folds).cpu().numpy().tobytes() if folds else b""


@lru_cache(maxsize=1)
def _factors() -> Tensor:
    """Fixed odd numbers of 64 bits [row]."""
    stream = b"".join(hashlib.sha512(f"weights {i}".encode()).digest() for i in range(_ROW // 8))
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1
