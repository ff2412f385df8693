"""Tensors in safetensors files, of which parts are read: those of a file, and those that consist of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mtrl.errors import UserError


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file."""

    file: str
    name: str
    """Name of the tensor in the file."""
    shape: tuple[int, ...]

    @property
    def pieces(self) -> tuple[tuple[FileTensor, tuple[int, ...]], ...]:
        """The tensor itself, as in a `JoinedTensor`."""
        return ((self, (0,) * len(self.shape)),)

    def read(self, part: Sequence[slice] = ()) -> Tensor:
        """Return a part of the tensor in the dtype of the file; the file is closed afterwards, since pages of an open
        file count as memory of the process.

        Args:
            part: slice of each dimension; without slices the whole tensor is read.

        Raises:
            UserError: the file cannot be read, or its tensor has another shape by now.
        """
        (value,) = _read(self.file, [(self, part)])
        return value


@dataclass(frozen=True)
class JoinedTensor:
    """A tensor that consists of tensors of safetensors files, such as the experts of a layer."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[FileTensor, tuple[int, ...]], ...]
    """Each tensor, and the indices of its first number in this tensor. The dimensions of a tensor that has fewer than
    this one are the last ones. The pieces do not overlap and leave nothing out."""

    def read(self, part: Sequence[slice] = ()) -> Tensor:
        """Return a part of the tensor, for which only the pieces that it covers are read, in a dtype of the files that
        holds the numbers of all of them. A file is opened once, and closed afterwards.

        Args:
            part: slice of each dimension, or of the first ones; without slices the whole tensor is read.

        Raises:
            UserError: as for `FileTensor.read`.
        """
        given = [*part, *(slice(None) for _ in self.shape[len(part) :])]
        wanted = [range(size)[rows] for size, rows in zip(self.shape, given, strict=True)]
        covered: dict[str, list[tuple[FileTensor, list[slice], tuple[slice, ...]]]] = {}
        for tensor, offset in self.pieces:
            if (found := _overlap(tensor, offset, wanted)) is not None:
                covered.setdefault(tensor.file, []).append((tensor, *found))
        result: Tensor | None = None
        for file, pieces in covered.items():
            values = _read(file, [(tensor, rows) for tensor, rows, _ in pieces])
            for (_, _, place), value in zip(pieces, values, strict=True):
                if result is None:
                    result = torch.empty([len(rows) for rows in wanted], dtype=value.dtype)
                result = result.to(torch.promote_types(result.dtype, value.dtype))
                result[place] = value
        return torch.empty([len(rows) for rows in wanted]) if result is None else result


StoredTensor = FileTensor | JoinedTensor
"""The place of a parameter in files."""


def stack(tensors: Sequence[StoredTensor]) -> JoinedTensor:
    """Return a tensor with a new first dimension, whose indices are these tensors of one shape, as by `torch.stack`."""
    pieces = ((piece, (i, *offset)) for i, tensor in enumerate(tensors) for piece, offset in tensor.pieces)
    return JoinedTensor((len(tensors), *tensors[0].shape), tuple(pieces))


def concatenate(tensors: Sequence[StoredTensor], dimension: int) -> JoinedTensor:
    """Return tensors one after another along a dimension, as by `torch.cat`. Their other dimensions are equal."""
    pieces: list[tuple[FileTensor, tuple[int, ...]]] = []
    before = 0
    for tensor in tensors:
        for piece, offset in tensor.pieces:
            pieces.append((piece, (*offset[:dimension], before + offset[dimension], *offset[dimension + 1 :])))
        before += tensor.shape[dimension]
    shape = tensors[0].shape
    return JoinedTensor((*shape[:dimension], before, *shape[dimension + 1 :]), tuple(pieces))


def _overlap(
    tensor: FileTensor, offset: Sequence[int], wanted: Sequence[range]
) -> tuple[list[slice], tuple[slice, ...]] | None:
    """Return which part of a piece is wanted, and where it lies in the wanted part; None if no number is wanted."""
    new = len(offset) - len(tensor.shape)
    rows, place = [], []
    for start, size, range_ in zip(offset, (*[1] * new, *tensor.shape), wanted, strict=True):
        begin, end = max(start, range_.start), min(start + size, range_.stop)
        if begin >= end:
            return None
        rows.append(slice(begin - start, end - start))
        place.append(slice(begin - range_.start, end - range_.start))
    return rows[new:], tuple(place)


def _read(file: str, wanted: Sequence[tuple[FileTensor, Sequence[slice]]]) -> Iterator[Tensor]:
    """Yield parts of tensors of one file, which is open until the last one was taken.

    Raises:
        UserError: see `FileTensor.read`.
    """
    name = wanted[0][0].name
    try:
        with safe_open(file, "pt") as opened:
            for tensor, part in wanted:
                name = tensor.name
                whole = opened.get_slice(name)
                if tuple(whole.get_shape()) != tensor.shape:
                    raise ValueError(f"its shape is {whole.get_shape()} and was {list(tensor.shape)}")
                yield whole[tuple(part)] if part else opened.get_tensor(name)
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(
            f"{name} cannot be read from {file} ({error}); each rank reads its slices of the weights from this file, "
            "so give an intact model that does not change while the ranks load it"
        ) from error
