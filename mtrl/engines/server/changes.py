"""Changes of a tensor since its last version: the positions of the elements that changed, and their new values.

Bit patterns are compared, so that NaN and -0.0 need no special case. This module also runs inside an engine's
environment, so it imports only torch and numpy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 2**22
"""Number of elements, or of codes, that are processed at a time, which bounds temporary memory."""
WIDTHS = (1, 2)
"""Sizes of a code of a position, in bytes."""


@dataclass(frozen=True)
class TensorChanges:
    """Layout of the changes of one tensor in a message: `codes` codes of positions, then `changed` values.

    The codes are unsigned integers of `width` bytes. The largest one, M, skips M unchanged elements; a smaller code c
    skips c elements, and the element after them has changed.
    """

    name: str
    dtype: str
    """Name of the dtype in torch: `float32`, `bfloat16`, …"""
    shape: tuple[int, ...]
    changed: int
    """Number of values that are sent."""
    codes: int = 0
    width: int = 0
    """Size of a code in bytes; 0: the tensor is sent whole, or has not changed (`changed` is 0)."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return getattr(torch, self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Number of bytes of the changes in a message."""
        return self.codes * self.width + self.changed * self.itemsize

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> TensorChanges:
        return cls(**{**values, "shape": tuple(values["shape"])})


def find_changes(name: str, new: Tensor, old: Tensor | None) -> tuple[TensorChanges, list[Tensor]]:
    """Return the changes from `old` to `new`, two tensors of one dtype and shape, and their bytes in order [n] uint8.

    A tensor is sent whole where its changes might not be smaller. `old` None: it is sent whole.
    """
    layout = name, str(new.dtype).removeprefix("torch."), tuple(new.shape)
    after = _bits(new)
    if old is None:
        return TensorChanges(*layout, after.numel()), [after.view(torch.uint8)] if after.numel() else []
    if (old.dtype, old.shape) != (new.dtype, new.shape):
        raise ValueError(f"{name} was {old.dtype} {tuple(old.shape)}, and is {new.dtype} {tuple(new.shape)}")
    before = _bits(old)
    masks = [
        (a != b).cpu().numpy() for a, b in zip(before.split(CHUNK), after.split(CHUNK), strict=True)
    ]  # numpy finds the changes three times as fast as torch
    changed = sum(int(np.count_nonzero(mask)) for mask in masks)
    if not changed:
        return TensorChanges(*layout, 0), []
    size, width = min((_largest_size(changed, after.numel(), width), width) for width in WIDTHS)
    if size + changed * new.itemsize >= new.nbytes:
        return TensorChanges(*layout, after.numel()), [after.view(torch.uint8)]
    codes, values, last = [], [], -1
    for i, mask in enumerate(masks):
        positions = np.flatnonzero(mask) + i * CHUNK
        values.append(after[torch.from_numpy(positions).to(after.device)].view(torch.uint8))
        codes.append(position_codes(positions, last, width))
        last = int(positions[-1]) if len(positions) else last
    coded = torch.from_numpy(np.concatenate(codes).view(np.uint8)).to(new.device)
    return TensorChanges(*layout, changed, len(coded) // width, width), [coded, *values]


def apply_changes(changes: TensorChanges, message: NDArray[np.uint8], target: Tensor) -> None:
    """Make `target`, the old tensor in contiguous main memory, the new one.

    Args:
        message: the bytes of these changes [`changes.nbytes`].

    Raises:
        ValueError: the message does not fit the tensor.
    """
    if len(message) != changes.nbytes or target.numel() != changes.numel or changes.width not in (0, *WIDTHS):
        raise ValueError(f"{len(message)} bytes are no changes of {changes.name} {changes.shape}")
    bits = _bits(target).numpy()
    values = message[changes.codes * changes.width :].view(bits.dtype)
    if not changes.width:
        if changes.changed not in (0, len(bits)):
            raise ValueError(f"{changes.changed} values of {changes.name} {changes.shape} have no positions")
        bits[: len(values)] = values
        return
    codes = message[: changes.codes * changes.width].view(_unsigned(changes.width))
    done = 0
    for positions in decoded_positions(codes):
        if (len(positions) and positions[-1] >= len(bits)) or done + len(positions) > len(values):
            raise ValueError(f"the changes of {changes.name} {changes.shape} are beyond its end")
        bits[positions] = values[done : done + len(positions)]
        done += len(positions)
    if done != len(values):
        raise ValueError(f"{len(values)} values of {changes.name} {changes.shape} have {done} positions")


def position_codes(positions: NDArray[np.int64], last: int, width: int) -> NDArray[Any]:
    """Return the codes [≥ n] of increasing positions [n] (see `TensorChanges`).

    Args:
        last: position of the last change before them; -1 if there is none.
        width: size of a code in bytes.
    """
    kind = _unsigned(width)
    largest = np.iinfo(kind).max
    skips, rest = np.divmod(np.diff(positions, prepend=last) - 1, largest)
    codes = np.full(len(positions) + int(skips.sum()), largest, kind)
    codes[np.cumsum(skips + 1) - 1] = rest
    return codes


def decoded_positions(codes: NDArray[Any]) -> Iterator[NDArray[np.int64]]:
    """Yield the positions that `position_codes` encoded, in order and in arrays of at most `CHUNK`."""
    largest, before = np.iinfo(codes.dtype).max, 0
    for start in range(0, len(codes), CHUNK):
        part = codes[start : start + CHUNK]
        is_change = part < largest
        ends = before + np.cumsum(part + is_change.astype(np.int64))  # a change is an element beside those skipped
        yield ends[is_change] - 1
        before = int(ends[-1])


def message_of(pieces: Sequence[Tensor], device: torch.device | str) -> Tensor:
    """Concatenate the bytes of changes: [`message_size`] uint8."""
    return torch.cat(list(pieces)) if pieces else torch.zeros(1, dtype=torch.uint8, device=device)


def message_size(changes: Sequence[TensorChanges]) -> int:
    """Return the number of bytes of a message. It has a byte without meaning if nothing has changed, because an empty
    broadcast by NCCL was never tried."""
    return max(1, sum(change.nbytes for change in changes))


def _largest_size(changed: int, numel: int, width: int) -> int:
    """Return the largest number of bytes of the codes of so many changes: all codes together skip at most `numel`
    elements."""
    return width * (changed + numel // np.iinfo(_unsigned(width)).max)


def _unsigned(width: int) -> np.dtype[Any]:
    return np.dtype(f"u{width}")


def _bits(tensor: Tensor) -> Tensor:
    """Return the bit patterns of a tensor as integers [numel]; the memory of a contiguous tensor is shared."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().contiguous().reshape(-1).view(kinds[tensor.itemsize])
