"""Ordinary memory in place of pinned memory, for machines without an accelerator.

SGLang's adapters (LoRA) request pinned memory unconditionally, and PyTorch refuses it on a machine that has only a CPU.
Results do not depend on pinning.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

FACTORIES = ("arange", "empty", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
"""Names of the functions of torch that SGLang calls with `pin_memory`."""


def ignore_pinning() -> None:
    """Patch torch so that `pin_memory` has no effect in this process."""
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
