"""In-place update of a module's weights, so that views of its parameters (as in the fused decode step) stay valid."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


@torch.no_grad()
def copy_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into the module's parameters and buffers, converting device and dtype.

    Either every parameter is written or none is: an engine with some old weights would sample from a policy that is not
    the trained one, without any error.

    Args:
        weights: tensors by the names of `module.state_dict()`; for tied parameters one name is enough.

    Raises:
        ValueError: a parameter has no weights, a name does not exist in the module, or a shape differs.
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
    """Format the first four names and the number of the others."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
