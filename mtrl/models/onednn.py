"""What oneDNN, which PyTorch multiplies with on a CPU, can do on this one."""

from __future__ import annotations

import torch

BFLOAT16: bool = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether this build of PyTorch has it, and the processor its instructions."""


def multiplies(dtype: torch.dtype) -> bool:
    """Whether it has matrix products in this half precision."""
    return dtype == torch.bfloat16 and BFLOAT16
