"""Keys and values of many trajectories in one static block: one slot (row) per trajectory."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """`keys[layer]`, `values[layer]`: [slots, kv_heads, capacity, head_dim]; grows by doubling in both directions.

    Rows are kept in the order that the engine wants, so that every batch is a slice and never a gather.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        self.shape = (kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.slots, self.capacity = 0, 0
        self.keys: list[Tensor] = [torch.empty(0)] * layers
        self.values: list[Tensor] = [torch.empty(0)] * layers

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for at least `slots` rows of `capacity` tokens."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        old_slots, old_capacity = self.slots, self.capacity
        self.slots = max(slots, self.slots)
        self.capacity = _round_up(capacity) if capacity > self.capacity else self.capacity
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                # Zeros, not empty: masked-out rubbish that happens to be NaN would still poison a softmax times value.
                new = self._zeros(store)
                if old_slots:
                    new[:old_slots, :, :old_capacity] = old
                store[layer] = new

    def _zeros(self, store: list[Tensor]) -> Tensor:
        """One layer of `store`, which is `keys` or `values`."""
        heads, dim = self.shape
        return torch.zeros(self.slots, heads, self.capacity, dim, dtype=self.dtype, device=self.device)

    def move(self, sources: list[int], targets: list[int], length: int) -> None:
        """Row `targets[i]` becomes a copy of what row `sources[i]` held before the call, up to `length` tokens."""
        source = torch.tensor(sources, device=self.device)
        target = torch.tensor(targets, device=self.device)
        for store in (self.keys, self.values):
            for block in store:
                held = block[:, :, :length]
                held.index_copy_(0, target, held.index_select(0, source))

    def write(self, layer: int, rows: Tensor, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [n, t, kv_heads, head_dim] at `positions` [n, t] of `rows` [n, 1]."""
        self.keys[layer][rows, :, positions] = keys
        self.values[layer][rows, :, positions] = values

    def clear(self) -> None:
        self.slots = self.capacity = 0
        self.keys = [torch.empty(0)] * len(self.keys)
        self.values = [torch.empty(0)] * len(self.values)


def _round_up(capacity: int) -> int:
    size = 64
    while size < capacity:
        size *= 2
    return size
