"""A key-value cache of many trajectories in one static block: one slot (row) per trajectory."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrl.config.derived import cache_capacity


class SlotCache:
    """Keys and values of each layer, `keys[layer]` and `values[layer]`: [slots, kv_heads, capacity, head_dim]. The
    capacity, in tokens, grows in steps (`cache_capacity`).

    The engine determines the order of the rows, so that every batch is a slice and never a gather.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.shape = (kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.slots, self.capacity = 0, 0
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = [torch.empty(0)] * layers

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least `slots` rows of `capacity` tokens. Rows after the first `slots` may be discarded where
        rows become longer: near the end of a step few trajectories are left, and they are the longest."""
        if capacity > self.capacity:
            self._resize(self._rows_for(slots), self.rounded(capacity))
        elif slots > self.slots:
            self._resize(slots, self.capacity)

    def fit(self, slots: int, capacity: int) -> None:
        """Like `reserve`, but also shrink the rows to `capacity` tokens; no row may hold more tokens than that."""
        if slots > self.slots or self.rounded(capacity) != self.capacity:
            self._resize(self._rows_for(slots), self.rounded(capacity))

    def _rows_for(self, slots: int) -> int:
        """Return the number of rows of a new block: `slots`, or as many as now if `slots` are more than half of them,
        so that trajectories that come and go do not change it each time."""
        return slots if slots > self.slots or 2 * slots <= self.slots else self.slots

    def rounded(self, capacity: int) -> int:
        """Return the allocated capacity, in tokens, of rows that need `capacity` tokens."""
        return cache_capacity(capacity)

    def row_bytes(self, capacity: int) -> int:
        """Return the number of bytes of one row with room for `capacity` tokens."""
        heads, dim = self.shape
        return 2 * len(self.keys) * heads * self.rounded(capacity) * dim * self.dtype.itemsize

    def _allocated(self, slots: int) -> int:
        """Return the number of allocated rows for so many slots."""
        return slots

    def _resize(self, slots: int, capacity: int) -> None:
        rows, copied = min(slots, self.slots), min(capacity, self.capacity)
        self.slots, self.capacity = slots, capacity
        heads, dim = self.shape
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                # Zeros, not empty: uninitialized memory may be NaN, and a masked weight of 0 times NaN is NaN.
                shape = (self._allocated(slots), heads, capacity, dim)
                store[layer] = torch.zeros(shape, dtype=self.dtype, device=self.device)
                if rows:
                    store[layer][:rows, :, :copied] = old[:rows, :, :copied]

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Copy the first `length` tokens of each row `sources[i]` to row `targets[i]`, as they were before the call."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for store in (self.keys, self.values):
            for block in store:
                held = block[:, :, :length]
                held.index_copy_(0, target, held.index_select(0, source))

    def write(self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, t, kv_heads, head_dim] at `positions` [n, t] of `rows` [n, 1]."""
        self.keys[layer][rows, :, positions] = keys.to(self.dtype)
        self.values[layer][rows, :, positions] = values.to(self.dtype)

    def clear(self) -> None:
        self.slots = self.capacity = 0
        self.keys = [torch.empty(0)] * len(self.keys)
        self.values = [torch.empty(0)] * len(self.values)
