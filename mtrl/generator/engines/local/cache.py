"""Keys and values of many trajectories in one static block: one slot (row) per trajectory."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """`keys[layer]`, `values[layer]`: [slots, kv_heads, capacity, head_dim]; grows by doubling.

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
        if slots > self.slots or capacity > self.capacity:
            self._resize(max(slots, self.slots), max(self.rounded(capacity), self.capacity))

    def fit(self, slots: int, capacity: int) -> None:
        """The same, and give back what rows of `capacity` tokens do not need: none may hold more."""
        slots, capacity = max(slots, self.slots), self.rounded(capacity)
        if (slots, capacity) != (self.slots, self.capacity):
            self._resize(slots, capacity)

    def rounded(self, capacity: int) -> int:
        """The capacity that rows of so many tokens get."""
        size = 64
        while size < capacity:
            size *= 2
        return size

    def _resize(self, slots: int, capacity: int) -> None:
        old_slots, kept = self.slots, min(capacity, self.capacity)
        self.slots, self.capacity = slots, capacity
        heads, dim = self.shape
        for store in (self.keys, self.values):
            for layer, old in enumerate(store):
                # Zeros, not empty: masked-out rubbish that happens to be NaN would still poison a softmax times value.
                store[layer] = torch.zeros(slots, heads, capacity, dim, dtype=self.dtype, device=self.device)
                if old_slots:
                    store[layer][:old_slots, :, :kept] = old[:, :, :kept]

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
        self.keys[layer][rows, :, positions] = keys.to(self.dtype)
        self.values[layer][rows, :, positions] = values.to(self.dtype)

    def clear(self) -> None:
        self.slots = self.capacity = 0
        self.keys = [torch.empty(0)] * len(self.keys)
        self.values = [torch.empty(0)] * len(self.values)
