"""Preparation of a model for training: packed samples that attend only to themselves, and recomputed activations.

The boundaries of packed samples follow from the positions, which restart at 0 with every sample.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mtrl.errors import UserError
from mtrl.models.attention import use_own_attention

PROBE = 8
"""Length of each of the two sequences that `keeps_apart` packs, in tokens."""


def prepare_packing(model: Any) -> None:
    """Prepare a model for packed samples, without a dense mask if possible, and check that it keeps them apart.

    Raises:
        UserError: the model does not keep packed samples apart, or takes no position ids.
    """
    if use_own_attention(model) and not keeps_apart(model):
        model.set_attn_implementation("sdpa")  # the layers of this model do not pass the positions to attention
    if not keeps_apart(model):
        raise UserError(
            f"trainer.packing=true lays samples end to end, and {type(model).__name__} does not keep them apart by "
            "their position ids; set trainer.packing=false"
        )


@torch.no_grad()
def keeps_apart(model: Any) -> bool:
    """Return whether packed samples do not influence each other in this model.

    State-space layers and models with custom code may mix them. Two short sequences are run packed, separately, and
    joined to one sequence: the packed result must equal the separate one, up to a rounding that is small compared with
    the effect of joining.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = (torch.arange(2 * PROBE, device=model.device) % vocabulary)[None]
    positions = torch.arange(PROBE, device=model.device).repeat(2)[None]

    def second(ids: Tensor, **inputs: Tensor) -> Tensor:
        return model(input_ids=ids, use_cache=False, **inputs).logits[:, -PROBE:].float()

    apart, joined = second(ids[:, PROBE:]), second(ids)
    try:
        leak = (second(ids, position_ids=positions) - apart).norm()
    except TypeError:  # the model takes no position ids
        return False
    return bool(leak <= torch.finfo(model.dtype).eps ** 0.5 * (joined - apart).norm())


def checkpoint_gradients(model: Any) -> None:
    """Recompute activations in the backward pass instead of storing them.

    Transformers' layers do this only in training mode, so these layers are switched to it. All other modules, including
    attention with its dropout, stay in evaluation mode, because the log-probs of training must equal those of sampling.
    """
    # The first name is that of Transformers 6; the second is that of early 5.x, which later versions deprecate.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    model.eval()
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing"):
            module.training = True
