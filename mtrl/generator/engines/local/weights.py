"""New weights for a module, in place: whoever holds views of its parameters (the fused decode step) sees them too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the module's parameters and buffers, on whatever device and in whatever precision they are.

    Every parameter is written, or none is: an engine that keeps some old weights samples a policy that nobody trains,
    and nothing fails.

    Args:
        weights: by the names of `module.state_dict()`; of parameters that are tied, one name is enough.

    Raises:
        ValueError: a parameter has no weights, a name is not the module's, or a shape differs.
    """
    own = module.state_dict(keep_vars=True)
    written = {id(own[name]) for name in weights if name in own}
    missing = [name for name, value in module.named_parameters() if id(value) not in written]
    unknown = [name for name in weights if name not in own]
    wrong = [name for name in weights if name in own and weights[name].shape != own[name].shape]
    problems = [
        *([f"no weights for {_some(missing)}"] if missing else []),
        *([f"no parameter is called {_some(unknown)}"] if unknown else []),
        *([f"another shape for {_some(wrong)}"] if wrong else []),
    ]
    if problems:
        raise ValueError(f"the weights do not fit {type(module).__name__}: {'; '.join(problems)}")
    for name, value in weights.items():
        own[name].copy_(value)


def _some(names: Iterable[str]) -> str:
    """The first few names."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
