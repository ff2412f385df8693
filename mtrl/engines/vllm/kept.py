"""The last weights of a vLLM worker in main memory, to which the trainer's changes are applied.

vLLM's own parameters are packed and perhaps sharded, so that changes of the tensors of a checkpoint cannot be applied
to them. This module runs inside the engine's environment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrl.engines.server.changes import TensorChanges, apply_changes, message_size


class KeptWeights:
    """Tensors by their names in a Hugging Face checkpoint, as the trainer sent them.

    Call `begin`, `apply` any number of times and `finish` for each update. Between `begin` and `finish`, and after an
    update without changes or one that failed, the worker keeps weights of no version, and changes are refused.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._version: int | None = None
        """Policy version of the tensors; None: they are incomplete, or there are none."""
        self._base: int | None = None
        """Version of the tensors at the beginning of the current update."""
        self._next: int | None = None
        """Version of the tensors after the current update."""
        self._received: set[str] = set()

    def check(self, version: int) -> None:
        """Check that the tensors are those of this policy version.

        Raises:
            ValueError: they are not, so that no changes from this version can be applied.
        """
        _compare(self._version, version)

    def begin(self) -> None:
        """Begin an update."""
        self._base, self._version, self._next, self._received = self._version, None, None, set()

    def apply(
        self, changes: Sequence[TensorChanges], message: Tensor, base: int | None, version: int
    ) -> dict[str, Tensor]:
        """Apply the changes of these tensors, and return their new values, which belong to this object.

        Args:
            message: bytes of the changes of all tensors in order [`message_size`] uint8, in main memory.
            base: policy version that the changes start from; None: all tensors are sent whole.
            version: policy version of the new weights.

        Raises:
            ValueError: the tensors are of another version, or the message does not fit them.
        """
        if base is not None:
            _compare(self._base, base)
        if len(message) != message_size(changes):
            raise ValueError(f"a message of {len(message)} bytes has no changes of {message_size(changes)} bytes")
        found: dict[str, Tensor] = {}
        start, content = 0, message.numpy()
        for change in changes:
            found[change.name] = self._tensor(change)
            apply_changes(change, content[start : start + change.nbytes], found[change.name])
            start += change.nbytes
        self._received |= set(found)
        self._next = version
        return found

    def finish(self) -> None:
        """End a complete update: the tensors are those of its version. Tensors that were no part of it are dropped."""
        self.tensors = {name: value for name, value in self.tensors.items() if name in self._received}
        self._version = self._next

    def _tensor(self, change: TensorChanges) -> Tensor:
        """Return the kept tensor, or memory for one that is sent whole.

        Raises:
            ValueError: the tensor is not sent whole, and none of its name, dtype and shape is kept.
        """
        kept, dtype = self.tensors.get(change.name), getattr(torch, change.dtype)
        if kept is None or (kept.dtype, tuple(kept.shape)) != (dtype, change.shape):
            if change.width or change.changed != change.numel:
                raise ValueError(f"this worker keeps no {change.name} of {change.dtype} {change.shape}")
            kept = self.tensors[change.name] = torch.empty(change.shape, dtype=dtype)
        return kept


def _compare(kept: int | None, wanted: int) -> None:
    if kept != wanted:
        held = "no weights" if kept is None else f"the weights of version {kept}"
        raise ValueError(f"this worker keeps {held}, and the changes are from version {wanted}")
