"""What oneDNN, which PyTorch multiplies with on a CPU, can do on this one."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiplies(dtype: torch.dtype) -> bool:
    """Whether it has matrix products in half precision: this build of PyTorch, and the processor's instructions."""
    here = dtype == torch.bfloat16 and torch.backends.mkldnn.is_available()
    return here and torch.ops.mkldnn._is_mkldnn_bf16_supported()
