"""Capabilities of oneDNN, PyTorch's library for matrix products on a CPU, on this machine."""

from __future__ import annotations

import os

import torch

for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN caches code and buffers for each shape of a product, by default for 1,024 shapes. Rollouts and packs keep
    # producing new shapes: at 1,024 the cache of a policy of a million parameters took a gigabyte.
    os.environ.setdefault(cache, "128")

AVAILABLE: bool = torch.backends.mkldnn.is_available()
BFLOAT16: bool = AVAILABLE and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this build of PyTorch and the processor support matrix products in bfloat16."""


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has matrix products in this half-precision dtype."""
    return dtype == torch.bfloat16 and BFLOAT16
