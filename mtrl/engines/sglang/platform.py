"""SGLang on a machine without a GPU: a platform plugin (entry point `sglang.srt.platforms` in `setup.py`) and patches
of PyTorch.

SGLang's own CPU engine needs kernels that no package registry has; with this platform every operator is plain PyTorch.
It is slow, but its numbers are those of the real engine. This module runs inside the engine's environment and imports
torch only within functions: `declare_operators` must run before torchvision is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import wraps
from typing import Any

PLATFORM = "mtrl.engines.sglang.torch_cpu.TorchCpuPlatform"
FACTORIES = ("arange", "empty", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
"""Names of the functions of torch that SGLang calls with `pin_memory`."""
_libraries: list[Any] = []
"""Libraries whose operators stay declared: the operators live as long as their library object."""


def activate() -> str | None:
    """Return the path of the platform's class, or None where the platform does not apply: if CUDA is available, or if
    SGLang's own CPU engine is requested (`SGLANG_USE_CPU_ENGINE=1`). SGLang calls this function of every plugin at its
    start."""
    import torch

    if torch.cuda.is_available() or os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return None
    return PLATFORM


def declare_operators() -> None:
    """Declare two operators, without which torchvision cannot be imported with a PyTorch that was built without CUDA.

    SGLang imports torchvision even for text, and the registry's torchvision is built for CUDA. The operators are never
    called. Every process must call this function before it imports torchvision.
    """
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _libraries.append(library)


def ignore_pinning() -> None:
    """Patch torch so that `pin_memory` has no effect in this process: tensors get ordinary memory.

    SGLang's adapters (LoRA) request pinned memory unconditionally, and PyTorch refuses it on a machine that has only a
    CPU. Results do not depend on pinning.
    """
    import torch

    for name in FACTORIES:
        make = getattr(torch, name)
        if not hasattr(make, "__wrapped__"):
            setattr(torch, name, _unpinned(make))
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return made
