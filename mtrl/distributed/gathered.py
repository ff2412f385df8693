"""Whole weights of a model that ranks share, gathered bucket by bucket while they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from mtrl.distributed.broadcast import buckets

Gather = Callable[[Sequence[str]], Mapping[str, Tensor]]


class GatheredWeights(Mapping[str, Tensor]):
    """Tensors by name. Reading one gathers its bucket over all ranks and frees the bucket before.

    Read the tensors in the order of the names, and keep no variable for one of them beyond its use
    (`for name in weights: target[name].copy_(weights[name])`): at most one bucket then exists. The weights must not
    change until all are read. Every reading gathers again; the tensors belong to the reader.
    """

    def __init__(self, layout: Mapping[str, Tensor], gather: Gather, limit: int):
        """
        Args:
            layout: for each name a tensor on the meta device with the shape and the dtype.
            gather: function that returns the whole tensors with these names; it may be called in any thread.
            limit: maximum size of a bucket, in bytes, unless a single tensor is larger.
        """
        self.layout, self._gather = layout, gather
        parts = ([name for name, _ in part] for part in buckets(layout.items(), limit))
        self._names = {name: names for names in parts for name in names}
        """The names in the bucket of each tensor."""
        self._bucket: Mapping[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        names = self._names[name]
        if name not in self._bucket:
            self._bucket = {}  # it is freed before the next one is gathered
            self._bucket = self._gather(names)
        return self._bucket[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layout)

    def __len__(self) -> int:
        return len(self.layout)


def layout_of(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors with the shapes and dtypes of `weights`, without gathering any."""
    return weights.layout if isinstance(weights, GatheredWeights) else weights
