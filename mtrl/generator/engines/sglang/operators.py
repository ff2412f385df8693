"""Names of two operators, without which torchvision does not import beside a PyTorch that was built without CUDA.

SGLang imports torchvision even for text, and the registry's torchvision is built for CUDA. Nothing calls them.
"""

from __future__ import annotations

from typing import Any

_kept: list[Any] = []
"""A library's operators live as long as it."""


def declare() -> None:
    """Declare them where they are missing; before torchvision is imported, in every process."""
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)
