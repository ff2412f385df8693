"""The storages of a module's weights, whose memory an engine frees during updates."""

from __future__ import annotations

from torch import nn


class WeightStorages:
    """The storages of the parameters of a module, whose memory can be freed and allocated again.

    Parameters and their views stay valid, since they share the storages. A storage that cannot be resized, such as the
    part of a file, keeps its memory.
    """

    def __init__(self, module: nn.Module) -> None:
        storages = [parameter.untyped_storage() for parameter in module.parameters()]
        once = {storage.data_ptr(): storage for storage in storages}  # tied parameters share one
        self._storages = [(storage, storage.nbytes()) for storage in once.values() if storage.resizable()]

    @property
    def bytes(self) -> int:
        """Number of bytes that `free` frees."""
        return sum(size for _, size in self._storages)

    def free(self) -> None:
        """Free the memory. The values of the parameters are lost."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again. The parameters have no defined values until they are written."""
        for storage, size in self._storages:
            storage.resize_(size)
