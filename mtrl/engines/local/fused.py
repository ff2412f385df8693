"""A forward pass written over the weights of Llama, Qwen2 and Qwen3: about 15 tensor operations per layer.

At a million parameters, the Python and dispatch overhead of the modules is most of the cost of decoding; this forward
pass avoids it. The fused weights *are* the model's own: each projection becomes a view into one block. Only large
matrices on a CPU have packed copies, which `refresh` discards so that they are made again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtrl.engines.local.cache import SlotCache
from mtrl.models.attention import ONEDNN

SUPPORTED = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LARGE = 2**17 + 1
"""Minimum number of elements of a float32 matrix that is packed for oneDNN. Smaller matrices use MKL, whose calls have
less overhead."""


def supports(model: Any) -> bool:
    """Whether `FusedRunner` computes exactly what the module computes."""
    config = model.config
    rope = getattr(config, "rope_parameters", None) or {}
    return (
        type(model).__name__ in SUPPORTED
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") == "default"
        and set(getattr(config, "layer_types", None) or ["full_attention"]) == {"full_attention"}
        and getattr(config, "pretraining_tp", 1) == 1
        and not getattr(config, "mlp_bias", False)
        and all(type(module) is nn.Linear for layer in model.model.layers for module in _projections(layer))
    )


def _projections(layer: Any) -> list[Any]:
    """Return the layer's projections. Adapters (LoRA) and quantised matrices are of other classes than `nn.Linear`, and
    models with them use the module's own forward."""
    attention, mlp = layer.self_attn, layer.mlp
    return [
        *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
        *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
    ]


