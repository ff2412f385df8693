"""Stand-ins for tensors of files, by which Transformers shows which of them become which parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from mtrl.models.stored_tensors import FileTensor, StoredTensor, concatenate, stack


class StandIns(TorchFunctionMode):
    """Tensors that have the shapes of files' tensors and no memory. Within its context `torch.stack` and `torch.cat` of
    stand-ins return stand-ins as well, and it is known of which tensors of the files they consist."""

    def __init__(self, tensors: Mapping[str, FileTensor], dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype
        self._known: dict[int, tuple[Tensor, StoredTensor]] = {}
        """All stand-ins by their addresses. They are kept, so that no other tensor gets the address of one."""
        self.state = {name: self._make(tensor) for name, tensor in tensors.items()}
        """Stand-ins of the tensors by their names."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        joined = self._joined(func, *args, **(kwargs or {})) if func in (torch.stack, torch.cat) else None
        return func(*args, **(kwargs or {})) if joined is None else self._make(joined)

    def represented(self, value: Tensor) -> StoredTensor | None:
        """Return what a tensor stands for; None if it is no stand-in, or has another shape."""
        _, stored = self._known.get(value.untyped_storage().data_ptr(), (None, None))
        return stored if stored is not None and stored.shape == value.shape else None

    def _make(self, stored: StoredTensor) -> Tensor:
        value = torch.zeros((), dtype=self._dtype).expand(stored.shape)
        self._known[value.untyped_storage().data_ptr()] = value, stored
        return value

    def _joined(
        self, func: Callable[..., Tensor], tensors: Sequence[Tensor], dim: int = 0, **others: object
    ) -> StoredTensor | None:
        """Return what the result of `torch.stack` or `torch.cat` consists of; None if it is computed with memory, since
        tensors are no stand-ins, or are stacked along another dimension than the first.

        Raises:
            RuntimeError: PyTorch cannot join tensors of these shapes.
        """
        found = [stored for tensor in tensors if (stored := self.represented(tensor)) is not None]
        if len(found) < len(tensors) or others or (func is torch.stack and dim != 0):
            return None
        func([torch.empty(stored.shape, device="meta") for stored in found], dim=dim)  # this checks the shapes
        return stack(found) if func is torch.stack else concatenate(found, dim % len(found[0].shape))
