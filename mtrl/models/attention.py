"""Attention of the models that are trained, where `sdpa` does more than is needed.

Packed samples must not see each other. FlashAttention reads that off the positions. For `sdpa` Transformers makes a
mask of tokens x tokens, under which attention computes every pair of tokens of the pack and throws away those of two
samples: twenty samples cost twenty times too much. Here attention is called sample by sample.

In bfloat16 on a CPU PyTorch's kernel takes twice the time of the two matrix products that attention is, which oneDNN
computes; as in `eager` attention, scores are rounded then.

It is registered beside Transformers' own (by its interface for that), so that models need not be changed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtrl.models.onednn import multiplies

OWN = "mtrl_sdpa"
"""Name of the implementation of attention."""
SCORES = 2**22
"""Scores of queries by keys that a layer may keep for its backward pass, where `sdpa` keeps none."""


def use_own_attention(model: Any) -> bool:
    """Let a model that attends by `sdpa` attend by what is here; whether it does now.

    Models with other attention, or with layers that do not see all of a sample, stay as they are.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation != "sdpa" or kinds != {"full_attention"} or _slides(config):
        return False
    AttentionInterface.register(OWN, _attention)
    AttentionMaskInterface.register(OWN, _mask)
    model.set_attn_implementation(OWN)
    return True


def products_are_faster(dtype: torch.dtype, device: torch.device) -> bool:
    """Than `sdpa`."""
    return device.type == "cpu" and multiplies(dtype)


def products(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """Attention [B, heads, L, dim] of scaled queries [B, heads, L, dim] to keys and values [B, kv_heads, W, dim].

    The heads that share keys are the rows of one product.

    Args:
        bias: what is added to the scores, broadcast to [B, heads, L, W].
    """
    n, heads, length, dim = queries.shape
    groups, width = n * keys.shape[1], keys.shape[2]
    rows = queries.reshape(groups, -1, dim)
    scores = torch.bmm(rows, keys.reshape(groups, width, -1).transpose(1, 2)).view(n, heads, length, width)
    scores += bias
    weights = scores.softmax(-1).view(groups, -1, width)
    return torch.bmm(weights, values.reshape(groups, width, -1)).view(n, heads, length, -1)


def _slides(config: Any) -> bool:
    """Whether the layers of a model that does not list their kinds have a window."""
    return getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None


def _mask(batch_size: int, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> Tensor | None:
    """None where the positions say all; with padding or a cache, what `sdpa` takes."""
    if kwargs.get("attention_mask") is None and q_length == kv_length:
        return None
    return sdpa_mask(batch_size, q_length, kv_length, *args, **kwargs)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """[B, L, heads, dim] from queries [B, heads, L, dim], keys and values [B, kv_heads, L, dim]."""
    positions = kwargs.get("position_ids")
    sizes = _sizes(positions) if attention_mask is None and positions is not None else []
    if len(sizes) < 2:
        return _attend(module, query, key, value, attention_mask, **kwargs), None
    samples = zip(*(states.split(sizes, 2) for states in (query, key, value)), strict=True)
    return torch.cat([_attend(module, *states, None, **kwargs) for states in samples], 1), None


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """One sample, or rows with padding."""
    n, heads, length, _ = query.shape
    too_many = length != key.shape[2] or n * heads * length**2 > SCORES
    if too_many or not products_are_faster(query.dtype, query.device) or _has_more(module, kwargs):
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    scaling = kwargs.get("scaling")
    queries = query * (query.shape[3] ** -0.5 if scaling is None else scaling)
    return products(queries, key, value, _bias(attention_mask, query)).transpose(1, 2)


def _has_more(module: Any, kwargs: dict[str, Any]) -> bool:
    """Whether more is asked of attention than causal products."""
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        return True
    others = ("position_bias", "cache", "softcap")
    return any(kwargs.get(key) is not None for key in others) or bool(kwargs.get("dropout"))


def _bias(mask: Tensor | None, like: Tensor) -> Tensor:
    """What to add to the scores, from `sdpa`'s mask. Not infinity: a row of padding may see nothing at all."""
    lowest = torch.finfo(like.dtype).min
    if mask is None:
        length = like.shape[2]
        return torch.full((length, length), lowest, dtype=like.dtype, device=like.device).triu(1)
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, lowest)


def _sizes(positions: Tensor) -> list[int]:
    """Tokens of each sample of a pack, from positions [1, L]; empty for rows that are no packs."""
    if len(positions) != 1:
        return []
    row = positions[0]
    starts = (row[1:] != row[:-1] + 1).nonzero().flatten() + 1
    ends = [0, *starts.tolist(), len(row)]
    return [end - start for start, end in pairwise(ends)]
