"""Declares two operators, without which torchvision cannot be imported with a PyTorch that was built without CUDA.

SGLang imports torchvision even for text, and the registry's torchvision is built for CUDA. The operators are never
called.
"""

from __future__ import annotations

from typing import Any

_kept: list[Any] = []
"""Libraries whose operators stay declared: the operators live as long as their library object."""


def declare() -> None:
    """Declare the operators if they are missing. Every process must call this before it imports torchvision."""
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
