"""Decoding of payloads that refer to tensors in memory that trainer and server share.

This module runs inside the engine's environment. A payload is base64 of a pickle; the unpickler accepts only functions
and classes that rebuild shared tensors.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

REBUILD = {
    (function.__module__, function.__name__): function
    for function in (
        reductions.rebuild_tensor,
        reductions.rebuild_typed_storage,
        reductions.rebuild_storage_filename,
        reductions.rebuild_storage_empty,
        OrderedDict,
        torch.Size,
        torch.UntypedStorage,
        torch.storage.TypedStorage,
        torch.Tensor,
        torch.nn.Parameter,
    )
}


def unpack(payload: str) -> dict[str, Tensor]:
    """Return the tensors of a payload of `[(name, tensor), …]` by name, in the shared memory itself.

    Raises:
        ValueError: the payload is invalid, or the tensors lie on a GPU that this process does not see.
    """
    try:
        pairs = Unpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
        weights = {str(name): tensor for name, tensor in pairs}
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"not a payload of shared tensors: {error}") from error
    if not all(isinstance(tensor, Tensor) for tensor in weights.values()) or len(weights) != len(pairs):
        raise ValueError("not a payload of shared tensors: a value is not a tensor, or a name occurs twice")
    return weights


class Unpickler(pickle.Unpickler):
    """An unpickler that accepts only functions and classes that rebuild tensors."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (reductions.__name__, reductions.rebuild_cuda_tensor.__name__):
            return rebuild_cuda_tensor
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) not in REBUILD:
            raise pickle.UnpicklingError(f"{module}.{name} does not rebuild a tensor")
        return REBUILD[module, name]


def rebuild_cuda_tensor(*args: Any) -> Tensor:
    """Like torch's function of this name, but the seventh argument may be the UUID of a GPU, because the number of a
    GPU differs between processes."""
    return reductions.rebuild_cuda_tensor(*args[:6], gpu_number(args[6]), *args[7:])  # type: ignore[call-arg]


def gpu_number(gpu: int | str) -> int:
    """Return the number of the GPU with this UUID in this process; a number is returned unchanged.

    Raises:
        ValueError: this process does not see the GPU.
    """
    numbers = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())}
    if isinstance(gpu, int):
        return gpu
    if gpu not in numbers:
        raise ValueError(f"the tensors lie on the GPU {gpu}, which this server does not see ({', '.join(numbers)})")
    return numbers[gpu]
