"""Attention of the models that are trained, for the cases where `sdpa` computes more than is needed.

Packed samples must not attend to each other. FlashAttention derives the boundaries from the positions. For `sdpa`
Transformers makes a mask of tokens x tokens, so that attention computes every pair of tokens of the pack and discards
the pairs across samples: twenty samples cost twenty times too much. Here attention is called sample by sample, and in
half precision on a GPU once for all samples (`mtrl.models.varlen`).

Samples of a pack may share a prefix: a piece whose positions begin at s > 0 continues the first s tokens of the sample
before it, whose keys and values it attends to. Thus the prompt of a group is computed once for all its trajectories.

In bfloat16 on a CPU, PyTorch's attention kernel takes twice the time of the two plain matrix products, which oneDNN
computes. With plain products, scores are rounded to bfloat16, as in `eager` attention.

The implementation is registered with Transformers through its attention interface, so that models need no change.
"""

from __future__ import annotations

import os
import platform
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtrl.models import varlen
from mtrl.models.varlen import Boundaries, Piece

for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    # oneDNN caches code and buffers for each shape of a product, by default for 1,024 shapes. Rollouts and packs keep
    # producing new shapes: at 1,024 the cache of a policy of a million parameters took a gigabyte.
    os.environ.setdefault(cache, "128")

ONEDNN: bool = torch.backends.mkldnn.is_available()
"""Whether this build of PyTorch has oneDNN, its library for matrix products on a CPU."""

# cuDNN's attention builds a plan for each new shape, which took 40 ms to a second on an H200, and PyTorch prefers it on
# Hopper. Turns and packs keep producing new shapes, for which the kernels of FlashAttention need no plan.
torch.backends.cuda.enable_cudnn_sdp(False)

MASKED = 2**26
"""Maximum size of the mask of a piece with a context (queries x keys), of which `sdpa` makes a copy in float32 and
stores it. A larger piece is computed without a mask, as a whole sample, if its padded queries and their results are
smaller than its mask; attention then computes the pairs of the whole sample."""
MASK_BYTES = 5
"""Bytes of a mask for each pair of a query and a key: as a boolean, and in float32."""
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


def attention_of(model: Any) -> str:
    """Return the name of the attention implementation of a causal LM or a value model, also with adapters or shards."""
    return str(text_config(model)._attn_implementation)


def takes_boundaries(model: Any) -> bool:
    """Return whether the attention of a model takes the boundaries of a pack (`cu_seq_lens_q` and so on)."""
    return attention_of(model).startswith("flash_")


def text_config(model: Any) -> Any:
    """Return the configuration of the language model inside a causal LM or a value model, also with adapters or
    shards."""
    config = next(m.config for m in model.modules() if hasattr(getattr(m, "config", None), "get_text_config"))
    return config.get_text_config()


def multiplies(dtype: torch.dtype) -> bool:
    """Return whether this machine's processor has instructions for matrix products in this half-precision dtype, and
    oneDNN uses them.

    With AVX-512 alone, oneDNN converts bfloat16 to float32 and back: its products took 2.5 (16 rows) to 5.7 times
    (1,024 rows) as long as those in float32 on an Intel Xeon.
    """
    if dtype != torch.bfloat16 or not ONEDNN or not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True  # elsewhere oneDNN supports bfloat16 only if the processor has the instructions
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


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


def pieces(positions: Tensor) -> list[Piece]:
    """Return the pieces of a packed row from its positions [1, L]; empty for several rows, which are not packed.

    A piece begins where a position is not the one before plus 1. A piece that begins at position s > 0 continues the
    first s tokens of the sample before it. The positions are read once, since every read waits for a GPU.
    """
    if len(positions) != 1:
        return []
    if (found := _PIECES.get(positions)) is None:
        found = _PIECES[positions] = _pieces(positions[0])
    return found


def _boundaries(positions: Tensor, row: list[Piece]) -> Boundaries:
    if (found := _BOUNDARIES.get(positions)) is None:
        found = _BOUNDARIES[positions] = Boundaries.of(row, positions.device)
    return found


_PIECES: Any = WeakIdKeyDictionary()
"""Pieces by the tensor of positions, which is the same object in every layer of a pass."""
_BOUNDARIES: Any = WeakIdKeyDictionary()
"""Boundaries by the same tensor, for the flash kernel."""


def _pieces(row: Tensor) -> list[Piece]:
    starts = (row[1:] != row[:-1] + 1).nonzero().flatten() + 1
    bounds = [0, *starts.tolist(), len(row)]
    firsts = row[bounds[:-1]].tolist()
    found: list[Piece] = []
    sample: tuple[slice, ...] = ()
    for (start, end), first in zip(pairwise(bounds), firsts, strict=True):
        context = _first_tokens(sample, first)
        found.append(Piece(slice(start, end), context))
        sample = (*context, found[-1].own)
    return found


def _first_tokens(parts: tuple[slice, ...], count: int) -> tuple[slice, ...]:
    """Return the first `count` tokens of a sample that consists of these parts."""
    taken: list[slice] = []
    for part in parts:
        size = min(count, part.stop - part.start)
        if size:
            taken.append(slice(part.start, part.start + size))
        count -= size
    return tuple(taken)


@torch.compiler.disable  # the pieces are Python objects, and each pack has others
def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Return attention [B, L, heads, dim] from queries [B, heads, L, dim], keys and values [B, kv_heads, L, dim].

    With the argument `head_exchange` (`mtrl.models.sequence_parallel`) the states are those of a part of the tokens.
    """
    exchange = kwargs.pop("head_exchange", None)
    attend = _attend_to_rows if exchange is None else partial(exchange.attend, _attend_to_rows)
    return attend(module, query, key, value, attention_mask, **kwargs), None


def _attend_to_rows(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Compute attention of whole rows, of one sample or packed."""
    positions = kwargs.get("position_ids")
    row = pieces(positions) if attention_mask is None and positions is not None else []
    if len(row) < 2:
        return _attend(module, query, key, value, attention_mask, **kwargs)
    if varlen.fits(query) and not _has_more(module, kwargs):
        return varlen.attend(query, key, value, _boundaries(positions, row), kwargs.get("scaling"))
    attended = [
        _attend(module, query[:, :, piece.own], *(_joined(states, piece) for states in (key, value)), None, **kwargs)
        for piece in row
    ]
    return torch.cat(attended, 1)


def _joined(states: Tensor, piece: Piece) -> Tensor:
    """Return the keys or values of a piece and of its context."""
    if not piece.context:
        return states[:, :, piece.own]
    return torch.cat([states[:, :, part] for part in (*piece.context, piece.own)], 2)


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Compute attention of one sample, of a piece with its context, or of rows with padding."""
    n, heads, length, dim = query.shape
    width = key.shape[2]
    continues = attention_mask is None and 1 < length < width
    padded_bytes = 2 * n * heads * width * dim * query.element_size()  # of the queries and of their results
    if continues and length * width > MASKED and MASK_BYTES * length * width > padded_bytes:
        context = width - length  # with queries for it, the mask is causal, and its results are cut off
        whole = _attend(module, F.pad(query, (0, 0, context, 0)), key, value, None, **kwargs)
        return whole[:, context:]
    if continues:  # `sdpa` would align its causal mask to the first key
        reached = torch.ones(length, width, dtype=torch.bool, device=query.device).tril(width - length)
        attention_mask = reached[None, None]
    cached = length != width and not continues
    if cached or n * heads * length * width > SCORES:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)[0]
    if not products_are_faster(query.dtype, query.device) or _has_more(module, kwargs):
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
