"""The fused forward pass for weights in half precision on a CPU.

With AVX512-BF16 or AMX, a CPU multiplies bfloat16 matrices several times as fast as float32 matrices, but every other
operation in bfloat16 is slow, `scaled_dot_product_attention` above all. Attention is therefore computed as two matrix
products, with keys, values and scores in half precision; hidden states, norms and rotations are float32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrl.engines.local.cache import SlotCache
from mtrl.engines.local.fused import FusedRunner, Layer
from mtrl.models.attention import multiplies, products

SCORES = 2**24
"""Maximum number of attention scores (query-key pairs) that are in memory at once."""


class DenseCache(SlotCache):
    """A cache whose rows are hardly longer than their contents, so that attention can use whole rows.

    oneDNN multiplies a contiguous block without a copy. From parts of rows it first makes a contiguous copy, which
    costs more than the product.
    """

    def rounded(self, capacity: int) -> int:
        return -(-capacity // 32) * 32


class HalfRunner(FusedRunner):
    """See `runner.Runner`."""

    Cache = DenseCache

    def __init__(self, model: Any):
        super().__init__(model)
        self.dtype = torch.float32
        self._wide: dict[Tensor, Tensor] = {}
        """Norm weights in float32, converted once per version of the weights."""

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        if self.cache.capacity <= 2 * width:
            width = self.cache.capacity  # positions that are not written yet are masked
        return super().forward(ids, starts, lengths, first_slot, width)

    def refresh(self) -> None:
        super().refresh()
        self._wide = {}

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Multiply in half precision. The result becomes float32 when it is combined with float32 activations."""
        return super()._linear(x.to(weight.dtype), weight, bias)

    def _packs(self, weight: Tensor) -> bool:
        return multiplies(weight.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if weight not in self._wide:
            self._wide[weight] = weight.detach().to(x.dtype)
        return self._root_mean_square(x) * self._wide[weight]

    def _norm_heads(self, qk: Tensor, layer: Layer) -> Tensor:
        if layer.q_norm not in self._wide:
            self._wide[layer.q_norm] = self._head_weights(layer).to(self.dtype)
        return self._root_mean_square(qk.to(self.dtype)) * self._wide[layer.q_norm]

    def _root_mean_square(self, x: Tensor) -> Tensor:
        """Normalise like `F.rms_norm`, with two thirds of its operations, whose number is the cost with few rows."""
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        n, heads, t, dim = queries.shape
        queries = (queries * dim**-0.5).to(keys.dtype)
        at_once = max(1, SCORES // (n * heads * keys.shape[2]))
        if t <= at_once:
            return products(queries, keys, values, mask)
        parts = zip(queries.split(at_once, 2), mask.split(at_once, 2), strict=True)
        return torch.cat([products(part, keys, values, masked) for part, masked in parts], 2)