class FusedRunner:
    """See `runner.Runner`."""

    Cache = SlotCache

    def __init__(self, model: Any):
        config = model.config
        self.model = model
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // self.heads
        self.eps = config.rms_norm_eps
        self.layers = [Layer(layer) for layer in model.model.layers]
        self.dtype = model.dtype
        """Dtype of activations."""
        self.packed: dict[Tensor, Tensor] = {}
        """Matrices in the layout of oneDNN, by their weight. They are packed once per version of the weights, because
        oneDNN would otherwise convert the layout for every product."""
        self.cache = self.Cache(config.num_hidden_layers, self.kv_heads, self.dim, model.dtype, model.device)
        self._cos = self._sin = torch.empty(0)

    def forward(self, ids: Tensor, starts: Tensor, lengths: Tensor, first_slot: int, width: int) -> Tensor:
        n, t = ids.shape
        positions = starts[:, None] + torch.arange(t, device=ids.device)
        self._reserve_rope(width)
        slots = torch.arange(first_slot, first_slot + n, device=ids.device)[:, None]
        x = self._hidden(ids, positions, slots, first_slot, width)
        return self._logits(x[torch.arange(n, device=ids.device), lengths - 1] if t > 1 else x[:, 0])

    def _hidden(self, ids: Tensor, positions: Tensor, slots: Tensor, first_slot: int, width: int) -> Tensor:
        """Feed tokens [n, t] at `positions` [n, t], and return the last layer's hidden states [n, t, H].

        Args:
            slots: [n, 1] slot to which each row writes its keys and values; row i reads slot `first_slot + i`.
        """
        n, t = ids.shape
        cos, sin = self._cos[positions], self._sin[positions]
        mask = torch.zeros(n, 1, t, width, dtype=self.cache.dtype, device=ids.device)
        mask.masked_fill_(torch.arange(width, device=ids.device) > positions[:, None, :, None], float("-inf"))
        x = F.embedding(ids, self.model.model.embed_tokens.weight).to(self.dtype)
        for i, layer in enumerate(self.layers):
            x = x + self._attention(layer, i, x, cos, sin, slots, positions, mask, first_slot, width)
            x = x + self._mlp(layer, self._norm(x, layer.norm2))
        return x

    def _logits(self, hidden: Tensor) -> Tensor:
        return self._linear(self._norm(hidden, self.model.model.norm.weight), self.model.lm_head.weight)

    def refresh(self) -> None:
        self.packed = {}

    def _attention(
        self,
        layer: Layer,
        index: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        positions: Tensor,
        mask: Tensor,
        first: int,
        width: int,
    ) -> Tensor:
        n, t = positions.shape
        qkv = self._linear(self._norm(x, layer.norm1), layer.qkv, layer.qkv_bias).view(n, t, -1, self.dim)
        rotated = self.heads + self.kv_heads
        qk, values = qkv[:, :, :rotated], qkv[:, :, rotated:]
        if layer.q_norm is not None:
            qk = self._norm_heads(qk, layer)
        qk = qk * cos + qk.roll(self.dim // 2, -1) * sin
        self.cache.write(index, rows, positions, qk[:, :, self.heads :], values)
        keys = self.cache.keys[index][first : first + n, :, :width]
        values = self.cache.values[index][first : first + n, :, :width]
        out = self._attend(qk[:, :, : self.heads].transpose(1, 2), keys, values, mask)
        return self._linear(out.transpose(1, 2).reshape(n, t, -1), layer.out, layer.out_bias)

    def _attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """Return attention outputs [n, heads, t, dim].

        Args:
            queries: [n, heads, t, dim].
            keys, values: [n, kv_heads, width, dim].
            mask: [n, 1, t, width], added to the scores.
        """
        gqa = self.heads != self.kv_heads
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=gqa)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = self._linear(x, layer.gate_up).chunk(2, -1)
        return self._linear(F.silu(gate) * up, layer.down)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self._packs(weight):
            return F.linear(x, weight, bias)
        if weight not in self.packed:
            self.packed[weight] = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        return torch.ops.mkldnn._linear_pointwise(x, self.packed[weight], bias, "none", [], "")

    def _packs(self, weight: Tensor) -> bool:
        """Whether oneDNN with a packed matrix is faster than MKL, which PyTorch uses for float32 on a CPU."""
        large = weight.numel() >= LARGE and weight.dtype == torch.float32
        return large and weight.device.type == "cpu" and ONEDNN and torch.backends.mkl.is_available()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _norm_heads(self, qk: Tensor, layer: Layer) -> Tensor:
        """Normalise each query and key head in one operation, then apply the norm weight of the queries or the keys."""
        return F.rms_norm(qk, (self.dim,), None, self.eps) * self._head_weights(layer)

    def _head_weights(self, layer: Layer) -> Tensor:
        return torch.cat((layer.q_norm.expand(self.heads, -1), layer.k_norm.expand(self.kv_heads, -1)))

    def _reserve_rope(self, width: int) -> None:
        """Make the rotary tables [positions, 1, dim] of cosines and sines for at least `width` positions.

        The first half of the sines is negated, so that x*cos + roll(x)*sin is the rotation.
        """
        if len(self._cos) >= width:
            return
        size = max(1024, 2 * width)
        device = self.cache.device
        cos, sin = self.model.model.rotary_emb(
            torch.empty(0, dtype=self.dtype, device=device), torch.arange(size, device=device)[None]
        )
        half = self.dim // 2
        self._cos = cos[0][:, None]
        self._sin = torch.cat((-sin[0][:, :half], sin[0][:, half:]), -1)[:, None]


class Layer:
    """The weights of one decoder layer, with its projections as views of fused blocks."""

    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        self.norm1, self.norm2 = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.qkv, self.qkv_bias = _fuse(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.out_bias = attention.o_proj.weight, attention.o_proj.bias
        self.q_norm = getattr(getattr(attention, "q_norm", None), "weight", None)
        self.k_norm = getattr(getattr(attention, "k_norm", None), "weight", None)
        self.gate_up, _ = _fuse(mlp.gate_proj, mlp.up_proj)
        self.down = mlp.down_proj.weight


def _fuse(*linears: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Move the weights of `linears` into one block, of which each parameter becomes a view, and return the fused weight
    and bias."""
    block = torch.cat([linear.weight.data for linear in linears])
    _point_into(block, [linear.weight for linear in linears])
    if linears[0].bias is None:
        return block, None
    bias = torch.cat([linear.bias.data for linear in linears])
    _point_into(bias, [linear.bias for linear in linears])
    return block, bias


def _point_into(block: Tensor, parameters: list[nn.Parameter]) -> None:
    start = 0
    for parameter in parameters:
        parameter.data = block[start : start + len(parameter)]
        start += len(parameter)
