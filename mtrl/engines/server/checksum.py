"""A checksum of all weights, by which both sides of a sync verify that they have the same weights.

This module also runs inside an engine's environment, so it imports only torch and hashlib.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

_ROW = 4096
"""Number of words of 8 bytes that are folded into one."""
_ROWS = 32
"""Number of rows that are folded at a time, so that intermediate results stay in a processor's cache."""


@torch.no_grad()
def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return 64 hexadecimal digits over names, dtypes, shapes and bytes; the order of the tensors does not matter.

    Each row of 32 KiB is folded into 8 bytes on the tensor's device (a multilinear hash modulo 2^64, Carter and Wegman
    1979, with fixed odd factors), and SHA-256 is computed over the folded bytes, so that a GPU's weights are not
    transferred. The checksum detects accidents (a lost, stale, torn or misnamed tensor), but not deliberate changes.
    """
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name}\n{tensor.dtype}\n{tuple(tensor.shape)}\n".encode())
        digest.update(_folded(tensor.contiguous().reshape(-1).view(torch.uint8)))
    return digest.hexdigest()


def _folded(data: Tensor) -> bytes:
    """Return 8 bytes per row of `data` [n] uint8. The last row is padded with zeros; the digest of the shape covers its
    length."""
    factors = _factors().to(data.device)
    folds = []
    for part in data.split(8 * _ROW * _ROWS):
        words = torch.nn.functional.pad(part, (0, -part.numel() % (8 * _ROW))).view(torch.int64)
        mixed = words + (words >> 32)  # with odd factors alone, two changed top bits would cancel
        folds.append(mixed.view(-1, _ROW).mul_(factors).sum(1))
    return torch.cat(folds).cpu().numpy().tobytes() if folds else b""


@lru_cache(maxsize=1)
def _factors() -> Tensor:
    """Return fixed odd 64-bit factors [_ROW]."""
    stream = b"".join(hashlib.sha512(f"weights {i}".encode()).digest() for i in range(_ROW // 8))
    return torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1
