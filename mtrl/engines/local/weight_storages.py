"""The storages of a module's weights, whose memory an engine frees during updates."""

from __future__ import annotations

from torch import nn


def own_storages(module: nn.Module) -> None:
    """Copy the parameters whose storages cannot be resized, such as parts of a mapped file, into memory of their own.
    Views of these parameters that exist already keep the old storages."""
    for parameter in module.parameters():
        if not parameter.untyped_storage().resizable():
            parameter.data = parameter.data.clone()


class WeightStorages:
    """The storages of the parameters of a module, whose memory can be freed and allocated again.

    Parameters and their views stay valid, since they share the storages. A storage that cannot be resized keeps its
    memory (`own_storages`).
    """

    def __init__(self, module: nn.Module) -> None:
        storages = [parameter.untyped_storage() for parameter in module.parameters()]
        once = {storage.data_ptr(): storage for storage in storages}  # tied parameters share one
        self._storages = [(storage, storage.nbytes()) for storage in once.values() if storage.resizable()]

    def free(self) -> None:
        """Free the memory. The values of the parameters are lost."""
        for storage, _ in self._storages:
            storage.resize_(0)

    def allocate(self) -> None:
        """Allocate the memory again. The parameters have no defined values until they are written."""
        for storage, size in self._storages:
            storage.resize_(size)
