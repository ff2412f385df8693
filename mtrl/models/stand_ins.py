"""Stand-ins for tensors of files, by which Transformers shows which of them become which parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtrl.models.stored_tensors import FileTensor, StoredTensor, concatenate, stack


class StandIns(TorchFunctionMode):
    """Tensors that have the shapes of files' tensors and no memory. Within its context `torch.stack`, `torch.cat` and
    casts of stand-ins return stand-ins as well, and it is known of which tensors of the files they consist."""

    def __init__(self, tensors: Mapping[str, FileTensor], dtype: torch.dtype):
        super().__init__()
        self._known: dict[int, tuple[Tensor, StoredTensor]] = {}
        """All stand-ins by their addresses. They are kept, so that no other tensor gets the address of one."""
        self.state = {name: self._make(tensor, dtype) for name, tensor in tensors.items()}
        """Stand-ins of the tensors by their names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        made = None
        if func in (torch.stack, torch.cat):
            made = self._joined(func, *args, **given)
        elif func is Tensor.to:
            made = self._cast(*args, **given)
        return func(*args, **given) if made is None else made

    def represented(self, value: Tensor) -> StoredTensor | None:
        """Return what a tensor stands for; None if it is no stand-in, or has another shape."""
        _, stored = self._known.get(value.untyped_storage().data_ptr(), (None, None))
        return stored if stored is not None and stored.shape == value.shape else None

    def _make(self, stored: StoredTensor, dtype: torch.dtype) -> Tensor:
        value = torch.zeros((), dtype=dtype).expand(stored.shape)
        self._known[value.untyped_storage().data_ptr()] = value, stored
        return value

    def _joined(
        self, func: Callable[..., Tensor], tensors: Sequence[Tensor], dim: int = 0, **others: object
    ) -> Tensor | None:
        """Return a stand-in for the result of `torch.stack` or `torch.cat`; None if it is computed with memory, since
        tensors are no stand-ins, or are stacked along another dimension than the first.

        Raises:
            RuntimeError: PyTorch cannot join tensors of these shapes.
        """
        found = [stored for tensor in tensors if (stored := self.represented(tensor)) is not None]
        if len(found) < len(tensors) or others or (func is torch.stack and dim != 0):
            return None
        func([torch.empty(stored.shape, device="meta") for stored in found], dim=dim)  # this checks the shapes
        joined = stack(found) if func is torch.stack else concatenate(found, dim % len(found[0].shape))
        return self._make(joined, tensors[0].dtype)

    def _cast(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return a stand-in for the result of `Tensor.to`; None if the tensor is no stand-in, keeps its dtype, or is
        moved to another device."""
        stored = self.represented(tensor)
        if stored is None:
            return None
        number = torch.empty((), dtype=tensor.dtype).to(*args, **kwargs)
        is_cast = number.dtype != tensor.dtype and number.device == tensor.device
        return self._make(stored, number.dtype) if is_cast else None
