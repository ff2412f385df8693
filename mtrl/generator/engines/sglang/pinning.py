"""Pinned memory where no accelerator could pin any: ordinary memory.

SGLang's adapters (LoRA) ask for pinned memory without looking whether there is such a thing, and PyTorch refuses it
on a machine that has only a CPU. Nothing that is computed depends on it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

FACTORIES = ("arange", "empty", "full", "ones", "ones_like", "tensor", "zeros", "zeros_like")
"""Functions of torch that take `pin_memory`, as SGLang uses them."""


def ignore_pinning() -> None:
    """From now on `pin_memory` has no effect in this process."""
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
