"""Tensors in memory that two processes share, and pickling of a model whose tensors lie in such memory."""

from __future__ import annotations

import io
import mmap
import os
import pickle
import tempfile
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mtrl.errors import UserError

ALIGNMENT = 64
"""Alignment of tensors in a block, in bytes: every tensor begins on a cache line."""


@dataclass(frozen=True)
class TensorPlace:
    """Position of a tensor in its block: `offset` in bytes, shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


Layout = dict[str, TensorPlace]


class Block:
    """A memory-mapped file of tensors: `tensors[name]` are views of memory that every process with the file can map.

    The file has no name, so that no file remains after the processes end for any reason. It does not lie in /dev/shm,
    which is small in containers.
    """

    def __init__(self, file: int, layout: Layout):
        """Map the descriptor `file`; the block owns it and closes it."""
        self.file, self.layout = file, layout
        self._close = weakref.finalize(self, os.close, file)
        memory = torch.frombuffer(mmap.mmap(file, _size(layout)), dtype=torch.uint8)
        self.tensors = {
            name: memory[place.offset : place.offset + place.bytes].view(place.dtype).view(place.shape)
            for name, place in layout.items()
        }

    @classmethod
    def like(cls, tensors: Mapping[str, Tensor]) -> Block:
        """Return a new block with room for tensors of these shapes and dtypes.

        Raises:
            UserError: there is not enough memory.
        """
        layout: Layout = {}
        end = 0
        for name, tensor in tensors.items():
            layout[name] = TensorPlace(end, tuple(tensor.shape), tensor.dtype)
            end += -(-layout[name].bytes // ALIGNMENT) * ALIGNMENT
        file = _nameless_file()
        try:
            _reserve(file, _size(layout))
        except OSError as error:
            os.close(file)
            raise UserError(
                f"the engine's process needs {_size(layout) / 2**30:.1f} GiB of shared memory ({error}); "
                "generator.local.process=false shares the weights instead"
            ) from error
        return cls(file, layout)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether `write` accepts these tensors: names, shapes and dtypes are those of the block."""
        return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()} == {
            name: (place.shape, place.dtype) for name, place in self.layout.items()
        }

    @torch.no_grad()
    def write(self, tensors: Mapping[str, Tensor]) -> None:
        for name in tensors:
            self.tensors[name].copy_(tensors[name])

    def close(self) -> None:
        """Close the file. The memory stays mapped until the tensors are freed."""
        self._close()


def _size(layout: Layout) -> int:
    return max((place.offset + place.bytes for place in layout.values()), default=0) or 1


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("mtrl")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _reserve(file: int, size: int) -> None:
    """Allocate the memory now: a shortage that appears later kills the writing process by a signal."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:  # macOS
        os.ftruncate(file, size)


def pack(value: Any) -> tuple[bytes, Block]:
    """Pickle `value`, usually a module, and copy its tensors into a block. The value itself is not changed.

    Raises:
        Exception: the value cannot be pickled; the error is that of pickle.
    """
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=5)
    pickler.dump(value)
    tensors = {str(index): tensor.detach() for index, tensor in enumerate(pickler.tensors)}
    block = Block.like(tensors)
    block.write(tensors)
    return buffer.getvalue(), block


def unpack(pickled: bytes, block: Block) -> Any:
    """Return the value that was packed, with new tensors. Tied parameters stay tied, and no parameter requires a
    gradient."""
    return _Unpickler(io.BytesIO(pickled), block).load()


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.tensors: list[Tensor] = []
        self._indices: dict[int, int] = {}

    def persistent_id(self, value: Any) -> tuple[int, bool, str] | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self._indices:
            self._indices[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._indices[id(value)], isinstance(value, nn.Parameter), str(value.device)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, block: Block):
        super().__init__(file)
        self._block = block
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, key: tuple[int, bool, str]) -> Tensor:
        index, is_parameter, device = key
        if index not in self._made:
            tensor = self._block.tensors[str(index)].to(device, copy=True)
            self._made[index] = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
        return self._made[index]
