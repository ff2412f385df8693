"""What oneDNN, which PyTorch multiplies with on a CPU, can do on this one."""

from __future__ import annotations

import os

import torch

for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # Every shape of a product is kept with its code and its buffers, 1,024 of them unless told. Rollouts and packs
    # change their shapes all the time: at 1,024 a policy of a million parameters held a gigabyte of them.
    os.environ.setdefault(cache, "128")

AVAILABLE: bool = torch.backends.mkldnn.is_available()
BFLOAT16: bool = AVAILABLE and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this build of PyTorch has it, and the processor its instructions."""


def multiplies(dtype: torch.dtype) -> bool:
    """Whether it has matrix products in this half precision."""
    return dtype == torch.bfloat16 and BFLOAT16
