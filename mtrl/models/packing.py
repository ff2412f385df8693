"""Packed samples: each must attend to itself alone, which the positions say that start again with every sample.

FlashAttention does so as it is. For `sdpa` Transformers makes a mask of tokens x tokens, under which attention computes
every pair of tokens of the pack and throws away those of two samples: twenty samples cost twenty times too much. Here
attention is called sample by sample. It is registered beside Transformers' own (by its interface for that), so that
models need not be changed.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mtrl.errors import UserError

APART = "sdpa_apart"
"""Name of the implementation of attention."""


PROBE = 8
"""Tokens of each of the two sequences that `keeps_apart` packs."""


def prepare_packing(model: Any) -> None:
    """Let a model keep packed samples apart, without a mask where it can, and see that it does.

    Raises:
        UserError: it does not keep them apart, or takes no position ids.
    """
    if attend_apart(model) and not keeps_apart(model):
        model.set_attn_implementation("sdpa")  # its layers do not hand the positions on
    if not keeps_apart(model):
        raise UserError(
            f"trainer.packing=true lays samples end to end, and {type(model).__name__} does not keep them apart by "
            "their position ids; set trainer.packing=false"
        )


def attend_apart(model: Any) -> bool:
    """Let a model that attends by `sdpa` attend sample by sample; whether it does now.

    Models with other attention, or with layers that do not see all of a sample, stay as they are.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if config._attn_implementation != "sdpa" or kinds != {"full_attention"} or _slides(config):
        return False
    AttentionInterface.register(APART, _attention)
    AttentionMaskInterface.register(APART, _mask)
    model.set_attn_implementation(APART)
    return True


@torch.no_grad()
def keeps_apart(model: Any) -> bool:
    """Whether packed samples do not see each other, before a model is trained that lets them.

    State-space layers and models with code of their own may. Two short sequences are run packed, apart, and joined to
    one: packed must be as apart, up to a rounding that is small against what joining them changes.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * PROBE, device=model.device) % vocabulary)[None]
    positions = torch.arange(PROBE, device=model.device).repeat(2)[None]

    def second(ids: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False, **inputs).logits[:, -PROBE:].float()

    apart, joined = second(ids[:, PROBE:]), second(ids)
    try:
        leak = (second(ids, position_ids=positions) - apart).norm()
    except TypeError:  # it takes no position ids
        return False
    return bool(leak <= torch.finfo(model.dtype).eps ** 0.5 * (joined - apart).norm())


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
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    samples = zip(*(states.split(sizes, 2) for states in (query, key, value)), strict=True)
    outputs = [sdpa_attention_forward(module, *states, None, **kwargs)[0] for states in samples]
    return torch.cat(outputs, 1), None


def _sizes(positions: Tensor) -> list[int]:
    """Tokens of each sample of a pack, from positions [1, L]; empty for rows that are no packs."""
    if len(positions) != 1:
        return []
    row = positions[0]
    starts = (row[1:] != row[:-1] + 1).nonzero().flatten() + 1
    ends = [0, *starts.tolist(), len(row)]
    return [end - start for start, end in pairwise(ends)]
