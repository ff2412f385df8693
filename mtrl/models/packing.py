"""Packed samples: each must attend to itself alone, which the positions say that start again with every sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrl.errors import UserError
from mtrl.models.attention import use_own_attention

PROBE = 8
"""Tokens of each of the two sequences that `keeps_apart` packs."""


def prepare_packing(model: Any) -> None:
    """Let a model keep packed samples apart, without a mask where it can, and see that it does.

    Raises:
        UserError: it does not keep them apart, or takes no position ids.
    """
    if use_own_attention(model) and not keeps_apart(model):
        model.set_attn_implementation("sdpa")  # its layers do not hand the positions on
    if not keeps_apart(model):
        raise UserError(
            f"trainer.packing=true lays samples end to end, and {type(model).__name__} does not keep them apart by "
            "their position ids; set trainer.packing=false"
        )


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
