"""The fused forward pass for weights in half precision on a CPU: matrices multiply in it, all else is float32.

With AVX512-BF16 or AMX a CPU multiplies bfloat16 matrices several times as fast as float32, and is slow at everything
else in bfloat16, attention to a cache above all. Activations, keys and values are float32 therefore. Keys lie
dimension by dimension, so that one query's scores are a product of a row and a matrix, not of `width` pairs of vectors.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtrl.generator.engines.local.cache import SlotCache
from mtrl.generator.engines.local.fused import FusedRunner, Layer


class HalfRunner(FusedRunner):
    """See `runner.Runner`."""

    def _make_cache(self, layers: int) -> SlotCache:
        return DimensionCache(layers, self.kv_heads, self.dim, torch.float32, self.model.device)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x.to(weight.dtype), weight, bias).to(x.dtype)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = F.linear(x.to(layer.down.dtype), layer.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, layer.down).to(x.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return super()._norm(x, weight.to(x.dtype))

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        n, heads, t, dim = queries.shape
        if t > 1:
            return super()._attend(queries, keys, values, mask)
        # The heads that share keys are the rows of one small product, for each trajectory and each head of the keys.
        grouped = queries.reshape(n * self.kv_heads, heads // self.kv_heads, dim)
        mask = mask.expand(n, self.kv_heads, 1, -1).flatten(0, 1)
        scores = torch.baddbmm(mask, grouped, keys.transpose(2, 3).flatten(0, 1), alpha=dim**-0.5)
        return torch.bmm(scores.softmax(-1), values.flatten(0, 1)).view(n, heads, 1, dim)


class DimensionCache(SlotCache):
    """Keys are `[slots, kv_heads, head_dim, capacity]` in memory, and look as those of every `SlotCache`."""

    def _zeros(self, store: list[Tensor]) -> Tensor:
        if store is self.values:
            return super()._zeros(store)
        heads, dim = self.shape
        memory = torch.zeros(self.slots, heads, dim, self.capacity, dtype=self.dtype, device=self.device)
        return memory.transpose(2, 3)
