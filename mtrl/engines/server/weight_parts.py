"""The parts in which weights are broadcast: whole tensors, or their changes since the last weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from mtrl.distributed.broadcast import buckets
from mtrl.engines.server.changes import TensorChanges, find_changes, message_of
from mtrl.engines.server.checksum import checksum
from mtrl.engines.server.server_api import ServerApi, TensorLayout


class WeightPart(Protocol):
    """Weights that are sent as one broadcast."""

    tensors: Sequence[Tensor]
    """The content of the broadcast."""

    async def receive(self, server: ServerApi, group: str, version: int) -> None:
        """Make a server receive the broadcast."""


@dataclass(frozen=True)
class WholePart:
    """Whole tensors."""

    tensors: Sequence[Tensor]
    layouts: Sequence[TensorLayout]
    checksum: str

    async def receive(self, server: ServerApi, group: str, version: int) -> None:
        await server.receive_broadcast(self.layouts, group, version, self.checksum)


@dataclass(frozen=True)
class ChangedPart:
    """Changes of some tensors, for servers that keep the weights from which they start."""

    tensors: Sequence[Tensor]
    """One message [n] uint8."""
    changes: Sequence[TensorChanges]
    base: int | None
    """Policy version that the changes start from; None: all tensors are sent whole."""
    checksum: str
    """Checksum of the whole new tensors."""

    async def receive(self, server: ServerApi, group: str, version: int) -> None:
        await server.receive_changes(self.changes, group, self.base, version, self.checksum)


def whole_parts(weights: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[WeightPart]:
    """Return parts of at most `limit` bytes, or of a single larger tensor. Each is made when it is taken, and at most
    one exists if the caller keeps none."""
    return map(_whole_part, buckets(weights, limit))  # a generator would keep a part while the next one is made


def changed_parts(
    weights: Iterator[tuple[str, Tensor]], old: Iterator[tuple[str, Tensor]] | None, base: int | None, limit: int
) -> Iterator[WeightPart]:
    """Return parts of the changes from the weights `old` of version `base`, for at most `limit` bytes of whole tensors
    each, or for a single larger tensor; see `whole_parts`. A part is at most as large as its tensors.

    Args:
        old: tensors with the names and in the order of `weights`; None: all tensors are sent whole.
    """
    return map(partial(_changed_part, old, base), buckets(weights, limit))


def _whole_part(part: list[tuple[str, Tensor]]) -> WeightPart:
    layouts = [TensorLayout(name, str(value.dtype)[len("torch.") :], tuple(value.shape)) for name, value in part]
    return WholePart([value for _, value in part], layouts, checksum(dict(part)))


def _changed_part(
    old: Iterator[tuple[str, Tensor]] | None, base: int | None, part: list[tuple[str, Tensor]]
) -> WeightPart:
    changes, pieces = [], []
    for name, value in part:
        before, last = (name, None) if old is None else next(old, (None, None))
        if before != name:
            raise ValueError(f"{name} was {before} in the last weights")
        change, content = find_changes(name, value, last)
        changes.append(change)
        pieces += content
    return ChangedPart([message_of(pieces, part[0][1].device)], changes, base, checksum(dict(part)))
