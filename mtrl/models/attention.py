"""Attention of the models that are trained, for the cases where `sdpa` computes more than is needed.

Packed samples must not attend to each other. FlashAttention derives the boundaries from the positions. For `sdpa`
Transformers makes a mask of tokens x tokens, so that attention computes every pair of tokens of the pack and discards
the pairs across samples: twenty samples cost twenty times too much. Here attention is called sample by sample.

In bfloat16 on a CPU, PyTorch's attention kernel takes twice the time of the two plain matrix products, which oneDNN
computes. With plain products, scores are rounded to bfloat16, as in `eager` attention.

The implementation is registered with Transformers through its attention interface, so that models need no change.
"""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN caches code and buffers for each shape of a product, by default for 1,024 shapes. Rollouts and packs keep
    # producing new shapes: at 1,024 the cache of a policy of a million parameters took a gigabyte.
    os.environ.setdefault(cache, "128")

ONEDNN: bool = torch.backends.mkldnn.is_available()
"""Whether this build of PyTorch has oneDNN, its library for matrix products on a CPU."""
ONEDNN_BFLOAT16: bool = ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
"""Whether oneDNN and the processor support matrix products in bfloat16."""

OWN = "mtrl_sdpa"
"""Name of this attention implementation in Transformers."""
SCORES = 2**22
"""Maximum number of attention scores (queries x keys) that a layer may store for its backward pass; `sdpa` stores
none."""


def use_own_attention(model: Any) -> bool:
    """Switch a model with `sdpa` attention to this implementation. Return whether it was switched.

    Models with another attention implementation, or with layers that do not attend to the whole sample, are unchanged.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation != "sdpa" or kinds != {"full_attention"} or _slides(config):
        return False
    AttentionInterface.register(OWN, _attention)
    AttentionMaskInterface.register(OWN, _mask)
    model.set_attn_implementation(OWN)
    return True


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether oneDNN has matrix products in this half-precision dtype on this machine."""
    return dtype == torch.bfloat16 and ONEDNN_BFLOAT16


def products_are_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether plain matrix products are faster than `sdpa` for this dtype and device."""
    return device.type == "cpu" and multiplies(dtype)


def products(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Return the attention [B, heads, L, dim] of scaled queries [B, heads, L, dim] to keys and values [B, kv_heads, W,
    dim].

    The heads that share keys are the rows of one product.

    Args:
        bias: bias of the scores, broadcastable to [B, heads, L, W].
    """
    n, heads, length, dim = queries.shape
    groups, width = n * keys.shape[1], keys.shape[2]
    rows = queries.reshape(groups, -1, dim)
    scores = torch.bmm(rows, keys.reshape(groups, width, -1).transpose(1, 2)).view(n, heads, length, width)
    scores += bias
    weights = scores.softmax(-1).view(groups, -1, width)
    return torch.bmm(weights, values.reshape(groups, width, -1)).view(n, heads, length, -1)


def _slides(config: Any) -> bool:
    """Return whether a model that does not list the kinds of its layers has a sliding window."""
    return getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """Return None if the positions are sufficient, or the mask for `sdpa` with padding or a cache."""
    if kwargs.get("attention_mask") is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return attention [B, L, heads, dim] from queries [B, heads, L, dim], keys and values [B, kv_heads, L, dim]."""
    positions = kwargs.get("position_ids")
    sizes = _sizes(positions) if attention_mask is None and positions is not None else []
    if len(sizes) < 2:
        return _attend(module, query, key, value, attention_mask, **kwargs), None
    samples = zip(*(states.split(sizes, 2) for states in (query, key, value)), strict=True)
    return torch.cat([_attend(module, *states, None, **kwargs) for states in samples], 1), None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Compute attention of one sample, or of rows with padding."""
    n, heads, length, _ = query.shape
    too_many = length != key.shape[2] or n * heads * length**2 > SCORES
    if too_many or not products_are_faster(query.dtype, query.device) or _has_more(module, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    scaling = kwargs.get("scaling")
    queries = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return products(queries, key, value, _bias(attention_mask, query)).transpose(1, 2)


def _has_more(module: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the call needs more than plain causal products."""
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return True
    others = ("position_bias", "cache", "softcap")
    return any(kwargs.get(key) is not None for key in others) or bool(kwargs.get("dropout"))


def _bias(mask: Tensor | None, like: Tensor) -> Tensor:
    """Return the bias of the scores from `sdpa`'s mask. Its masked value is finite, since a row of padding may mask
    every key, where infinity would give NaN."""
    lowest = torch.finfo(like.dtype).min
    if mask is None:
        length = like.shape[2]
        return torch.full((length, length), lowest, dtype=like.dtype, device=like.device).triu(1)
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, lowest)


def _sizes(positions: Tensor) -> list[int]:
    """Return the number of tokens of each sample of a pack, from positions [1, L]; empty for several rows, which are
    not packed."""
    if len(positions) != 1:
        return []
    row = positions[0]
    starts = (row[1:] != row[:-1] + 1).nonzero().flatten() + 1
    ends = [0, *starts.tolist(), len(row)]
    return [end - start for start, end in pairwise(ends)]
